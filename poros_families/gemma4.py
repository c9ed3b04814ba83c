"""Gemma 4, dense: text-only or with vision and audio; keys and values that cross layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from poros_core.family import Family
from poros_families._tiny import TINY
from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms, text_config

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
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
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
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "layer_types": ([_SLIDING] * 5 + [_FULL]) * 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "use_bidirectional_attention": "vision",
}

_E2B: dict[str, Any] = {
    **_PUBLISHED,
    **_SMALL,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": ([_SLIDING] * 4 + [_FULL]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
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


def _attention(config: Mapping[str, Any], number: int) -> Shapes:
    kinds = config.get("layer_types")
    full = kinds[number] == _FULL if kinds else (number + 1) % 6 == 0
    same = bool(config.get("attention_k_eq_v")) and full
    head_dim, kv_heads = _heads(config, number, full=full, same=same)
    found = attention(
        config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    found |= norms(head_dim, "self_attn.q_norm", "self_attn.k_norm")
    if same:
        del found["self_attn.v_proj.weight"]
    if number >= _first_shared(config):
        for name in ("k_proj", "v_proj", "k_norm"):
            found.pop(f"self_attn.{name}.weight", None)
    return found


def _heads(config: Mapping[str, Any], number: int, *, full: bool, same: bool) -> tuple[int, int]:
    """Return a layer's head size and key/value heads, as either form of the config says them."""
    head_dim, kv_heads = config.get("head_dim") or 256, config["num_key_value_heads"]
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        own = {int(key): value for key, value in by_layer.items()}.get(number, {})
        return own.get("head_dim", head_dim), own.get("num_key_value_heads", kv_heads)
    if full:
        head_dim = config.get("global_head_dim") or 512
    if same:
        kv_heads = config.get("num_global_key_value_heads") or kv_heads
    return head_dim, kv_heads


def _first_shared(config: Mapping[str, Any]) -> int:
    """Return the first layer that reads an earlier layer's keys and values."""
    return int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers") or 0)


def _layer(config: Mapping[str, Any], number: int) -> Shapes:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    if config.get("use_double_wide_mlp") and number >= _first_shared(config):
        width *= 2
    found = {
        **_attention(config, number),
        **mlp(hidden, width),
        **norms(hidden, "input_layernorm", "post_attention_layernorm"),
        **norms(hidden, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    }
    per_layer = config.get("hidden_size_per_layer_input")
    if per_layer:
        found["per_layer_input_gate.weight"] = (per_layer, hidden)
        found["per_layer_projection.weight"] = (hidden, per_layer)
        found |= norms(hidden, "post_per_layer_input_norm")
    return found


def _weights(config: Mapping[str, Any]) -> Shapes:
    found = decoder_weights(config, _layer, tied=True, vocabulary=262144)
    text = text_config(config)
    per_layer = text.get("hidden_size_per_layer_input")
    if per_layer:
        wide = text["num_hidden_layers"] * per_layer
        entries = text.get("vocab_size_per_layer_input") or 262144
        found["model.embed_tokens_per_layer.weight"] = (entries, wide)
        found["model.per_layer_model_projection.weight"] = (wide, text["hidden_size"])
        found |= norms(per_layer, "model.per_layer_projection_norm")
    return found


GEMMA4 = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=("gemma4", "gemma4_text"),
    weights=_weights,
    shapes={
        **{"tiny": _TINY, "tiny-e2b": _TINY_E2B, "tiny-multimodal": _TINY_MULTIMODAL},
        **{"e2b": _E2B, "31b": _31B},
    },
    refuse=_refuse,
    shared=("shared_kv_states",),
    breaks=_first_that_shares,
)
"""The family of ``model_type`` ``gemma4`` and ``gemma4_text``."""
