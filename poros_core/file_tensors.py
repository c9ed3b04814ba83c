"""Tensors that are views of mapped files, and reading their bytes without looking at the mapping.

[Note: Read, not looked at]
A checkpoint's tensors come as views of mapped files. Whoever copies one looks at every page of the
mapping: the process then holds the pages besides the copy, and gets them 4 KiB at a time. So the
bytes are read from the file, straight to where they will stand, by several threads. That is done
only for what still is the file's: the mapping must be of the same file, and no page of it written
to (a private mapping keeps such pages for itself). Everything else is copied.
"""

from __future__ import annotations

import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from attrs import frozen

from poros_core.errors import CheckpointError

__all__ = ["LARGE", "FileSpan", "MappedFiles", "read_span"]

LARGE = 1 << 20
"""Bytes from which it pays to read a tensor from its file."""

_MAPS = Path("/proc/self/maps")
_OF_FILES = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ ([1-9][0-9]*) +(/.*)$", re.MULTILINE
)
"""A line of ``/proc/self/maps`` (proc_pid_maps(5)) that is of a file: from where to where, offset,
inode, path."""
_PAGES = Path("/proc/self/pagemap")
_PIECE = 32 << 20
_THREADS = 4
_OF_A_FILE = 1 << 61
_PRESENT = 0b11 << 62
"""Bits of an entry of ``/proc/self/pagemap`` (proc_pid_pagemap(5)): the page is a file's or shared;
it is in memory, or in swap."""


@frozen(kw_only=True)
class FileSpan:
    """Where bytes stand.

    Attributes:
        file: the file, no link.
        begin: bytes before them.
        nbytes: how many there are.
    """

    file: Path
    begin: int
    nbytes: int


class MappedFiles:
    """The files that this process had mapped when this was made."""

    def __init__(self) -> None:
        try:
            found = _OF_FILES.findall(_MAPS.read_bytes())
        except OSError:
            found = []
        self._mappings = [(int(start, 16), int(end, 16), rest) for start, end, *rest in found]

    def span_of(self, tensor: torch.Tensor) -> FileSpan | None:
        """Return where a tensor's bytes stand in a file; None if it is no view of one, or is not
        as the file has it."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
            return None
        pointer = tensor.data_ptr()
        inside = (m for m in self._mappings if m[0] <= pointer and pointer + tensor.nbytes <= m[1])
        mapping = next(inside, None)
        if mapping is None:
            return None
        start, _, (offset, inode, path) = mapping
        file = Path(os.fsdecode(path))
        try:
            if file.stat().st_ino != int(inode) or _written(pointer, tensor.nbytes):
                return None
        except OSError:
            return None
        return FileSpan(file=file, begin=int(offset, 16) + pointer - start, nbytes=tensor.nbytes)


def read_span(span: FileSpan, into: memoryview) -> None:
    """Read bytes with several threads.

    Args:
        span: where they stand.
        into: where they go; as long as the span.

    Raises:
        CheckpointError: the file ends too early.
        OSError: it cannot be read.
    """
    handle = os.open(span.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begins = range(0, span.nbytes, _PIECE)
        threads = min(_THREADS, len(begins), os.cpu_count() or 1)
        if threads == 1:
            _read(handle, span, 0, into)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="poros-read-span") as pool:
            reads = [pool.submit(_read, handle, span, at, into[at : at + _PIECE]) for at in begins]
            for read in reads:
                read.result()
    finally:
        os.close(handle)


def _read(handle: int, span: FileSpan, at: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(handle, [into[done:]], span.begin + at + done)
        if not count:
            raise CheckpointError(
                f"File '{span.file}' ended while it was read. Something else writes to it, or it "
                "is damaged: fetch the checkpoint again."
            )
        done += count


def _written(pointer: int, nbytes: int) -> bool:
    """Say whether the process has a page of its own in a stretch.

    Raises:
        OSError: the system does not say.
    """
    first, last = pointer // mmap.PAGESIZE, (pointer + nbytes - 1) // mmap.PAGESIZE
    size = 8 * (last - first + 1)
    with _PAGES.open("rb", buffering=0) as file:
        content = os.pread(file.fileno(), size, 8 * first)
    if len(content) != size:
        raise OSError("pages of the process are not told")
    pages = torch.frombuffer(bytearray(content), dtype=torch.int64)
    present = pages.bitwise_and(_signed(_PRESENT)) != 0
    of_a_file = pages.bitwise_and(_OF_A_FILE) != 0
    return bool((present & ~of_a_file).any())


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
