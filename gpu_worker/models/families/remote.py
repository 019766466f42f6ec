"""Families that transformers has no class for: their checkpoints came with code of their own, none of which is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ....proto.config import ConfigError
from ...spec import DecoderSpec, Layout, WeightNames
from .common import (
    BY_KEY_HEAD,
    CONV1D,
    LLAMA_LAYER,
    LLAMA_NAMES,
    Config,
    Family,
    activation,
    alibi_slopes,
    decoder,
    integer,
    positive,
    refuse,
    rope,
)
from .gpt import GPT2_LAYER, MEGATRON_LAYER
from .llama import llama, qwen2

if TYPE_CHECKING:
    import torch

# -- Baichuan

_BAICHUAN_NAMES = WeightNames({**LLAMA_LAYER, "qkv": ("self_attn.W_pack",)})


def _normalised(weight: torch.Tensor) -> torch.Tensor:
    """Rows of length 1."""
    import torch.nn.functional as F

    return F.normalize(weight)


_BAICHUAN2_NAMES = replace(_BAICHUAN_NAMES, layouts={"lm_head": Layout(convert=_normalised)})


def baichuan(hf: Config) -> DecoderSpec:
    """Baichuan-7B (BaiChuan...) and Baichuan2-7B: Llama with one linear layer for queries, keys and values."""
    return decoder(hf)


def baichuan_13b(hf: Config) -> DecoderSpec:
    """The 13B models: ALiBi. The name is also Baichuan2-7B's, which is told by its size."""
    if hf.get("hidden_size") == 4096:
        return baichuan(hf)
    return decoder(hf, rope=None, alibi=alibi_slopes(integer(hf, "num_attention_heads")))


def _baichuan_names(hf: Config) -> WeightNames:
    """Baichuan2's head has rows of length 1, which are made so at load."""
    return _BAICHUAN2_NAMES if hf.get("vocab_size") == 125696 else _BAICHUAN_NAMES


# -- ChatGLM2 and 3

_CHATGLM_NAMES = WeightNames(
    {**MEGATRON_LAYER, "gate_up": ("mlp.dense_h_to_4h",)},
    layer_prefix="transformer.encoder.layers.{}.", embed="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm", lm_head="transformer.output_layer",
    skip=(r"transformer\.rotary_pos_emb\.inv_freq",),
)  # fmt: skip


def chatglm(hf: Config) -> DecoderSpec:
    """ChatGLM2 and 3: half of each head is rotary, in pairs; few key heads; a bias on queries, keys and values."""
    refuse(hf, original_rope=True, post_layer_norm=True, multi_query_attention=True)
    head_dim = integer(hf, "kv_channels", 128)
    hf = {**hf, "num_key_value_heads": integer(hf, "multi_query_group_num", 1), "head_dim": head_dim}
    hf |= {"rope_theta": 10000.0 * positive(hf, "rope_ratio", 1.0), "partial_rotary_factor": 0.5}
    linear_bias, rms = bool(hf.get("add_bias_linear")), hf.get("rmsnorm") is not False
    return decoder(
        hf,
        rope=rope(hf, head_dim, integer(hf, "max_position_embeddings", 2048), interleaved=True),
        norm="rms" if rms else "ln", norm_bias=not rms, norm_eps=positive(hf, "layernorm_epsilon", 1e-5),
        residual_from_norm=bool(hf.get("apply_residual_connection_post_layernorm")),
        qkv_bias=linear_bias or bool(hf.get("add_qkv_bias")), o_bias=linear_bias, mlp_bias=linear_bias,
        activation="silu", tied=False,
    )  # fmt: skip


# -- DeciLM, InternLM, Orion: Llama but for a value or two


def decilm(hf: Config) -> DecoderSpec:
    """DeciLM: each layer has its own number of key heads."""
    if hf.get("block_configs"):
        raise ConfigError("config.json: block_configs (Nemotron-NAS) are not supported.")
    counts, layers = hf.get("num_key_value_heads_per_layer"), integer(hf, "num_hidden_layers")
    if not isinstance(counts, list) or len(counts) != layers or not all(type(n) is int and n > 0 for n in counts):
        raise ConfigError(f"config.json: num_key_value_heads_per_layer must be {layers} positive integers.")
    if odd := [count for count in counts if integer(hf, "num_attention_heads") % count]:
        raise ConfigError(f"config.json: num_attention_heads is not a multiple of {odd[0]} key heads, as a layer has.")
    return decoder(hf, kv_heads=tuple(counts))


