"""What each stage of a load can do at most, measured; see ``load_texts.FLOOR_METHOD``."""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from attrs import frozen
from device_figures import LINK_BYTES, link_rates
from load_generated import Pool

from poros_core.host_store import HostBuffer
from poros_core.packing import READERS
from poros_core.page_locking import makers

__all__ = ["Rates", "drop_from_page_cache", "lock_rate", "quantise_rate", "read_rate", "write_rate"]

_PIECE = 16 << 20
_THREADS = 8
_READ_BYTES = 8 << 30
_LOCK_BYTES = 8 << 30
_WRITE_BYTES = 1 << 30
_HASH_BYTES = 256 << 20
_COPIES = 15


@frozen(kw_only=True)
class Rates:
    """Bytes per second of each stage; None for one that this machine or this load has not.

    Attributes:
        read: from the files.
        quantise: of unquantised bytes.
        to_device: page-locked host to device.
        to_host: device to page-locked host.
        page_lock: of memory that is allocated and registered.
        write: to the disk of the cache.
        hash: SHA-256 by as many threads as check a packed base.
    """

    read: float | None
    quantise: float | None
    to_device: float | None
    to_host: float | None
    page_lock: float | None
    write: float | None
    hash: float


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Let the next read of files come from the disk, once what was written is on it."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_rate(files: Sequence[Path], *, most: int = _READ_BYTES) -> tuple[float, int]:
    """Read files with several threads, as a load can.

    Returns:
        Bytes per second, and how many bytes were read.
    """
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, _PIECE)]
    pieces = pieces[: max(1, most // _PIECE)]
    warm = [memoryview(bytearray(_PIECE)) for _ in range(_THREADS)]

    def read(number: int) -> int:
        done = 0
        for file, at in pieces[number::_THREADS]:
            handle = os.open(file, os.O_RDONLY)
            try:
                done += os.preadv(handle, [warm[number]], at)
            finally:
                os.close(handle)
        return done

    with ThreadPoolExecutor(_THREADS) as pool:
        start = time.perf_counter()
        done = sum(pool.map(read, range(_THREADS)))
        return done / (time.perf_counter() - start), done


def generate_rate(pool: Pool, *, nbytes: int = _READ_BYTES) -> float:
    """Return bytes per second of copying weights from a pool with several threads."""
    warm = [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(_THREADS)]
    turns = max(1, nbytes // _PIECE // _THREADS)

    def fill(number: int) -> None:
        for turn in range(turns):
            pool.fill(f"{number}.{turn}", 0, warm[number])

    with ThreadPoolExecutor(_THREADS) as threads:
        start = time.perf_counter()
        list(threads.map(fill, range(_THREADS)))
        return turns * _THREADS * _PIECE / (time.perf_counter() - start)


def quantise_rate(shape: torch.Size, device: torch.device, *, double: bool) -> float:
    """Return unquantised bf16 bytes per second of the quantiser on a weight of that shape."""
    from bitsandbytes.functional import quantize_4bit

    weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)
    count = 10 if device.type == "cuda" else 1

    def once() -> None:
        quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)

    once()
    return weight.nbytes / statistics.median(_timed(once, device) for _ in range(count))


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Return bytes per second to the device and back, in page-locked memory."""
    there = max(link_rates(device, [LINK_BYTES]).values())
    target = HostBuffer(LINK_BYTES, device=device)
    source = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)
    target.bytes.copy_(source, non_blocking=True)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_COPIES + 1)]
    marks[0].record()
    for mark in marks[1:]:
        target.bytes.copy_(source, non_blocking=True)
        mark.record()
    torch.cuda.synchronize(device)
    taken = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return there, LINK_BYTES / statistics.median(taken)


def lock_rate(device: torch.device, sizes: Sequence[int], *, most: int = _LOCK_BYTES) -> float:
    """Return bytes per second of allocating and page-locking memory as a load does: stretches of
    the same sizes, by as many threads.

    Args:
        device: the compute device.
        sizes: bytes of each stretch.
        most: bytes of all of them together; what is beyond is left out.
    """
    chosen = [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= most]
    chosen = chosen or [min(sizes)]

    def once() -> float:
        with ThreadPoolExecutor(makers()) as pool:
            start = time.perf_counter()
            held = list(pool.map(lambda size: HostBuffer(size, device=device), chosen))
            taken = time.perf_counter() - start
        del held
        return taken

    return sum(chosen) / statistics.median(once() for _ in range(3))


def write_rate(folder: Path, *, nbytes: int = _WRITE_BYTES) -> float:
    """Return bytes per second of writing to a folder's disk, synced."""
    content = memoryview(os.urandom(_PIECE))
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(max(1, nbytes // _PIECE)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return max(1, nbytes // _PIECE) * _PIECE / (time.perf_counter() - start)


def hash_rate(*, nbytes: int = _HASH_BYTES) -> float:
    """Return bytes per second of SHA-256 by as many threads as check a packed base."""
    content = bytes(nbytes)
    count = min(READERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        start = time.perf_counter()
        list(pool.map(lambda number: hashlib.sha256(content).digest(), range(count)))
        return count * nbytes / (time.perf_counter() - start)


def _timed(what: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        what()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    what()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
