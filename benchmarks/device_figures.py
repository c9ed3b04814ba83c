"""What a GPU and its link do, measured: memory as the driver sees it, and the pinned copy rate."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from poros_core.host_store import HostBuffer

LINK_BYTES = 256 * 2**20
_COPIES = 15
_SAMPLE_SECONDS = 0.01
_rates: dict[int, float] = {}
"""What this process has measured of its link, by size."""


def link_rates(device: torch.device, sizes: Sequence[int]) -> dict[str, float]:
    """Return bytes per second of a pinned host-to-device copy, by size in bytes. A size is measured
    once a process."""
    for size in set(sizes) - _rates.keys():
        _rates[size] = _link_rate(device, size)
    return {str(size): _rates[size] for size in sorted(set(sizes))}


def _link_rate(device: torch.device, size: int) -> float:
    stream = torch.cuda.Stream(device)
    source = HostBuffer(size, device=device)
    source.bytes.fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            target.copy_(source.bytes, non_blocking=True)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_COPIES + 1)]
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source.bytes, non_blocking=True)
            mark.record()
    torch.cuda.synchronize(device)
    return size / statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


class _Memory(ctypes.Structure):
    """``nvmlMemory_v2_t`` (NVML API reference, device queries)."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


_MEMORY_VERSION = ctypes.sizeof(_Memory) | (2 << 24)


class Driver:
    """The driver's own count of a GPU's memory, which needs no CUDA context and waits for none."""

    def __init__(self, device: torch.device) -> None:
        """Find the GPU in NVML by its UUID.

        Raises:
            OSError: there is no NVML here, or it does not know the GPU.
        """
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._check(self._library.nvmlInit_v2())
        self._check(
            self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle))
        )

    def used(self) -> int:
        """Return the bytes in use on the GPU."""
        memory = _Memory(version=_MEMORY_VERSION)
        self._check(self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(memory)))
        return int(memory.used)

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"NVML error {status}")


class DeviceMemory:
    """Follows how much of a GPU is in use. On a CPU it does nothing and knows nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._driver: Driver | None = None
        self._high = 0
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None
        if self._cuda:
            with contextlib.suppress(OSError, AttributeError):
                self._driver = Driver(device)

    @property
    def peak(self) -> int | None:
        """Highest that was seen since ``restart``, in bytes, or None on a CPU."""
        return self._high if self._cuda else None

    def bound(self) -> int | None:
        """Return what the peak cannot have been above: the allocator's peak of reserved memory, and
        all that is in use beside the allocator now. None on a CPU."""
        now = self.now()
        if now is None:
            return None
        beside = now - torch.cuda.memory_reserved(self._device)
        return max(self._high, beside + torch.cuda.max_memory_reserved(self._device))

    @property
    def sampled(self) -> bool:
        """Whether the driver is asked between the looks too."""
        return self._driver is not None

    def now(self) -> int | None:
        """Return the bytes in use now, or None on a CPU. Makes the context if there is none."""
        if not self._cuda:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return max(total - free, 0 if self._driver is None else self._driver.used())

    def look(self) -> None:
        """Take the memory in use into account."""
        self._high = max(self._high, self.now() or 0)

    def restart(self) -> None:
        """Forget the peak."""
        self._high = 0
        self.look()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample the driver's count from a thread."""
        if self._driver is None:
            yield
            return
        self._quit.clear()
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._quit.set()
            thread.join()

    def _sample(self) -> None:
        assert self._driver is not None
        while not self._quit.wait(_SAMPLE_SECONDS):
            self._high = max(self._high, self._driver.used())


def used_before(device: torch.device) -> int | None:
    """Return what is in use on the GPU by the driver's count; None without CUDA or NVML."""
    if device.type != "cuda":
        return None
    try:
        return Driver(device).used()
    except (OSError, AttributeError):
        return None


def cap_memory(device: torch.device, *, cap: int, reserve: int) -> dict[str, Any]:
    """Bound the allocator so that the GPU's whole use stays under ``cap`` bytes.

    Args:
        device: the GPU.
        cap: bytes of the card that is emulated.
        reserve: bytes for what the allocator does not see and that comes later: kernels that are
            loaded when they are first used, and graphs.

    Returns:
        What was measured and set.
    """
    probe = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    (probe @ probe).sum().item()
    del probe
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    allowed = cap - context - reserve
    if allowed <= 0:
        raise ValueError(
            f"a card of {cap / 1e9:.2f} GB has nothing left beside a context of "
            f"{context / 1e9:.2f} GB and the {reserve / 1e9:.2f} GB that are reserved"
        )
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    return {
        "cap_bytes": cap,
        "context_bytes": context,
        "reserved_for_graphs_bytes": reserve,
        "allocator_limit_bytes": allowed,
    }
