"""Streams as bad as they may be: copies that run at the last moment, or at the first."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Bytes:
    """Memory that is there only while somebody else holds it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._storage = weakref.ref(flat.untyped_storage())
        self._at = flat.storage_offset(), flat.shape

    def tensor(self) -> torch.Tensor:
        storage = self._storage()
        assert storage is not None, "memory is freed before a copy from or to it is done"
        return torch.empty(0, dtype=torch.uint8).set_(storage, *self._at)


class Late:
    """A copy that runs as late as it may: when somebody waits for it, or for a later one."""

    def __init__(
        self, lane: LateLane, target: Bytes, source: Bytes, *, after: list[Late], poison: bool
    ) -> None:
        self.lane, self.target, self.source, self.after = lane, target, source, after
        self.poison = poison

    @property
    def pending(self) -> bool:
        return self in self.lane.queue

    def run(self) -> None:
        for event in self.after:
            event.lane.wait(event)
        if self.poison:
            self.target.tensor().fill_(0xFF)
        self.target.tensor().copy_(self.source.tensor())


class LateLane:
    """A stream beside kernels that run at once."""

    stalled_seconds = None

    def __init__(self) -> None:
        self.queue: list[Late] = []

    def adopt(self, arena: Any) -> None:
        """Arenas outlive their copies here."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Any], poison: bool
    ) -> Late:
        before = [event for event in after if isinstance(event, Late)]
        self.queue.append(Late(self, Bytes(target), Bytes(source), after=before, poison=poison))
        return self.queue[-1]

    def wait(self, event: Any) -> None:
        while isinstance(event, Late) and event.pending:
            event.lane.queue.pop(0).run()

    def record(self) -> object:
        return object()


class EarlyLane(LateLane):
    """A stream whose copies run as soon as all that they wait for has run."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Any], poison: bool
    ) -> Late:
        event = super().copy(target, source, after=after, poison=poison)
        while self.queue and not any(earlier.pending for earlier in self.queue[0].after):
            self.queue.pop(0).run()
        return event
