"""The table of families: config.json -> DecoderSpec, and the names of the weights.

A family is a function of the config's values that differ from Llama's, and a ``WeightNames``. Both spellings of
configs are read: transformers 5 (``rope_parameters``, ``dtype``) and older (``rope_theta``, ``rope_scaling``,
``torch_dtype``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...proto.config import ConfigError
from ...proto.model_config import rope_parameters
from .spec import DecoderSpec, RopeSpec, WeightNames

Config = dict[str, Any]

_LLAMA_LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
_LLAMA_NAMES = WeightNames(_LLAMA_LAYER)
_QWEN3_NAMES = WeightNames({**_LLAMA_LAYER, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)})
_PHI3_NAMES = WeightNames({**_LLAMA_LAYER, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)})

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def _int(hf: Config, key: str, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive integer, got {value!r}.")
    return value


def _positive(hf: Config, key: str, default: float) -> float:
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}.")
    return float(value)


def _activation(hf: Config, key: str = "hidden_act") -> str:
    name = hf.get(key) or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {key} {name!r} is not supported; it may be one of {sorted(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _rope(hf: Config, head_dim: int, trained_len: int) -> RopeSpec:
    values = rope_parameters(hf)
    kind = str(values.pop("rope_type"))
    theta = _positive(values, "rope_theta", 10000.0)
    del values["rope_theta"]
    fraction = values.pop("partial_rotary_factor", None)
    fraction = hf.get("partial_rotary_factor") if fraction is None else fraction
    # Phi-3 keeps this beside the dict, and there it wins; elsewhere the config's length is the default.
    outside = hf.get("original_max_position_embeddings")
    if outside is not None:
        values["original_max_position_embeddings"] = outside
    values.setdefault("original_max_position_embeddings", trained_len)
    fraction = _positive({"partial_rotary_factor": fraction}, "partial_rotary_factor", 1.0)
    if kind == "proportional":  # turns every dim, those past the fraction by nothing
        values["fraction"], fraction = fraction, 1.0
    kind = {"su": "longrope"}.get(kind, kind)
    return RopeSpec(int(head_dim * fraction), theta, kind, values, trained_len)


def _windows(hf: Config, layers: int, window: int | None) -> tuple[int | None, ...]:
    """``window`` on each layer, or where layer_types says so (transformers 5 writes them out)."""
    types = hf.get("layer_types")
    if window is None or not types:
        return (window,) * layers
    if len(types) != layers:
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers {layers}.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _llama(hf: Config, **changes: Any) -> DecoderSpec:
    """Llama's values from ``hf``; other families pass what differs."""
    hidden, layers, heads = _int(hf, "hidden_size"), _int(hf, "num_hidden_layers"), _int(hf, "num_attention_heads")
    kv_heads = _int(hf, "num_key_value_heads", heads)
    head_dim = _int(hf, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    values: dict[str, Any] = {
        "architecture": (hf.get("architectures") or [""])[0],
        "vocab_size": _int(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "heads": heads,
        "kv_heads": (kv_heads,) * layers,
        "head_dim": head_dim,
        "intermediate_size": _int(hf, "intermediate_size"),
        "rope": _rope(hf, head_dim, _int(hf, "max_position_embeddings", 2048)),
        "attn_scale": head_dim**-0.5,
        "windows": (None,) * layers,
        "norm_eps": _positive(hf, "rms_norm_eps", 1e-6),
        "qkv_bias": bool(hf.get("attention_bias")),
        "o_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "activation": _activation(hf),
        "tied": bool(hf.get("tie_word_embeddings")),
        "config_dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "").removeprefix("torch.") or None,
    }
    values.update(changes)
    return DecoderSpec(**values)


def _mistral(hf: Config) -> DecoderSpec:
    window = hf.get("sliding_window", 4096)
    return _llama(hf, windows=_windows(hf, _int(hf, "num_hidden_layers"), window), qkv_bias=False, o_bias=False)


def _qwen_windows(hf: Config) -> tuple[int | None, ...]:
    """Layers from max_window_layers up have the window, where use_sliding_window is on."""
    layers = _int(hf, "num_hidden_layers")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    if window is None or hf.get("layer_types"):
        return _windows(hf, layers, window)
    first = hf.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(layers))


def _qwen2(hf: Config) -> DecoderSpec:
    return _llama(hf, windows=_qwen_windows(hf), qkv_bias=True, o_bias=False)


def _qwen3(hf: Config) -> DecoderSpec:
    hf = {**hf, "head_dim": _int(hf, "head_dim", 128)}
    return _llama(hf, windows=_qwen_windows(hf), qk_norm=True)


def _gemma(hf: Config) -> DecoderSpec:
    # Early configs say "gelu" and mean the tanh form; absent keys have Gemma's defaults.
    hf = {**hf, "head_dim": _int(hf, "head_dim", 256)}
    return _llama(
        hf,
        activation="gelu_tanh" if hf.get("hidden_act") in (None, "gelu") else _activation(hf),
        norm_plus_one=True,
        embed_scale=_int(hf, "hidden_size") ** 0.5,
        tied=hf.get("tie_word_embeddings") is not False,
    )


def _phi3(hf: Config) -> DecoderSpec:
    rope = rope_parameters(hf)
    if rope["rope_type"] in ("su", "yarn"):  # what the first Phi-3 files called longrope
        rope["rope_type"] = "longrope"
    hf = {**hf, "rope_parameters": rope}
    hf.setdefault("original_max_position_embeddings", 4096)
    hf.setdefault("max_position_embeddings", 4096)
    hf["rms_norm_eps"] = hf.get("rms_norm_eps") or 1e-5
    windows = _windows({**hf, "layer_types": None}, _int(hf, "num_hidden_layers"), hf.get("sliding_window"))
    return _llama(hf, windows=windows, qkv_bias=False, o_bias=False)


# architecture in config.json -> (its values, the names of its weights)
FAMILIES: Mapping[str, tuple[Callable[[Config], DecoderSpec], WeightNames]] = {
    "LlamaForCausalLM": (_llama, _LLAMA_NAMES),
    "LLaMAForCausalLM": (_llama, _LLAMA_NAMES),
    "MistralForCausalLM": (_mistral, _LLAMA_NAMES),
    "Qwen2ForCausalLM": (_qwen2, _LLAMA_NAMES),
    "Qwen3ForCausalLM": (_qwen3, _QWEN3_NAMES),
    "GemmaForCausalLM": (_gemma, _LLAMA_NAMES),
    "Phi3ForCausalLM": (_phi3, _PHI3_NAMES),
}


def find_family(hf: Config) -> tuple[DecoderSpec, WeightNames]:
    """The spec and weight names of ``hf``. Raises ConfigError for an architecture the table does not hold."""
    names = hf.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            make, weights = FAMILIES[name]
            return make({**hf, "architectures": [name]}), weights
    raise ConfigError(f"architectures {names} in config.json are not supported; supported are {sorted(FAMILIES)}.")
