"""Llama, and what differs from it in a few values."""

from __future__ import annotations

from typing import Any

from ....proto.checkpoint.model_config import rope_parameters
from ...spec import DecoderSpec, WeightNames
from .common import LLAMA_LAYER, LLAMA_NAMES, Config, Family, activation, decoder, integer, windows

_QK_NORMS = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
QWEN3_NAMES = WeightNames({**LLAMA_LAYER, **_QK_NORMS})
_PHI3_NAMES = WeightNames({**LLAMA_LAYER, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)})


def llama(hf: Config) -> DecoderSpec:
    """Llama, Yi, Aquila, XVERSE."""
    return decoder(hf)


def mistral(hf: Config) -> DecoderSpec:
    """Mistral and, with experts, Mixtral: a window on every layer."""
    window = hf.get("sliding_window", 4096)
    return decoder(hf, windows=windows(hf, integer(hf, "num_hidden_layers"), window), qkv_bias=False, o_bias=False)


def qwen_windows(hf: Config) -> tuple[int | None, ...]:
    """Layers from max_window_layers up have the window, where use_sliding_window is on."""
    layers = integer(hf, "num_hidden_layers")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    spans = windows(hf, layers, window)
    first = 0 if window is None or hf.get("layer_types") else hf.get("max_window_layers", 28)
    return tuple(span if layer >= first else None for layer, span in enumerate(spans))


def qwen2(hf: Config, **changes: Any) -> DecoderSpec:
    """Qwen1.5 and Qwen2: Llama with biases on queries, keys and values."""
    bias = hf.get("qkv_bias") is not False  # which Qwen2-MoE's may say
    return decoder(hf, windows=qwen_windows(hf), qkv_bias=bias, o_bias=False, **changes)


def qwen3(hf: Config, **changes: Any) -> DecoderSpec:
    """Qwen3: a norm on each head's query and key."""
    hf = {**hf, "head_dim": integer(hf, "head_dim", 128)}
    return decoder(hf, windows=qwen_windows(hf), qk_norm="head", **changes)


def gemma(hf: Config) -> DecoderSpec:
    """Gemma. Early configs say "gelu" and mean the tanh form; absent keys have Gemma's defaults."""
    return decoder(
        hf,
        head_dim=integer(hf, "head_dim", 256),
        activation="gelu_tanh" if hf.get("hidden_act") in (None, "gelu") else activation(hf),
        norm_plus_one=True,
        embed_scale=integer(hf, "hidden_size") ** 0.5,
        tied=hf.get("tie_word_embeddings") is not False,
    )


def phi3(hf: Config) -> DecoderSpec:
    """Phi-3: fused projections, and its own longrope."""
    rope = rope_parameters(hf)
    if rope["rope_type"] in ("su", "yarn"):  # what the first Phi-3 files called longrope
        rope["rope_type"] = "longrope"
    hf = {**hf, "rope_parameters": rope}
    hf.setdefault("original_max_position_embeddings", 4096)
    hf.setdefault("max_position_embeddings", 4096)
    hf["rms_norm_eps"] = hf.get("rms_norm_eps") or 1e-5
    spans = windows({**hf, "layer_types": None}, integer(hf, "num_hidden_layers"), hf.get("sliding_window"))
    return decoder(hf, windows=spans, qkv_bias=False, o_bias=False)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": (llama, LLAMA_NAMES),
    "LLaMAForCausalLM": (llama, LLAMA_NAMES),
    "MistralForCausalLM": (mistral, LLAMA_NAMES),
    "Qwen2ForCausalLM": (qwen2, LLAMA_NAMES),
    "Qwen3ForCausalLM": (qwen3, QWEN3_NAMES),
    "GemmaForCausalLM": (gemma, LLAMA_NAMES),
    "Phi3ForCausalLM": (phi3, _PHI3_NAMES),
}
