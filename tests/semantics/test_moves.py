"""What ``.to()``, Accelerate and Trainer do to a model at construction moves no parked weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import poros
from poros_core.errors import StateError
from poros_core.prepare import prepared_of
from semantics.arms import BF16, FP32, NF4, Arm, Recipe, batches, build, frozen_places, twins

RECIPES = [pytest.param(r, id=r.precision) for r in (NF4, BF16)]


class Places:
    """Addresses, types and bytes of the base, and the host store's bytes, at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self.places = {
            name: (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape)
            for name, tensor in frozen_places(model)
        }
        self.objects = {name: id(param) for name, param in model.named_parameters()}
        store = prepared_of(model).store
        self.host = [image.buffer.bytes.clone() for image in store._images]
        self.stretches = [image.buffer.bytes.data_ptr() for image in store._images]

    def check(self, model: nn.Module) -> None:
        """Fail if anything moved since."""
        now = Places(model)
        assert now.places == self.places
        assert now.objects == self.objects
        assert now.stretches == self.stretches
        assert all(map(torch.equal, now.host, self.host))


def _prepared(recipe: Recipe = NF4) -> Any:
    return poros.prepare(build(recipe), verbose=False)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda model: model.to("cpu"), id="to-cpu"),
        pytest.param(lambda model: model.to(torch.device("cpu")), id="to-device"),
        pytest.param(lambda model: model.cpu(), id="cpu"),
        pytest.param(lambda model: model.base_model.to("cpu"), id="inner"),
        pytest.param(lambda model: model.get_base_model().model.to("cpu"), id="decoder"),
        pytest.param(lambda model: model.get_base_model().model.layers[2].to("cpu"), id="layer"),
        pytest.param(lambda model: model.get_base_model().lm_head.to("cpu"), id="head"),
        pytest.param(lambda model: model.train().eval().train(), id="modes"),
        pytest.param(lambda model: model.requires_grad_(False), id="requires-grad-off"),
    ],
)
def test_no_parked_weight_moves(recipe: Recipe, move: Callable[[Any], object]) -> None:
    model = _prepared(recipe)
    before = Places(model)
    move(model)
    before.check(model)


REFUSED: list[Any] = [
    pytest.param(lambda module: module.to(torch.float16), id="to-dtype"),
    pytest.param(lambda module: module.half(), id="half"),
    pytest.param(lambda module: module.double(), id="double"),
    pytest.param(lambda module: module.to("meta"), id="to-meta"),
    pytest.param(lambda module: module.to("meta", torch.float64), id="to-both"),
    pytest.param(lambda module: module.to_empty(device="meta"), id="to-empty"),
]


@pytest.mark.parametrize("move", REFUSED)
@pytest.mark.parametrize(
    "whose",
    [
        pytest.param(lambda model: model, id="model"),
        pytest.param(lambda model: model.base_model, id="inner"),
        pytest.param(lambda model: model.get_base_model(), id="base"),
        pytest.param(lambda model: model.get_base_model().model, id="decoder"),
    ],
)
def test_refused_before_anything_moved(
    whose: Callable[[Any], nn.Module], move: Callable[[nn.Module], object]
) -> None:
    model = _prepared(BF16)
    before = Places(model)
    tensors = [*model.parameters(), *model.buffers()]
    found = [(t.data_ptr(), t.dtype, t.device) for t in tensors]
    with pytest.raises(StateError, match="unprepare"):
        move(whose(model))
    before.check(model)
    assert [(t.data_ptr(), t.dtype, t.device) for t in tensors] == found


@pytest.mark.parametrize("move", [REFUSED[0], REFUSED[3]])
def test_refused_on_a_model_that_the_next_step_trains(move: Callable[[nn.Module], object]) -> None:
    def script(arm: Arm) -> None:
        optimizer = arm.optimizer()
        arm.train(batches(1), optimizer)
        if arm.streamed:
            with pytest.raises(StateError):
                move(arm.model)
        arm.train(batches(1, seed=1), optimizer)

    twins(script, BF16)


def test_dtype_that_the_whole_base_has_is_no_move() -> None:
    model = _prepared(FP32)
    before = Places(model)
    model.to(torch.float32)
    model.float()
    before.check(model)


def test_training_after_moves() -> None:
    def script(arm: Arm) -> None:
        arm.train(batches(1))
        arm.model.to("cpu")
        arm.train(batches(1, seed=1))
        loss = arm.model(**batches(1, seed=2)[0]).loss
        arm.model.cpu()
        loss.backward()
        arm.note_grads()

    twins(script, sizes=(1, 2))


@pytest.mark.usefixtures("new_accelerate")
def test_accelerate_prepare() -> None:
    def script(arm: Arm) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        before = Places(arm.model) if arm.streamed else None
        model, optimizer = accelerator.prepare(arm.model, arm.optimizer())
        if before is not None:
            before.check(arm.model)
        for batch in batches(4):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    arm.note("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                arm.note("loss", loss)
                optimizer.step()
                optimizer.zero_grad()
            arm.note_weights()
        accelerator.free_memory()

    twins(script, NF4)


def _rows(count: int = 8) -> Dataset:
    rows: list[dict[str, list[int]]] = []
    for batch in batches(count, size=1):
        rows.append({"input_ids": batch["input_ids"][0].tolist()})
        rows[-1]["labels"] = batch["labels"][0].tolist()
        rows[-1]["attention_mask"] = batch["attention_mask"][0].tolist()
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("recipe", "bf16"),
    [
        pytest.param(NF4, True, id="nf4-autocast"),
        pytest.param(BF16, False, id="bf16-plain"),
    ],
)
def test_trainer_construction(recipe: Recipe, bf16: bool, tmp_path: Path) -> None:
    model = _prepared(recipe)
    before = Places(model)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=bf16, report_to="none", max_steps=1
    )
    Trainer(model=model, args=arguments, train_dataset=_rows())
    before.check(model)


def test_sft_trainer_construction(tmp_path: Path, tokenizer: Any) -> None:
    model = _prepared()
    before = Places(model)
    arguments = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, report_to="none", max_steps=1
    )
    SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=_rows().select_columns(["input_ids"]),
        processing_class=tokenizer,
    )
    before.check(model)
