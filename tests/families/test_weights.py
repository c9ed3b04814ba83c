"""What a family says of its weights from the config alone is what Transformers builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from poros_core.configs import auto_class
from poros_core.gate.random_checkpoint import write_random_checkpoint
from poros_core.planner import read_model
from poros_families import poros_families
from poros_families.gemma4 import GEMMA4

SHAPES = [
    pytest.param(family, config, id=f"{family.name}-{shape}")
    for family in poros_families()
    for shape, config in family.shapes.items()
]
TOWERS = (
    "model.visual.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.embed_audio.",
)


@pytest.mark.parametrize(("family", "config"), SHAPES)
def test_weights_are_the_models(family: Any, config: Mapping[str, Any]) -> None:
    full = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = getattr(transformers, auto_class(config)).from_config(full)
    wanted = {
        name.replace("model.language_model.", "model."): tuple(param.shape)
        for name, param in model.named_parameters()
        if not name.startswith(TOWERS)
    }
    assert family.weights is not None
    assert family.weights(config) == wanted
    assert family.weights(full.to_dict()) == wanted


def test_what_a_published_config_leaves_out() -> None:
    families = {family.name: family for family in poros_families()}
    for name, defaults in (
        ("gemma3", ("vocab_size", "tie_word_embeddings")),
        ("gemma4", ("vocab_size", "head_dim")),
        ("qwen3_5", ("layer_types",)),
    ):
        family = families[name]
        config = dict(next(reversed(family.shapes.values())))
        wanted = family.weights(config)
        for key in defaults:
            config.pop(key, None)
        assert family.weights(config) == wanted
    tiny = families["qwen3"].shapes["tiny"]
    config = {key: value for key, value in tiny.items() if key != "vocab_size"}
    with pytest.raises(KeyError, match="vocab_size"):
        families["qwen3"].weights(config)


def test_towers_of_gemma_4_are_named_from_the_config_and_counted_from_headers(
    tmp_path: Path,
) -> None:
    config = GEMMA4.shapes["tiny-e2b-multimodal"]
    write_random_checkpoint(
        config, tmp_path, seed=0, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    named = read_model(str(tmp_path / "config.json")).weights
    assert (named.towers, named.uncounted) == ((), ("vision_config", "audio_config"))
    counted = read_model(str(tmp_path)).weights
    assert counted.uncounted == ()
    assert {weight.name.split(".")[1] for weight in counted.towers} == {
        *("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    }
    more = counted.rest_bytes("bf16") - named.rest_bytes("bf16")
    assert more == 2 * sum(weight.count for weight in counted.towers) > 0
