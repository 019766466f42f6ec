"""Families with a mixture of experts in place of some or all MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....proto.config import ConfigError
from ...spec import DecoderSpec, Layout, MoESpec, WeightNames
from .common import LLAMA_LAYER, Config, Family, activation, decoder, integer, positive, windows
from .llama import QWEN3_NAMES, qwen2, qwen3
from .modern import pattern

if TYPE_CHECKING:
    import torch

_MIXTRAL_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        "router": ("block_sparse_moe.gate",),
        "experts_gate_up": ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        "experts_down": ("block_sparse_moe.experts.{e}.w2",),
    },
    # As quantizers save what transformers 5 calls so.
    renamed=((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")),
)
_EXPERTS = {
    "router": ("mlp.gate",),
    "experts_gate_up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts_down": ("mlp.experts.{e}.down_proj",),
}
_QWEN2_MOE_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        **_EXPERTS,
        "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "shared_down": ("mlp.shared_expert.down_proj",),
        "shared_gate": ("mlp.shared_expert_gate",),
    }
)
_DEEPSEEK_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        **_EXPERTS,
        "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "shared_down": ("mlp.shared_experts.down_proj",),
    }
)


def _transposed(one: torch.Tensor) -> torch.Tensor:
    return one.t()


_DBRX_NAMES = WeightNames(
    {
        "qkv": ("norm_attn_norm.attn.Wqkv",),
        "o": ("norm_attn_norm.attn.out_proj",),
        "attn_norm": ("norm_attn_norm.norm_1",),
        "mlp_norm": ("norm_attn_norm.norm_2",),
        "router": ("ffn.router.layer",),
        "experts_gate_up.weight": ("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
        "experts_down.weight": ("ffn.experts.mlp.w2",),
    },
    layer_prefix="transformer.blocks.{}.", embed="transformer.wte", final_norm="transformer.norm_f",
    layouts={
        "experts_gate_up": Layout(per_expert=True),
        "experts_down": Layout(per_expert=True, convert=_transposed),
    },
)  # fmt: skip


def _gate_then_up(one: torch.Tensor) -> torch.Tensor:
    """gpt-oss keeps an expert's weights transposed, and the columns of gate and up alternate."""
    import torch

    rows = one.t()  # a bias stays as it is
    return torch.cat((rows[0::2], rows[1::2]))


_GPT_OSS_NAMES = WeightNames(
    {
        **LLAMA_LAYER,
        "sinks.weight": ("self_attn.sinks",),
        "router": ("mlp.router",),
        "experts_gate_up.weight": ("mlp.experts.gate_up_proj",),
        "experts_gate_up.bias": ("mlp.experts.gate_up_proj_bias",),
        "experts_down.weight": ("mlp.experts.down_proj",),
        "experts_down.bias": ("mlp.experts.down_proj_bias",),
    },
    layouts={
        "experts_gate_up": Layout(per_expert=True, convert=_gate_then_up),
        "experts_down": Layout(per_expert=True, convert=_transposed),
    },
    apart={  # as quantizers save them, each expert's weights [out, in], and gate and up apart
        "experts_gate_up": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        "experts_down": ("mlp.experts.{e}.down_proj",),
    },
)


def mixtral(hf: Config) -> DecoderSpec:
    """Mixtral: experts in every layer, their weights summing to 1."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    spans = windows(hf, integer(hf, "num_hidden_layers"), hf.get("sliding_window"))
    experts = integer(hf, "num_experts", 8)
    moe = MoESpec(
        experts, integer(hf, "num_experts_per_tok", 2), integer(hf, "intermediate_size"), renormalise=True,
        activation=activation(hf),
    )  # fmt: skip
    return decoder(hf, windows=spans, qkv_bias=False, o_bias=False, moe=moe)


def _sparse(hf: Config) -> tuple[bool, ...]:
    """Which of Qwen's layers have experts."""
    dense, step = hf.get("mlp_only_layers") or [], integer(hf, "decoder_sparse_step", 1)
    return tuple(n not in dense and (n + 1) % step == 0 for n in range(integer(hf, "num_hidden_layers")))


def _qwen_experts(hf: Config, **shared: Any) -> dict[str, Any]:
    experts, chosen = integer(hf, "num_experts"), integer(hf, "num_experts_per_tok")
    width = integer(hf, "moe_intermediate_size")
    moe = MoESpec(
        experts, chosen, width, renormalise=bool(hf.get("norm_topk_prob")), activation=activation(hf), **shared
    )
    return {"moe": moe, "moe_layers": _sparse(hf)}


