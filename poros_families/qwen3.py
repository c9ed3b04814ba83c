"""Qwen3, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_core.family import Family
from poros_families._tiny import TINY
from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms

__all__ = ["QWEN3"]

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}

_TINY: dict[str, Any] = {
    **TINY,
    **_COMMON,
    "head_dim": 16,
}

_PUBLISHED: dict[str, Any] = {
    **_COMMON,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}


def _layer(config: Mapping[str, Any], number: int) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return {
        **attention(hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        **norms(head_dim, "self_attn.q_norm", "self_attn.k_norm"),
        **mlp(hidden, config["intermediate_size"]),
        **norms(hidden, "input_layernorm", "post_attention_layernorm"),
    }


def _weights(config: Mapping[str, Any]) -> Shapes:
    return decoder_weights(config, _layer, tied=False)


QWEN3 = Family(
    name="qwen3",
    title="Qwen3",
    model_types=("qwen3",),
    weights=_weights,
    shapes={
        "tiny": _TINY,
        "32b": {
            **_PUBLISHED,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    },
)
"""The family of ``model_type`` ``qwen3``."""
