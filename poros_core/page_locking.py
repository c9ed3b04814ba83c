"""Memory that is made and page-locked fast.

[Note: Page-locked memory]
What page-locking waits for is that memory is made: the system finds pages and clears them, one by
one. So memory that will be page-locked is private and asks for huge pages of 2 MiB;
shared memory gets them only where an administrator allowed it. Several threads make a large
stretch.

Linux copies page-locked private pages for every child that a process forks. A child that shares
CUDA memory cannot use it anyway, so the stretch is wiped there instead: a child reads zeros from
it, and its parent's pages stay where the device reads them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from poros_core.errors import PrepareError

__all__ = ["lock", "lockable_memory", "makers", "populate"]

_HUGEPAGE = 14
"""``MADV_HUGEPAGE`` (madvise(2)): make huge pages of a range where they fit."""
_WIPEONFORK = 18
"""``MADV_WIPEONFORK`` (madvise(2), Linux 4.14): zeros for a child, and no copies."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` (madvise(2), Linux 5.14): make all pages of a range now."""
_REGISTER_PORTABLE_MAPPED = 0x01 | 0x02
"""``cudaHostRegisterPortable | cudaHostRegisterMapped`` (CUDA runtime API, memory management)."""

_PIECE = 32 << 20
"""Bytes that a thread makes at once; a multiple of a huge page."""
_THREADS = 8


def makers() -> int:
    """Return how many threads make and page-lock memory at once: half of the cores, eight at most.
    More are no faster, and take cores from those that read."""
    return min(_THREADS, max(1, (os.cpu_count() or 1) // 2))


def lockable_memory(nbytes: int) -> mmap.mmap:
    """Return memory that is to be page-locked; nothing of it is made yet.

    Raises:
        OSError: it cannot be had.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for advice in (_HUGEPAGE, _WIPEONFORK):  # a system that knows them not is slower, no more
        _advise(address, nbytes, advice)
    return memory


def populate(pointer: int, nbytes: int) -> None:
    """Have all pages of a stretch made now, while other threads run and CUDA is free. Where the
    system cannot, page-locking does it."""

    def one(begin: int) -> None:
        _advise(pointer + begin, min(_PIECE, nbytes - begin), _POPULATE_WRITE)

    begins = range(0, nbytes, _PIECE)
    if len(begins) <= makers():  # the threads that make other stretches are enough
        for begin in begins:
            one(begin)
        return
    with ThreadPoolExecutor(makers(), thread_name_prefix="poros-populate") as pool:
        list(pool.map(one, begins))


def lock(pointer: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """Page-lock a stretch and map it for a CUDA device.

    Returns:
        What gives it up again. In a child that was forked since, it does nothing.

    Raises:
        PrepareError: it cannot be page-locked.
    """
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(pointer, nbytes, _REGISTER_PORTABLE_MAPPED)
    if int(status) != 0:
        raise PrepareError(
            f"{nbytes / 1e9:.2f} GB of host memory cannot be page-locked (CUDA error "
            f"{int(status)}). Raise the limit that `ulimit -l` shows, give the container more "
            "memory, free some, or load with host='pageable' or host='mmap'."
        )
    return functools.partial(_unlock, runtime, pointer, device, os.getpid())


def _unlock(runtime: Any, pointer: int, device: torch.device, process: int) -> None:
    """Give page-locked memory up. Copies and kernels that were issued may still read it: those of a
    model that was dropped right after a step, say."""
    if os.getpid() != process:
        return
    try:
        torch.cuda.synchronize(device)
    finally:
        runtime.cudaHostUnregister(pointer)


def _advise(pointer: int, nbytes: int, advice: int) -> int:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return int(madvise(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes), advice))
