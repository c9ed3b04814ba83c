"""With a budget, some units stay on the device; the bits are the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import poros
from poros_core.prepare import prepared_of
from poros_runtimes.streamed.budget import Budget
from semantics.arms import LAYERS, NF4, Arm, batches, compare, play


def units_of(arm: Arm) -> Any:
    prepared = prepared_of(arm.model)
    assert prepared is not None
    return prepared.handle.units


@cache
def sizes_of(block_size: Any) -> tuple[int, int]:
    """Return the bytes of the arena and of one layer."""
    seen: list[tuple[int, int]] = []

    def script(arm: Arm) -> None:
        units = units_of(arm)
        seen.append((units.window.arena.nbytes, max(units.sizes.layers)))
        arm.train(batches(1))

    play(script, NF4, streamed=True, late=False, block_size=block_size)
    return seen[0]


def steps(arm: Arm) -> None:
    optimizer = arm.optimizer()
    arm.train(batches(2), optimizer)
    for first, second in ((0, 1), (2, 3)):  # accumulation, and two forwards before a backward
        losses = [arm.model(**batch).loss for batch in batches(2, seed=first + second)]
        torch.stack(losses).sum().backward()
        arm.model(**batches(1, seed=second)[0]).loss.backward()
        arm.step(optimizer)
    arm.model.eval()
    with torch.no_grad():
        arm.note("evaluated", arm.model(**batches(1)[0]).logits)
    arm.model.train()
    arm.train(batches(1), optimizer)


@cache
def resident_steps() -> Arm:
    """Return what the resident model notes of ``steps``; tests share it."""
    return play(steps, NF4, streamed=False, late=False)


@pytest.mark.parametrize(
    ("kept", "block_size"),
    [
        (3, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 1), (1, 2), (3, 2), (LAYERS, 1), (LAYERS, 2))
        ),
    ],
)
def test_units_stay_and_the_bits_are_the_same(kept: int, block_size: int) -> None:
    arena, layer = sizes_of(block_size)
    resident = resident_steps()
    budget = arena + kept * layer
    streamed = play(
        steps, NF4, streamed=True, late=False, block_size=block_size, vram_budget=budget
    )
    compare(resident.notes, streamed.notes)
    units = units_of(streamed)
    assert len(units.resident) == kept
    assert units_of(streamed).window.arena.nbytes <= arena


def test_resident_units_are_copied_once() -> None:
    arena, layer = sizes_of(1)

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(2), optimizer)
        before = units_of(arm).window.copies if arm.streamed else 0
        arm.train(batches(2), optimizer)
        if arm.streamed:
            units = units_of(arm)
            streaming = LAYERS - len(units.resident)
            # Two of the streaming layers stay for the next forward; the head is copied once.
            assert units.window.copies - before <= 2 * (2 * streaming - 2 + 1)
            assert len(units.resident) == 2

    resident = play(script, NF4, streamed=False, late=False)
    budget = arena + 2 * layer
    streamed = play(script, NF4, streamed=True, late=False, vram_budget=budget)
    compare(resident.notes, streamed.notes)


def test_residents_with_optimizer_state_on_the_host() -> None:
    arena, layer = sizes_of("all")

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        if arm.streamed:
            poros.offload_optimizer(optimizer)
        arm.train(batches(4), optimizer)

    resident = play(script, NF4, streamed=False, late=False)
    budget = arena + 2 * layer
    streamed = play(script, NF4, streamed=True, late=False, block_size="all", vram_budget=budget)
    compare(resident.notes, streamed.notes)
    assert len(units_of(streamed).resident) == 2


def test_a_budget_that_is_too_small_is_an_error_that_says_what_is_needed() -> None:
    def script(arm: Arm) -> None:
        arm.train(batches(1))
        with pytest.raises(poros.StateError, match=r"vram_budget is 0\.00 GB, and this run needs"):
            arm.train(batches(1))
        poros.unprepare(arm.model)
        arm.train(batches(1))

    play(script, NF4, streamed=True, late=False, vram_budget=1000)


def test_auto_goes_on_where_less_seems_to_be_left_than_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left is an estimate; with bytes that the user named it is an error."""
    monkeypatch.setattr(Budget, "spare", lambda *args, **kwargs: -5)

    def script(arm: Arm) -> None:
        arm.train(batches(2))
        if arm.streamed:
            assert not units_of(arm).resident

    resident = play(script, NF4, streamed=False, late=False)
    compare(resident.notes, play(script, NF4, streamed=True, late=False, vram_budget="auto").notes)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Give what a GPU of 80 GiB says of its memory, to be changed."""
    figures = {
        "memory_allocated": 2 << 30,
        "max_memory_allocated": 4 << 30,
        "memory_reserved": 5 << 30,
        "free": 70 << 30,
    }
    for name in figures.keys() - {"free"}:
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: figures[name])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *args: 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (figures["free"], 80 << 30))
    return figures


CUDA = torch.device("cuda")


def test_graphs_and_their_buffers_are_taken_off_what_is_left(device: dict[str, int]) -> None:
    budget = Budget(20 << 30, CUDA)
    left = budget.spare(own=0, graphs=0, buffers=0)
    graphs = left - budget.spare(own=0, graphs=1, buffers=0)
    assert graphs == 120_000_000 + 750_000
    assert budget.spare(own=0, graphs=512, buffers=1 << 28) == left - graphs - 511 * 750_000 - (
        1 << 28
    )


def after_a_first_step(device: dict[str, int], *, elsewhere: bool, hooked: bool = True) -> int:
    """Return what is left of 20 GiB when a step with a loss of 3 GiB has made 2 GiB of state."""
    budget = Budget(20 << 30, CUDA)
    device |= {"memory_allocated": 1 << 30, "max_memory_allocated": 1 << 30}
    budget.start()
    device["max_memory_allocated"] = 4 << 30  # the loss
    if hooked:
        budget.optimizer_steps()
    device["max_memory_allocated"] = 5 << 30  # gradients, state, and what it computes with
    if elsewhere:
        budget.state_elsewhere()
    budget.optimizer_steps()  # of another model, or the next step's
    device["memory_allocated"] = 3 << 30
    return budget.spare(own=0, graphs=0, buffers=0)


def test_the_optimizers_first_step_is_no_part_of_the_next_peak(device: dict[str, int]) -> None:
    """Its state is there already then: 3 GiB at rest and 3 for the loss, not 4."""
    usual = after_a_first_step(device, elsewhere=False)
    whole = after_a_first_step(device, elsewhere=True)
    assert usual - whole == pytest.approx(1.06 * (1 << 30), abs=2)
    assert after_a_first_step(device, elsewhere=False, hooked=False) == whole


def test_a_peak_that_was_seen_is_never_taken_for_less(device: dict[str, int]) -> None:
    """An optimizer that computes with much has its peak in its own step, every time."""
    budget = Budget(20 << 30, CUDA)
    device |= {"memory_allocated": 1 << 30, "max_memory_allocated": 1 << 30}
    budget.start()
    device["max_memory_allocated"] = 2 << 30
    budget.optimizer_steps()
    device |= {"memory_allocated": 2 << 30, "max_memory_allocated": 9 << 30}
    left = budget.spare(own=0, graphs=0, buffers=0)
    assert left == (20 << 30) - 1_500_000_000 - round(1.06 * (9 << 30)) - (64 << 20)


def test_graphs_of_another_length_must_stay_within_the_budget(device: dict[str, int]) -> None:
    budget = Budget(10 << 30, CUDA)
    device |= {"memory_reserved": 4 << 30, "free": 75 << 30}  # 1 GiB beside the allocator
    budget.spare(own=0, graphs=0, buffers=0)
    device |= {"memory_reserved": 8 << 30, "free": 71 << 30}
    assert budget.has_room(graphs=128)
    device["free"] -= (1 << 30) - 128 * 750_000
    assert budget.has_room(graphs=128)
    device["free"] -= 1
    assert not budget.has_room(graphs=128)


def test_what_another_process_takes_later_is_counted_and_before_is_not(
    device: dict[str, int],
) -> None:
    budget = Budget(10 << 30, CUDA)
    device |= {"memory_reserved": 4 << 30, "free": 26 << 30}  # 50 GiB beside, most of it others'
    budget.spare(own=0, graphs=0, buffers=0)
    device["memory_reserved"], device["free"] = 8 << 30, 22 << 30
    assert budget.has_room(graphs=1)
    device["free"] -= 1 << 30
    assert not budget.has_room(graphs=1)


def test_auto_keeps_nothing_on_a_cpu() -> None:
    def script(arm: Arm) -> None:
        arm.train(batches(3))
        if arm.streamed:
            assert not units_of(arm).resident

    resident = play(script, NF4, streamed=False, late=False)
    compare(resident.notes, play(script, NF4, streamed=True, late=False, vram_budget="auto").notes)
