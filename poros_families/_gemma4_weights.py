"""Weights of Gemma 4 from a config: head sizes, keys and values by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_families._weights import Shapes, attention, decoder_weights, mlp, norms, text_config

__all__ = ["gemma4_weights"]

_FULL = "full_attention"


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


def gemma4_weights(config: Mapping[str, Any]) -> Shapes:
    """Return the names and shapes of a checkpoint's weights, from its config."""
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
