"""The matrix: which gates there are, in which order they run, and which have run.

A matrix is a TOML file of rows. Each is one gate, with the settings of ``poros gate`` under their
own names; a row that plants a fault is a negative control, and runs twice: with the fault, which
must be found, and without it. Rows run in their order. One whose record exists and is its own is
done; one that the time cuts short is kept and goes on when the matrix is run again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from poros_core.errors import GateError, PorosError
from poros_core.gate.flags import options_of
from poros_core.gate.options import GateOptions

__all__ = ["CONTROL", "MATRIX", "Row", "read_matrix"]

MATRIX = Path(__file__).with_name("matrix.toml")
"""The matrix that comes along."""

CONTROL = "negative-control"
"""The ``kind`` of a negative control's record."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **{"name": str, "group": str, "order": int, "device": str},
    **{"needs_minutes": (int, float), "settings": dict},
}
_ALL = "all"


@frozen(kw_only=True)
class Row:
    """One gate of a matrix.

    Attributes:
        name: what its record is called.
        group: which rows are run together.
        order: when it is run; rows of equal order run as the file lists them.
        device: ``"cuda"``, or ``"any"`` for a row that a CPU can run too.
        needs_minutes: with less time left it is not begun.
        settings: of ``poros gate``, by name; the rest keep their defaults.
    """

    name: str
    group: str
    order: int
    device: Literal["any", "cuda"] = "any"
    needs_minutes: float = 0.0
    settings: Mapping[str, Any] = field(factory=dict, repr=False)

    @property
    def planted(self) -> bool:
        """Whether it is a negative control."""
        return self.settings.get("plant") is not None

    def options(self, data: Path | None = None, *, clean: bool = False) -> GateOptions:
        """Return what it asks of a gate.

        Args:
            data: the folder of its data file.
            clean: without the fault that it plants.
        """
        settings = dict(self.settings)
        if clean:
            settings.pop("plant", None)
        if data is not None and "data" in settings:
            settings["data"] = str(data / settings["data"])
        return options_of(settings)


def read_matrix(name: str, *, rows: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a file, or of a group of the matrix that comes along, in order.

    Args:
        name: a TOML file, a group, or ``"all"``.
        rows: names; only these are returned.

    Raises:
        GateError: there is no such file, group or row, or a row is malformed.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        found = _read(path)
    else:
        every = _read(MATRIX)
        found = [row for row in every if name in (row.group, _ALL)]
        if not found:
            groups = sorted({row.group for row in every})
            raise GateError(
                f"There is no matrix file '{name}', and no group of that name. Groups: "
                f"{', '.join(groups)}, all."
            )
    names = {row.name for row in found}
    unknown = [name for name in rows if name not in names]
    if unknown:
        raise GateError(f"There is no row '{unknown[0]}'. There are: {', '.join(sorted(names))}.")
    return [row for row in found if not rows or row.name in rows]


def _read(path: Path) -> list[Row]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(f"'{path}' cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise GateError(f"'{path}' is not TOML: {error}. Mend it there.") from error
    listed = content.get("row", [])
    if not listed or not isinstance(listed, list) or not isinstance(listed[0], dict):
        raise GateError(f"'{path}' has no row: a row begins with [[row]] and has a name.")
    found = [_row(path, entry) for entry in listed]
    names = [row.name for row in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GateError(f"'{path}' has two rows '{twice}'. Give each a name of its own.")
    return sorted(found, key=lambda row: row.order)


def _row(path: Path, entry: Mapping[str, Any]) -> Row:
    name = entry.get("name", "?")
    unknown = sorted(entry.keys() - _TYPES)
    missing = sorted({"name", "group", "order"} - entry.keys())
    if unknown or missing:
        what = f"does not know '{unknown[0]}'" if unknown else f"lacks '{missing[0]}'"
        raise GateError(
            f"'{path}': row '{name}' {what}. A row has {', '.join(sorted(_TYPES))}, and the flags "
            "of poros gate in its settings."
        )
    for key, kind in _TYPES.items():
        value = entry.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise GateError(f"'{path}': row '{name}': {key} cannot be {value!r}.")
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise GateError(
            f"'{path}': row '{name}': its record is called so, in the folder of the records. Give "
            "it a name without '/'."
        )
    if entry.get("device", "any") not in ("any", "cuda"):
        raise GateError(f"'{path}': row '{name}': device is 'any' or 'cuda'.")
    row = Row(**entry)
    try:
        row.options()
    except PorosError as error:
        raise GateError(f"'{path}': row '{name}': {error}") from error
    return row
