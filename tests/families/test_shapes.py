"""Shapes are real configs, of the sizes that were published."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from poros_core.configs import auto_class
from poros_core.plan import build_plan
from poros_core.plugins import plugins
from poros_families import poros_families

FAMILIES = {family.name: family for family in poros_families()}

PARAMETERS = {
    ("qwen3", "32b"): 32_762_123_264,
    ("qwen3_5", "4b"): 4_205_751_296,
    ("qwen3_5", "27b"): 26_895_998_464,
    ("gemma3", "27b"): 27_009_346_304,
    ("gemma4", "31b"): 30_697_345_280,
    ("gemma4", "e2b"): 4_628_569_344,
}
SHAPES = [(family.name, shape) for family in poros_families() for shape in family.shapes]


def on_meta(shape: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, auto_class(shape)).from_config(
            AutoConfig.for_model(**shape), dtype=torch.bfloat16
        )
    return model.requires_grad_(False)


@pytest.mark.parametrize(("name", "shape"), PARAMETERS)
def test_published_sizes(name: str, shape: str) -> None:
    model = on_meta(FAMILIES[name].shapes[shape])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name, shape]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_a_shape_is_a_model_of_its_family_and_streams(name: str, shape: str) -> None:
    family = FAMILIES[name]
    config = family.shapes[shape]
    model = on_meta(config)
    assert [type(model).__name__] == config["architectures"]
    assert plugins().family_for(model.config.to_dict()).value is family
    plan = build_plan(model, family=family, codecs=plugins().codecs(), device=torch.device("cpu"))
    assert len(plan.layers) == model.config.get_text_config().num_hidden_layers
    assert all(unit.refs for unit in plan.layers)
    assert plan.head is not None


TOWERS = {
    ("gemma3", "tiny-multimodal"): {"vision_tower", "multi_modal_projector"},
    ("gemma4", "tiny-multimodal"): {"vision_tower", "embed_vision"},
    ("gemma4", "tiny-e2b-multimodal"): {
        "vision_tower",
        "embed_vision",
        "audio_tower",
        "embed_audio",
    },
    ("qwen3_5", "tiny-multimodal"): {"visual"},
}
PER_LAYER = ("model_projection", "projection_norm")


@pytest.mark.parametrize(("name", "shape"), [s for s in SHAPES if "multimodal" in s[1]])
def test_towers_stay_on_the_device_and_are_counted(name: str, shape: str) -> None:
    model = on_meta(FAMILIES[name].shapes[shape])
    plan = build_plan(
        model, family=FAMILIES[name], codecs=plugins().codecs(), device=torch.device("cpu")
    )
    streamed = {id(ref) for unit in plan.units() for ref in unit.refs}
    assert streamed
    counted = plan.on_device_bytes()
    left = sum(parameter.nbytes for parameter in plan.on_device)
    assert sum(counted.values()) == left > 0
    towers = {f"model.{tower}" for tower in TOWERS[name, shape]}
    own = {f"{plan.decoder_name}.norm"}
    if shape == "tiny-e2b-multimodal":
        own |= {f"{plan.decoder_name}.per_layer_{part}" for part in PER_LAYER}
        [table] = plan.embeddings
        assert table.module is model.model.language_model.embed_tokens_per_layer
    assert counted.keys() == towers | own


def test_gemma_4_reads_its_table_of_inputs_per_layer_from_host_memory() -> None:
    model = on_meta(FAMILIES["gemma4"].shapes["e2b"])
    plan = build_plan(
        model, family=FAMILIES["gemma4"], codecs=plugins().codecs(), device=torch.device("cpu")
    )
    (table,) = plan.embeddings
    assert table.module is model.model.embed_tokens_per_layer
    assert sum(ref.get().nbytes for ref in table.refs) == 2 * 2_348_810_240
    assert sum(plan.on_device_bytes().values()) < 30e6


def test_a_multimodal_config_is_built_by_the_image_text_class() -> None:
    text = FAMILIES["qwen3_5"].shapes["tiny"]
    assert auto_class(text) == "AutoModelForCausalLM"
    assert auto_class({**text, "vision_config": None}) == "AutoModelForCausalLM"
    shape = FAMILIES["qwen3_5"].shapes["tiny-multimodal"]
    assert auto_class(shape) == "AutoModelForImageTextToText"


def test_families_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, poros_families; poros_families.poros_families(); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
