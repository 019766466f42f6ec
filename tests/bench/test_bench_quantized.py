"""The quantized checkpoints that are measured load in quire, in the formats that they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny_models
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.quantized import GGUF_TYPES, GPTQ, write_gguf, write_gptq
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("Qwen2", tmp_path_factory.mktemp("float"), 0, num_hidden_layers=1, **SIZES)


def quantization(path: Path) -> str:
    config = load_model_config(str(path))
    load_model(config, torch.float32, torch.device("cpu"))
    return str(config)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_checkpoints_load(name, model, tmp_path):
    written = write_gptq(name, model, tmp_path / name)
    assert f"'bits': {GPTQ[name]}" in quantization(written)


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_files_load(name, model, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf writes the files")
    assert write_gguf(name, model, tmp_path).stat().st_size
    quantization(tmp_path / f"{model.name}-{name}.gguf")