def qwen2_moe(hf: Config) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a gated MLP that every token goes through, beside the experts."""
    shared = integer(hf, "shared_expert_intermediate_size")
    hf = {"num_experts_per_tok": 4, **hf, "intermediate_size": hf.get("intermediate_size") or shared}
    return qwen2(hf, **_qwen_experts(hf, shared_width=shared, shared_gate=True))


def qwen3_moe(hf: Config) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with experts. Its window, if it is on, is every layer's."""
    hf = {"num_experts_per_tok": 8, "intermediate_size": 6144, **hf, "max_window_layers": 0, "layer_types": None}
    return qwen3(hf, **_qwen_experts(hf))


def deepseek(hf: Config) -> DecoderSpec:
    """DeepSeek-MoE, the first: dense layers, then experts beside one MLP for all. (V2 and V3 attend otherwise.)"""
    layers = integer(hf, "num_hidden_layers")
    first, every = hf.get("first_k_dense_replace") or 0, hf.get("moe_layer_freq") or 1
    if (hf.get("scoring_func") or "softmax") != "softmax":
        raise ConfigError(f"config.json: scoring_func {hf['scoring_func']!r} is not supported; it may be 'softmax'.")
    width = integer(hf, "moe_intermediate_size")
    moe = MoESpec(
        integer(hf, "num_experts"), integer(hf, "num_experts_per_tok"), width,
        renormalise=bool(hf.get("norm_topk_prob")), shared_width=width * (hf.get("n_shared_experts") or 0),
        activation=activation(hf),
    )  # fmt: skip
    sparse = tuple(layer >= first and layer % every == 0 for layer in range(layers))
    return decoder(hf, moe=moe, moe_layers=sparse)


def dbrx(hf: Config) -> DecoderSpec:
    """DBRX: LayerNorms without bias, clipped queries, keys and values, four of sixteen experts."""
    attention, ffn = hf.get("attn_config") or {}, hf.get("ffn_config") or {}
    # Files leave out what has its default value; null says that the weights stay as they are.
    if (power := ffn.get("moe_normalize_expert_weights", 1.0)) not in (None, 1, 1.0):
        raise ConfigError(f"config.json: moe_normalize_expert_weights {power!r} is not supported; it may be 1 or null.")
    kind = activation({"ffn_act_fn": (ffn.get("ffn_act_fn") or {}).get("name")}, "ffn_act_fn")
    width = integer(ffn, "ffn_hidden_size", 3584)
    experts, chosen = integer(ffn, "moe_num_experts", 4), integer(ffn, "moe_top_k", 1)
    hf = {"rope_theta": attention.get("rope_theta"), **hf, "num_key_value_heads": integer(attention, "kv_n_heads", 1)}
    return decoder(
        hf, norm="ln", norm_eps=1e-5, clip_qkv=attention.get("clip_qkv"), intermediate_size=width,
        moe=MoESpec(experts, chosen, width, renormalise=power is not None, activation=kind),
    )  # fmt: skip


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "truncate": False,
}  # fmt: skip


def gpt_oss(hf: Config) -> DecoderSpec:
    """gpt-oss: attention sinks, a window on every other layer, experts with biases and a clamped gate."""
    if not hf.get("rope_parameters") and "rope_scaling" not in hf:
        hf = {**hf, "rope_parameters": _GPT_OSS_ROPE}
    hf = pattern({"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **hf, "head_dim": integer(hf, "head_dim", 64)}, 2)
    if (hf.get("swiglu_limit") or 7.0, hf.get("swiglu_alpha") or 1.702) != (7.0, 1.702):
        raise ConfigError("config.json: swiglu_limit and swiglu_alpha may only be 7.0 and 1.702.")
    moe = MoESpec(
        integer(hf, "num_experts"), integer(hf, "num_experts_per_tok", 4), integer(hf, "intermediate_size"),
        scoring="topk_softmax", activation="swiglu_oai", bias=True, router_bias=True,
    )  # fmt: skip
    spans = windows(hf, integer(hf, "num_hidden_layers"), integer(hf, "sliding_window", 128))
    bias = hf.get("attention_bias") is not False
    return decoder(
        hf, windows=spans, sinks=True, moe=moe, qkv_bias=bias, o_bias=bias, norm_eps=positive(hf, "rms_norm_eps", 1e-5)
    )


FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": (mixtral, _MIXTRAL_NAMES),
    "Qwen2MoeForCausalLM": (qwen2_moe, _QWEN2_MOE_NAMES),
    "Qwen3MoeForCausalLM": (qwen3_moe, WeightNames({**QWEN3_NAMES.layer, **_EXPERTS})),
    "DeepseekForCausalLM": (deepseek, _DEEPSEEK_NAMES),
    "DbrxForCausalLM": (dbrx, _DBRX_NAMES),
    "GptOssForCausalLM": (gpt_oss, _GPT_OSS_NAMES),
}
