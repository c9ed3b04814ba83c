"""Autocast: the recompute sees what the forward saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semantics.arms import FP32, NF4, Arm, Recipe, batches, twins

RECIPES = [
    pytest.param(NF4, id="nf4"),
    pytest.param(FP32, id="fp32", marks=pytest.mark.slow),
]


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_around_the_forward_only(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            with bf16():
                loss = arm.model(**batch).loss
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script, recipe, sizes=(1, 2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_around_forward_and_backward(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            with bf16():
                loss = arm.model(**batch).loss
                loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script, recipe, sizes=(1, 2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_around_the_backward_only(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            loss = arm.model(**batch).loss
            with bf16():
                loss.backward()
            arm.step(optimizer)

    twins(script, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulation_in_regions_of_their_own(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4)):
            with bf16():
                loss = arm.model(**batch).loss / 2
            loss.backward()
            if number % 2:
                arm.step(optimizer)

    twins(script, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_forwards_in_regions_of_their_own_then_one_backward(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        first, second = batches(2)
        with bf16():
            one = arm.model(**first).loss
        with bf16():
            two = arm.model(**second).loss
        (one + two).backward()
        arm.step(optimizer)

    twins(script, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_forwards_in_one_region_then_one_backward(recipe: Recipe) -> None:
    """Without torch's weight cache: with it, both resident forwards read one cast of each adapter
    weight, and the gradients of the two add up in bf16 before they reach the weight."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        first, second = batches(2)
        with bf16(cache_enabled=False):
            loss = arm.model(**first).loss + arm.model(**second).loss
        loss.backward()
        arm.step(optimizer)

    twins(script, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_backward_twice_in_one_region(recipe: Recipe) -> None:
    """The first backward frees nothing that the second forward's cached casts need."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        with bf16(cache_enabled=False):
            for batch in batches(2):
                arm.model(**batch).loss.backward()
        arm.step(optimizer)

    twins(script, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_under_autocast_between_forward_and_backward(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch, other in zip(batches(2), batches(2, seed=4), strict=True):
            loss = arm.model(**batch).loss
            with bf16(), torch.no_grad():
                arm.note("logits", arm.model(**other).logits)
            loss.backward()
            arm.step(optimizer)

    twins(script, recipe)


def test_steps_with_and_without_autocast_alternate() -> None:
    """On a CPU the first forward of a 4-bit layer casts its bias for good."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4)):
            with bf16(enabled=number % 2 == 0):
                loss = arm.model(**batch).loss
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script, NF4)


def test_float16_forward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = arm.model(**batch).loss
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script, FP32)
