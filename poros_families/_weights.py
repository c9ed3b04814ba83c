"""Names and shapes of a decoder's weights, from its config alone: for ``poros plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Shapes", "attention", "decoder_weights", "mlp", "norms", "text_config"]

Shapes = dict[str, tuple[int, ...]]
"""Shapes by name. A linear layer's weight is ``(outputs, inputs)``, as torch stores it."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the text decoder."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def decoder_weights(
    config: Mapping[str, Any],
    layer: Callable[[Mapping[str, Any], int], Shapes],
    *,
    tied: bool,
    vocabulary: int | None = None,
) -> Shapes:
    """Return embedding, layers, final norm and, unless it is tied, the head.

    Args:
        config: a Transformers config as a mapping, multimodal or not.
        layer: called with the text config and a layer's number; returns that layer's shapes.
        tied: whether the head is the embedding where the config does not say.
        vocabulary: its size where the config does not say.
    """
    text = text_config(config)
    hidden = text["hidden_size"]
    entries = text.get("vocab_size") or vocabulary
    if entries is None:
        raise KeyError("vocab_size")
    found: Shapes = {"model.embed_tokens.weight": (entries, hidden)}
    for number in range(text["num_hidden_layers"]):
        shapes = layer(text, number)
        found |= {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
    found["model.norm.weight"] = (hidden,)
    said = [part.get("tie_word_embeddings") for part in (config, text)]
    if not next((tie for tie in said if tie is not None), tied):
        found["lm_head.weight"] = (entries, hidden)
    return found


def attention(
    hidden: int, *, heads: int, kv_heads: int, head_dim: int, gated: bool = False
) -> Shapes:
    """Return the four projections of an attention; a gated one's queries are twice as wide."""
    width, narrow = heads * head_dim, kv_heads * head_dim
    return {
        "self_attn.q_proj.weight": (2 * width if gated else width, hidden),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, width),
    }


def mlp(hidden: int, intermediate: int) -> Shapes:
    """Return the three projections of a gated MLP."""
    return {
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


def norms(width: int, *names: str) -> Shapes:
    """Return norms of one width."""
    return {f"{name}.weight": (width,) for name in names}
