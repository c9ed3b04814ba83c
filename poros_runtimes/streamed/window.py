"""The device window: an arena, what stands in it, and the one place where that changes."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

import torch
from attrs import define, field

from poros_core.errors import StateError
from poros_core.host_store import UnitImage
from poros_core.protocols import TensorRef
from poros_core.schedule import Region, fetches
from poros_runtimes.streamed.ahead import Ahead
from poros_runtimes.streamed.lane import POISON, Event, Lane

__all__ = ["Residency", "Window"]


class Residency(enum.Enum):
    """Where a unit is, and what that costs."""

    HOST = "host"
    """In host memory only: no device memory."""
    IN_FLIGHT = "in flight"
    """A copy into its region has been issued: its region of the arena."""
    DEVICE = "device"
    """Bound to its region and read by kernels: its region of the arena."""
    RETIRING = "retiring"
    """In its region, no longer bound; the last kernels that read it may still run. It can be
    bound again without a copy until another unit takes the region."""


_LEGAL = {
    (Residency.HOST, Residency.IN_FLIGHT),
    (Residency.IN_FLIGHT, Residency.DEVICE),
    (Residency.DEVICE, Residency.RETIRING),
    (Residency.RETIRING, Residency.DEVICE),
    (Residency.RETIRING, Residency.HOST),
    (Residency.IN_FLIGHT, Residency.HOST),
}


@define(eq=False)
class _Place:
    """One unit's region, its bytes as tensors, and the event that orders its next move: that the
    copy arrived (IN_FLIGHT, DEVICE), or that the last reader is done (RETIRING). ``beyond``: its
    region ends behind all others there, where graphs of any layer may keep their temporaries."""

    image: UnitImage
    region: Region
    memory: torch.Tensor = field(repr=False)
    bindings: list[tuple[TensorRef, torch.Tensor]] = field(repr=False)
    overlapping: list[int]
    beyond: bool = False
    state: Residency = Residency.HOST
    event: Event | None = None
    users: int = 0

    def move(self, state: Residency) -> None:
        """The one function that changes where a unit is."""
        if (self.state, state) not in _LEGAL:
            raise AssertionError(f"illegal move of a unit: {self.state} to {state}")
        self.state = state

    def forget(self) -> None:
        """Leave the region to others. Whoever copies into it next waits for ``event`` first; since
        copies run in order, later ones need not."""
        self.move(Residency.HOST)


_HELD = (
    "A layer is needed while the device window is held by another call that has not finished. Do "
    "not call the model's layers from inside a layer's hook."
)


def _placed(image: UnitImage, region: Region, arena: torch.Tensor) -> _Place:
    """Return a unit's place, its region told by address, so that arenas can be told apart."""
    memory = arena[region.offset : region.offset + region.size]
    at = Region(memory.data_ptr(), region.size)
    return _Place(image, at, memory, image.views(memory), [])


