"""Families: shapes are real configs, of the sizes that were published."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from poros_core.family import Family
from poros_families import poros_families

FAMILIES = poros_families()
BY_NAME = {family.name: family for family in FAMILIES}

PARAMETERS = {
    ("qwen2", "0.5b"): 494_032_768,
    ("qwen2", "1.5b"): 1_543_714_304,
    ("qwen2", "7b"): 7_615_616_512,
    ("qwen2", "32b"): 32_763_876_352,
    ("qwen2", "72b"): 72_706_203_648,
}


def on_meta(family: Family, shape: str) -> PreTrainedModel:
    values = dict(family.shapes[shape])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_shape_is_a_config_of_the_family(family: Family) -> None:
    assert "tiny" in family.shapes
    for shape in family.shapes.values():
        assert shape["model_type"] in family.model_types
        assert family.refuse(shape) is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_layers_are_found(family: Family) -> None:
    model = on_meta(family, "tiny")
    decoder = family.decoder(model)
    assert len(family.layers(decoder)) == family.shapes["tiny"]["num_hidden_layers"]


@pytest.mark.parametrize(("name", "shape"), PARAMETERS)
def test_published_sizes(name: str, shape: str) -> None:
    model = on_meta(BY_NAME[name], shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name, shape]


def test_the_sliding_variant_slides() -> None:
    config = on_meta(BY_NAME["qwen2"], "tiny-sliding").config
    assert config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
