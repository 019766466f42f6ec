"""What the families share: reading a config's values, and the spec and names of the commonest shape.

Both spellings of configs are read: transformers 5 (``rope_parameters``, ``dtype``) and older (``rope_theta``,
``rope_scaling``, ``torch_dtype``); and the older names of sizes (``n_embd``, ``num_layers``, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ....proto.checkpoint.model_config import OTHER_NAMES, rope_parameters, with_usual_names
from ....proto.config import ConfigError
from ...spec import DecoderSpec, Layout, RopeSpec, WeightNames

Config = dict[str, Any]
Family = tuple[Callable[[Config], DecoderSpec], WeightNames | Callable[[Config], WeightNames]]

LLAMA_LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
LLAMA_NAMES = WeightNames(LLAMA_LAYER)

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "quick_gelu": "quick_gelu",
}  # fmt: skip

# Other names of a value, read where config.json lacks the usual one.
_ALIASES = {
    **OTHER_NAMES,
    "hidden_act": ("activation_function", "hidden_activation"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len", "max_sequence_length"),
}


_FLAGS = {
    "_remove_final_layer_norm", "add_bias_linear", "add_qkv_bias", "alibi", "apply_residual_connection_post_layernorm",
    "attention_bias", "bias", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "learned_pos_emb",
    "mlp_bias", "multi_query", "mup_scale_qk_dot_by_d", "new_decoder_architecture", "no_bias", "norm_topk_prob",
    "parallel_attn", "qk_layernorm", "qk_ln", "qkv_bias", "rmsnorm", "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights", "scale_qk_dot_by_d", "tie_word_embeddings", "use_bias", "use_bidirectional_attention",
    "use_parallel_residual", "use_qk_norm", "use_qkv_bias", "use_sliding_window", "weight_tying",
}  # fmt: skip


def with_aliases(hf: Config) -> Config:
    """``hf`` with the usual names of what it holds under other ones. Raises ConfigError for a flag that is none."""
    check_flags(hf)
    return with_usual_names(hf, _ALIASES)


def check_flags(hf: Config) -> None:
    """Raises ConfigError where what is true or false in ``hf`` is something else: the text "false" counts as true."""
    for key in sorted(_FLAGS & hf.keys()):
        if hf[key] is not None and type(hf[key]) is not bool:
            raise ConfigError(f"config.json: {key} must be true or false, got {hf[key]!r}.")


def integer(hf: Config, key: str, default: int | None = None) -> int:
    """A positive integer. Raises ConfigError."""
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        most = f" of at most {2**31 - 1}" if type(value) is int and value > 0 else ""
        raise ConfigError(f"config.json: {key} must be a positive integer{most}, got {value!r}.")
    return value


def positive(hf: Config, key: str, default: float) -> float:
    """A positive number. Raises ConfigError."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}.")
    return float(value)


def activation(hf: Config, key: str = "hidden_act", default: str = "silu") -> str:
    """The spec's name of an activation. Raises ConfigError."""
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {key} {name!r} is not supported; it may be one of {sorted(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def rope(hf: Config, head_dim: int, trained_len: int, interleaved: bool = False) -> RopeSpec:
    """Rotary positions as config.json has them."""
    values = rope_parameters(hf)
    kind = str(values.pop("rope_type"))
    theta = positive(values, "rope_theta", 10000.0)
    del values["rope_theta"]
    fraction = values.pop("partial_rotary_factor", None)
    fraction = hf.get("partial_rotary_factor") if fraction is None else fraction
    # Phi-3 keeps this beside the dict, and there it wins; elsewhere the config's length is the default.
    outside = hf.get("original_max_position_embeddings")
    if outside is not None:
        values["original_max_position_embeddings"] = outside
    values.setdefault("original_max_position_embeddings", trained_len)
    fraction = positive({"partial_rotary_factor": fraction}, "partial_rotary_factor", 1.0)
    if kind == "proportional":  # rotates every dim, those past the fraction by nothing
        values["fraction"], fraction = fraction, 1.0
    kind = {"su": "longrope"}.get(kind, kind)
    return RopeSpec(int(head_dim * fraction), theta, kind, values, trained_len, interleaved)


def windows(hf: Config, layers: int, window: int | None) -> tuple[int | None, ...]:
    """``window`` on each layer, or where layer_types says so (transformers 5 writes them out)."""
    types = hf.get("layer_types")
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
    if not types:
        return (window,) * layers
    if len(types) != layers:
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers {layers}.")
    if unknown := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        raise ConfigError(f"config.json: layer_types {unknown[0]!r} is not supported.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder(hf: Config, **changes: Any) -> DecoderSpec:
    """Llama's values from ``hf``; other families pass what differs.

    Beside the spec's fields, ``rope`` (a RopeSpec or None) and ``attn_scale`` stand for the same in every layer.
    """
    hidden, layers = integer(hf, "hidden_size"), integer(hf, "num_hidden_layers")
    heads = integer(hf, "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    head_dim = changes.get("head_dim") or integer(hf, "head_dim", hidden // heads)
    if "kv_heads" not in changes and heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    if "ropes" not in changes:
        rotary = changes.pop("rope") if "rope" in changes else rope(hf, head_dim, _length(hf))
        if rotary is not None and (rotary.rotary_dim % 2 or not 0 < rotary.rotary_dim <= head_dim):
            raise ConfigError(
                f"config.json: {rotary.rotary_dim} dims of each head would turn (rotary_dim, partial_rotary_factor); "
                f"it must be an even number of the head's {head_dim}."
            )
        changes["ropes"] = (rotary,) * layers
    scale = changes.pop("attn_scale", head_dim**-0.5)
    bias = bool(hf.get("attention_bias"))
    values: dict[str, Any] = {
        "architecture": (hf.get("architectures") or [""])[0],
        "vocab_size": integer(hf, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "heads": heads,
        "kv_heads": (kv_heads,) * layers,
        "head_dim": head_dim,
        "intermediate_size": changes.get("intermediate_size") or integer(hf, "intermediate_size"),
        "attn_scales": (scale,) * layers,
        "windows": (None,) * layers,
        "norm_eps": changes.get("norm_eps") or positive(hf, "rms_norm_eps", 1e-6),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias")),
        "activation": changes.get("activation") or activation(hf),
        "tied": bool(hf.get("tie_word_embeddings")),
    }
    return DecoderSpec(**{**values, **changes})


def _length(hf: Config) -> int:
    return integer(hf, "max_position_embeddings", 2048)


def refuse(hf: Config, **wanted: Any) -> None:
    """Raises ConfigError for a value of config.json that is there and is not the one we can do."""
    for key, value in wanted.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key} {hf[key]!r} is not supported; it may be {value!r}.")


def alibi_slopes(heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """2^-(bias_max / n), 2^-(2 bias_max / n), ...; where n is no power of two, every other of the next one's first."""
    power = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * (at + 1) / power) for at in range(power)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def by_key_head(spec: DecoderSpec, layer: int) -> np.ndarray:
    """A ``Layout.order``: the file holds, for each key head, its query heads, itself and its value head."""
    kv, dim = spec.kv_heads[layer], spec.head_dim
    rows = np.arange((spec.heads + 2 * kv) * dim).reshape(kv, spec.heads // kv + 2, dim)
    return np.concatenate([rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()])


BY_KEY_HEAD = {"qkv": Layout(order=by_key_head)}
CONV1D = {name: Layout(transposed=True) for name in ("qkv", "o", "gate_up", "up", "down")}
