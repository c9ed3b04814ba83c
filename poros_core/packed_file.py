"""One unit of a packed base on disk: a safetensors file whose data is the unit's stretch.

The tensors lie in the file as they lie in host memory, gaps included, so that one read fills a
stretch. safetensors knows no gaps: each is a tensor of its own (``gap.0``, ``gap.1``, ...). The
data begins at a multiple of ``PAGE``, so that a mapping of the file is aligned as memory is.
Needs neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["PAGE", "DamagedFile", "PackedFile", "Piece", "read_packed", "write_packed"]

PAGE = 4096
_CHUNK = 16 << 20
_GAP = "gap"


class DamagedFile(Exception):
    """A packed file is not what its record says; the text says how."""


@frozen
class Piece:
    """One tensor of a packed file.

    Attributes:
        name: what it is called.
        dtype: safetensors' name of its dtype, for example ``"BF16"``.
        shape: its shape.
        offset: bytes from the start of the data.
        nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@frozen
class PackedFile:
    """What is recorded of a packed file, so that a damaged one is never taken for whole.

    Attributes:
        file: its name in the entry's folder.
        unit: the unit whose stretch it holds.
        start: bytes before the data.
        nbytes: bytes of data.
        sha256: of the whole file.
        pieces: its tensors, in the order in which they lie.
    """

    file: str
    unit: str
    start: int
    nbytes: int
    sha256: str
    pieces: tuple[Piece, ...]


def write_packed(
    path: Path, pieces: Sequence[Piece], chunks: Iterable[memoryview], *, unit: str, nbytes: int
) -> PackedFile:
    """Write a file and wait until it is on the disk.

    Args:
        path: the file.
        pieces: its tensors, in the order in which they lie.
        chunks: the data, gaps included, as flat bytes.
        unit: the unit's name.
        nbytes: bytes of data.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    head = _header(pieces, unit=unit, nbytes=nbytes)
    digest = hashlib.sha256(head)
    written = 0
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(head))
        for chunk in chunks:
            for begin in range(0, len(chunk), _CHUNK):
                part = chunk[begin : begin + _CHUNK]
                digest.update(part)
                _write_all(file, part)
                written += len(part)
        os.fsync(file.fileno())
    assert written == nbytes, "a unit's chunks do not make up its stretch"
    return PackedFile(path.name, unit, len(head), nbytes, digest.hexdigest(), tuple(pieces))


def read_packed(path: Path, record: PackedFile, into: memoryview | None) -> None:
    """Read a file and check it against its record.

    Args:
        path: the file.
        record: what was recorded when it was written.
        into: where the data goes, flat bytes of its size; None only checks.

    Raises:
        DamagedFile: it is missing, of another size, or holds other bytes.
    """
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(_CHUNK, record.nbytes) if into is None else 0))
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.start + record.nbytes:
                raise DamagedFile(
                    f"{path.name} has {size} bytes instead of {record.start + record.nbytes}"
                )
            digest.update(file.read(record.start))
            for begin in range(0, record.nbytes, _CHUNK):
                count = min(_CHUNK, record.nbytes - begin)
                part = scratch[:count] if into is None else into[begin : begin + count]
                _read_all(file, part, path)
                digest.update(part)
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({error.strerror})") from error
    if digest.hexdigest() != record.sha256:
        raise DamagedFile(f"{path.name} holds other bytes than were written")


def _header(pieces: Sequence[Piece], *, unit: str, nbytes: int) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "unit": unit}}
    end = gaps = 0
    for piece in pieces:
        if piece.offset > end:
            table[f"{_GAP}.{gaps}"] = _row("U8", (piece.offset - end,), end, piece.offset)
            gaps += 1
        end = piece.offset + piece.nbytes
        table[piece.name] = _row(piece.dtype, piece.shape, piece.offset, end)
    if nbytes > end:
        table[f"{_GAP}.{gaps}"] = _row("U8", (nbytes - end,), end, nbytes)
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return struct.pack("<Q", len(text)) + text


def _row(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _read_all(file: Any, into: memoryview, path: Path) -> None:
    while len(into):
        count = file.readinto(into)
        if not count:
            raise DamagedFile(f"{path.name} ended while it was read")
        into = into[count:]
