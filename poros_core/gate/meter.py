"""Memory and time of each arm, where several share one device.

[Note: Shared device]
All arms stand on one device, so an arm's own bytes are followed as differences: what allocated
memory rose by while it was built and stepped. Its peak in a step is the device's peak in that step,
less what the others hold. Reserved memory cannot be told apart so well, since an arm may be given
gaps in what another reserved: every gap is counted as the arm's, so its figure is what it reserved
at most. The gaps are smallest while the allocator's cache is emptied around each arm's step, which
costs time: that is done in the first steps, and time is taken in the later ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from poros_core.workspaces import drop_workspaces

__all__ = ["METHOD", "SETTLING_STEPS", "Meter"]

SETTLING_STEPS = 3
"""Steps in which reserved memory is measured and time is not."""

METHOD = (
    "All arms in one process. peak_allocated_bytes: highest over all steps of the allocator's peak "
    "in the arm's step, less what the other arms hold. peak_reserved_bytes: the device's peak of "
    "reserved memory in the arm's step, less what the other arms hold: an upper bound, since gaps "
    f"between the others' tensors count too; in the first {SETTLING_STEPS} steps, with the "
    "allocator's cache emptied before and after each arm's step. step_seconds: median "
    f"over the steps after the first {SETTLING_STEPS}, device synchronised before and after. "
    "Null: not measured (no CUDA device, too few steps, or other gates ran beside it)."
)


class Meter:
    """Follows one arm. On a CPU it takes time only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._own = 0
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._steps = 0
        self._seconds: list[float] = []

    @property
    def peak_allocated(self) -> int | None:
        """Bytes, or None without CUDA."""
        return self._peak_allocated if self._cuda else None

    @property
    def peak_reserved(self) -> int | None:
        """Bytes, or None without CUDA."""
        return self._peak_reserved if self._cuda else None

    @property
    def step_seconds(self) -> float | None:
        """Median of a step, or None if there were too few."""
        return statistics.median(self._seconds) if self._seconds else None

    def state(self) -> dict[str, Any]:
        """Return what was measured so far, for a run that goes on later."""
        return {
            "peak_allocated": self._peak_allocated,
            "peak_reserved": self._peak_reserved,
            "seconds": list(self._seconds),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what was measured before."""
        self._peak_allocated = max(self._peak_allocated, state["peak_allocated"])
        self._peak_reserved = max(self._peak_reserved, state["peak_reserved"])
        self._seconds = [*state["seconds"], *self._seconds]

    @contextmanager
    def building(self) -> Iterator[None]:
        """Count what is allocated within as the arm's own."""
        with self._owning(empty=True):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step of the arm; see [Note: Shared device]."""
        self._steps += 1
        settling = self._steps <= SETTLING_STEPS
        with self._owning(empty=settling):
            others = self._others()
            self._synchronize()
            start = time.perf_counter()
            yield
            self._synchronize()
            elapsed = time.perf_counter() - start
            if not settling:
                self._seconds.append(elapsed)
            if self._cuda:
                peak = torch.cuda.max_memory_allocated(self._device) - others
                self._peak_allocated = max(self._peak_allocated, peak)
                if settling:
                    peak = torch.cuda.max_memory_reserved(self._device) - others
                    self._peak_reserved = max(self._peak_reserved, peak)

    def _others(self) -> int:
        """Return the bytes that the other arms hold, and start a new peak."""
        if not self._cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device) - self._own

    @contextmanager
    def _owning(self, *, empty: bool) -> Iterator[None]:
        before = self._held(empty=empty)
        yield
        self._own += self._held(empty=empty) - before

    def _held(self, *, empty: bool) -> int:
        if not self._cuda:
            return 0
        self._synchronize()
        drop_workspaces()  # they are nobody's: one arm's would go in another's step
        if empty:
            torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self._device)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
