"""Qwen2.5 and what shares its architecture, such as DeepSeek-R1-Distill-Qwen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_core.family import Family
from poros_families._tiny import TINY
from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms

__all__ = ["QWEN2"]

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
}

_TINY: dict[str, Any] = {**TINY, **_COMMON, "tie_word_embeddings": False}

_PUBLISHED: dict[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "dtype": "bfloat16",
}


def _published(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int = 152064,
    tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    return {
        **_PUBLISHED,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": eps,
    }


def _layer(config: Mapping[str, Any], number: int) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    projections = attention(hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    biases = {
        name.replace("weight", "bias"): (shape[0],)
        for name, shape in projections.items()
        if "o_proj" not in name
    }
    return {
        **projections,
        **biases,
        **mlp(hidden, config["intermediate_size"]),
        **norms(hidden, "input_layernorm", "post_attention_layernorm"),
    }


def _weights(config: Mapping[str, Any]) -> Shapes:
    return decoder_weights(config, _layer, tied=False)


QWEN2 = Family(
    name="qwen2",
    title="Qwen2.5",
    model_types=("qwen2",),
    weights=_weights,
    shapes={
        "tiny": _TINY,
        "tiny-sliding": {
            **_TINY,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
        "0.5b": _published(
            hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocab=151936, tied=True
        ),
        "1.5b": _published(
            hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocab=151936, tied=True
        ),
        "7b": _published(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4),
        "32b": _published(
            hidden=5120, intermediate=27648, layers=64, heads=40, kv_heads=8, eps=1e-5
        ),
        "72b": _published(
            hidden=8192, intermediate=29568, layers=80, heads=64, kv_heads=8, eps=1e-5
        ),
    },
)
"""The family of ``model_type`` ``qwen2``."""
