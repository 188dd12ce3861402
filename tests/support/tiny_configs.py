"""A tiny `config.json` of every family in the table: small widths, and every part the family has
(windows shorter than the samples, layers that repeat a pattern and some behind it).
"""

from __future__ import annotations

from typing import Any

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_OF_TEXT = ("num_key_value_heads", "vocab_size", "max_position_embeddings")
_LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.25],
    "long_factor": [1.5, 4.0],
}
_HEAD = {"head_dim": 8}

TINY: dict[str, dict[str, Any]] = {
    "llama": _SIZES
    | {
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "rope_scaling": _LLAMA_31,
    },
    "mistral": _SIZES | _HEAD | {"sliding_window": 3, "rms_norm_eps": 1e-5},
    "qwen2": _SIZES | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "qwen3": _SIZES | _HEAD | {"tie_word_embeddings": True, "rope_theta": 1e6},
    "mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": _SIZES
    | _HEAD
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "gemma2": _SIZES | _HEAD | {"sliding_window": 3, "query_pre_attn_scalar": 12},
    "gemma3_text": _SIZES
    | _HEAD
    | {
        "num_hidden_layers": 7,
        "sliding_window": 3,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 12,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "granite": _SIZES
    | {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "phi3": _SIZES
    | {
        "partial_rotary_factor": 0.5,
        "sliding_window": 5,
        "rope_scaling": _LONGROPE,
        "original_max_position_embeddings": 8,
        "pad_token_id": 0,
    },
    "gpt2": {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 32,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    },
    "gpt_neox": {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
    | {"rotary_pct": 0.5, "hidden_act": "gelu"},
    "deepseek_v3": _SIZES
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_theta": 1e4,
        "rope_scaling": _YARN | {"truncate": True, "mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "bert": {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "t5": {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": True,
    },
    "vit": {k: v for k, v in _SIZES.items() if k not in _OF_TEXT}
    | {"image_size": 12, "patch_size": 4, "num_labels": 5},
    "gpt_oss": _SIZES
    | _HEAD
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
        "rope_theta": 150000.0,
        "rope_scaling": _YARN,
    },
}
TINY["gemma3"] = {
    "text_config": {"model_type": "gemma3_text"} | TINY["gemma3_text"] | {"num_hidden_layers": 4},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8},
    "mm_tokens_per_image": 256,
}
"""Configs by `model_type`, without that key."""


def of_bytes(model_type: str, tokens: int = 256) -> tuple[dict[str, Any], int]:
    """The tiny config of a family with a vocabulary of bytes, and the length of its samples."""
    config = tiny(model_type)
    if "image_size" in config:
        return config, 0
    inner = config.get("text_config")
    words = {"vocab_size": tokens}
    return config | ({"text_config": inner | words} if inner else words), 8


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """The tiny config of a family."""
    return {"model_type": model_type} | TINY[model_type] | changes
