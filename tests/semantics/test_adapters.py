"""Adapters of every kind and place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from semantics.arms import (
    BF16,
    FP32,
    LAYERS,
    NF4,
    SOME_LINEAR,
    Arm,
    Recipe,
    batches,
    lora_config,
    twins,
)

EVERY = list(SOME_LINEAR)
HEAD_AND_TABLE = ["lm_head", "embed_tokens"]


def _train(arm: Arm) -> None:
    arm.train(batches(2))


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([4], id="4"),
        pytest.param([0], id="0"),
        pytest.param([2, 3], id="2-3", marks=pytest.mark.slow),
        pytest.param([1, 4], id="1-4"),
        pytest.param([0, 1], id="0-1", marks=pytest.mark.slow),
    ],
)
def test_adapters_in_some_layers_only(layers: list[int]) -> None:
    assert max(layers) < LAYERS
    twins(_train, NF4.with_lora(layers_to_transform=layers), sizes=(1, 2))


def test_adapters_of_one_projection_only() -> None:
    twins(_train, NF4.with_lora(target_modules=["o_proj"]))


def test_adapters_on_the_head_only() -> None:
    """No layer has anything that trains: none needs a recompute."""
    twins(_train, NF4.with_lora(target_modules=["lm_head"]))


def test_adapters_on_the_embedding_only() -> None:
    """Every layer passes gradients on, and none has anything that trains."""
    twins(_train, NF4.with_lora(target_modules=["embed_tokens"]), sizes=(1, "all"))


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({"use_dora": True}, id="dora"),
        pytest.param({"use_rslora": True}, id="rslora"),
        pytest.param({"bias": "lora_only"}, id="bias-lora-only"),
        pytest.param({"bias": "all"}, id="bias-all"),
        pytest.param({"lora_bias": True}, id="lora-bias"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="saved-head"),
        pytest.param({"modules_to_save": ["embed_tokens"]}, id="saved-embedding"),
        pytest.param({"modules_to_save": HEAD_AND_TABLE}, id="saved-both"),
        pytest.param({"modules_to_save": ["input_layernorm", "norm"]}, id="saved-norms"),
        pytest.param({"target_modules": [*EVERY, "lm_head"]}, id="head"),
        pytest.param({"target_modules": [*EVERY, "embed_tokens"]}, id="embedding"),
        pytest.param({"target_modules": [*EVERY, *HEAD_AND_TABLE]}, id="head-embedding"),
        pytest.param(
            {"trainable_token_indices": {"embed_tokens": [3, 7, 50]}}, id="trainable-tokens"
        ),
        pytest.param({"rank_pattern": {"layers.2": 8}, "r": 2}, id="ranks"),
    ],
)
def test_kinds(lora: dict[str, Any]) -> None:
    twins(_train, NF4.with_lora(**lora))


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({}, id="lora"),
        pytest.param({"trainable_token_indices": {"embed_tokens": [3, 7]}}, id="trainable-tokens"),
        pytest.param(
            {"modules_to_save": ["embed_tokens"]}, id="saved-embedding", marks=pytest.mark.slow
        ),
        pytest.param({"modules_to_save": ["lm_head"]}, id="saved-head", marks=pytest.mark.slow),
        pytest.param({"target_modules": [*EVERY, "embed_tokens"]}, id="embedding"),
        pytest.param({"target_modules": [*EVERY, "lm_head"]}, id="head"),
    ],
)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(NF4, id="nf4"), pytest.param(BF16, id="bf16", marks=pytest.mark.slow)],
)
def test_tied_head(recipe: Recipe, lora: dict[str, Any]) -> None:
    tied = Recipe(precision=recipe.precision, tied=True, lora=lora)
    twins(_train, tied)


def test_dora_under_autocast_and_accumulation() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = arm.model(**batch).loss / 2
            loss.backward()
            if number % 2:
                arm.step(optimizer)

    twins(script, NF4.with_lora(use_dora=True), sizes=(2,))


def test_adapters_in_bf16() -> None:
    def script(arm: Arm) -> None:
        for param in arm.trainable().values():
            param.data = param.data.to(torch.bfloat16)
        arm.prepare()
        arm.train(batches(2))

    twins(script, NF4, late=True)


def test_one_parameter_in_several_layers() -> None:
    """Adapters tied by hand: autograd adds up what each layer contributes, in a resident order."""

    def script(arm: Arm) -> None:
        layers = arm.model.get_base_model().model.layers
        for layer in layers[1:]:
            for name in ("lora_A", "lora_B"):
                source = getattr(layers[0].mlp.up_proj, name)["default"]
                getattr(layer.mlp.up_proj, name)["default"].weight = source.weight
        arm.prepare()
        optimizer = arm.optimizer()
        for number, batch in enumerate(batches(4)):
            arm.model(**batch).loss.backward()
            if number % 2:
                arm.step(optimizer)

    twins(script, FP32, late=True, sizes=(1, 2))


def _second(arm: Arm, **changes: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        config: LoraConfig = lora_config(**{"r": 2, "lora_dropout": 0.2, **changes})
        arm.model.add_adapter("second", config)


@pytest.mark.parametrize("after", [False, True], ids=["before-prepare", "after-prepare"])
@pytest.mark.parametrize(
    "targets", [EVERY, ["gate_proj", "o_proj"]], ids=["same-modules", "other-modules"]
)
def test_two_adapters_by_turns(after: bool, targets: list[str]) -> None:
    def script(arm: Arm) -> None:
        if after:
            arm.prepare()
        _second(arm, target_modules=targets)
        if not after:
            arm.prepare()
        for number, batch in enumerate(batches(3)):
            arm.model.set_adapter("second" if number % 2 else "default")
            arm.train([batch])

    twins(script, late=True)


def test_set_adapter_between_forward_and_backward() -> None:
    def script(arm: Arm) -> None:
        _second(arm)
        arm.prepare()
        for seed in range(2):
            arm.model.set_adapter("default")
            one = arm.model(**batches(1, seed=seed)[0]).loss
            arm.model.set_adapter("second")
            two = arm.model(**batches(1, seed=seed + 5)[0]).loss
            arm.model.base_model.set_requires_grad(["default", "second"])
            (one + two).backward()
            arm.note_grads()
            arm.model.zero_grad()

    twins(script, late=True, sizes=(1, 2))


def test_disable_adapter_between_forward_and_backward() -> None:
    """As preference losses do: policy, then reference without the adapter."""

    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            policy = arm.model(**batch)
            with torch.no_grad(), arm.model.disable_adapter():
                reference = arm.model(**batch)
            arm.note("reference", reference.logits)
            gap = (policy.logits - reference.logits).float().square().mean()
            (policy.loss + gap).backward()
            arm.step(optimizer)

    twins(script, sizes=(1, 2))


def test_backward_inside_disable_adapter() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            loss = arm.model(**batch).loss
            with arm.model.disable_adapter():
                loss.backward()
            arm.step(optimizer)

    twins(script)


def test_scaling_changed_between_forward_and_backward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        layer = arm.model.get_base_model().model.layers[2].mlp.up_proj
        for batch in batches(2):
            loss = arm.model(**batch).loss
            layer.scaling["default"] *= 3
            loss.backward()
            arm.step(optimizer)

    twins(script)


def test_two_active_adapters() -> None:
    def script(arm: Arm) -> None:
        _second(arm)
        arm.prepare()
        arm.model.base_model.set_adapter(["default", "second"])
        arm.train(batches(2))

    twins(script, late=True)


def test_adapter_deleted_after_prepare() -> None:
    def script(arm: Arm) -> None:
        _second(arm)
        arm.prepare()
        arm.train(batches(1))
        arm.model.delete_adapter("second")
        arm.train(batches(1))

    twins(script, late=True)


def test_dora_adapter_added_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA reads the base when it is created. (Parked tensors are poison only in tests.)"""
    monkeypatch.setenv("POROS_POISON", "0")

    def script(arm: Arm) -> None:
        arm.prepare()
        _second(arm, use_dora=True)
        arm.model.set_adapter("second")
        arm.train(batches(2))

    twins(script, late=True)
