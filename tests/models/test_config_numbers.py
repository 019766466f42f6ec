"""No number of a config.json is used before it is checked: each of every family, with each value that is none.

The suite takes a share of the cases; QUIRE_FUZZ_ALL=1 has all of them.
"""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.sizes import formats_of, sizes_of
from quire.gpu_worker.models.families import FAMILIES
from quire.gpu_worker.models.pooled import find_pooled
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.checkpoint.pooler_config import pooler_of
from quire.proto.config import ConfigError, EngineArgs

SHARE = 1.0 if os.environ.get("QUIRE_FUZZ_ALL") else 0.04
ROOM = 300 << 20
"""Bytes of memory that all cases together may take."""
LAYERS = 3
BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 512, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "rotary_dim": 8,
    "num_key_value_heads_per_layer": [6] * LAYERS,
}  # fmt: skip
MORE: dict[str, Any] = {
    "layer_types": ["full_attention"] * LAYERS, "rope_theta": 10000.0, "sliding_window": 24, "max_window_layers": 1,
    "use_sliding_window": True, "sliding_window_pattern": 2, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5, "norm_eps": 1e-5, "clip_qkv": 8.0,
    "logit_scale": 1.0, "partial_rotary_factor": 0.5, "rotary_pct": 0.25, "rope_pct": 0.25, "rope_ratio": 1.0,
    "rotary_emb_base": 10000, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 8.0, "decoder_sparse_step": 2,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "mlp_only_layers": [1], "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "word_embed_proj_dim": 48, "num_kv_heads": 6, "n_head_kv": 6,
    "num_ln_in_parallel_attn": 1, "kv_channels": 8, "multi_query_group_num": 2, "mlp_ratio": 4, "mlp_hidden_size": 96,
    "n_kv_heads": 2, "expansion_ratio": 4, "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "n_layer": LAYERS,
    "residual_multiplier": 1.0, "logits_scaling": 1.0, "mup_width_scale": 1.0, "width_scale": 1.0, "n_head": 6,
    "mup_embeddings_scale": 1.0, "embeddings_scale": 1.0, "mup_output_alpha": 1.0, "output_logits_scale": 1.0,
    "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "original_max_position_embeddings": 128, "n_inner": 96,
    "type_vocab_size": 2, "num_labels": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "eos_token_id": 2, "num_local_experts": 4, "n_routed_experts": 4,
    "hidden_act": "silu", "architectures": None, "model_type": "llama", "quantization_config": None,
    "alibi_scaling": None, "rotary": None, "block_configs": None, "tie_word_embeddings": True, "pad_token_id": 1,
    "scoring_func": "softmax", "norm_type": "low_precision_layernorm", "position_embedding_type": "absolute",
    "id2label": {"0": "a"}, "num_nextn_predict_layers": 1, "n_embd": 48, "n_positions": 512, "model_max_length": 512,
}  # fmt: skip
NESTED: dict[str, tuple[dict[str, Any], ...]] = {
    "rope_scaling": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
         "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0,
         "original_max_position_embeddings": 256},
    ),
    "rope_parameters": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                        {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "attn_config": ({"kv_n_heads": 6, "rope_theta": 1e4, "clip_qkv": 8.0, "alibi_bias_max": 8, "softmax_scale": 1.0},),
    "ffn_config": ({"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},),
    "quantization_config": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True},
        {"quant_method": "awq", "bits": 4, "w_bit": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        {"quant_method": "compressed-tensors",
         "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}}},
    ),
}  # fmt: skip
WRONG: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**63, 10**9, 10**30, 1e300, 2.5, float("nan"), float("inf"), -float("inf"), "5", "", True, [],
    [1], [-1] * LAYERS, ["x"] * LAYERS, [None], {}, {"a": 1}, [10**9] * LAYERS,
)  # fmt: skip
ENCODERS = ("BertModel", "RobertaForSequenceClassification", "DistilBertModel", "Qwen2ForSequenceClassification")


def changes() -> Iterator[dict[str, Any]]:
    """Each field with each wrong value, alone or within the object where it stands."""
    for key in {**BASE, **MORE}:
        yield from ({key: wrong} for wrong in WRONG)
    for key, objects in NESTED.items():
        yield from ({key: wrong} for wrong in WRONG)
        for values in objects:
            for path in _paths(values):
                yield from ({key: _put(values, path, wrong)} for wrong in WRONG)


def _paths(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in _paths(value))


def _put(values: dict[str, Any], path: tuple[str, ...], wrong: Any) -> dict[str, Any]:
    return {**values, path[0]: wrong if len(path) == 1 else _put(values[path[0]], path[1:], wrong)}


def build(folder: Path, architecture: str, values: dict[str, Any]) -> str | None:
    """What is said of such a config, or None where a spec comes of it; anything but ConfigError is raised."""
    try:
        config = load_model_config(str(folder), overrides={"architectures": [architecture], **values})
        if architecture in FAMILIES:
            sizes_of(config)
            formats_of(config)
        pooler = pooler_of(config, EngineArgs(model=str(folder)))
        if pooler is not None:
            find_pooled(config.hf, pooler)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    return tmp_path


@pytest.mark.parametrize("architecture", [*FAMILIES, *ENCODERS])
def test_every_wrong_value_of_every_field_ends_in_a_spec_or_a_line(architecture: str, folder: Path) -> None:
    rng, before = random.Random(architecture), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for change in changes():
        if rng.random() >= SHARE:
            continue
        try:
            said = build(folder, architecture, change)
        except Exception as error:
            raise AssertionError(f"{architecture} {change}: {type(error).__name__}: {error}") from error
        assert said is None or "\n" not in said, f"{change}: {said}"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < ROOM


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_billion_layers_or_experts_is_refused_by_name(architecture: str, folder: Path) -> None:
    for field, limit in (("num_hidden_layers", 10_000), ("num_experts", 65_536)):
        said = build(folder, architecture, {field: 10**9})
        wanted = f"{folder}/config.json: {field} must be a positive integer of at most {limit}, got 1000000000."
        assert said == wanted


def test_what_models_have_in_their_configs_is_let_through(folder: Path) -> None:
    for values in (
        {"time_step_limit": [0.0, float("inf")]}, {"pad_token_id": -1},
        {"sliding_window": -1, "use_sliding_window": None},
        {"id2label": {str(i): f"LABEL_{i}" for i in range(50_000)}}, {"label2id": {"factor": "x"}},
        {"num_experts": 0}, {"n_shared_experts": None},
    ):  # fmt: skip
        load_model_config(str(folder), overrides={"architectures": ["Qwen3ForCausalLM"], **values})
