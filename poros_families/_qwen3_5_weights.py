"""Weights of Qwen3.5 from a config: linear attention and full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms

__all__ = ["qwen3_5_weights"]

_PERIOD = 4
"""Every fourth layer has full attention, where the config does not say."""


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
    period = config.get("full_attention_interval", _PERIOD)
    linear = kinds[number] == "linear_attention" if kinds else (number + 1) % period != 0
    return {
        **(_linear_attention if linear else _full_attention)(config),
        **mlp(config["hidden_size"], config["intermediate_size"]),
        **norms(config["hidden_size"], "input_layernorm", "post_attention_layernorm"),
    }


def qwen3_5_weights(config: Mapping[str, Any]) -> Shapes:
    """Return the names and shapes of a checkpoint's weights, from its config."""
    return decoder_weights(config, _layer, tied=False)
