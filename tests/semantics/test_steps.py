"""Ordinary training loops: what is noted of every step is the resident run's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semantics.arms import (
    ALL_LINEAR,
    BF16,
    FP32,
    LAYERS,
    NF4,
    Arm,
    Recipe,
    batches,
    compare,
    play,
    twins,
)

SIZES: tuple[Any, ...] = (1, 2, 3, "all")


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        pytest.param(NF4, SIZES, id="nf4"),
        pytest.param(BF16, (1, 2), id="bf16", marks=pytest.mark.slow),
        pytest.param(FP32, (1, "all"), id="fp32"),
    ],
)
def test_dropout_padding_and_changing_lengths(recipe: Recipe, sizes: tuple[Any, ...]) -> None:
    recipe = recipe.with_lora(target_modules=list(ALL_LINEAR))
    twins(lambda arm: arm.train(batches(3)), recipe, sizes=sizes)


def test_left_padding() -> None:
    twins(lambda arm: arm.train(batches(2, padding="left")))


def test_default_initialisation() -> None:
    """B starts at zero, so the gradients of A do too."""
    arm = twins(lambda arm: arm.train(batches(3)), NF4.with_lora(init_lora_weights=True))
    grads = [v for n, v in arm.notes if n.startswith("grad.") and "lora_A" in n]
    assert not any(g.any() for g in grads[: len(grads) // 3])
    assert all(g.any() for g in grads[-len(grads) // 3 :])


@pytest.mark.parametrize(
    ("recipe", "accumulate"),
    [
        pytest.param(NF4, 2, id="nf4-2"),
        pytest.param(NF4, 4, id="nf4-4"),
        pytest.param(FP32, 2, id="fp32-2"),
        pytest.param(FP32, 4, id="fp32-4", marks=pytest.mark.slow),
    ],
)
def test_accumulation_and_clipping(recipe: Recipe, accumulate: int) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(2 * accumulate), start=1):
            loss = arm.model(**batch).loss / accumulate
            loss.backward()
            arm.note("loss", loss)
            if number % accumulate == 0:
                norm = torch.nn.utils.clip_grad_norm_(arm.trainable().values(), 0.05)
                assert norm > 0.05, "clipping had nothing to do"
                arm.note("norm", norm)
                arm.step(optimizer)

    twins(script, recipe)


def test_output_hidden_states() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            output = arm.model(**batch, output_hidden_states=True)
            assert len(output.hidden_states) == LAYERS + 1
            arm.note("hidden", output.hidden_states)
            output.loss.backward()
            arm.step(optimizer)

    twins(script, sizes=(1, 2))


@pytest.mark.parametrize("recipe", [NF4, BF16, FP32], ids=lambda r: r.precision)
def test_loss_that_reads_a_hidden_state_between_layers(recipe: Recipe) -> None:
    """Three gradients meet in that state, and the order in which they are added shows."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            output = arm.model(**batch, output_hidden_states=True)
            (output.loss + output.hidden_states[3].float().square().mean()).backward()
            arm.step(optimizer)

    twins(script, recipe)


def test_loss_that_reads_the_last_hidden_state() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            output = arm.model(**batch, output_hidden_states=True)
            (output.loss + output.hidden_states[-1].float().square().mean()).backward()
            arm.step(optimizer)

    twins(script)


def test_labels_that_are_all_masked_in_one_row() -> None:
    def script(arm: Arm) -> None:
        data = batches(2)
        for batch in data:
            batch["labels"][0] = -100
        arm.train(data)

    twins(script)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(3):
            arm.model(**batch).loss.backward()
            arm.step(optimizer, set_to_none=set_to_none)
            arm.note_grads("left")
        arm.model.zero_grad(set_to_none=set_to_none)

    twins(script)


@pytest.mark.parametrize("early", [True, False])
def test_optimizer_built_before_or_after_prepare(early: bool) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer() if early else None
        arm.prepare()
        arm.train(batches(2), optimizer)

    twins(script, late=True)


def test_prepare_in_the_middle_of_a_run() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        arm.prepare()
        arm.train(batches(2, seed=1), optimizer)
        arm.unprepare()
        arm.train(batches(1, seed=2), optimizer)

    twins(script, late=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(attention: str) -> None:
    def script(arm: Arm) -> None:
        arm.model.get_base_model().set_attn_implementation(attention)
        arm.train(batches(2))

    twins(script)


def test_use_cache_given_and_left_at_its_default() -> None:
    def script(arm: Arm) -> None:
        assert arm.model.config.use_cache
        optimizer = arm.optimizer()
        for batch, extra in zip(
            batches(3), ({}, {"use_cache": True}, {"use_cache": False}), strict=True
        ):
            output = arm.model(**batch, **extra)
            output.loss.backward()
            arm.note("loss", output.loss)
            arm.step(optimizer)

    twins(script)


def test_packed_rows_by_position_ids() -> None:
    """Position ids that start again tell sequences of one row apart."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2, size=1):
            length = batch["input_ids"].shape[1]
            cut = length // 2
            positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None]
            loss = arm.model(
                input_ids=batch["input_ids"], labels=batch["labels"], position_ids=positions
            ).loss
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script)


def test_the_comparison_can_fail() -> None:
    """One bit of one frozen weight of the streamed arm must show."""

    def script(arm: Arm) -> None:
        if arm.streamed:
            weight = arm.model.get_base_model().model.layers[2].mlp.up_proj.base_layer.weight
            weight.data.view(-1)[7] *= 1.5
        arm.prepare()
        arm.train(batches(1))

    resident = play(script, FP32, streamed=False, late=True)
    streamed = play(script, FP32, streamed=True, late=True)
    with pytest.raises(pytest.fail.Exception, match="notes differ"):
        compare(resident.notes, streamed.notes)
