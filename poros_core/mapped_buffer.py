"""A unit's stretch that stays in a file."""

from __future__ import annotations

import ctypes
import errno
import mmap
import warnings
from pathlib import Path

import torch

from poros_core.errors import PrepareError
from poros_core.host_memory import TensorEntry
from poros_core.log import get_logger

__all__ = ["MappedBuffer"]

_log = get_logger("host_store")

_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` (madvise(2), Linux 5.14): read all pages of a range now."""


class MappedBuffer:
    """Part of a file as host memory: pages are read when they are looked at, and given up when
    memory is short.

    The mapping is private. Whoever writes to it (a planted fault, a merge) writes to memory of the
    process and never to the file. That counts as data in the eyes of ``RLIMIT_DATA``; under such a
    limit it is mapped read-only, and writing to a weight ends the process.
    """

    locked = False

    def __init__(self, path: Path, *, start: int, nbytes: int) -> None:
        """Map a file.

        Args:
            path: the file.
            start: where the stretch begins in it.
            nbytes: its size.

        Raises:
            PrepareError: it cannot be mapped.
        """
        self.nbytes = nbytes
        self._start = start
        with path.open("rb") as file:
            self._map = _mapped(file.fileno(), start + nbytes, path)
        self.bytes = self._tensor(torch.uint8, nbytes, 0)

    def view(self) -> memoryview:
        """Return the bytes as the host reads them."""
        return memoryview(self._map)[self._start : self._start + self.nbytes]

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return a view of one tensor, as the host sees it, with a storage of its own."""
        count = entry.nbytes // entry.dtype.itemsize
        return self._tensor(entry.dtype, count, entry.offset).view(entry.shape)

    def will_need(self) -> None:
        """Read the stretch from the disk at the disk's speed. Other threads run meanwhile."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        address, length = ctypes.c_void_p(self.bytes.data_ptr()), ctypes.c_size_t(self.nbytes)
        if madvise(address, length, _POPULATE_READ) != 0:
            madvise(address, length, mmap.MADV_WILLNEED)

    def _tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(
                self._map, dtype=dtype, count=count, offset=self._start + offset
            )


def _mapped(handle: int, length: int, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(
            handle, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise PrepareError(f"'{path}' cannot be mapped: {error.strerror}.") from error
    try:
        found = mmap.mmap(handle, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise PrepareError(
            f"'{path}' cannot be mapped: {error.strerror}. Raise `ulimit -v`."
        ) from error
    _log.warning("mapped_read_only", file=path.name, reason="RLIMIT_DATA (ulimit -d)")
    return found
