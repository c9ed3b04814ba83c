"""The head and the layers take the same device memory in turn; see [Note: The head's lifetime]."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import poros
from poros_core.prepare import prepared_of
from semantics.arms import Arm, batches, twins


def units_of(arm: Arm) -> Any:
    prepared = prepared_of(arm.model)
    assert prepared is not None
    return prepared.handle.units


def plain_steps(arm: Arm) -> None:
    optimizer = arm.optimizer()
    for batch in batches(3):
        arm.model(**batch).loss.backward()
        arm.step(optimizer)


def test_a_plain_loop_shares_and_copies_the_head_once_a_step() -> None:
    def script(arm: Arm) -> None:
        plain_steps(arm)
        before = units_of(arm).window.copies if arm.streamed else 0
        arm.model(**batches(1)[0]).loss.backward()
        if not arm.streamed:
            return
        units = units_of(arm)
        assert units.shared
        *layers, head = units.window._places
        assert head.region.overlaps(layers[0].region)
        # Two layers are there from before. None is left after the head, if it takes both slots.
        beside = sum(not head.region.overlaps(place.region) for place in layers[-2:])
        assert units.window.copies - before == 2 * len(layers) - 2 + 1 - beside

    twins(script)


def several(arm: Arm) -> None:
    first, second = (arm.model(**batch).loss for batch in batches(2))
    (first + second).backward()


def retained(arm: Arm) -> None:
    loss = arm.model(**batches(1)[0]).loss
    loss.backward(retain_graph=True)
    loss.backward()


def evaluated(arm: Arm) -> None:
    loss = arm.model(**batches(1)[0]).loss
    with torch.no_grad():
        arm.note("between", arm.model(**batches(1, seed=2)[0]).logits)
    loss.backward()


@pytest.mark.parametrize("reason", [several, retained, evaluated])
def test_layers_move_out_where_the_head_must_stay(reason: Any) -> None:
    def script(arm: Arm) -> None:
        plain_steps(arm)
        optimizer = arm.optimizer()
        reason(arm)
        arm.step(optimizer)
        if arm.streamed:
            assert not units_of(arm).shared
        plain_steps(arm)

    twins(script, sizes=(2,))


def test_a_dropped_loss_and_an_evaluation_do_not_move_anything() -> None:
    def script(arm: Arm) -> None:
        arm.note("dropped", arm.model(**batches(1)[0]).loss)
        with torch.no_grad():
            arm.note("evaluated", arm.model(**batches(1)[0]).loss)
        plain_steps(arm)
        if arm.streamed:
            assert units_of(arm).shared

    twins(script)


def test_the_head_moves_out_where_graphs_keep_a_part_of_the_arena() -> None:
    def script(arm: Arm) -> None:
        plain_steps(arm)
        if arm.streamed:
            units = units_of(arm)
            units.memory.arena.shareable = False
        plain_steps(arm)
        if arm.streamed:
            places = units.window._places
            assert not any(places[-1].region.overlaps(place.region) for place in places[:-1])

    twins(script)


def test_a_head_that_layers_are_copied_over_counts_as_changed() -> None:
    """So that autograd refuses to differentiate with what it saved of it."""

    def script(arm: Arm) -> None:
        head = arm.model.get_output_embeddings().weight
        loss = arm.model(**batches(1)[0]).loss
        arm.note("loss", loss)
        before = head._version
        loss.backward()
        assert head._version - before == arm.streamed

    twins(script)


@pytest.mark.parametrize("grouped", [1, "all"])
def test_the_arena_holds_optimizer_state_while_it_steps(grouped: Any) -> None:
    inside: list[int] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            arena = units_of(arm).window.arena
            start, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
            tensors = [state["exp_avg"] for state in optimizer.state.values()]
            inside.append(sum(start <= tensor.data_ptr() < end for tensor in tensors))

        if arm.streamed:
            poros.offload_optimizer(optimizer)
            optimizer.register_step_pre_hook(look)
        arm.train(batches(4), optimizer)

    arm = twins(script, sizes=(grouped,))
    if grouped == "all":
        assert inside == [0, *[len(arm.trainable())] * 3], "the arena is large enough"


def test_a_step_that_fails_gives_the_arena_back_to_the_next_forward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        if arm.streamed:
            poros.offload_optimizer(optimizer)
        failing: list[bool] = []

        def fail(*_: Any) -> None:
            if failing:
                raise RuntimeError("planned")

        optimizer.register_step_pre_hook(fail)
        arm.train(batches(2), optimizer)
        failing.append(True)
        arm.model(**batches(1)[0]).loss.backward()
        with pytest.raises(RuntimeError, match="planned"):
            optimizer.step()
        failing.clear()
        arm.train(batches(2), optimizer)

    twins(script, sizes=(1, "all"))
