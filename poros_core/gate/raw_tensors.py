"""Tensors of a safetensors file as bytes: to copy them from file to file as they are."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from poros_core.errors import GateError

__all__ = ["RawFile", "write_index", "write_raw"]

_CHUNK = 1 << 24


@frozen(eq=False)
class RawFile:
    """A file, and where its tensors are.

    Attributes:
        path: the file.
        entries: per tensor: dtype, shape, and offsets from ``start``.
        start: where the first tensor begins.
    """

    path: Path
    entries: Mapping[str, Mapping[str, Any]] = field(repr=False)
    start: int

    @classmethod
    def open(cls, path: Path) -> RawFile:
        """Read a file's header.

        Raises:
            GateError: it cannot be read.
        """
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise GateError(f"'{path}' cannot be read: {error}. Fetch the file again.") from error
        header.pop("__metadata__", None)
        return cls(path, header, 8 + length)

    def size(self, name: str) -> int:
        """Return a tensor's bytes."""
        begin, end = self.entries[name]["data_offsets"]
        return int(end - begin)

    def chunks(self, name: str, *, rolled: int = 0) -> Iterator[bytes]:
        """Yield a tensor's bytes, those after the first ``rolled`` ones first.

        Raises:
            GateError: the file ends early.
        """
        begin, end = (self.start + offset for offset in self.entries[name]["data_offsets"])
        with self.path.open("rb") as file:
            for low, high in ((begin + rolled, end), (begin, begin + rolled)):
                file.seek(low)
                while low < high:
                    chunk = file.read(min(high - low, _CHUNK))
                    if not chunk:
                        raise GateError(f"'{self.path}' ends early. Fetch the file again.")
                    low += len(chunk)
                    yield chunk


def write_raw(
    path: Path,
    entries: Mapping[str, Mapping[str, Any]],
    chunks: Callable[[str], Iterable[bytes]],
) -> None:
    """Write a file.

    Args:
        path: the file.
        entries: per tensor: dtype, shape, and offsets, of which only the size counts.
        chunks: called with a name; returns that tensor's bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, size = end, entry["data_offsets"][1] - entry["data_offsets"][0]
        end += size
        header[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in entries:
            out.writelines(chunks(name))


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index that says which file of a folder has which tensor."""
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
