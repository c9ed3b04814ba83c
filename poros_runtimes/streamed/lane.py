"""The copy lane: how bytes get from the host to the arena, and who waits for whom.

The same code drives both lanes. On CUDA a copy is asynchronous on a stream of its own; on a CPU
it is done when the call returns, and an event is a value that says nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch

from poros_runtimes.streamed.arena import Arena
from poros_runtimes.streamed.streams import own_stream

__all__ = ["POISON", "CudaLane", "Event", "HostLane", "Lane", "make_lane"]

POISON = 0xFF
"""Every byte of poisoned memory: NaN in bf16, fp16, fp32 and fp64, and an absurd quantised code."""


class Event(Protocol):
    """A point in a stream that another stream can wait for."""


class Lane(Protocol):
    """Moves bytes into the arena and orders the moves against the compute stream."""

    def adopt(self, arena: Arena) -> None:
        """Tell the allocator that copies into ``arena`` may run when it is dropped."""
        ...

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], poison: bool
    ) -> Event:
        """Copy ``source`` to ``target`` (flat uint8, equal size) once every event of ``after``
        has passed, and return the event that the bytes are there. With ``poison``, fill
        ``target`` with 0xFF first."""
        ...

    def wait(self, event: Event) -> None:
        """Make the compute stream wait for ``event``. The host does not wait."""
        ...

    def record(self) -> Event:
        """Return the event that all work issued so far on the compute stream is done."""
        ...

    @property
    def stalled_seconds(self) -> float | None:
        """How long the compute stream stood in ``wait`` so far, as far as it is known without
        waiting; None where that cannot be known."""
        ...


class HostLane:
    """The CPU's lane: plain copies, done at once."""

    def adopt(self, arena: Arena) -> None:
        """Do nothing: no copy outlives its call."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], poison: bool
    ) -> Event:
        """Copy now; see ``Lane``."""
        if poison:
            target.fill_(POISON)
        target.copy_(source)
        return self

    stalled_seconds = None

    def wait(self, event: Event) -> None:
        """Return: everything is done already."""

    def record(self) -> Event:
        """Return an event that has passed."""
        return self


class CudaLane:
    """A copy stream beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = own_stream(self, device)
        self._waits: deque[tuple[Any, Any]] = deque()
        self._stalled = 0.0

    def adopt(self, arena: Arena) -> None:
        """Record the copy stream; see ``Lane``."""
        arena.used_by(self._stream)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Event], poison: bool
    ) -> Event:
        """Issue a copy on the copy stream; see ``Lane``."""
        for event in after:
            assert isinstance(event, torch.cuda.Event)
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            if poison:
                target.fill_(POISON)
            target.copy_(source, non_blocking=True)
            return cast(Event, self._stream.record_event())

    def wait(self, event: Event) -> None:
        """Make the current stream wait; see ``Lane``."""
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        cuda: Any = torch.cuda
        if cast(Any, event).query():
            return
        before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))

    @property
    def stalled_seconds(self) -> float:
        """The time between events around each wait that is over; see ``Lane``."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._stalled += before.elapsed_time(after) / 1e3
        return self._stalled

    def record(self) -> Event:
        """Record an event on the current stream; see ``Lane``."""
        return cast(Event, torch.cuda.current_stream(self._device).record_event())


def make_lane(device: torch.device) -> Lane:
    """Return the lane for a compute device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
