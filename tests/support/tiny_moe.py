"""Rows of ``moe.py``'s families; see tiny_models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_models
import torch


def _deepseek(folder: Path, seed: int, **values: Any) -> Path:
    """Qwen2-MoE in DeepSeek's names: a shared gate of zeros is a factor of a half on what everybody goes through."""
    from safetensors.torch import load_file, save_file

    plain = tiny_models.save("Qwen2Moe", folder / "plain", seed, **{**tiny_models.BASE, **values})
    weights = load_file(plain / "model.safetensors")
    for name in list(weights):
        if name.endswith(("_proj.bias", "shared_expert_gate.weight")):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    weights = {
        name.replace("shared_expert.", "shared_experts."): tensor * (0.5 if "shared_expert.down" in name else 1.0)
        for name, tensor in weights.items()
        if not name.endswith(("_proj.bias", "shared_expert_gate.weight"))
    }
    save_file(weights, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config |= {
        "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "first_k_dense_replace": 1,
        "n_routed_experts": values["num_experts"], "n_shared_experts": 2, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.save_tokenizer(folder)
    return folder


def _dbrx(folder: Path, seed: int, **values: Any) -> Path:
    import transformers

    config = transformers.DbrxConfig(
        d_model=48, n_heads=6, n_layers=3, max_seq_len=512, vocab_size=tiny_models.VOCAB,
        attn_config={"kv_n_heads": 2, "clip_qkv": values["clip_qkv"], "rope_theta": 10000.0},
        ffn_config={"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
                    "ffn_act_fn": {"name": "gelu"}},
    )  # fmt: skip
    tiny_models.save_model(transformers.DbrxForCausalLM, config, folder, seed)
    # As on the hub: what has its default value is left out, weights of experts that sum to 1 among it.
    values = json.loads((folder / "config.json").read_text())
    for name, kept in (
        ("attn_config", ("clip_qkv", "kv_n_heads", "rope_theta")),
        ("ffn_config", ("ffn_hidden_size", "moe_num_experts", "moe_top_k", "ffn_act_fn")),
    ):
        values[name] = {key: values[name][key] for key in kept}
    del values["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


ROWS: dict[str, Any] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 25, "hidden_act": "gelu"}),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
         "mlp_only_layers": [1]},
    ),
    "qwen2-moe-renormed": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
         "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False, "hidden_act": "relu"},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
         "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 20},
    ),
    "deepseek-moe": (
        _deepseek,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0],
         "shared_expert_intermediate_size": 32, "num_key_value_heads": 6, "hidden_act": "gelu_new"},
        lambda folder: tiny_models.reference(folder / "plain"),
    ),
    "dbrx": (_dbrx, {"clip_qkv": 0.8}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128}},
    ),
}  # fmt: skip
