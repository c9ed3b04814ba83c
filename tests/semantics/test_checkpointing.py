"""Gradient checkpointing and ``prepare_model_for_kbit_training``, before or after ``prepare``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training

from semantics.arms import Arm, Recipe, batches, twins


def _enable(arm: Arm, reentrant: bool) -> None:
    arm.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_enabled(reentrant: bool, after: bool) -> None:
    """The resident arm checkpoints too."""

    def script(arm: Arm) -> None:
        arm.model.enable_input_require_grads()
        if after:
            arm.prepare()
        _enable(arm, reentrant)
        if not after:
            arm.prepare()
        arm.train(batches(2))
        assert arm.model.get_base_model().is_gradient_checkpointing

    twins(script, late=True, sizes=(1, 2) if after else (1,))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_against_a_resident_run_without_it(reentrant: bool, after: bool) -> None:
    def script(arm: Arm) -> None:
        if not after:
            arm.prepare()
        if arm.streamed:
            _enable(arm, reentrant)
        if after:
            arm.prepare()
        arm.train(batches(2))

    twins(script, late=True)


def test_enabled_and_disabled_between_steps() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        _enable(arm, False)
        arm.train(batches(1, seed=1), optimizer)
        arm.model.gradient_checkpointing_disable()
        arm.train(batches(1, seed=2), optimizer)

    twins(script)


def test_accumulation_and_autocast() -> None:
    def script(arm: Arm) -> None:
        _enable(arm, False)
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = arm.model(**batch).loss / 2
            loss.backward()
            if number % 2:
                arm.step(optimizer)

    twins(script)


def test_generate_with_checkpointing_enabled() -> None:
    def script(arm: Arm) -> None:
        _enable(arm, False)
        arm.train(batches(1))
        arm.model.eval()
        arm.note("tokens", arm.model.generate(batches(1)[0]["input_ids"][:1], max_new_tokens=4))

    twins(script)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="default"),
        pytest.param({"use_gradient_checkpointing": False}, id="no-checkpointing"),
        pytest.param(
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, id="non-reentrant"
        ),
    ],
)
@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, id="untied"), pytest.param(True, id="tied", marks=pytest.mark.slow)],
)
def test_prepare_model_for_kbit_training(how: dict[str, Any], tied: bool) -> None:
    def cast(model: torch.nn.Module) -> torch.nn.Module:
        return prepare_model_for_kbit_training(model, **how)

    recipe = Recipe(tied=tied, before_peft=cast)

    def script(arm: Arm) -> None:
        norm = arm.model.get_base_model().model.layers[0].input_layernorm.weight
        assert norm.dtype == torch.float32
        arm.train(batches(2))

    twins(script, recipe)


def test_prepare_model_for_kbit_training_under_autocast() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = arm.model(**batch).loss
            loss.backward()
            arm.step(optimizer)

    twins(script, Recipe(before_peft=prepare_model_for_kbit_training))
