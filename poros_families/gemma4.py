"""Gemma 4, dense: text-only or with vision and audio; keys and values that cross layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from poros_core.family import Family
from poros_families._gemma4_weights import gemma4_weights
from poros_families._tiny import TINY

__all__ = ["GEMMA4"]

_SLIDING, _FULL = "sliding_attention", "full_attention"

_COMMON: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0,
}

_LARGE: dict[str, Any] = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}

_SMALL: dict[str, Any] = {"attention_k_eq_v": False, "use_double_wide_mlp": True}

_TINY: dict[str, Any] = {
    **TINY,
    **_COMMON,
    **_LARGE,
    "vocab_size_per_layer_input": 96,
    "layer_types": [_SLIDING, _FULL] * 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
}

_TINY_E2B: dict[str, Any] = {
    **_TINY,
    **_SMALL,
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _FULL] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64,
    "num_global_key_value_heads": None,
}

_TINY_MULTIMODAL: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {**_TINY, "use_bidirectional_attention": "vision"},
    "vision_config": {
        "model_type": "gemma4_vision",
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 8},
        **{"pooling_kernel_size": 2, "position_embedding_size": 64},
    },
    "image_token_id": 90,
}

_PUBLISHED: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 262144,
    "head_dim": 256,
    "dtype": "bfloat16",
}

_31B: dict[str, Any] = {
    **_PUBLISHED,
    **_LARGE,
    **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
    "layer_types": ([_SLIDING] * 5 + [_FULL]) * 10,
    **{"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
    **{"sliding_window": 1024, "max_position_embeddings": 262144},
    "use_bidirectional_attention": "vision",
}

_E2B: dict[str, Any] = {
    **_PUBLISHED,
    **_SMALL,
    **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
    "layer_types": ([_SLIDING] * 4 + [_FULL]) * 7,
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20},
    "hidden_size_per_layer_input": 256,
    **{"sliding_window": 512, "max_position_embeddings": 131072},
}


def _refuse(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config") or config
    if text.get("enable_moe_block") or text.get("num_experts"):
        return (
            "it has mixture-of-experts layers, as Gemma 4 26B-A4B does, and only dense models are "
            "covered. Choose a dense Gemma 4, such as E2B, E4B or 31B."
        )
    return None


def _first_that_shares(decoder: Any) -> Collection[int]:
    """Before the layers that share keys and values, tokens without a logit are dropped."""
    return (decoder.config.num_hidden_layers - decoder.config.num_kv_shared_layers,)


GEMMA4 = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=("gemma4", "gemma4_text"),
    weights=gemma4_weights,
    shapes={
        **{"tiny": _TINY, "tiny-e2b": _TINY_E2B, "tiny-multimodal": _TINY_MULTIMODAL},
        **{"e2b": _E2B, "31b": _31B},
    },
    refuse=_refuse,
    shared=("shared_kv_states",),
    breaks=_first_that_shares,
)
"""The family of ``model_type`` ``gemma4`` and ``gemma4_text``."""
