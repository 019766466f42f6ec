"""The one gate for the numbers of a config.json: nothing is counted, multiplied or made from one before it is checked.

Families, poolers and draft heads read the same names, so the names are here once, each with the largest value that
makes sense. A name that is not here is nobody's count. What a family wants beyond that (no zero, a divisor) is its own
to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ConfigError

MAX_LAYERS = 10_000
"""Of a config that makes sense: each costs memory before the weights can show that they are not there."""
MAX_HEADS = MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 24
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e30
MAX_ENTRIES = 1 << 20
"""Of a list or an object anywhere in a config: labels are the longest there are."""
_DEPTH = 50

_LIMITS: dict[int, str] = {
    MAX_LAYERS:
        "num_hidden_layers n_layer n_layers num_layers num_nextn_predict_layers medusa_num_layers medusa_num_heads",
    MAX_HEADS:
        "num_attention_heads n_head n_heads num_heads num_key_value_heads num_kv_heads n_head_kv n_kv_heads kv_n_heads "
        "multi_query_group_num num_key_value_heads_per_layer "
        "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok moe_top_k n_shared_experts",
    MAX_WIDTH:
        "hidden_size n_embd n_embed d_model model_dim dim intermediate_size n_inner ffn_hidden_size ffn_dim "
        "hidden_dim head_dim kv_channels moe_intermediate_size shared_expert_intermediate_size word_embed_proj_dim "
        "embedding_size mlp_hidden_size rotary_dim qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank "
        "q_lora_rank colbert_dim",
    MAX_ENTRIES: "num_labels",
    MAX_COUNT:
        "vocab_size padded_vocab_size n_vocab draft_vocab_size type_vocab_size max_position_embeddings n_positions "
        "max_seq_len seq_length original_max_position_embeddings max_window_layers decoder_sparse_step "
        "first_k_dense_replace mlp_only_layers num_ln_in_parallel_attn",
}  # fmt: skip
_MOST = {name: limit for limit, names in _LIMITS.items() for name in names.split()}
_MAY_BE_BELOW = {"sliding_window": MAX_COUNT, "pad_token_id": MAX_COUNT}
"""Counts, and an id, in which some model's config has -1 for none."""
_NUMBER_NAMES = (
    "rope_theta rope_local_base_freq rotary_emb_base rotary_pct rope_pct rope_ratio partial_rotary_factor factor "
    "low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim short_factor "
    "long_factor short_mscale long_mscale rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps "
    "norm_epsilon attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale "
    "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping alibi_bias_max softmax_scale clip_qkv "
    "expansion_ratio mlp_ratio mup_width_scale width_scale mup_embeddings_scale embeddings_scale mup_output_alpha "
    "output_logits_scale swiglu_limit swiglu_alpha routed_scaling_factor initializer_range"
)
_NUMBERS = frozenset(_NUMBER_NAMES.split())
"""Numbers that need not be whole."""
_WORDS = {"logit_scale": ("inv_sqrt_d_model", "sqrt")}
"""Words that stand for a number, which a family takes or refuses."""

_LABELS = ("id2label", "label2id")
_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("attn_config", "ffn_config", "alibi_scaling"), (dict, "an object")),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), (list, "a list")),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), (str, "a name")),
}
"""What must be of one kind, for a number stands where it should, or it holds some."""


def check_numbers(where: str, hf: Mapping[str, Any]) -> None:
    """Hold every count and number of ``hf``, nested ones too, to what makes sense. Raises ConfigError that names
    ``where``, the field, the value and the limit."""
    for name, (kind, words) in _KINDS.items():
        if not isinstance(value := hf.get(name), kind | None):
            raise ConfigError(f"{where}: {name} must be {words}, got {_shown(value)}.")
    for field, name, value in _fields(where, hf, "", 0):
        if name in _MOST:
            _check_count(where, field, value, _MOST[name])
        elif name in _MAY_BE_BELOW:
            _check_count(where, field, value, _MAY_BE_BELOW[name], below=True)
        elif name in _NUMBERS and value not in _WORDS.get(name, ()):
            _check_number(where, field, value)


def _fields(where: str, values: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """Each value below ``values`` that is neither list nor object: where it is, the name it is under, and itself."""
    for key, value in values.items():
        if key in _LABELS and isinstance(value, dict) and len(value) <= MAX_ENTRIES:
            continue  # its names are the model's own
        yield from _value(where, f"{above}{key}", str(key), value, depth)


def _value(where: str, field: str, name: str, value: Any, depth: int) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, list | dict):
        if depth == _DEPTH:
            raise ConfigError(f"{where}: {field[:80]} is nested more than {_DEPTH} deep; download it again.")
        if len(value) > MAX_ENTRIES:
            raise ConfigError(f"{where}: {field} has {len(value)} entries, and may have {MAX_ENTRIES}.")
    if isinstance(value, dict):
        if name in _MOST or name in _MAY_BE_BELOW:
            raise ConfigError(
                f"{where}: {field} must be a positive integer of at most {_MOST.get(name, MAX_COUNT)}, got an object."
            )
        yield from _fields(where, value, f"{field}.", depth + 1)
    elif isinstance(value, list):
        for at, each in enumerate(value):
            if isinstance(each, list | dict) or name in _MOST or name in _MAY_BE_BELOW or name in _NUMBERS:
                yield from _value(where, f"{field}[{at}]", name, each, depth + 1)
    elif value is not None:
        yield field, name, value


def _check_count(where: str, field: str, value: Any, most: int, below: bool = False) -> None:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole or value > most or (value < 0 and not below):
        raise ConfigError(f"{where}: {field} must be a positive integer of at most {most}, got {_shown(value)}.")


def _check_number(where: str, field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ConfigError(
            f"{where}: {field} must be a number of at most {MAX_NUMBER:g}, got {_shown(value)}."
            if not (isinstance(value, float) and not math.isfinite(value))
            else f"{where}: {field} must be a finite number of at most {MAX_NUMBER:g}, got {value!r}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_layer_lists(where: str, hf: Mapping[str, Any]) -> None:
    """Hold lists of one entry for each layer to as many. Raises ConfigError."""
    layers = hf.get("num_hidden_layers")
    for name in ("layer_types", "num_key_value_heads_per_layer"):
        if layers is not None and (found := hf.get(name)) and isinstance(found, list) and len(found) != layers:
            raise ConfigError(f"{where}: {name} has {len(found)} entries for num_hidden_layers {layers}.")
