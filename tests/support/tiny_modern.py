"""Rows of ``modern.py``'s families; see tiny_models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_models
import torch

_SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


def _gemma3(folder: Path, seed: int, **values: Any) -> Path:
    """transformers calls the config of the text alone otherwise than the model."""
    import transformers

    config = transformers.Gemma3TextConfig(**{**tiny_models.BASE, **values})
    return tiny_models.save_model(transformers.Gemma3ForCausalLM, config, folder, seed, norm=0.0)


def _of_language(prefix: str) -> Any:
    """A checkpoint of text and images, of which the text is used: the names are those on the hub."""

    def make(folder: Path, seed: int, **values: Any) -> Path:
        from safetensors.torch import load_file, save_file

        plain = folder / "plain"
        if prefix == "Gemma3":
            _gemma3(plain, seed, **values)
        else:
            tiny_models.save(prefix, plain, seed, **{**tiny_models.BASE, **values})
        found = load_file(plain / "model.safetensors")
        weights = {f"language_model.{name}": tensor for name, tensor in found.items()}
        for name in ("vision_tower.patch.weight", "multi_modal_projector.linear.weight"):
            weights[name] = torch.zeros(2, 2)
        save_file(weights, folder / "model.safetensors")
        text = json.loads((plain / "config.json").read_text())
        kind = {"Gemma3": "Gemma3", "Mistral": "Mistral3", "Ministral3": "Mistral3"}[prefix]
        config = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": text, "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(config))
        tiny_models.save_tokenizer(folder)
        return folder

    return make


def _plain(folder: Path) -> Any:
    return tiny_models.reference(folder / "plain")


_GEMMA3: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 4, "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "rope_parameters": _SCALED,
}  # fmt: skip

ROWS: dict[str, Any] = {
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True},
    ),
    "gemma2-no-caps": (
        "Gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True,
         "num_key_value_heads": 6, "sliding_window": 12},
    ),
    # Of the two caps the class has one.
    "gemma3": (_gemma3, {**_GEMMA3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3-with-images": (_of_language("Gemma3"), _GEMMA3, _plain),
    "mistral3-with-images": (_of_language("Mistral"), {"sliding_window": None, "head_dim": 16}, _plain),
    # Queries grow with their position, a step at every 32nd here.
    "mistral3-growing": (_of_language("Ministral3"), {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}, _plain),
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
