"""The window: what is bound where, poison, legal moves, and bytes counted."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from torch import nn

from poros_core.errors import StateError
from poros_core.host_store import ALIGNMENT, HostStore
from poros_core.schedule import Region, Regions
from poros_runtimes.streamed.lane import HostLane
from poros_runtimes.streamed.window import Residency, Window

CPU = torch.device("cpu")


@frozen(eq=False)
class Ref:
    parameter: nn.Parameter
    name: str = "data"

    @property
    def key(self) -> tuple[int, str]:
        return (id(self.parameter), self.name)

    def get(self) -> torch.Tensor:
        return self.parameter.data

    def set(self, value: torch.Tensor) -> None:
        self.parameter.data = value


def parameter(seed: int, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator), requires_grad=False)


def make(count: int = 4, *, slots: int = 2, poison: bool = True):
    store = HostStore(CPU)
    layers = [[parameter(10 * i, 3, 5 + i), parameter(10 * i + 1, 7)] for i in range(count)]
    wanted = [[param.detach().clone() for param in layer] for layer in layers]
    images = [store.adopt([Ref(param) for param in layer]) for layer in layers]
    regions = Regions.lay_out([i.nbytes for i in images if i], slots=slots, head_bytes=0)
    window = Window(
        images,
        regions.layers,
        arena=torch.empty(regions.size, dtype=torch.uint8),
        lane=HostLane(),
        device=CPU,
        poison=poison,
    )
    return window, layers, wanted


def test_an_acquired_unit_reads_its_own_bytes_from_the_arena() -> None:
    window, layers, wanted = make()
    start, end = window.arena.data_ptr(), window.arena.data_ptr() + window.arena.nbytes
    for unit in (0, 1, 2, 3, 2, 0):
        window.acquire(unit)
        for param, expected in zip(layers[unit], wanted[unit], strict=True):
            assert torch.equal(param, expected)
            assert start <= param.data_ptr() < end
            assert (param.data_ptr() - start) % ALIGNMENT == 0
        window.release(unit)


def test_a_released_unit_reads_nan_under_poison() -> None:
    window, layers, _ = make()
    assert all(param.isnan().all() for layer in layers for param in layer)
    window.acquire(1)
    window.release(1)
    assert all(param.isnan().all() for param in layers[1])


def test_a_released_unit_reads_the_host_store_without_poison() -> None:
    window, layers, wanted = make(poison=False)
    window.acquire(1)
    window.arena.fill_(0)
    window.release(1)
    assert torch.equal(layers[1][0], wanted[1][0])


def test_a_unit_keeps_its_address_at_every_use() -> None:
    window, layers, _ = make(5, slots=3)
    seen: dict[int, set[int]] = {}
    for unit in (0, 1, 2, 3, 4, 3, 2, 1, 0):
        window.acquire(unit)
        seen.setdefault(unit, set()).add(layers[unit][0].data_ptr())
        window.release(unit)
    assert all(len(addresses) == 1 for addresses in seen.values())


def test_a_slot_in_use_is_not_given_away() -> None:
    window, layers, wanted = make()
    window.acquire(0)
    with pytest.raises(StateError, match="device window is held"):
        window.acquire(2)
    assert torch.equal(layers[0][0], wanted[0][0])
    window.release(0)
    window.acquire(2)
    assert torch.equal(layers[2][0], wanted[2][0])


def test_a_failed_acquire_leaves_the_unit_usable() -> None:
    window, _, _ = make()
    window.acquire(0)
    with pytest.raises(StateError):
        window.acquire(2)
    window.release(0)
    window.acquire(2)
    window.release(2)
    assert window.state(2) is Residency.RETIRING


def test_a_unit_still_in_its_slot_is_not_copied_again() -> None:
    window, _, _ = make()
    for unit in (0, 1, 0, 1):
        window.acquire(unit)
        window.release(unit)
    assert window.copies == 2


def test_forgotten_units_are_copied_again() -> None:
    window, layers, wanted = make()
    for unit in (0, 1):
        window.acquire(unit)
        window.release(unit)
    window.keep_only([1])
    assert window.state(0) is Residency.HOST
    window.acquire(0)
    assert window.copies == 3
    assert torch.equal(layers[0][0], wanted[0][0])


def test_nested_users_share_one_binding() -> None:
    window, layers, wanted = make()
    window.acquire(0)
    window.acquire(0)
    window.release(0)
    assert torch.equal(layers[0][0], wanted[0][0])
    window.release(0)
    assert layers[0][0].isnan().all()


def test_prefetch_counts_the_bytes_it_moves() -> None:
    window, _, _ = make()
    window.prefetch([0, 1, 2])
    sizes = [place.region.size for place in window._places if place is not None]
    assert window.copies == 2
    assert window.bytes_streamed == sizes[0] + sizes[1]
    assert window.state(0) is Residency.IN_FLIGHT


def test_moved_units_are_read_from_their_new_arena() -> None:
    window, layers, wanted = make(poison=False)
    for unit in (0, 1):
        window.acquire(unit)
        window.release(unit)
    images = [place.image for place in window._places if place is not None]
    regions = Regions.lay_out([image.nbytes for image in images], slots=3, head_bytes=0)
    arena = torch.full((regions.size,), 7, dtype=torch.uint8)
    window.move(dict(enumerate(regions.layers)), arena)
    window.arena.fill_(0)
    start, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    for unit in (1, 0, 2, 3):
        window.acquire(unit)
        assert start <= layers[unit][0].data_ptr() < end
        assert torch.equal(layers[unit][0], wanted[unit][0])
        window.release(unit)
    assert not window.conflict(0, 1)
    assert window.conflict(0, 3)


def test_a_unit_in_use_is_not_moved() -> None:
    window, layers, wanted = make()
    window.acquire(0)
    with pytest.raises(StateError, match="device window is held"):
        window.move({0: Region(0, 4096)}, torch.empty(4096, dtype=torch.uint8))
    assert torch.equal(layers[0][0], wanted[0][0])


def test_a_vacated_unit_is_copied_again() -> None:
    window, layers, wanted = make()
    window.prefetch([0])
    window.vacate(0)
    assert window.state(0) is Residency.HOST
    window.acquire(0)
    assert torch.equal(layers[0][0], wanted[0][0])
    assert window.copies == 2
