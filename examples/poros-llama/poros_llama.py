"""Llama and Mistral for Poros: two families in one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poros_core.family import Family
from poros_core.hookspecs import hookimpl

__all__ = ["LLAMA", "MISTRAL", "poros_families"]

_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

LLAMA = Family(
    name="llama",
    title="Llama",
    model_types=("llama",),
    shapes={
        "tiny": {**_LLAMA, **_TINY},
        "8b": {
            **_LLAMA,
            **_8B,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    },
)

MISTRAL = Family(
    name="mistral",
    title="Mistral",
    model_types=("mistral",),
    shapes={
        "tiny": {**_MISTRAL, **_TINY, "sliding_window": 8},
        "7b": {
            **_MISTRAL,
            **_8B,
            "vocab_size": 32768,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    },
)


@hookimpl
def poros_families() -> Sequence[Family]:
    """Offer both."""
    return (LLAMA, MISTRAL)
