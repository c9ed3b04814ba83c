"""Qwen3.5 and Qwen3.6, dense: layers of linear and of full attention, text-only or with vision."""

from __future__ import annotations

from typing import Any

from poros_core.family import Family
from poros_families._qwen3_5_weights import qwen3_5_weights
from poros_families._tiny import TINY

__all__ = ["QWEN3_5"]

_PERIOD = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
}

_TINY: dict[str, Any] = {
    **TINY,
    **_COMMON,
    "layer_types": _PERIOD,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": False,
}

_TINY_MULTIMODAL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        **_TINY,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "tie_word_embeddings": False,
}


def _published(
    *, hidden: int, intermediate: int, layers: int, heads: int, value_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        **_COMMON,
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "layer_types": _PERIOD * (layers // len(_PERIOD)),
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": tied,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
    }


QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_text"),
    weights=qwen3_5_weights,
    shapes={
        "tiny": _TINY,
        "tiny-multimodal": _TINY_MULTIMODAL,
        "4b": _published(
            hidden=2560, intermediate=9216, layers=32, heads=16, value_heads=32, tied=True
        ),
        "27b": _published(
            hidden=5120, intermediate=17408, layers=64, heads=24, value_heads=48, tied=False
        ),
    },
)
"""The family of ``model_type`` ``qwen3_5`` and ``qwen3_5_text``."""
