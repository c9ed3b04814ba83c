"""What tells the inputs of two gates apart.

[Note: What an identity covers]
Of the data file: the SHA-256. Of every weight file: its size, the SHA-256 of its header, and the
SHA-256 of up to 1024 samples of 4 KiB spread over it. Of ``config.json`` and the index: the
SHA-256 of what they say. Weights are not hashed whole, which would take longer than a short gate.
So an edit in place that keeps the size and misses every sample is seen by the modification time
alone, which says nothing on another machine and is asked for only on this one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from poros_core.errors import GateError

__all__ = ["checkpoint_identity", "file_sha256"]

_TEXTS = ("config.json", "model.safetensors.index.json")
_WRITTEN_BY = "transformers_version"
_SAMPLES = 1024
_SAMPLE = 4096


def checkpoint_identity(folder: Path, *, data: Path | None, dated: bool = False) -> dict[str, Any]:
    """Return what tells two inputs apart. See [Note: What an identity covers].

    Args:
        folder: of the checkpoint.
        data: the data file, if there is one.
        dated: with the modification times of weight files.

    Raises:
        GateError: a file cannot be read.
    """
    found: dict[str, Any] = {}
    try:
        if data is not None:
            found["data"] = {"sha256": file_sha256(data)}
        for path in (folder / name for name in _TEXTS):
            if path.is_file():
                found[path.name] = {"sha256": _said(path)}
        for path in sorted(folder.glob("*.safetensors")):
            found[path.name] = _weights(path, dated=dated)
    except OSError as error:
        raise GateError(
            f"'{error.filename or folder}' cannot be read ({error.strerror}). Check the file."
        ) from error
    return found


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _said(path: Path) -> str:
    """Return the SHA-256 of what a JSON file says, but for the library that wrote it."""
    text = path.read_bytes()
    try:
        content = json.loads(text)
    except ValueError:
        return hashlib.sha256(text).hexdigest()
    if isinstance(content, dict):
        content.pop(_WRITTEN_BY, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _weights(path: Path, *, dated: bool) -> dict[str, Any]:
    stat = path.stat()
    with path.open("rb", buffering=0) as file:
        length = min(int.from_bytes(file.read(8), "little"), stat.st_size)
        header = hashlib.sha256(file.read(length)).hexdigest()
        sampled = hashlib.sha256()
        step = max(_SAMPLE, (stat.st_size - length) // _SAMPLES)
        for begin in range(8 + length, stat.st_size, step):
            file.seek(begin)
            sampled.update(file.read(_SAMPLE))
    found: dict[str, Any] = {
        "bytes": stat.st_size,
        "header_sha256": header,
        "samples_sha256": sampled.hexdigest(),
    }
    return {**found, "modified_ns": stat.st_mtime_ns} if dated else found
