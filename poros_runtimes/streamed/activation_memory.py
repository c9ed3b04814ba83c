"""Host memory that hidden states are kept in, used again whatever their lengths."""

from __future__ import annotations

from collections import deque

import torch
from attrs import define

from poros_core.errors import PrepareError, StateError
from poros_core.host_memory import HostBuffer
from poros_runtimes.streamed.lane import Event

__all__ = ["ActivationMemory", "HostStretch"]

_GRAIN = 2 << 20
"""Bytes that sizes of host memory are rounded up to, so that lengths that differ little meet the
same memory."""


@define(eq=False)
class HostStretch:
    """Host memory for one hidden state, and the event that the last copy from or to it is done."""

    buffer: HostBuffer
    event: Event | None = None


class ActivationMemory:
    """Page-locked memory that is used again. There are never more stretches than hidden states
    were kept at once, and none is larger than the largest that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.back: deque[HostStretch] = deque()
        """Stretches that nobody needs any more; filled whenever a graph is dropped."""
        self.nbytes = 0
        self._device = device
        self._free: dict[int, list[HostStretch]] = {}

    def take(self, nbytes: int) -> HostStretch:
        """Return a stretch of at least ``nbytes`` bytes.

        Raises:
            StateError: it cannot be had.
        """
        while self.back:
            stretch = self.back.popleft()
            self._free.setdefault(stretch.buffer.nbytes, []).append(stretch)
        size = -(-nbytes // _GRAIN) * _GRAIN
        fitting = (
            size if size in self._free else min((s for s in self._free if s > size), default=0)
        )
        if fitting:
            return self._pop(fitting)
        if self._free:
            self._drop(max(self._free))
        try:
            buffer = HostBuffer(size, device=self._device)
        except PrepareError as error:
            raise StateError(
                f"A hidden state cannot be kept on the host. {error} Or leave "
                "offload_activations=True out."
            ) from error
        self.nbytes += size
        return HostStretch(buffer)

    def _pop(self, size: int) -> HostStretch:
        stretches = self._free[size]
        stretch = stretches.pop()
        if not stretches:
            del self._free[size]
        return stretch

    def _drop(self, size: int) -> None:
        """Give one stretch back to the system, in place of which a larger one will be had."""
        stretch = self._pop(size)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies from or to it may still run
        self.nbytes -= stretch.buffer.nbytes
