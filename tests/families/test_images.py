"""Real image inputs through the multimodal models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import poros
from poros_core.conformance import bench, check_training
from poros_core.load import choose_strategy
from poros_core.protocols import LoadRequest

IMAGE = 90
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


MODELS: dict[str, tuple[Callable[[int], Batch], str]] = {
    "gemma3": (gemma3, "token_type_ids"),
    "gemma4": (gemma4, "mm_token_type_ids"),
    "qwen3_5": (qwen3_5, "mm_token_type_ids"),
}


def batches(family: str) -> Iterator[Batch]:
    """Two rows, each with an image, one of them padded."""
    pixels, types = MODELS[family]
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
        labels = ids.masked_fill((mask == 0) | (kinds == 1), -100)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(ids.sum()))
            found = pixels(2)
        yield {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            types: kinds,
            **found,
        }


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("family", MODELS)
def test_training_with_images_is_exact(family: str, size: int) -> None:
    with bench(family, shape="tiny-multimodal", block_sizes=(size,)) as opened:
        opened.batches = batches(family)
        check_training(opened)
        opened.build()
        assert opened.resident is not None
        batch = next(opened.batches)
        with torch.no_grad():
            seen = opened.resident.model(**batch).logits
            other = opened.resident.model(
                **{**batch, "pixel_values": batch["pixel_values"] + 0.5}
            ).logits
        assert not torch.equal(seen, other)


@pytest.mark.parametrize("family", MODELS)
def test_adapters_in_the_tower_train_through_the_streamed_decoder(family: str) -> None:
    with bench(family, shape="tiny-multimodal") as opened:
        workshop = opened.workshop
        request = LoadRequest(
            path=workshop.path, family=workshop.subject.family, device=workshop.device
        )
        arms = []
        for streams in (False, True):
            model: Any = choose_strategy("nf4", "standard", request).load_resident(request)
            torch.manual_seed(3)
            model = get_peft_model(
                model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            )
            arms.append(poros.prepare(model, block_size=2, verbose=False) if streams else model)
        batch = next(batches(family))
        for model in arms:
            torch.manual_seed(4)
            model.train()(**batch).loss.backward()
        resident, streamed = (dict(model.named_parameters()) for model in arms)
        reached = [name for name, param in resident.items() if param.grad is not None]
        assert any("vision" in name or "visual" in name for name in reached)
        assert reached == [name for name, param in streamed.items() if param.grad is not None]
        for name in reached:
            assert torch.equal(resident[name].grad, streamed[name].grad), name
