"""One unit of a packed base on disk: a safetensors file whose data is the unit's stretch.

The tensors lie in the file as they lie in host memory, gaps included, so that one read fills a
stretch. safetensors knows no gaps: each is a tensor of its own (``gap.0``, ``gap.1``, ...). The
data begins at a multiple of ``PAGE``, so that a mapping of the file is aligned as memory is.
Needs neither torch nor safetensors.

[Note: Hashed in chunks]
SHA-256 takes longer than a fast disk, and cannot be divided. So the header and every ``CHUNK``
bytes of data are hashed by themselves, by as many threads as there are, and the file's hash is that
of their digests, one after the other. Every byte is under it, and so is the order.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = [
    "CHUNK",
    "PAGE",
    "DamagedFile",
    "OpenedFile",
    "PackedFile",
    "Piece",
    "check_packed",
    "read_chunk",
    "read_packed",
    "write_packed",
]

PAGE = 4096
CHUNK = 16 << 20
"""Bytes of data that are hashed by themselves; part of the format."""
_SCRATCH = 1 << 20
_GAP = "gap"


class DamagedFile(Exception):
    """A packed file is not what its record says; the text says how."""


class OpenedFile:
    """A file that several threads read; closed when nobody refers to it any more."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            DamagedFile: it cannot be opened.
        """
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedFile(f"{path.name} cannot be read ({error.strerror})") from error
        weakref.finalize(self, os.close, self._handle).atexit = False

    def read(self, begin: int, into: memoryview) -> None:
        """Fill ``into`` with what stands after the first ``begin`` bytes.

        Raises:
            DamagedFile: the file ends too early, or cannot be read.
        """
        try:
            while len(into):
                count = os.preadv(self._handle, [into], begin)
                if not count:
                    raise DamagedFile(f"{self._path.name} ended while it was read")
                into, begin = into[count:], begin + count
        except OSError as error:
            raise DamagedFile(f"{self._path.name} cannot be read ({error.strerror})") from error


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
        sha256: of the whole file; see [Note: Hashed in chunks].
        pieces: its tensors, in the order in which they lie.
    """

    file: str
    unit: str
    start: int
    nbytes: int
    sha256: str
    pieces: tuple[Piece, ...]


def write_packed(
    path: Path,
    pieces: Sequence[Piece],
    chunks: Iterable[memoryview],
    *,
    unit: str,
    nbytes: int,
    hashers: Executor | None = None,
) -> PackedFile:
    """Write a file and wait until it is on the disk.

    Args:
        path: the file.
        pieces: its tensors, in the order in which they lie.
        chunks: the data, gaps included, as flat bytes that nobody changes meanwhile.
        unit: the unit's name.
        nbytes: bytes of data.
        hashers: hash while the data is written; None hashes in this thread.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    head = _header(pieces, unit=unit, nbytes=nbytes)
    digests = _Digests(head, hashers)
    written = 0
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(head))
        for chunk in chunks:
            digests.add(chunk)
            for begin in range(0, len(chunk), CHUNK):
                part = chunk[begin : begin + CHUNK]
                _write_all(file, part)
                written += len(part)
        os.fsync(file.fileno())
    assert written == nbytes, "a unit's chunks do not make up its stretch"
    return PackedFile(path.name, unit, len(head), nbytes, digests.all(), tuple(pieces))


def read_packed(path: Path, record: PackedFile, into: memoryview | None) -> None:
    """Read a file and check it against its record.

    Args:
        path: the file.
        record: what was recorded when it was written.
        into: where the data goes, flat bytes of its size; None only checks.

    Raises:
        DamagedFile: it is missing, of another size, or holds other bytes.
    """
    file = OpenedFile(path)
    digests = [
        read_chunk(file, record, begin, None if into is None else into[begin : begin + CHUNK])
        for begin in range(0, record.nbytes, CHUNK)
    ]
    check_packed(path, record, digests)


def read_chunk(file: OpenedFile, record: PackedFile, begin: int, into: memoryview | None) -> bytes:
    """Read and hash a stretch of a file's data: ``CHUNK`` bytes, or what is left.

    Args:
        file: the file.
        record: what was recorded when it was written.
        begin: where the stretch begins in the data, a multiple of ``CHUNK``.
        into: where it goes; None only hashes.

    Returns:
        Its SHA-256, for ``check_packed``.

    Raises:
        DamagedFile: the file ends too early, or cannot be read.
    """
    count = min(CHUNK, record.nbytes - begin)
    start = record.start + begin
    if into is not None:
        file.read(start, into[:count])
        return _sha256(into[:count])
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(_SCRATCH, count)))
    for at in range(0, count, _SCRATCH):
        part = scratch[: min(_SCRATCH, count - at)]
        file.read(start + at, part)
        digest.update(part)
    return digest.digest()


def check_packed(path: Path, record: PackedFile, digests: Sequence[bytes]) -> None:
    """Check a file whose data was read.

    Args:
        path: the file.
        record: what was recorded when it was written.
        digests: what ``read_chunk`` returned for each stretch, in order.

    Raises:
        DamagedFile: it is of another size, or holds other bytes.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read ({error.strerror})") from error
    if size != record.start + record.nbytes:
        raise DamagedFile(f"{path.name} has {size} bytes instead of {record.start + record.nbytes}")
    head = memoryview(bytearray(record.start))
    OpenedFile(path).read(0, head)
    if _root([_sha256(head), *digests]) != record.sha256:
        raise DamagedFile(f"{path.name} holds other bytes than were written")


class _Digests:
    """Hashes data that comes in parts; see [Note: Hashed in chunks]."""

    def __init__(self, head: bytes, pool: Executor | None) -> None:
        self._pool = pool
        self._found: list[bytes | Future[bytes]] = [_sha256(memoryview(head))]
        self._current = hashlib.sha256()
        self._filled = 0

    def add(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: CHUNK - self._filled], data[CHUNK - self._filled :]
            if self._pool is not None and len(part) == CHUNK:
                self._found.append(self._pool.submit(_sha256, part))
                continue
            self._current.update(part)
            self._filled += len(part)
            if self._filled == CHUNK:
                self._close()

    def all(self) -> str:
        if self._filled:
            self._close()
        return _root(
            [found if isinstance(found, bytes) else found.result() for found in self._found]
        )

    def _close(self) -> None:
        self._found.append(self._current.digest())
        self._current, self._filled = hashlib.sha256(), 0


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _root(digests: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


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
