"""Orders of calls in which memory changes hands, on a lane that is as late as a device may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

import poros
from semantics.arms import BF16, Arm, Recipe, batches, build, compare, layers_of, play, twins
from semantics.races import watch
from semantics.test_budget import units_of

HEAD = 2100
"""Rows of a head that is larger than the slots of layers, as heads of real models are."""


def large_head(model: Any) -> nn.Module:
    head = nn.Linear(64, HEAD, bias=False, dtype=torch.bfloat16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        nn.init.normal_(head.weight, std=0.1)
    model.lm_head = head.requires_grad_(False)
    model.config.vocab_size = HEAD
    return model


def uneven_layers(model: Any) -> nn.Module:
    """Give two layers twice the width of the others."""
    for index in (1, 3):
        mlp = model.model.layers[index].mlp
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = getattr(mlp, name).weight
            axis = 1 if name == "down_proj" else 0
            wide = nn.Parameter(torch.cat([weight, weight.flip(axis)], axis).detach().clone())
            getattr(mlp, name).weight = wide
            linear = getattr(mlp, name)
            linear.out_features, linear.in_features = wide.shape
    return model


LARGE = evolve(BF16, before_peft=large_head)
UNEVEN = evolve(BF16, before_peft=uneven_layers)


def bytes_of(recipe: Recipe, **options: Any) -> tuple[int, int]:
    """Return the bytes of the arena and of the largest layer."""
    arm = Arm(build(recipe), True, options)
    arm.prepare()
    units = units_of(arm)
    return units.window.arena.nbytes, max(units.sizes.layers)


def loop(arm: Arm) -> None:
    optimizer = arm.optimizer()
    if arm.streamed:
        poros.offload_optimizer(optimizer)
    arm.train(batches(3), optimizer)
    arm.model.eval()
    with torch.no_grad():
        arm.note("evaluated", arm.model(**batches(1)[0]).logits)
    arm.model.train()
    arm.train(batches(2, seed=1), optimizer)


def several(arm: Arm) -> None:
    loop(arm)
    optimizer = arm.optimizer()
    for seed in range(2):
        losses = [arm.model(**batch).loss for batch in batches(2, seed=seed)]
        torch.stack(losses).sum().backward()
        arm.step(optimizer)


def interrupted(arm: Arm) -> None:
    """A forward and a backward that fail, and a loss that is kept."""
    loop(arm)
    optimizer = arm.optimizer()
    for index in (1, 4):
        mlp = layers_of(arm.model)[index].mlp
        state = torch.get_rng_state()
        handle = mlp.register_forward_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            arm.model(**batches(1)[0])
        handle.remove()
        torch.set_rng_state(state)
        arm.train(batches(1, seed=2), optimizer)
    kept = arm.model(**batches(1)[0]).loss
    arm.train(batches(2, seed=3), optimizer)
    arm.note("kept", kept)


def _raise(*_: object) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("script", "kept", "block_size"),
    [
        (loop, 2, 1),
        (several, None, 2),
        pytest.param(loop, 5, 2, marks=pytest.mark.slow),
        pytest.param(several, 2, 1, marks=pytest.mark.slow),
        pytest.param(interrupted, None, 1, marks=pytest.mark.slow),
        pytest.param(interrupted, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_no_copy_races_with_kernels(
    script: Callable[[Arm], None],
    kept: int | None,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, layer = bytes_of(LARGE, block_size=block_size)
    lanes = watch(monkeypatch)
    options = {} if kept is None else {"vram_budget": arena + kept * layer}
    resident = play(script, LARGE, streamed=False, late=False)
    streamed = play(script, LARGE, streamed=True, late=False, block_size=block_size, **options)
    compare(resident.notes, streamed.notes)
    assert sum(lane.checks for lane in lanes) > 100
    assert len(units_of(streamed).resident) == (kept or 0)


def test_memory_lent_to_an_optimizer_that_is_gone_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch(monkeypatch)

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        if arm.streamed:
            poros.offload_optimizer(optimizer)
        arm.train(batches(2), optimizer)
        optimizer.register_step_pre_hook(_raise)
        arm.model(**batches(1)[0]).loss.backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        if arm.streamed:
            assert units_of(arm).lender.lent, "the state stands in the arena"
        del optimizer
        arm.model.zero_grad()
        arm.train(batches(1, seed=1))
        if arm.streamed:
            assert not units_of(arm).lender.lent

    twins(script, LARGE, sizes=("all",))


def test_residents_of_other_sizes_than_the_layers_that_stream() -> None:
    arena, layer = bytes_of(UNEVEN)
    resident = play(loop, UNEVEN, streamed=False, late=False)
    for kept in (1, 2, 3):
        streamed = play(loop, UNEVEN, streamed=True, late=False, vram_budget=arena + kept * layer)
        compare(resident.notes, streamed.notes)
        assert units_of(streamed).resident


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_the_head_is_copied_once_a_step(kept: int) -> None:
    arena, layer = bytes_of(LARGE)
    fetched: list[int] = []

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(2), optimizer)
        window = units_of(arm).window
        fetch = window._fetch

        def noted(unit: int) -> None:
            fetched.append(unit)
            fetch(unit)

        window._fetch = noted
        arm.train(batches(2), optimizer)

    play(script, LARGE, streamed=True, late=False, vram_budget=arena + kept * layer)
    assert fetched.count(5) == 2
