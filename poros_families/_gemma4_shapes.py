"""Shapes of Gemma 4: tiny ones of every kind, and the published ones."""

from __future__ import annotations

from typing import Any

from poros_families._tiny import TINY

__all__ = ["SHAPES"]

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

_AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"subsampling_conv_channels": [16, 16], "output_proj_dims": 64},
    **{"attention_chunk_size": 4, "attention_context_left": 3, "use_clipped_linears": True},
}

_TINY_E2B_MULTIMODAL: dict[str, Any] = {
    **_TINY_MULTIMODAL,
    "text_config": _TINY_E2B,
    "vision_config": {**_TINY_MULTIMODAL["vision_config"], "use_clipped_linears": True},
    "audio_config": _AUDIO,
    "audio_token_id": 91,
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

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-e2b": _TINY_E2B,
    "tiny-multimodal": _TINY_MULTIMODAL,
    "tiny-e2b-multimodal": _TINY_E2B_MULTIMODAL,
    "e2b": _E2B,
    "31b": _31B,
}
"""Configs by name. In audio, the mel bands are as many as the first convolution's channels."""
