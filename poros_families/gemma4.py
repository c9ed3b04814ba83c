"""Gemma 4, dense: text-only or with vision and audio; keys and values that cross layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from poros_core.family import Family
from poros_families._gemma4_shapes import SHAPES
from poros_families._gemma4_weights import gemma4_weights

__all__ = ["GEMMA4"]


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
    shapes=SHAPES,
    refuse=_refuse,
    shared=("shared_kv_states",),
    breaks=_first_that_shares,
)
"""The family of ``model_type`` ``gemma4`` and ``gemma4_text``."""
