"""Rows of ``modern.py``'s families; see tiny_models."""

from __future__ import annotations

from typing import Any

_SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True}),
    "gemma2-no-caps": (
        "Gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True,
         "num_key_value_heads": 6, "sliding_window": 12},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 20, "num_hidden_layers": 4, "sliding_window_pattern": 3,
         "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "rope_parameters": _SCALED},
    ),
    "olmo2": ("Olmo2", {}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm-no-bias": ("Glm", {"head_dim": 16, "attention_bias": False}),
    "glm4": ("Glm4", {"head_dim": 8, "num_key_value_heads": 1}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 2.5},
    ),
    "cohere2": (
        "Cohere2", {"sliding_window": 16, "num_hidden_layers": 4, "logit_scale": 0.5, "tie_word_embeddings": True},
    ),
}  # fmt: skip
