"""Writing what a gate leaves behind: whole or not at all, in JSON that every reader takes."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from poros_core.errors import GateError

__all__ = ["json_text", "write_whole"]


def json_text(value: Any) -> str:
    """Return a value as JSON, indented. JSON has no word for a number that is none, or without
    bound: it is null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def write_whole(path: Path, *parts: str | bytes | memoryview) -> None:
    """Write a file so that whatever happens it has its old content or the new, and no other. Line
    ends and permissions stay; a link goes on leading where it leads.

    Args:
        path: the file. What can only be written to, such as a pipe, is written to.
        parts: its content, text in UTF-8.

    Raises:
        GateError: it cannot be written; what was there is there still.
    """
    target = path.resolve()
    part: Path | None = None
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                _write(file, parts)
            return
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        part = Path(name)
        with os.fdopen(handle, "wb") as file:
            _write(file, parts)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        else:
            part.chmod(0o666 & ~_umask())
        os.replace(part, target)
    except OSError as error:
        raise GateError(
            f"'{path}' cannot be written: {error.strerror or error}. What was there before is "
            "there still. Free disk space, or name another file."
        ) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _write(file: BinaryIO, parts: Iterable[str | bytes | memoryview]) -> None:
    for part in parts:
        file.write(part.encode() if isinstance(part, str) else part)


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found