def internlm(hf: Config) -> DecoderSpec:
    """InternLM: biases on all four of attention's linear layers."""
    if not isinstance(rotary := hf.get("rotary") or {}, dict):
        raise ConfigError(f"config.json: rotary must be an object, got {rotary!r}.")
    refuse(rotary, base=10000, scaling_factor=1.0)
    bias = hf.get("bias") is not False
    return decoder(hf, qkv_bias=bias, o_bias=bias)


def orion(hf: Config) -> DecoderSpec:
    """Orion: LayerNorms with bias where Llama has RMS norms."""
    return decoder(hf, norm="ln", norm_bias=True)


# -- InternLM2


_INTERNLM2_NAMES = WeightNames(
    {
        "qkv": ("attention.wqkv",),
        "o": ("attention.wo",),
        "gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "down": ("feed_forward.w2",),
        "attn_norm": ("attention_norm",),
        "mlp_norm": ("ffn_norm",),
    },
    embed="model.tok_embeddings", lm_head="output", layouts=BY_KEY_HEAD,
)  # fmt: skip


def internlm2(hf: Config) -> DecoderSpec:
    """InternLM2."""
    return decoder(hf, qkv_bias=bool(hf.get("bias")), o_bias=bool(hf.get("bias")))


# -- Jais

_JAIS_NAMES = WeightNames(
    {**GPT2_LAYER, "gate_up": ("mlp.c_fc2", "mlp.c_fc")},
    layer_prefix="transformer.h.{}.", embed="transformer.wte", final_norm="transformer.ln_f",
    outer={"positions": "transformer.wpe"}, layouts=CONV1D,
    prefix="transformer.", skip=(r".*attn\.(bias|masked_bias)", r".*relative_pe.*"),
)  # fmt: skip


