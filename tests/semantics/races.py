"""A lane that is as late as a device may be, and that notices who reads or writes too early.

Copies are done when the compute stream waits for them and not before, and every use of the arena is
dated: a copy whose events do not cover the last use of the bytes that it overwrites is a race, and
so is a use of bytes that a copy which nobody waited for may still write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from attrs import define, field, frozen

from poros_runtimes.streamed import units as units_module
from poros_runtimes.streamed.arena import Arena
from poros_runtimes.streamed.lane import POISON
from poros_runtimes.streamed.lending import ArenaLender
from poros_runtimes.streamed.units import Units
from poros_runtimes.streamed.window import Window

__all__ = ["LateLane", "watch"]


@frozen
class Span:
    """Addresses of some memory."""

    start: int
    end: int

    @classmethod
    def of(cls, memory: torch.Tensor) -> Span:
        """Return the addresses of a flat uint8 tensor."""
        return cls(memory.data_ptr(), memory.data_ptr() + memory.nbytes)

    def overlaps(self, other: Span) -> bool:
        """Say whether the two share a byte."""
        return self.start < other.end and other.start < self.end


@frozen
class Computed:
    """The event that the compute stream has got so far."""

    time: int


@frozen
class Copied:
    """The event that so many copies are done."""

    count: int


@define(eq=False)
class LateLane:
    """Implements ``Lane``; see the module."""

    now: int = 1
    seen: int = 0
    waited: int = 0
    copies: list[tuple[Span, torch.Tensor, torch.Tensor, bool]] = field(factory=list)
    uses: list[tuple[Span, int]] = field(factory=list)
    checks: int = 0
    stalled_seconds: float | None = None

    def adopt(self, arena: Arena) -> None:
        """Do nothing: a copy that is late keeps its target."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Any], poison: bool
    ) -> Copied:
        """Put a copy off; fail if its events do not cover what computed in its target."""
        times = [event.time for event in after if isinstance(event, Computed)]
        self.seen = max([self.seen, *times])
        span = Span.of(target)
        late = [time for used, time in self.uses if used.overlaps(span) and time > self.seen]
        self.checks += 1
        assert not late, "a copy does not wait for kernels that use its target"
        self.copies.append((span, target, source, poison))
        return Copied(len(self.copies))

    def wait(self, event: Any) -> None:
        """Do the copies up to this one."""
        if isinstance(event, Copied):
            for _, target, source, poison in self.copies[self.waited : event.count]:
                if poison:
                    target.fill_(POISON)
                target.copy_(source)
            self.waited = max(self.waited, event.count)

    def record(self) -> Computed:
        """Date what was computed so far."""
        self.now += 1
        return Computed(self.now - 1)

    def check(self, span: Span) -> None:
        """Fail if a copy that nobody waited for writes there."""
        pending = [other for other, *_ in self.copies[self.waited :] if other.overlaps(span)]
        self.checks += 1
        assert not pending, "kernels use memory that a copy may still write"

    def use(self, span: Span) -> None:
        """Note that kernels issued now use this memory."""
        self.check(span)
        self.uses.append((span, self.now))


def watch(monkeypatch: pytest.MonkeyPatch, *, graphs: bool = True) -> list[LateLane]:
    """Give models that are prepared from here on a late lane.

    Args:
        monkeypatch: undoes it.
        graphs: layers also use what the arena has beyond its slots, as graphs do.

    Returns:
        The lanes, one a model, as they come.
    """
    lanes: list[LateLane] = []

    def make(device: torch.device) -> LateLane:
        lanes.append(LateLane())
        return lanes[-1]

    acquire, release = Window.acquire, Window.release

    def watched_acquire(window: Window, unit: int) -> None:
        acquire(window, unit)
        place = window._places[unit]
        if place is not None and _watched(window):
            _lane(window).check(Span.of(place.memory))

    def watched_release(window: Window, unit: int) -> None:
        place = window._places[unit]
        if place is not None and _watched(window):
            _lane(window).use(Span.of(place.memory))
        release(window, unit)

    layer_acquire, layer_release = Units.acquire, Units.release

    def watched_layer_acquire(units: Units, layer: int, *, backward: bool) -> None:
        layer_acquire(units, layer, backward=backward)
        if graphs and (rest := _rest(units)) is not None:
            _lane(units.window).check(rest)

    def watched_layer_release(units: Units, layer: int, *, backward: bool) -> None:
        if graphs and (rest := _rest(units)) is not None:
            _lane(units.window).use(rest)
        layer_release(units, layer, backward=backward)

    lend, take_back = ArenaLender.lend, ArenaLender.take_back

    def watched_lend(lender: ArenaLender, nbytes: int, reclaim: Any) -> torch.Tensor | None:
        memory = lend(lender, nbytes, reclaim)
        if memory is not None:
            _lane(lender._memory.window).check(Span.of(memory))
            lender.__dict__["span"] = Span.of(memory)
        return memory

    def watched_take_back(lender: ArenaLender) -> None:
        _lane(lender._memory.window).use(lender.__dict__["span"])
        take_back(lender)

    monkeypatch.setattr(units_module, "make_lane", make)
    monkeypatch.setattr(Window, "acquire", watched_acquire)
    monkeypatch.setattr(Window, "release", watched_release)
    monkeypatch.setattr(Units, "acquire", watched_layer_acquire)
    monkeypatch.setattr(Units, "release", watched_layer_release)
    monkeypatch.setattr(ArenaLender, "lend", watched_lend)
    monkeypatch.setattr(ArenaLender, "take_back", watched_take_back)
    return lanes


def _watched(window: Window) -> bool:
    """Whether a window is a model's that was prepared since; others may not be collected yet."""
    return isinstance(window._lane, LateLane)


def _lane(window: Window) -> LateLane:
    lane = window._lane
    assert isinstance(lane, LateLane)
    return lane


def _rest(units: Units) -> Span | None:
    """Return what the arena has beyond its slots, if the head takes it too."""
    if not units.shared or not units.memory.shareable:
        return None
    whole = Span.of(units.window.arena)
    slots = [
        Span.of(place.memory)
        for unit, place in enumerate(units.window._places)
        if place is not None and unit != units._head and whole.overlaps(Span.of(place.memory))
    ]
    start = max((slot.end for slot in slots), default=whole.start)
    return Span(start, whole.end) if start < whole.end else None
