"""Gemma 3: layers of sliding and of full attention, text-only or with vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_core.family import Family
from poros_families._tiny import TINY
from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms

__all__ = ["GEMMA3"]

_SLIDING, _FULL = "sliding_attention", "full_attention"

_COMMON: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

_TINY: dict[str, Any] = {
    **TINY,
    **_COMMON,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}

_TINY_MULTIMODAL: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": _TINY,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 90,
    "boi_token_index": 91,
    "eoi_token_index": 92,
}

_27B: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "layer_types": [*([_SLIDING] * 5 + [_FULL]) * 10, _SLIDING, _SLIDING],
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "bos_token_id": 2,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def _layer(config: Mapping[str, Any], number: int) -> Shapes:
    hidden, head_dim = config["hidden_size"], config.get("head_dim") or 256
    heads, kv_heads = config.get("num_attention_heads", 8), config.get("num_key_value_heads", 4)
    return {
        **attention(hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        **norms(head_dim, "self_attn.q_norm", "self_attn.k_norm"),
        **mlp(hidden, config["intermediate_size"]),
        **norms(hidden, "input_layernorm", "post_attention_layernorm"),
        **norms(hidden, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    }


def _weights(config: Mapping[str, Any]) -> Shapes:
    # published configs leave out what equals the library's defaults, as do the numbers above
    return decoder_weights(config, _layer, tied=True, vocabulary=262208)


GEMMA3 = Family(
    name="gemma3",
    title="Gemma 3",
    model_types=("gemma3", "gemma3_text"),
    weights=_weights,
    shapes={"tiny": _TINY, "tiny-multimodal": _TINY_MULTIMODAL, "27b": _27B},
)
"""The family of ``model_type`` ``gemma3`` and ``gemma3_text``."""
