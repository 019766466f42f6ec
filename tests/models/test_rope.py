"""Rope tables against transformers' rotary embedding, for each scaling it knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.gpu_worker.layers.rope import rope_tables
from quire.gpu_worker.models.families import find_family
from quire.proto.config import ConfigError

TRAINED, DIM = 256, 32
SHORT = [1.0 + i / 8 for i in range(DIM // 2)]
LONG = [2.0 + i / 2 for i in range(DIM // 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.5, "mscale_all_dim": 0.7,
        "beta_fast": 24, "beta_slow": 2, "truncate": False,
    },
    "yarn-attention": {"factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.25},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64, "factor": 4.0,
    },
    "longrope-ratio": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
}  # fmt: skip


def config(kind: str, theta: float = 5000.0) -> LlamaConfig:
    rope = {"rope_type": kind.split("-")[0], "rope_theta": theta, **KINDS[kind]}
    return LlamaConfig(
        hidden_size=DIM * 4, num_attention_heads=4, max_position_embeddings=TRAINED, rope_parameters=rope
    )


def tables(hf: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec, _ = find_family({**hf, "architectures": ["LlamaForCausalLM"]})
    return rope_tables(spec.ropes[0], length)


def theirs(rotary: LlamaRotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary(torch.zeros(1), positions[None])
    return cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [60, TRAINED])
def test_whole_sequences(kind: str, length: int) -> None:
    """Up to the trained length; longrope has both its sides here (the original length is 64)."""
    made = config(kind)
    want = theirs(LlamaRotaryEmbedding(made), torch.arange(length))
    torch.testing.assert_close(tables(made.to_dict(), length), want, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith(("dynamic", "longrope"))])
def test_beyond_the_trained_length(kind: str) -> None:
    made = config(kind)
    want = theirs(LlamaRotaryEmbedding(made), torch.arange(TRAINED + 100))
    torch.testing.assert_close(tables(made.to_dict(), TRAINED + 100), want, atol=2e-6, rtol=0)


def test_dynamic_grows_as_transformers_decodes() -> None:
    """Past the trained length, position p turns as in transformers' step that decodes token p."""
    made = config("dynamic")
    cos, sin = tables(made.to_dict(), TRAINED + 200)
    rotary = LlamaRotaryEmbedding(made)
    for position in (TRAINED - 1, TRAINED, TRAINED + 1, TRAINED + 57, TRAINED + 199):
        want_cos, want_sin = theirs(rotary, torch.tensor([position]))
        torch.testing.assert_close(cos[position : position + 1], want_cos, atol=2e-5, rtol=0)
        torch.testing.assert_close(sin[position : position + 1], want_sin, atol=2e-5, rtol=0)


def test_old_spellings() -> None:
    old = {
        "hidden_size": DIM * 4, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8,
        "vocab_size": 10, "max_position_embeddings": TRAINED, "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }  # fmt: skip
    torch.testing.assert_close(tables(old, 99), tables(config("linear").to_dict(), 99))
    plain = {**old, "rope_scaling": None}
    torch.testing.assert_close(tables(plain, 99), tables(config("default").to_dict(), 99))


def test_errors_name_the_value() -> None:
    hf = config("linear").to_dict()
    with pytest.raises(ConfigError, match=r"'mystery' is not supported.*'yarn'"):
        tables({**hf, "rope_parameters": {"rope_type": "mystery"}}, 10)
    with pytest.raises(ConfigError, match="'linear' needs a number for factor, got None"):
        tables({**hf, "rope_parameters": {"rope_type": "linear"}}, 10)
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": LONG, "factor": 2.0}
    with pytest.raises(ConfigError, match="needs 16 numbers in short_factor, got 1"):
        tables({**hf, "rope_parameters": longrope}, 10)