def jais(hf: Config) -> DecoderSpec:
    """Jais: GPT-2 with ALiBi, a gated MLP, and factors on embeddings and logits."""
    refuse(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    if (hf.get("alibi_scaling") or {}).get("train_seq_len", 0) < integer(hf, "max_position_embeddings"):
        refuse(hf, alibi_scaling=None)  # flattens ALiBi past train_seq_len; no request gets there otherwise
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    alibi, gated = hf.get("position_embedding_type") == "alibi", hf.get("hidden_act") == "swiglu"
    by_dim = hf.get("mup_scale_qk_dot_by_d") or hf.get("scale_qk_dot_by_d")
    width = positive(hf, "mup_width_scale", hf.get("width_scale") or 1.0)
    return decoder(
        {"intermediate_size": 4 * hidden, **hf}, rope=None, norm="ln", norm_bias=True,
        norm_eps=positive(hf, "layer_norm_epsilon", 1e-5), alibi=alibi_slopes(heads) if alibi else None,
        positions=0 if alibi else integer(hf, "max_position_embeddings"),
        attn_scale=(hidden // heads) ** (-1.0 if by_dim else -0.5),
        gated=gated, activation="silu" if gated else activation(hf, default="gelu"),
        qkv_bias=True, o_bias=True, mlp_bias=True, tied=hf.get("tie_word_embeddings") is not False,
        embed_scale=positive(hf, "mup_embeddings_scale", hf.get("embeddings_scale") or 1.0),
        logit_scale=positive(hf, "mup_output_alpha", hf.get("output_logits_scale") or 1.0) * width,
    )  # fmt: skip


# -- Qwen, the first

_QWEN_NAMES = WeightNames(
    {**GPT2_LAYER, "gate_up": ("mlp.w2", "mlp.w1")},
    layer_prefix="transformer.h.{}.", embed="transformer.wte", final_norm="transformer.ln_f",
    skip=(r"transformer\.rotary_emb\.inv_freq",),
)  # fmt: skip


def qwen(hf: Config) -> DecoderSpec:
    """Qwen: a bias on queries, keys and values; config.json gives twice the MLP's width.

    Within seq_length, to which requests are limited, use_dynamic_ntk and use_logn_attn change nothing.
    """
    hf = {**hf, "rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct")}
    bias = hf.get("no_bias") is False
    return decoder(
        hf, intermediate_size=integer(hf, "intermediate_size") // 2, norm_eps=positive(hf, "layer_norm_epsilon", 1e-6),
        qkv_bias=True, o_bias=bias, mlp_bias=bias, activation="silu",
    )  # fmt: skip


# -- OLMo as AI2 first published it


def _gate_second(spec: DecoderSpec, layer: int) -> np.ndarray:
    """Of ff_proj's rows the second half is the gate."""
    return np.roll(np.arange(2 * spec.intermediate_size), spec.intermediate_size)


_OLMO_NAMES = WeightNames(
    {"qkv": ("att_proj",), "o": ("attn_out",), "gate_up": ("ff_proj",), "down": ("ff_out",)},
    layer_prefix="model.transformer.blocks.{}.", embed="model.transformer.wte", lm_head="model.transformer.ff_out",
    layouts={
        "gate_up": Layout(order=_gate_second), "embed": Layout(padded=True), "lm_head": Layout(padded=True),
    },
)  # fmt: skip


def olmo(hf: Config) -> DecoderSpec:
    """OLMo: LayerNorms without weights. Its MLP's width counts both halves."""
    refuse(
        hf, activation_type="swiglu", layer_norm_type="default", layer_norm_with_affine=False, include_bias=False,
        rope=True, alibi=False, attention_layer_norm=False, block_type="sequential", scale_logits=False,
    )  # fmt: skip
    wide = hf.get("mlp_hidden_size") or integer(hf, "mlp_ratio", 4) * integer(hf, "hidden_size")
    kv = hf.get("n_kv_heads") or (1 if hf.get("multi_query_attention") else None)
    return decoder(
        {**hf, "num_key_value_heads": kv}, norm="ln", norm_affine=False, norm_eps=1e-5, intermediate_size=wide // 2,
        activation="silu", clip_qkv=hf.get("clip_qkv"), tied=hf.get("weight_tying") is not False,
    )  # fmt: skip


# -- MiMo

_MIMO_NAMES = replace(LLAMA_NAMES, skip=(*LLAMA_NAMES.skip, r"model\.mtp_layers\..*"))
"""The layers that predict several tokens are left to ``speculation/heads.py``."""


def mimo(hf: Config) -> DecoderSpec:
    """MiMo-7B: Qwen2."""
    return qwen2(hf)


FAMILIES: dict[str, Family] = {
    "AquilaModel": (llama, LLAMA_NAMES),
    "AquilaForCausalLM": (llama, LLAMA_NAMES),
    "XverseForCausalLM": (llama, LLAMA_NAMES),
    "BaiChuanForCausalLM": (baichuan, _BAICHUAN_NAMES),
    "BaichuanForCausalLM": (baichuan_13b, _baichuan_names),
    "ChatGLMModel": (chatglm, _CHATGLM_NAMES),
    "ChatGLMForConditionalGeneration": (chatglm, _CHATGLM_NAMES),
    "DeciLMForCausalLM": (decilm, LLAMA_NAMES),
    "InternLMForCausalLM": (internlm, LLAMA_NAMES),
    "InternLM2ForCausalLM": (internlm2, _INTERNLM2_NAMES),
    "JAISLMHeadModel": (jais, _JAIS_NAMES),
    "MiMoForCausalLM": (mimo, _MIMO_NAMES),
    "OrionForCausalLM": (orion, LLAMA_NAMES),
    "QWenLMHeadModel": (qwen, _QWEN_NAMES),
    "OLMoForCausalLM": (olmo, _OLMO_NAMES),
    "OLMoModelForCausalLM": (olmo, _OLMO_NAMES),  # as the first files say it, in either spelling
    "OlmoModelForCausalLM": (olmo, _OLMO_NAMES),
}
