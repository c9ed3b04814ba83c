"""How far a load is, and what it took: told to an observer while it runs, and noted at the end.

[Note: Host memory of a load]
What counts is memory that nothing but this process can give back: anonymous pages, private and
shared, which the host store is made of and which page-locking keeps (``RssAnon`` and ``RssShmem``
in ``/proc/self/status``). Mapped pages of files are left out: they give way. The level
before the load is subtracted. The peak is the highest of samples that are 20 ms apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from attrs import frozen

__all__ = ["LoadMeter", "LoadObserver", "LoadReport", "SilentObserver", "host_memory"]

_STATUS = Path("/proc/self/status")
_STATUS_BYTES = 1 << 16
_COUNTED = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_KINDS = 2
_EVERY_S = 0.02


@frozen(kw_only=True)
class LoadReport:
    """What a load took, in bytes and seconds.

    Attributes:
        source: ``"checkpoint"`` or ``"cache"``.
        host: where layers stand: ``"pinned"``, ``"pageable"`` or ``"mmap"``.
        read_bytes: what was read from disk.
        host_bytes: the base, in host memory or in files.
        device_bytes: frozen tensors that stand on the device.
        seconds: how long it took.
        host_peak_bytes: most host memory while it ran, over the level before. See
            [Note: Host memory of a load]. None where the system does not say.
        host_steady_bytes: host memory once it was done, likewise.
        device_peak_bytes: most device memory that was allocated while it ran, over the level
            before; None without CUDA, or if the process had a higher peak earlier.
    """

    source: str
    host: str
    read_bytes: int
    host_bytes: int
    device_bytes: int
    seconds: float
    host_peak_bytes: int | None
    host_steady_bytes: int | None
    device_peak_bytes: int | None


class LoadObserver(Protocol):
    """Is told how far a load is. ``advance`` may be called from several threads."""

    def stage(self, title: str, total: int) -> None:
        """Called when something that takes time begins.

        Args:
            title: what it is, for example ``"reading the cache"``.
            total: about how many bytes it will go through.
        """
        ...

    def advance(self, nbytes: int) -> None:
        """Called when so many bytes more are done."""
        ...

    def done(self, report: LoadReport) -> None:
        """Called once at the end, if the load succeeded."""
        ...


class SilentObserver:
    """Says nothing."""

    def stage(self, title: str, total: int) -> None:
        """Say nothing."""

    def advance(self, nbytes: int) -> None:
        """Say nothing."""

    def done(self, report: LoadReport) -> None:
        """Say nothing."""


def host_memory() -> int | None:
    """Return this process's host memory; see [Note: Host memory of a load]."""
    with _status() as handle:
        return _counted(handle)


@contextlib.contextmanager
def _status() -> Iterator[int | None]:
    """Open what the system says of this process; None where it says nothing."""
    try:
        handle = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _counted(handle: int | None) -> int | None:
    content = b"" if handle is None else os.pread(handle, _STATUS_BYTES, 0)
    found = _COUNTED.findall(content)
    return sum(map(int, found)) * 1024 if len(found) == _KINDS else None


class LoadMeter:
    """Follows memory and time while it is entered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="poros-memory", daemon=True)
        self._start = self._before = self._peak = 0
        self._device_before = self._device_peak_before = 0

    def __enter__(self) -> LoadMeter:
        self._start_time = time.perf_counter()
        self._before = self._peak = host_memory() or 0
        self._device_before, self._device_peak_before = self._device_bytes()
        self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._sampler.join()

    def report(
        self, *, source: str, host: str, read_bytes: int, host_bytes: int, device_bytes: int
    ) -> LoadReport:
        """Return what was measured so far, with what only the load itself knows."""
        now = host_memory()
        self._peak = max(self._peak, now or 0)
        _, peak = self._device_bytes()
        rose = peak > self._device_peak_before
        return LoadReport(
            source=source,
            host=host,
            read_bytes=read_bytes,
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            seconds=time.perf_counter() - self._start_time,
            host_peak_bytes=None if now is None else self._peak - self._before,
            host_steady_bytes=None if now is None else now - self._before,
            device_peak_bytes=peak - self._device_before if rose else None,
        )

    def _sample(self) -> None:
        with _status() as handle:  # kept open: every call takes a turn from the thread that loads
            while not self._stop.wait(_EVERY_S):
                self._peak = max(self._peak, _counted(handle) or 0)

    def _device_bytes(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        return (
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )
