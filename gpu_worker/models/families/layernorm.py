"""Llama's relatives with LayerNorms: rotations, and MLPs both gated and plain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...spec import DecoderSpec, WeightNames
from .common import BY_KEY_HEAD, LLAMA_LAYER, LLAMA_NAMES, Config, Family, activation, integer, positive, rope, windows
from .gpt import gpt
from .llama import QWEN3_NAMES


def rotary(hf: Config, fraction: float = 1.0, interleaved: bool = False, **changes: Any) -> DecoderSpec:
    """What these have in common: ``fraction`` of each head is rotary, unless config.json says how much."""
    hf = {"partial_rotary_factor": fraction, **{key: value for key, value in hf.items() if value is not None}}
    head_dim = hf.get("head_dim") or integer(hf, "hidden_size") // integer(hf, "num_attention_heads")
    positions = rope(hf, head_dim, integer(hf, "max_position_embeddings", 2048), interleaved)
    return gpt(hf, **{"rope": positions, "tied": bool(hf.get("tie_word_embeddings")), **changes})


_PHI_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        "o": ("self_attn.dense",),
        "up": ("mlp.fc1",),
        "down": ("mlp.fc2",),
        "q_norm": ("self_attn.q_layernorm",),
        "k_norm": ("self_attn.k_layernorm",),
    },
    final_norm="model.final_layernorm",
)


def phi(hf: Config) -> DecoderSpec:
    """Phi-1, 1.5 and 2: both halves from one norm, biases everywhere, also on the head."""
    return rotary(
        hf, 0.5, parallel_residual=True, norms=("attn",), activation=activation(hf, default="gelu_new"),
        lm_head_bias=True, qk_norm="head" if hf.get("qk_layernorm") else "", qk_norm_kind="ln", qk_norm_bias=True,
    )  # fmt: skip


_PERSIMMON_NAMES = replace(
    _PHI_NAMES,
    layer={
        **_PHI_NAMES.layer,
        "qkv": ("self_attn.query_key_value",),
        "up": ("mlp.dense_h_to_4h",),
        "down": ("mlp.dense_4h_to_h",),
    },
    layouts=BY_KEY_HEAD,
)


def persimmon(hf: Config) -> DecoderSpec:
    """Persimmon: squared ReLU, and norms of each head's query and key."""
    return rotary(
        hf, 0.5, activation=activation(hf, default="relu2"), qk_norm_kind="ln", qk_norm_bias=True,
        qk_norm="" if hf.get("qk_layernorm") is False else "head",
    )  # fmt: skip


_STABLELM_NAMES = WeightNames(
    {**LLAMA_LAYER, "q_norm": ("self_attn.q_layernorm.norms.{e}",), "k_norm": ("self_attn.k_layernorm.norms.{e}",)}
)


def stablelm(hf: Config) -> DecoderSpec:
    """StableLM: 12B has both halves from one norm, and norms of each head's query and key with weights of its own."""
    hf = {**hf, "layer_norm_eps": hf.get("layer_norm_eps") or hf.get("norm_eps")}
    parallel, bias = bool(hf.get("use_parallel_residual")), bool(hf.get("use_qkv_bias"))
    return rotary(
        hf, hf.get("rope_pct") or 0.25, gated=True, parallel_residual=parallel,
        norms=("attn",) if parallel else ("attn", "mlp"), qkv_bias=bias, o_bias=False, mlp_bias=False,
        qk_norm="heads" if hf.get("qk_layernorm") else "", qk_norm_kind="ln",
    )  # fmt: skip


_STARCODER2_NAMES = WeightNames({**LLAMA_LAYER, "up": ("mlp.c_fc",), "down": ("mlp.c_proj",)})


def starcoder2(hf: Config) -> DecoderSpec:
    """StarCoder2: a plain MLP, biases everywhere, a window."""
    bias = hf.get("use_bias") is not False
    return rotary(
        hf, qkv_bias=bias, o_bias=bias, mlp_bias=bias, activation=activation(hf, default="gelu_pytorch_tanh"),
        windows=windows(hf, integer(hf, "num_hidden_layers"), hf.get("sliding_window")),
        tied=hf.get("tie_word_embeddings") is not False,
    )  # fmt: skip


def olmo(hf: Config) -> DecoderSpec:
    """OLMo as transformers has it: LayerNorms without weights, and queries, keys and values in bounds."""
    bias = bool(hf.get("attention_bias"))
    return rotary(
        hf, gated=True, norm_affine=False, norm_eps=1e-5, clip_qkv=hf.get("clip_qkv"), qkv_bias=bias, o_bias=bias,
        mlp_bias=False,
    )  # fmt: skip


def cohere(hf: Config) -> DecoderSpec:
    """Command-R: both halves from one norm without bias, rotary positions in pairs; R+ norms each query and key."""
    bias = bool(hf.get("attention_bias"))
    return rotary(
        {"rope_theta": 500000.0, **hf}, interleaved=True, parallel_residual=True, norms=("attn",), norm_bias=False,
        gated=True, qk_norm="heads" if hf.get("use_qk_norm") else "", qk_norm_kind="ln", qkv_bias=bias, o_bias=bias,
        mlp_bias=False, logit_scale=positive(hf, "logit_scale", 0.0625),
        tied=hf.get("tie_word_embeddings") is not False,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "PhiForCausalLM": (phi, _PHI_NAMES),
    "PersimmonForCausalLM": (persimmon, _PERSIMMON_NAMES),
    "StableLmForCausalLM": (stablelm, _STABLELM_NAMES),
    "StableLMEpochForCausalLM": (stablelm, _STABLELM_NAMES),
    "Starcoder2ForCausalLM": (starcoder2, _STARCODER2_NAMES),
    "OlmoForCausalLM": (olmo, LLAMA_NAMES),
    "CohereForCausalLM": (cohere, QWEN3_NAMES),
}
