"""What the tiny shapes have in common: they train on a CPU in seconds."""

from __future__ import annotations

from typing import Any

__all__ = ["TINY"]

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Every width is a multiple of 64, which NF4 on a CPU needs."""
