"""Memory that is made and page-locked fast.

[Note: Page-locked memory]
What page-locking waits for is that memory is made: the system finds pages and clears them, one by
one. So memory that will be page-locked is private and asks for huge pages of 2 MiB;
shared memory gets them only where an administrator allowed it. Several threads make a large
stretch. They write to every page: a call that makes many pages at once (``MADV_POPULATE_WRITE``)
keeps the process from mapping anything, and so from starting a thread, until it is done.

Linux copies page-locked private pages for every child that a process forks. A child that shares
CUDA memory cannot use it anyway, so the stretch is wiped there instead: a child reads zeros from
it, and its parent's pages stay where the device reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
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
_REGISTER_PORTABLE_MAPPED = 0x01 | 0x02
"""``cudaHostRegisterPortable | cudaHostRegisterMapped`` (CUDA runtime API, memory management)."""

_PIECE = 32 << 20
"""Bytes that a thread makes at once; a multiple of a huge page, and few enough that torch needs no
threads of its own for them."""
_THREADS = 8
_LARGE = 1 << 30
"""Bytes from which several threads make a stretch whether or not others are being made."""


class _Making:
    """Counts the stretches that are being made; entered, tells how many others there are."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> int:
        with self._lock:
            self._count += 1
            return self._count - 1

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self._count -= 1


_making = _Making()


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
    for advice in (_HUGEPAGE, _WIPEONFORK):
        with contextlib.suppress(OSError):  # a system that knows them not is slower, no more
            memory.madvise(advice)
    return memory


def populate(pointer: int, nbytes: int) -> None:
    """Have all pages of a new stretch made now, while other threads run and CUDA is free."""
    if not nbytes:
        return
    memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
    pieces = [memory[at : at + _PIECE : mmap.PAGESIZE] for at in range(0, nbytes, _PIECE)]
    with _making as others:
        # those that make other stretches are enough: threads that only start, many at a time,
        # wait for one another to map their stacks
        if len(pieces) <= makers() or (others and nbytes < _LARGE):
            for piece in pieces:
                piece.zero_()
            return
        with ThreadPoolExecutor(makers(), thread_name_prefix="poros-populate") as pool:
            list(pool.map(torch.Tensor.zero_, pieces))


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
