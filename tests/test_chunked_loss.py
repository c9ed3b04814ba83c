"""The chunked loss: close to the plain one, the same bits in both arms, and gone when removed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import poros
from poros_core.chunked_loss import chunked_cross_entropy
from poros_families.gemma3 import GEMMA3
from poros_families.qwen2 import QWEN2

VOCABULARY = 96


def base(config: Any = QWEN2.shapes["tiny"], **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **changes}))


def adapted(**lora: Any) -> Any:
    model = base()
    torch.manual_seed(1)
    usual = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
    return get_peft_model(model, LoraConfig(**{**usual, "init_lora_weights": False, **lora}))


def batch(seed: int = 0, *, width: int = 11, rows: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 11, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, 16, generator=generator) / 4).to(dtype).requires_grad_()
    return hidden, weight, batch()["labels"]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cap: Any) -> Any:
    logits = functional.linear(hidden, weight)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )


@pytest.mark.parametrize("chunk", [1, 5, 22, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_value_and_gradients_are_the_plain_ones(chunk: int, cap: Any, items: Any) -> None:
    hidden, weight, labels = states()
    count = int((labels[:, 1:] != -100).sum()) if items is None else 7
    wanted = plain(hidden, weight, labels, cap) / count
    loss = chunked_cross_entropy(
        hidden, weight, labels, chunk=chunk, softcap=cap, num_items_in_batch=items
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(wanted, [hidden, weight])
    )


def test_labels_that_are_shifted_already_and_another_ignored_label() -> None:
    hidden, weight, labels = states()
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    wanted = chunked_cross_entropy(hidden, weight, labels, chunk=4)
    assert torch.equal(chunked_cross_entropy(hidden, weight, shifted, chunk=4, shift=False), wanted)
    other = torch.where(labels == -100, 5, labels)
    ignored = chunked_cross_entropy(hidden, weight, other, chunk=4, ignore_index=5)
    some = torch.where(labels == 5, -100, labels)
    assert torch.equal(ignored, chunked_cross_entropy(hidden, weight, some, chunk=4))


def test_logits_of_one_chunk_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = states()
    rows: list[int] = []
    linear = functional.linear

    def counted(part: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows.append(len(part))
        return linear(part, matrix)

    monkeypatch.setattr(functional, "linear", counted)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=4)
    assert rows == [4, 4, 4, 4, 4, 2]
    assert max(kept, default=0) < 4 * VOCABULARY
    loss.backward()
    assert rows[6:] == [2, 4, 4, 4, 4, 4]


def test_autocast_holds_in_the_recompute() -> None:
    hidden, _, labels = states()
    dtypes: list[torch.dtype] = []
    head = nn.Linear(16, VOCABULARY, bias=False)
    head.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, head, labels, chunk=11)
    loss.backward()
    assert dtypes == [torch.bfloat16] * 4
    assert hidden.grad is not None
    assert head.weight.grad is not None


def test_bad_input_is_named() -> None:
    hidden, weight, labels = states()
    with pytest.raises(poros.SettingsError, match="chunk must be"):
        chunked_cross_entropy(hidden, weight, labels, chunk=0)
    with pytest.raises(poros.SettingsError, match="need labels of shape"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(poros.SettingsError, match="chunk must be"):
        poros.chunked_loss(base(), chunk=-1)


def train(model: Any, *, autocast: bool, steps: int = 2) -> Iterator[torch.Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(3)
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(**batch(step), num_items_in_batch=20)
        assert output.logits is None
        output.loss.backward()
        yield output.loss.detach()
        yield from (param.grad.clone() for param in trained if param.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        yield from (param.detach().clone() for param in trained)


@pytest.mark.parametrize(
    ("autocast", "lora"),
    [
        (False, {}),
        (True, {}),
        (False, {"target_modules": ["q_proj", "lm_head"]}),
        (False, {"modules_to_save": ["lm_head"]}),
    ],
)
def test_both_arms_have_the_same_bits(autocast: bool, lora: dict[str, Any]) -> None:
    resident, streamed = adapted(**lora), adapted(**lora)
    poros.prepare(streamed, verbose=False)
    noted = []
    for model in (resident, streamed):
        with poros.chunked_loss(model, chunk=8):
            noted.append(list(train(model.train(), autocast=autocast)))
    first, second = noted
    assert len(first) > 10
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_is_put_back_and_prepared_afterwards_too() -> None:
    model = adapted()
    inner = model.get_base_model()
    before = inspect.signature(inner.forward)
    handle = poros.chunked_loss(model, chunk=8)
    assert inspect.signature(inner.forward) == before
    with pytest.raises(poros.PrepareError, match="in chunks already"):
        poros.chunked_loss(model)
    poros.prepare(model, verbose=False)
    assert model(**batch()).logits is None
    poros.unprepare(model)
    assert model(**batch()).logits is None
    handle.remove()
    handle.remove()
    assert "forward" not in inner.__dict__
    assert "forward" not in inner.lm_head.__dict__
    assert model(**batch()).logits.shape == (2, 11, VOCABULARY)


def test_a_wrapper_that_came_later_stays() -> None:
    model = base()
    given = batch()
    plain_loss = model(**given).loss
    handle = poros.chunked_loss(model, chunk=8)
    inner = model.forward
    calls: list[int] = []

    def later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = later
    assert model(**given).logits is None
    handle.remove()
    again = model(**given)
    assert len(calls) == 2
    assert torch.equal(again.loss, plain_loss)
    assert again.logits is not None


def test_trl_keeps_its_own_loss(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from poros_core.demo_model import demo_tokenizer

    def loss(before: bool, after: bool) -> list[float]:
        model = adapted(lora_dropout=0.0)
        settings = SFTConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        rows = Dataset.from_list([{"input_ids": row.tolist()} for row in batch()["input_ids"]])
        first = [poros.chunked_loss(model, chunk=8)] if before else []
        trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=demo_tokenizer())
        second = [poros.chunked_loss(model, chunk=8)] if after else []
        trainer.train()
        for handle in [*first, *second]:
            handle.remove()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted = loss(False, False)
    assert wanted
    assert loss(True, False) == wanted
    assert loss(False, True) == wanted


def test_calls_without_labels_are_the_models_own() -> None:
    model = base().eval()
    given = batch()
    ids = given["input_ids"]
    wanted = model(input_ids=ids).logits
    plain_loss = model(**given).loss
    with poros.chunked_loss(model, chunk=8):
        assert torch.equal(model(input_ids=ids).logits, wanted)
        with torch.no_grad():
            torch.testing.assert_close(model(**given).loss, plain_loss)
            loss, logits, *_ = model(**given, return_dict=False)
            torch.testing.assert_close(loss, plain_loss)
            assert logits is None
        with pytest.raises(poros.SettingsError, match="logits_to_keep"):
            model(**given, logits_to_keep=1)


def test_soft_capped_logits() -> None:
    config = {**GEMMA3.shapes["tiny"], "final_logit_softcapping": 0.05}
    model = base(config)
    given = batch()
    wanted = model(**given).loss
    with poros.chunked_loss(model, chunk=8):
        torch.testing.assert_close(model(**given).loss, wanted)
    model.config.get_text_config().final_logit_softcapping = None
    assert not torch.allclose(model(**given).loss, wanted)


def test_models_that_it_does_not_fit_are_refused() -> None:
    model = base()
    with pytest.raises(poros.UnsupportedModelError, match="no output embedding"):
        poros.chunked_loss(model.model)
    model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(poros.UnsupportedModelError, match="loss of its own"):
        poros.chunked_loss(model)
    scaled = base()
    scaled.forward = _scaling(scaled)
    with poros.chunked_loss(scaled), pytest.raises(poros.UnsupportedModelError, match="changes"):
        scaled(**batch())


def _scaling(model: Any) -> Any:
    inner = model.forward

    def forward(input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = inner(input_ids=input_ids, labels=labels, **kwargs)
        output.logits = output.logits * 2
        return output

    return forward


def test_under_a_trainer_it_is_the_plain_loss_to_rounding(tmp_path: Path) -> None:
    def losses(chunked: bool) -> list[float]:
        model = adapted(lora_dropout=0.0)
        rows = [{k: v[0] for k, v in batch(seed, rows=1).items()} for seed in range(8)]
        settings = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, settings, train_dataset=rows)  # type: ignore[arg-type]
        if chunked:
            with poros.chunked_loss(model, chunk=8):
                trainer.train()
        else:
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain_losses, chunked_losses = losses(False), losses(True)
    assert len(plain_losses) == 2
    assert chunked_losses == pytest.approx(plain_losses, rel=1e-3)
