"""Qwen3.5 and Qwen3.6, dense: layers of linear and of full attention, text-only or with vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_core.family import Family
from poros_families._tiny import TINY
from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms

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


def _linear_attention(config: Mapping[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.conv1d.weight": (mixed, 1, config.get("linear_conv_kernel_dim", 4)),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
        "linear_attn.in_proj_qkv.weight": (mixed, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
    }


def _full_attention(config: Mapping[str, Any]) -> Shapes:
    head_dim = config.get("head_dim") or 256
    projections = attention(
        config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        gated=True,
    )
    return {**projections, **norms(head_dim, "self_attn.q_norm", "self_attn.k_norm")}


def _layer(config: Mapping[str, Any], number: int) -> Shapes:
    kinds = config.get("layer_types")
    period = config.get("full_attention_interval", len(_PERIOD))
    linear = kinds[number] == "linear_attention" if kinds else (number + 1) % period != 0
    return {
        **(_linear_attention if linear else _full_attention)(config),
        **mlp(config["hidden_size"], config["intermediate_size"]),
        **norms(config["hidden_size"], "input_layernorm", "post_attention_layernorm"),
    }


def _weights(config: Mapping[str, Any]) -> Shapes:
    return decoder_weights(config, _layer, tied=False)


QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5",
    model_types=("qwen3_5", "qwen3_5_text"),
    weights=_weights,
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
