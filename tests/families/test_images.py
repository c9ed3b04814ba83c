"""Real image and audio inputs through the multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros_core.conformance import Bench, bench, check_training
from poros_core.load import choose_strategy
from poros_core.protocols import LoadRequest

IMAGE, AUDIO = 90, 91
TOKENS = 4
LENGTH = 24
Batch = dict[str, torch.Tensor]


def gemma3(images: int) -> Batch:
    return {"pixel_values": torch.randn(images, 3, 28, 28)}


def gemma4(images: int) -> Batch:
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1)
    return {
        "pixel_values": torch.rand(images, 16, 3 * 8 * 8),
        "image_position_ids": grid.reshape(1, 16, 2).repeat(images, 1, 1),
    }


def qwen3_5(images: int) -> Batch:
    return {
        "pixel_values": torch.randn(images * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(images, 1),
    }


def gemma4_e2b(images: int) -> Batch:
    """Each image goes with a recording; the last one is padded by four frames, which is a token."""
    frames = torch.ones(images, 4 * TOKENS, dtype=torch.bool)
    frames[-1, -4:] = False
    features = torch.randn(images, 4 * TOKENS, 16)
    return {**gemma4(images), "input_features": features, "input_features_mask": frames}


MODELS: dict[str, tuple[str, Callable[[int], Batch], str]] = {
    "gemma3": ("tiny-multimodal", gemma3, "token_type_ids"),
    "gemma4": ("tiny-multimodal", gemma4, "mm_token_type_ids"),
    "gemma4-e2b": ("tiny-e2b-multimodal", gemma4_e2b, "mm_token_type_ids"),
    "qwen3_5": ("tiny-multimodal", qwen3_5, "mm_token_type_ids"),
}


CASES = [
    pytest.param(model, marks=[pytest.mark.slow] * (model == "gemma4"), id=model)
    for model in MODELS
]
"""Gemma 4 that hears too has the same vision tower, and is fast."""


def bench_of(model: str, **options: Any) -> AbstractContextManager[Bench]:
    return bench(model.partition("-")[0], shape=MODELS[model][0], **options)


def batches(model: str) -> Iterator[Batch]:
    """Two rows, each with an image and where the model hears with a recording, one padded."""
    _, inputs, types = MODELS[model]
    generator = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(3, IMAGE - 1, (2, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        kinds = torch.zeros_like(ids)
        for row, start in enumerate((2, 7)):
            ids[row, start : start + TOKENS] = IMAGE
            kinds[row, start : start + TOKENS] = 1
        ids[1, -5:] = 0
        mask[1, -5:] = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(ids.sum()))
            found = inputs(2)
        if "input_features" in found:
            ids[0, 8 : 8 + TOKENS] = AUDIO
            ids[1, 13 : 13 + TOKENS - 1] = AUDIO
            kinds[ids == AUDIO] = 3
        labels = ids.masked_fill((mask == 0) | (kinds != 0), -100)
        yield {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            types: kinds,
            **found,
        }


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("model", CASES)
def test_training_with_images_is_exact(model: str, size: int) -> None:
    with bench_of(model, block_sizes=(size,)) as opened:
        opened.batches = batches(model)
        check_training(opened)
        opened.build()
        assert opened.resident is not None
        batch = next(opened.batches)
        with torch.no_grad():
            seen = opened.resident.model(**batch).logits
            for name in {"pixel_values", "input_features"} & batch.keys():
                other = opened.resident.model(**{**batch, name: batch[name] + 0.5}).logits
                assert not torch.equal(seen, other), name


@pytest.mark.parametrize("model", CASES)
def test_adapters_in_the_tower_train_through_the_streamed_decoder(model: str) -> None:
    with bench_of(model) as opened:
        workshop = opened.workshop
        request = LoadRequest(
            path=workshop.path, family=workshop.subject.family, device=workshop.device
        )
        arms = []
        for streams in (False, True):
            arm: Any = choose_strategy("nf4", "standard", request).load_resident(request)
            torch.manual_seed(3)
            arm = get_peft_model(
                arm, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            )
            arms.append(poros.prepare(arm, block_size=2, verbose=False) if streams else arm)
        batch = next(batches(model))
        for arm in arms:
            torch.manual_seed(4)
            arm.train()(**batch).loss.backward()
        resident, streamed = (dict(arm.named_parameters()) for arm in arms)
        reached = [name for name, param in resident.items() if param.grad is not None]
        moved = [name for name in reached if resident[name].grad.count_nonzero()]
        assert any("vision" in name or "visual" in name for name in moved)
        heard = any("audio_tower.layers.0.self_attn" in name for name in moved)
        assert heard == ("input_features" in batch)
        assert reached == [name for name, param in streamed.items() if param.grad is not None]
        for name in reached:
            assert torch.equal(resident[name].grad, streamed[name].grad), name
