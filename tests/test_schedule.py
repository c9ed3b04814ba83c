"""The copy policy, as a simulation: units, regions, readers and copies are integers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poros_core.schedule import (
    Region,
    Regions,
    fetches,
    most_resident,
    spread,
    upcoming_backward,
    upcoming_forward,
)

SIZES = st.lists(st.integers(1, 9).map(lambda n: n * 256), min_size=1, max_size=14)


class Device:
    """Plays a runtime: obeys the policy, copies what is missing, and checks every move."""

    def __init__(self, sizes: Sequence[int], *, slots: int, head: int) -> None:
        self.regions = Regions.lay_out(sizes, slots=slots, head_bytes=head)
        self.places = [*self.regions.layers, *([self.regions.head] if head else [])]
        self.head = len(sizes) if head else None
        self.layers = len(sizes)
        self.present: set[int] = set()
        self.busy: set[int] = set()
        self.copies = 0

    def conflict(self, unit: int, other: int) -> bool:
        place, against = self.places[unit], self.places[other]
        assert place is not None
        assert against is not None
        return unit != other and place.overlaps(against)

    def fetch(self, unit: int) -> None:
        assert unit not in self.present
        for other in list(self.present):
            if self.conflict(unit, other):
                assert other not in self.busy, "a region is overwritten before its last reader"
                self.present.discard(other)
        self.present.add(unit)
        self.copies += 1
        taken = [self.places[unit] for unit in self.present]
        assert sum(place.size for place in taken if place) <= self.regions.size

    def prefetch(self, upcoming: Sequence[int]) -> None:
        chosen = fetches(upcoming, present=self.present, busy=self.busy, conflict=self.conflict)
        for unit in chosen:
            self.fetch(unit)

    def acquire(self, unit: int) -> None:
        if unit not in self.present:
            self.fetch(unit)
        self.busy.add(unit)

    def release(self, unit: int) -> None:
        self.busy.discard(unit)

    def step(self) -> None:
        """A forward, the head, and a backward, as the runtime makes them."""
        self.prefetch(upcoming_forward(-1, layers=self.layers, head=self.head))
        for layer in range(self.layers):
            self.acquire(layer)
            assert layer in self.present
            self.release(layer)
            self.prefetch(upcoming_forward(layer, layers=self.layers, head=self.head))
        if self.head is not None:
            self.acquire(self.head)
            self.release(self.head)
        self.prefetch(upcoming_backward(self.layers, lowest=0, layers=self.layers))
        for layer in reversed(range(self.layers)):
            self.acquire(layer)
            self.release(layer)
            self.prefetch(upcoming_backward(layer, lowest=0, layers=self.layers))


@given(SIZES, st.integers(1, 5), st.sampled_from([0, 512, 8192, 32768]))
def test_a_step_copies_each_unit_as_rarely_as_the_arena_allows(
    sizes: list[int], slots: int, head: int
) -> None:
    device = Device(sizes, slots=slots, head=head)
    device.step()
    first = device.copies
    device.step()
    again = device.copies - first
    count = device.regions.slots
    last = device.regions.layers[-count:]
    beside = [place for place in last if head == 0 or place.offset >= head]
    fewest = (len(sizes) - count) + (1 if head else 0) + (len(sizes) - len(beside))
    assert again == fewest, (
        "the forward starts with what the backward ended with, and the backward with what the head "
        "left in place"
    )


@given(SIZES, st.integers(1, 5), st.data())
def test_any_order_of_use_is_served(sizes: list[int], slots: int, data: st.DataObject) -> None:
    device = Device(sizes, slots=slots, head=1024)
    order = data.draw(st.lists(st.integers(0, len(sizes)), max_size=40))
    for unit in order:
        device.acquire(unit)
        assert unit in device.present
        device.release(unit)
        device.prefetch(upcoming_forward(unit, layers=len(sizes), head=len(sizes)))


def fewest_copies(order: Sequence[int], places: Sequence[Region]) -> int:
    """Return a number of copies that no policy can serve an order with fewer than: a unit comes at
    its first use, and again if another one whose region overlaps was used since its last."""
    copies = 0
    for position, unit in enumerate(order):
        before = [n for n in range(position) if order[n] == unit]
        since = order[before[-1] + 1 : position] if before else []
        copies += not before or any(places[unit].overlaps(places[other]) for other in since)
    return copies


@given(SIZES, st.integers(1, 5), st.data())
def test_any_order_takes_the_fewest_copies(
    sizes: list[int], slots: int, data: st.DataObject
) -> None:
    """Where the policy knows what comes, fetching ahead costs no copy beyond those that every
    policy needs."""
    device = Device(sizes, slots=slots, head=data.draw(st.sampled_from([256, 1024, 8192])))
    order = data.draw(st.lists(st.integers(0, len(sizes)), max_size=30))
    places = [place for place in device.places if place is not None]
    device.prefetch(order)
    for position, unit in enumerate(order):
        device.acquire(unit)
        device.release(unit)
        device.prefetch(order[position + 1 :])
    assert device.copies == fewest_copies(order, places)


@given(SIZES, st.integers(1, 5), st.integers(0, 60000), st.sampled_from([0, 512, 8192]))
def test_with_residents_the_rest_is_copied_as_rarely(
    sizes: list[int], slots: int, spare: int, head: int
) -> None:
    """Layers that stay are copied never again, those that stream as in a model without them, and
    no more is held than the budget leaves."""
    chosen = most_resident(sizes, spare=spare)
    streaming = [nbytes for layer, nbytes in enumerate(sizes) if layer not in chosen]
    assert sum(sizes) - sum(streaming) <= spare
    device = Device(streaming, slots=slots, head=head)
    device.step()
    first = device.copies
    device.step()
    uses = [*range(len(streaming)), *([len(streaming)] if head else [])]
    step = [*uses, *reversed(range(len(streaming)))]
    places = [place for place in device.places if place is not None]
    assert first == fewest_copies(step, places)
    assert device.copies == fewest_copies(2 * step, places)


@given(SIZES, st.integers(1, 5), st.integers(0, 4096))
@settings(max_examples=50)
def test_regions_fit_and_layers_overlap_only_in_one_slot(
    sizes: list[int], slots: int, head: int
) -> None:
    regions = Regions.lay_out(sizes, slots=slots, head_bytes=head)
    count = min(slots, len(sizes))
    assert regions.slots == count
    for index, region in enumerate(regions.layers):
        assert region.size == sizes[index]
        assert region.offset + region.size <= regions.size
        for other, against in enumerate(regions.layers):
            assert region.overlaps(against) == (index % count == other % count)
    assert regions.slot_bytes == sum(max(sizes[slot::count]) for slot in range(count))
    assert regions.size == max(regions.slot_bytes, head)
    assert regions.head == (Region(0, head) if head else None)


def test_fetches_stop_at_a_unit_that_is_being_read() -> None:
    def conflict(unit: int, other: int) -> bool:
        return unit % 2 == other % 2

    chosen = fetches([1, 2, 3], present={0}, busy=[0], conflict=conflict)
    assert chosen == [1], "unit 2 would overwrite unit 0, and 3 is needed later than 2"


def test_fetches_do_not_overwrite_what_is_needed_sooner() -> None:
    def conflict(unit: int, other: int) -> bool:
        return unit % 2 == other % 2

    assert fetches([0, 1, 2, 3], present={0, 1}, busy=[], conflict=conflict) == []


@pytest.mark.parametrize("layer", [-1, 0, 3])
def test_the_order_of_a_forward_ends_with_the_head(layer: int) -> None:
    assert upcoming_forward(layer, layers=4, head=4) == [*range(layer + 1, 4), 4]
    assert upcoming_forward(layer, layers=4, head=None) == list(range(layer + 1, 4))


def test_the_order_of_a_backward_goes_on_with_the_next_forward() -> None:
    assert upcoming_backward(3, lowest=1, layers=4) == [2, 1, 0, 1, 2, 3]
    assert upcoming_backward(4, lowest=4, layers=4) == [0, 1, 2, 3]


def test_a_region_does_not_overlap_its_neighbour() -> None:
    assert not Region(0, 256).overlaps(Region(256, 256))
    assert Region(0, 257).overlaps(Region(256, 256))


@given(st.integers(1, 100), st.data())
def test_resident_layers_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, layers))
    chosen = spread(count, layers=layers)
    assert len(chosen) == count
    assert chosen <= set(range(layers))
    for start in range(layers):
        for length in range(1, layers - start + 1):
            inside = len(chosen & set(range(start, start + length)))
            assert abs(inside - count * length / layers) < 1, "as many as its share, but for one"


@given(SIZES, st.integers(0, 40000))
def test_resident_layers_fit_and_one_more_would_not(sizes: list[int], spare: int) -> None:
    chosen = most_resident(sizes, spare=spare)
    assert sum(sizes[layer] for layer in chosen) <= spare
    for count in range(len(chosen) + 1, len(sizes) + 1):
        assert sum(sizes[layer] for layer in spread(count, layers=len(sizes))) > spare
