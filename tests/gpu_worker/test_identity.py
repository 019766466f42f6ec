"""Whose blocks a folder of files has, and which workers go on with each other's blocks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.gpu_worker.models import identity
from quire.gpu_worker.models.fallback import TransformersModel
from quire.gpu_worker.models.identity import digest_of, identity_of
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import EngineArgs

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return tmp_path


def config_at(folder: Path, length: int = 64, rope: str = "default") -> ModelConfig:
    return ModelConfig(path=str(folder), hf={"rope_type": rope}, max_model_len=length, vocab_size=8)


def model(dtype: torch.dtype = torch.float32, device: Any = CPU) -> Any:
    return SimpleNamespace(dtype=dtype, whole="spec", device=device)


def digest(folder: Path, length: int = 64, of: Any = None, rope: str = "default", **flags: Any) -> str:
    return digest_of(EngineArgs(**flags), config_at(folder, length, rope), "told", "shard", of or model())


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "default"])
def test_files_of_another_length_are_not_found(folder, rope):
    assert digest(folder, 64, rope=rope) == digest(folder, 64, rope=rope) != digest(folder, 128, rope=rope)


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_invariant": True},
        {"attention_backend": "TRITON_ATTN"},
        {"enable_lora": True},
        {"enable_lora": True, "lora_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_files_that_other_flags_made_are_not_found(folder, flags):
    assert digest(folder, **flags) != digest(folder)


def test_the_dtype_of_adapters_counts_where_there_are_adapters(folder):
    auto, same = (digest(folder, enable_lora=True, lora_dtype=name) for name in ("auto", "float32"))
    assert auto == same != digest(folder, enable_lora=True, lora_dtype="bfloat16")
    assert digest(folder, lora_dtype="bfloat16") == digest(folder)


def test_the_version_of_transformers_counts_for_its_models(folder, monkeypatch):
    theirs = object.__new__(TransformersModel)
    for name, value in vars(model()).items():
        setattr(theirs, name, value)
    found = []
    for version in ("4.57.0", "4.57.1"):
        monkeypatch.setattr(identity, "version", lambda name, version=version: version)
        found.append((digest(folder), digest(folder, of=theirs)))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_workers_of_one_model_have_one_identity(folder, tmp_path):
    args, one = EngineArgs(), identity_of(EngineArgs(), config_at(folder), model())
    os.utime(folder / "model.safetensors", ns=(1, 1))  # a copy on another machine
    assert identity_of(args, config_at(folder, 128), model()) == one
    assert identity_of(args, config_at(folder), model(torch.bfloat16)) != one
    rope = {identity_of(args, config_at(folder, length, "longrope"), model()) for length in (64, 128)}
    assert len(rope) == 2
    (folder / "model.safetensors").write_bytes(bytes(256 * 64))
    assert identity_of(args, config_at(folder), model()) != one


def test_where_the_files_are_gone_no_other_worker_is_the_same(folder):
    args, config = EngineArgs(), config_at(folder / "gone")
    assert identity_of(args, config, model()) != identity_of(args, config, model())