class Window:
    """Binds units to their regions of the arena. Decides nothing: what to copy next is
    ``poros_core.schedule``'s, and ``acquire`` copies whatever is missing."""

    def __init__(
        self,
        images: Sequence[UnitImage | None],
        regions: Sequence[Region | None],
        *,
        arena: torch.Tensor,
        lane: Lane,
        device: torch.device,
        poison: bool,
        readable: frozenset[int] = frozenset(),
    ) -> None:
        """Give every unit its region of the arena.

        Args:
            images: one per unit; None for a unit with nothing to stream.
            regions: each unit's region of the arena.
            arena: the device memory, a flat uint8 tensor.
            lane: moves the bytes.
            device: the compute device.
            poison: fill a region with 0xFF before a copy, and bind released tensors to such
                bytes, so that a read of a unit that is not there shows in the numbers.
            readable: units that may rightly be read while parked, so never bound to poison.
        """
        self.arena = arena
        self.ahead: Ahead | None = None
        self.copies = 0
        self.bytes_streamed = 0
        self._lane = lane
        self._poison = poison
        self._last: Event | None = None
        self._readable = readable
        self._places: list[_Place | None] = []
        for image, region in zip(images, regions, strict=True):
            if image is None or region is None:
                self._places.append(None)
                continue
            self._places.append(_placed(image, region, arena))
        self._find_overlaps()
        self._poisoned: dict[int, list[tuple[TensorRef, torch.Tensor]]] = {}
        if poison:
            self._bind_to_poison(readable, device)

    def _find_overlaps(self) -> None:
        for place in filter(None, self._places):
            place.overlapping = [
                index
                for index, other in enumerate(self._places)
                if other is not None and other is not place and other.region.overlaps(place.region)
            ]
            others = (self._places[index] for index in place.overlapping)
            place.beyond = all(o is not None and o.region.end < place.region.end for o in others)

    def _bind_to_poison(self, readable: frozenset[int], device: torch.device) -> None:
        largest = max((p.region.size for p in self._places if p is not None), default=0)
        memory = torch.full((largest,), POISON, dtype=torch.uint8, device=device)
        for unit, place in enumerate(self._places):
            if place is not None and unit not in readable:
                self._poisoned[unit] = place.image.views(memory)
                self._park(unit)

    def _park(self, unit: int) -> None:
        place = self._places[unit]
        assert place is not None
        if unit not in self._poisoned:
            place.image.park()
            return
        for ref, view in self._poisoned[unit]:
            ref.set(view)

    @property
    def stalled_seconds(self) -> float | None:
        """How long kernels waited for copies so far; see ``Lane``."""
        return self._lane.stalled_seconds

    def state(self, unit: int) -> Residency:
        """Return where a unit is. A unit with nothing to stream is always on the device."""
        place = self._places[unit]
        return Residency.DEVICE if place is None else place.state

    def conflict(self, unit: int, other: int) -> bool:
        """Say whether the regions of two units overlap."""
        place = self._places[unit]
        return place is not None and other in place.overlapping

    def prefetch(self, upcoming: Sequence[int]) -> None:
        """Issue the copies that can be issued now for units needed in this order."""
        places = self._places
        present = {i for i, p in enumerate(places) if p is None or p.state is not Residency.HOST}
        busy = [i for i, p in enumerate(places) if p is not None and p.users]
        for unit in fetches(upcoming, present=present, busy=busy, conflict=self.conflict):
            self._fetch(unit)
        if self.ahead is not None and self.ahead.open:
            self.ahead.fetch(
                upcoming,
                present={i for i, p in enumerate(places) if p and p.state is not Residency.HOST},
                conflicts=self._conflicts,
                image=self._waiting_image,
            )

    def _conflicts(self, unit: int) -> Sequence[int]:
        place = self._places[unit]
        return () if place is None else place.overlapping

    def _waiting_image(self, unit: int) -> UnitImage | None:
        """Return what is copied of a unit that may wait for its slot; None for one that may not,
        which is read while it is parked."""
        place = self._places[unit]
        return None if place is None or unit in self._readable else place.image

    def acquire(self, unit: int) -> None:
        """Bind a unit for kernels issued from here on; copy it first if it is not there.

        Raises:
            StateError: its region is in use by a unit that has not been released.
        """
        place = self._places[unit]
        if place is None:
            return
        place.users += 1
        if place.users > 1:
            return
        if place.state is Residency.HOST:
            try:
                self._fetch(unit)
            except BaseException:
                place.users -= 1
                raise
        if place.state is Residency.IN_FLIGHT:
            assert place.event is not None
            self._lane.wait(place.event)
        place.move(Residency.DEVICE)
        for ref, view in place.bindings:
            ref.set(view)

    def release(self, unit: int) -> None:
        """Park a unit: no kernel issued from here on reads it through the window."""
        place = self._places[unit]
        if place is None:
            return
        assert place.users > 0, "a unit is released more often than acquired"
        place.users -= 1
        if place.users:
            return
        place.event = self._last = self._lane.record()
        place.move(Residency.RETIRING)
        self._park(unit)

    def keep_only(self, units: Collection[int]) -> None:
        """Forget every unit that no kernel will read again and that is not named."""
        for index, place in enumerate(self._places):
            if place is None or place.users or index in units or place.state is Residency.HOST:
                continue
            place.forget()

    def vacate(self, unit: int) -> None:
        """Forget a unit that nobody has bound, so that kernels issued from here on may write to
        its region of the arena."""
        place = self._places[unit]
        if place is None or place.state is Residency.HOST:
            return
        assert not place.users
        assert place.event is not None
        self._lane.wait(place.event)
        place.forget()

    def clear(self, region: Region) -> bool:
        """Forget every unit in a region of the first arena, so that kernels issued from here on
        may write there. Returns False, and does nothing, if one of them is bound."""
        at = Region(self.arena.data_ptr() + region.offset, region.size)
        inside = [
            unit for unit, p in enumerate(self._places) if p is not None and p.region.overlaps(at)
        ]
        if any(self.state(unit) is Residency.DEVICE for unit in inside):
            return False
        for unit in inside:
            place = self._places[unit]
            if place is not None and place.state is Residency.HOST and place.event is not None:
                self._lane.wait(place.event)  # a copy that was forgotten may still arrive
            self.vacate(unit)
        return True

    def written(self) -> None:
        """Copies must wait for all kernels issued so far: they used the arena."""
        now = self._last = self._lane.record()
        for place in self._places:
            if place is not None and place.state is Residency.HOST:
                place.event = now

    def drop(self) -> None:
        """Let the arena go. No unit may be in it; ``rebuild`` gives its units another."""
        whole = Region(self.arena.data_ptr(), self.arena.nbytes)
        self.arena = empty = torch.empty(0, dtype=torch.uint8, device=self.arena.device)
        for place in filter(None, self._places):
            if place.region.overlaps(whole):
                assert place.state is Residency.HOST
                place.memory, place.bindings = empty, []

    def rebuild(self, regions: Mapping[int, Region], arena: torch.Tensor) -> None:
        """Give the units that were in the arena regions of a new one."""
        self.move(regions, arena)
        self.arena = arena

    def move(self, regions: Mapping[int, Region], arena: torch.Tensor) -> None:
        """Give units that nobody has bound regions of another arena.

        Raises:
            StateError: one of them is bound.
        """
        moving = {unit: place for unit in regions if (place := self._places[unit]) is not None}
        if any(place.users for place in moving.values()):
            raise StateError(_HELD)
        for unit, place in moving.items():
            if place.state is not Residency.HOST:
                place.forget()
            self._places[unit] = _placed(place.image, regions[unit], arena)
        self._find_overlaps()
        self.written()

    def _fetch(self, unit: int) -> None:
        place = self._places[unit]
        assert place is not None
        assert place.state is Residency.HOST
        others = [other for index in place.overlapping if (other := self._places[index])]
        if any(other.users for other in others):
            raise StateError(_HELD)
        waiting = None if self.ahead is None else self.ahead.take(unit)
        source, there = waiting or (place.image.bytes_for_copy(), None)
        source = source[: place.region.size]
        events = [place.event, there, *(other.event for other in others)]
        if place.beyond:
            events.append(self._last)
        after = [event for event in events if event is not None]
        for other in others:  # a copy that breaks off leaves nothing of them
            if other.state is not Residency.HOST:
                other.forget()
        place.event = self._lane.copy(place.memory, source, after=after, poison=self._poison)
        for other in others:
            other.event = None
        place.move(Residency.IN_FLIGHT)
        if waiting is not None:
            assert self.ahead is not None
            self.ahead.taken(unit, place.event)
            return
        place.image.copied(place.event)
        self.copies += 1
        self.bytes_streamed += place.region.size
