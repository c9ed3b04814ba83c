"""Whether a family is validated, as the committed gate records say.

There are two words only. A family is *validated* if a record of a parity gate that ended exact on
a GPU is committed for it, and *experimental* if not. Records lie in ``docs/validation`` of a
source checkout, or in the ``validation`` folder of the installed package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from poros_core.errors import PorosError

__all__ = ["PARITY", "Status", "family_status", "record_folders"]

Status = Literal["validated", "experimental"]

PARITY = "training-parity"
"""The ``kind`` of a parity gate's record."""


def record_folders() -> tuple[Path, ...]:
    """Return the folders that hold committed records, in this checkout and in this package."""
    package = Path(__file__).resolve().parent
    folders = [package / "validation"]
    if (package.parent / "pyproject.toml").is_file():
        folders.append(package.parent / "docs" / "validation")
    return tuple(folder for folder in folders if folder.is_dir())


def family_status(name: str, *, folders: Iterable[Path] | None = None) -> Status:
    """Return the status of the family with this name.

    Args:
        name: the family's name.
        folders: where to look for records; None means the committed ones.

    Raises:
        PorosError: a record there is not a JSON file.
    """
    where = record_folders() if folders is None else folders
    for folder in where:
        for path in sorted(folder.glob("*.json")):
            if _validates(_read(path), name):
                return "validated"
    return "experimental"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PorosError(
            f"The gate record {path} cannot be read: {error}. Restore it or remove it."
        ) from error


def _validates(record: Any, name: str) -> bool:
    if not isinstance(record, Mapping):
        return False
    stack = record.get("stack")
    gpu = stack.get("gpu") if isinstance(stack, Mapping) else None
    return (
        record.get("kind") == PARITY
        and record.get("family") == name
        and record.get("verdict") == "exact"
        and isinstance(gpu, str)
        and gpu != ""
    )
