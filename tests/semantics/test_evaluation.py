"""Evaluation, generation and saving give the resident tokens, logits and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from peft import PeftModel
from safetensors.torch import load_file

from semantics.arms import BF16, FEW_LAYERS, FP32, NF4, Arm, Recipe, base_model, batches, twins

RECIPES = [
    pytest.param(NF4, id="nf4"),
    pytest.param(BF16, id="bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_before_and_after_training(recipe: Recipe) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for _ in range(2):
            arm.model.eval()
            with torch.no_grad():
                for batch in batches(2, seed=8):
                    arm.note("logits", arm.model(**batch).logits)
            arm.model.train()
            arm.train(batches(2), optimizer)

    twins(script, recipe, sizes=(1, "all"))


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        pytest.param(NF4, {"use_cache": True}, id="nf4-cache"),
        pytest.param(NF4, {"use_cache": False}, id="nf4-no-cache"),
        pytest.param(NF4, {"do_sample": True, "temperature": 0.8}, id="nf4-sampled"),
        pytest.param(NF4, {"num_beams": 2}, id="nf4-beams"),
        pytest.param(BF16, {"use_cache": True}, id="bf16-cache"),
        pytest.param(BF16, {"use_cache": False}, id="bf16-no-cache", marks=pytest.mark.slow),
    ],
)
def test_generate(recipe: Recipe, how: dict[str, Any]) -> None:
    def script(arm: Arm) -> None:
        batch = batches(1, padding="left")[0]
        arm.train(batches(1))
        arm.model.eval()
        for _ in range(2):
            output = arm.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=4,
                min_new_tokens=4,
                output_logits=True,
                return_dict_in_generate=True,
                **how,
            )
            arm.note("tokens", output.sequences)
            arm.note("logits", output.logits)
        arm.model.train()
        arm.train(batches(1))

    twins(script, recipe)


def test_generate_without_the_adapter() -> None:
    def script(arm: Arm) -> None:
        arm.model.eval()
        with arm.model.disable_adapter():
            ids = batches(1, size=1)[0]["input_ids"]
            arm.note("tokens", arm.model.generate(ids, max_new_tokens=6))

    twins(script)


def test_decoder_and_layers_called_by_themselves() -> None:
    def script(arm: Arm) -> None:
        base = arm.model.get_base_model()
        batch = batches(1)[0]
        hidden = base.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        arm.note("hidden", hidden)
        arm.note("logits", base.lm_head(hidden))
        hidden.float().square().mean().backward()
        arm.note_grads()
        arm.model.zero_grad()
        arm.train(batches(1))

    twins(script, sizes=(1, 2))


def _head_weight_loss(arm: Arm, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    base = arm.model.get_base_model()
    hidden = base.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    logits = hidden[:, :-1] @ base.lm_head.weight.T
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_loss_that_reads_the_head_weight(tied: bool) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for batch in batches(2):
            loss = _head_weight_loss(arm, batch)
            loss.backward()
            arm.note("loss", loss)
            arm.step(optimizer)

    twins(script, Recipe(tied=tied), sizes=(1,) if tied else (1, 2))


def test_head_weight_read_in_two_forwards_before_one_backward() -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        for seed in range(2):
            losses = [_head_weight_loss(arm, batch) for batch in batches(2, seed=seed)]
            sum(losses).backward()
            arm.step(optimizer)

    twins(script)


def test_head_weight_read_before_any_forward() -> None:
    def script(arm: Arm) -> None:
        head = arm.model.get_output_embeddings().weight
        arm.note("head", head)
        arm.train(batches(1))
        arm.note("head", head)

    twins(script)


def _saved(arm: Arm, folder: Path) -> Path:
    path = folder / ("streamed" if arm.streamed else "resident")
    arm.model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(NF4, id="lora"),
        pytest.param(NF4.with_lora(use_dora=True), id="dora"),
        pytest.param(NF4.with_lora(modules_to_save=["lm_head"]), id="saved-head"),
        pytest.param(NF4.with_lora(target_modules=["q_proj", "embed_tokens"]), id="embedding"),
    ],
)
def test_saved_adapter_is_the_resident_file_and_loads_in_plain_peft(
    recipe: Recipe, tmp_path: Path
) -> None:
    recipe = evolve(recipe, layers=FEW_LAYERS)

    def script(arm: Arm) -> None:
        arm.train(batches(2))
        path = _saved(arm, tmp_path)
        arm.model.eval()
        batch = batches(1, seed=9)[0]
        with torch.no_grad():
            logits = arm.model(**batch).logits
        arm.note("logits", logits)
        plain = PeftModel.from_pretrained(base_model(recipe), path).eval()
        with torch.no_grad():
            assert torch.equal(plain(**batch).logits, logits)

    twins(script, recipe)
    files = [tmp_path / arm / "adapter_model.safetensors" for arm in ("resident", "streamed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    configs = [tmp_path / arm / "adapter_config.json" for arm in ("resident", "streamed")]
    assert configs[0].read_bytes() == configs[1].read_bytes()


def test_saving_while_a_backward_is_outstanding(tmp_path: Path) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        loss = arm.model(**batches(1)[0]).loss
        arm.note("saved", load_file(_saved(arm, tmp_path) / "adapter_model.safetensors"))
        loss.backward()
        arm.step(optimizer)

    twins(script)


def test_state_dict_holds_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves everything saves the true base. (Parked tensors are poison only in tests.)"""
    monkeypatch.setenv("POROS_POISON", "0")

    def script(arm: Arm) -> None:
        arm.note("state", arm.model.state_dict())
        arm.train(batches(1))
        arm.note("state", arm.model.state_dict())
        loss = arm.model(**batches(1, seed=1)[0]).loss
        arm.note("state", arm.model.state_dict())
        loss.backward()
        arm.note("state", arm.model.state_dict())

    twins(script, FP32)
    twins(script, Recipe(precision="bf16", tied=True))


def test_merge_and_unload_after_unprepare() -> None:
    def script(arm: Arm) -> None:
        arm.train(batches(1))
        arm.unprepare()
        merged = arm.model.merge_and_unload().eval()
        with torch.no_grad():
            arm.note("logits", merged(**batches(1)[0]).logits)

    twins(script, FP32)
