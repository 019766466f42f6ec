"""The descendants of GPT-2: LayerNorms, plain MLPs, and positions that are learned, ALiBi, or rotations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...spec import DecoderSpec, RopeSpec, WeightNames
from .common import (
    BY_KEY_HEAD,
    CONV1D,
    Config,
    Family,
    activation,
    alibi_slopes,
    check_flags,
    decoder,
    integer,
    positive,
    refuse,
    rope,
)  # fmt: skip

_BUFFERS = r".*\.(masked_bias|rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.bias|attention\.bias)"
GPT2_LAYER = {
    "qkv": ("attn.c_attn",),
    "o": ("attn.c_proj",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
    "attn_norm": ("ln_1",),
    "mlp_norm": ("ln_2",),
}
MEGATRON_LAYER = {
    "qkv": ("self_attention.query_key_value",),
    "o": ("self_attention.dense",),
    "up": ("mlp.dense_h_to_4h",),
    "down": ("mlp.dense_4h_to_h",),
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}


def gpt(hf: Config, **changes: Any) -> DecoderSpec:
    """What most have in common: biases everywhere, four times as wide an MLP, a tied head, no rotation."""
    eps = next((key for key in ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon") if key in hf), "")
    values = {
        "norm": "ln", "norm_bias": True, "norm_eps": positive(hf, eps, 1e-5), "gated": False, "qkv_bias": True,
        "o_bias": True, "mlp_bias": True, "tied": hf.get("tie_word_embeddings") is not False,
        "intermediate_size": integer(hf, "intermediate_size", 4 * integer(hf, "hidden_size")), "rope": None,
    }  # fmt: skip
    return decoder(hf, **{**values, **changes})


# -- GPT-2 and GPT-BigCode

_GPT2_NAMES = WeightNames(
    GPT2_LAYER, layer_prefix="transformer.h.{}.", embed="transformer.wte", final_norm="transformer.ln_f",
    outer={"positions": "transformer.wpe"}, layouts=CONV1D, prefix="transformer.", skip=(_BUFFERS,),
)  # fmt: skip
_BIGCODE_NAMES = replace(_GPT2_NAMES, layouts=BY_KEY_HEAD)


def gpt2(hf: Config) -> DecoderSpec:
    """GPT-2."""
    refuse(hf, add_cross_attention=False)
    spec = gpt(
        hf, positions=integer(hf, "max_position_embeddings", 1024), activation=activation(hf, default="gelu_new")
    )
    scale = 1.0 if hf.get("scale_attn_weights") is False else spec.attn_scales[0]
    by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx"))
    return replace(spec, attn_scales=tuple(scale / (layer * by_layer + 1) for layer in range(spec.num_layers)))


def bigcode(hf: Config) -> DecoderSpec:
    """StarCoder, SantaCoder: GPT-2 with one key head for all query heads."""
    kv_heads = 1 if hf.get("multi_query") is not False else None
    return gpt2({"activation_function": "gelu_pytorch_tanh", **hf, "num_key_value_heads": kv_heads})


# -- GPT-J and GPT-NeoX

_GPTJ_NAMES = WeightNames(
    {
        "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "o": ("attn.out_proj",),
        "up": ("mlp.fc_in",),
        "down": ("mlp.fc_out",),
        "attn_norm": ("ln_1",),
    },
    layer_prefix="transformer.h.{}.", embed="transformer.wte", final_norm="transformer.ln_f", prefix="transformer.",
    skip=(_BUFFERS,),
)  # fmt: skip
_NEOX_NAMES = WeightNames(
    {**MEGATRON_LAYER, "qkv": ("attention.query_key_value",), "o": ("attention.dense",)},
    layer_prefix="gpt_neox.layers.{}.", embed="gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm",
    layouts=BY_KEY_HEAD, prefix="gpt_neox.", renamed=(("embed_out", "lm_head"),), skip=(_BUFFERS,),
)  # fmt: skip


def gptj(hf: Config) -> DecoderSpec:
    """GPT-J: both halves from one norm, adjacent dims are rotary pairs, and the head has a bias."""
    return gpt(
        hf, parallel_residual=True, norms=("attn",), rope=RopeSpec(integer(hf, "rotary_dim", 64), interleaved=True),
        activation=activation(hf, default="gelu_new"), qkv_bias=False, o_bias=False, lm_head_bias=True,
        tied=bool(hf.get("tie_word_embeddings")),
    )  # fmt: skip


def neox(hf: Config) -> DecoderSpec:
    """GPT-NeoX, Pythia: a quarter of each head is rotary; both halves from one input, each with its norm."""
    hf = {"partial_rotary_factor": hf.get("rotary_pct", 0.25), "rope_theta": hf.get("rotary_emb_base", 10000), **hf}
    head_dim, bias = integer(hf, "hidden_size") // integer(hf, "num_attention_heads"), hf.get("attention_bias")
    return gpt(
        hf, parallel_residual=hf.get("use_parallel_residual") is not False, activation=activation(hf, default="gelu"),
        rope=rope(hf, head_dim, integer(hf, "max_position_embeddings", 2048)), qkv_bias=bias is not False,
        o_bias=bias is not False, tied=bool(hf.get("tie_word_embeddings")),
    )  # fmt: skip


# -- BLOOM and Falcon

_BLOOM_NAMES = WeightNames(
    MEGATRON_LAYER, layer_prefix="transformer.h.{}.", embed="transformer.word_embeddings",
    final_norm="transformer.ln_f", outer={"embed_norm": "transformer.word_embeddings_layernorm"}, layouts=BY_KEY_HEAD,
    prefix="transformer.",
)  # fmt: skip
_FALCON_NAMES = replace(
    _BLOOM_NAMES, outer={}, renamed=(("ln_attn", "input_layernorm"), ("ln_mlp", "post_attention_layernorm")),
    skip=(_BUFFERS,),
)  # fmt: skip


def bloom(hf: Config) -> DecoderSpec:
    """BLOOM: ALiBi, and a norm of the embeddings."""
    return gpt(
        hf, alibi=alibi_slopes(integer(hf, "num_attention_heads")), embed_norm=True, activation="gelu_tanh",
        residual_from_norm=bool(hf.get("apply_residual_connection_post_layernorm")),
    )  # fmt: skip


def falcon(hf: Config) -> DecoderSpec:
    """Falcon: 7B's halves share a norm, 40B's and 180B's have one each; RW's are in sequence and have ALiBi.

    ALiBi is added before the scores are scaled.
    """
    hidden, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    grouped = bool(hf.get("new_decoder_architecture", hf.get("model_type") == "RefinedWeb"))
    parallel = grouped or hf.get("parallel_attn") is not False
    two = not parallel or (grouped and hf.get("num_ln_in_parallel_attn") != 1)
    kv_heads = hf.get("num_kv_heads") or hf.get("n_head_kv") if grouped else None
    single = not grouped and hf.get("multi_query") is not False
    scale = (hidden // heads) ** -0.5
    slopes = tuple(slope * scale for slope in alibi_slopes(heads)) if hf.get("alibi") else None
    rotary = None if slopes else rope(hf, hidden // heads, integer(hf, "max_position_embeddings", 2048))
    bias = bool(hf.get("bias"))
    return gpt(
        {**hf, "num_key_value_heads": 1 if single else kv_heads}, rope=rotary, alibi=slopes, parallel_residual=parallel,
        norms=("attn", "mlp") if two else ("attn",), qkv_bias=bias, o_bias=bias, mlp_bias=bias,
        activation=activation(hf, "activation", "gelu"),
    )  # fmt: skip


# -- MPT

_MPT_NAMES = WeightNames(
    {
        "qkv": ("attn.Wqkv",),
        "o": ("attn.out_proj",),
        "up": ("ffn.up_proj",),
        "down": ("ffn.down_proj",),
        "attn_norm": ("norm_1",),
        "mlp_norm": ("norm_2",),
        "q_norm": ("attn.q_ln",),
        "k_norm": ("attn.k_ln",),
    },
    layer_prefix="transformer.blocks.{}.", embed="transformer.wte", final_norm="transformer.norm_f",
    outer={"positions": "transformer.wpe"}, prefix="transformer.",
)  # fmt: skip


def mpt(hf: Config) -> DecoderSpec:
    """MPT: no biases; ALiBi or learned positions, clipped or normed queries and keys."""
    attn = hf.get("attn_config") or {}
    check_flags(attn)
    refuse(hf, final_logit_softcapping=None)
    refuse(attn, prefix_lm=False, rope=False, sliding_window_size=-1, qk_gn=False, attn_logit_softcapping=None)
    refuse(hf.get("ffn_config") or {}, ffn_type="mptmlp", ffn_hidden_size=None)
    if hf.get("norm_type") != "low_precision_layernorm":  # which rounds otherwise, and is a layernorm
        refuse(hf, norm_type="layernorm")
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    one = 1 if attn.get("attn_type") == "multiquery_attention" else None
    alibi, bias = attn.get("alibi") is not False, hf.get("no_bias") is False
    learned = not alibi and hf.get("learned_pos_emb") is not False
    scale = hidden**-0.5 if hf.get("logit_scale") == "inv_sqrt_d_model" else positive(hf, "logit_scale", 1.0)
    return gpt(
        {**hf, "num_key_value_heads": attn.get("kv_n_heads") or one},
        alibi=alibi_slopes(heads, positive(attn, "alibi_bias_max", 8)) if alibi else None,
        positions=integer(hf, "max_position_embeddings", 2048) if learned else 0,
        attn_scale=positive(attn, "softmax_scale", (hidden // heads) ** -0.5), clip_qkv=attn.get("clip_qkv"),
        qk_norm="full" if attn.get("qk_ln") else "", qk_norm_kind="ln", qk_norm_bias=bias,
        norm_bias=bias, qkv_bias=bias, o_bias=bias, mlp_bias=bias, activation="gelu", logit_scale=scale,
        intermediate_size=int(positive(hf, "expansion_ratio", 4) * hidden),
    )  # fmt: skip


# -- OPT

_OPT_NAMES = WeightNames(
    {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.out_proj",),
        "up": ("fc1",),
        "down": ("fc2",),
        "attn_norm": ("self_attn_layer_norm",),
        "mlp_norm": ("final_layer_norm",),
    },
    layer_prefix="model.decoder.layers.{}.", embed="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm", prefix="model.",
    outer={
        "positions": "model.decoder.embed_positions", "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
    },
)  # fmt: skip


def opt(hf: Config) -> DecoderSpec:
    """OPT: positions from 2; 350m has its norms behind the sums, and embeddings of half the width."""
    hidden, before = integer(hf, "hidden_size"), hf.get("do_layer_norm_before") is not False
    width, bias = integer(hf, "word_embed_proj_dim", hidden), hf.get("enable_bias") is not False
    return gpt(
        hf, positions=integer(hf, "max_position_embeddings", 2048) + 2, position_offset=2, post_norm=not before,
        final_norm=before and not hf.get("_remove_final_layer_norm"), embed_size=width if width != hidden else 0,
        qkv_bias=bias, o_bias=bias, mlp_bias=bias, norm_affine=hf.get("layer_norm_elementwise_affine") is not False,
        activation=activation(hf, default="relu"),
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": (gpt2, _GPT2_NAMES),
    "GPTBigCodeForCausalLM": (bigcode, _BIGCODE_NAMES),
    "GPTJForCausalLM": (gptj, _GPTJ_NAMES),
    "GPTNeoXForCausalLM": (neox, _NEOX_NAMES),
    "BloomForCausalLM": (bloom, _BLOOM_NAMES),
    "FalconForCausalLM": (falcon, _FALCON_NAMES),
    "RWForCausalLM": (falcon, _FALCON_NAMES),
    "MptForCausalLM": (mpt, _MPT_NAMES),
    "MPTForCausalLM": (mpt, _MPT_NAMES),
    "OPTForCausalLM": (opt, _OPT_NAMES),
}
