"""The floor of a decode step and of single kernels: bytes that must move, products that must be computed."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY = LLAMA_3_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SERVED = LLAMA_3_8B | {"vocab_size": 32_000, "bos_token_id": 0, "eos_token_id": 2}
"""Llama-3-8B with a vocabulary that a tokenizer made here can fill."""
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
TINY_MOE = QWEN3_MOE | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Ceilings:
    """What the card does: bytes a second (read plus written) and half-precision floating-point operations a second."""

    bandwidth: float
    products: float


def product_weights(config: dict, batch: int | None = None) -> int:
    """Weights that every decoded token is multiplied with: all but the embedding table, of which one row is read.

    Of experts those of one token; with a ``batch``, those that as many tokens hit between them, if each chooses evenly.
    """
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    mlp = 3.0 * hidden * wide
    if experts := config.get("num_experts"):
        chosen = config["num_experts_per_tok"]
        hit = chosen if batch is None else experts * (1 - (1 - chosen / experts) ** batch)
        mlp = hidden * experts + 3 * hidden * config["moe_intermediate_size"] * hit
    return round(config["num_hidden_layers"] * (attention + mlp) + hidden * config["vocab_size"])


def kv_bytes_per_token(config: dict, item: int = 2) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * item


def decode_floor(config: dict, batch: int, context: int, ceilings: Ceilings, item: int = 2) -> float:
    """Seconds of one decode step at best: KV time, plus the larger of weight time and product time."""
    kv = batch * context * kv_bytes_per_token(config, item) / ceilings.bandwidth
    read = product_weights(config, batch) * item / ceilings.bandwidth
    return kv + max(read, 2 * product_weights(config) * batch / ceilings.products)


def prefill_flops(tokens: int, heads: int, head_dim: int) -> float:
    """Operations of causal attention over ``tokens``: two products over half the square."""
    return 4 * heads * head_dim * tokens * (tokens + 1) / 2


def decode_bytes(batch: int, context: int, kv_heads: int, head_dim: int, item: int = 2) -> int:
    """Bytes of keys and values that one layer's decode attention reads."""
    return 2 * batch * context * kv_heads * head_dim * item
