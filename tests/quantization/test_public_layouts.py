"""The tensors of three public checkpoints, by name, type and shape, and that quire has a place for exactly these.

The lists are made from the models' sizes and their tools' layouts (AutoAWQ's gemm, AutoGPTQ's v1 with its biases of
zeros, llm-compressor's FP8), not copied from index files, which could not be had when this was written. Of no tensor
is more made than its shape, so that the widths and the numbers of layers are the true ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.gpu_worker.models import loader, places
from quire.gpu_worker.models.files import Entry
from quire.gpu_worker.models.parts import Parts
from quire.proto.checkpoint.model_config import load_model_config

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
F16, BF16, F8, I32 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "bos_token_id": 151643,
    "eos_token_id": 151645, "max_position_embeddings": 32768, "max_window_layers": 70, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "float16", "vocab_size": 152064,
}  # fmt: skip
TENSOR8 = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "tensor", "symmetric": True, "type": "float",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-32B-Instruct-AWQ": {
        **QWEN, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "quantization_config": {
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True,
        },
    },
    "Qwen2.5-7B-Instruct-GPTQ-Int4": {
        **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "quantization_config": {
            "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
            "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
            "group_size": 128, "max_input_length": None, "model_seqlen": None,
            "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
            "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
            "use_exllama": True,
        },
    },
    "Meta-Llama-3.1-8B-Instruct-FP8": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
        "quantization_config": {
            "config_groups": {
                "group_0": {"input_activations": TENSOR8, "output_activations": None, "targets": ["Linear"],
                            "weights": TENSOR8},
            },
            "format": "float-quantized", "global_compression_ratio": 1.239, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen",
        },
    },
}  # fmt: skip


def awq(rows: int, columns: int) -> Layout:
    return {
        "qweight": (I32, (columns, rows // 8)), "qzeros": (I32, (columns // 128, rows // 8)),
        "scales": (F16, (columns // 128, rows)),
    }  # fmt: skip


def gptq(rows: int, columns: int) -> Layout:
    return {
        "qweight": (I32, (columns // 8, rows)), "qzeros": (I32, (columns // 128, rows // 8)),
        "scales": (F16, (columns // 128, rows)), "g_idx": (I32, (columns,)), "bias": (F16, (rows,)),
    }  # fmt: skip


def fp8(rows: int, columns: int) -> Layout:
    return {"weight": (F8, (rows, columns)), "weight_scale": (BF16, (1,)), "input_scale": (BF16, (1,))}


LAYOUTS = dict(zip(CONFIGS, (awq, gptq, fp8), strict=True))


def tensors_of(config: dict[str, Any], linear: Callable[[int, int], Layout]) -> Layout:
    """All tensors of the checkpoint."""
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = hidden // config["num_attention_heads"]
    kv, dtype = config["num_key_value_heads"] * dim, getattr(torch, config["torch_dtype"])
    found: Layout = {
        "model.embed_tokens.weight": (dtype, (vocabulary, hidden)), "model.norm.weight": (dtype, (hidden,)),
        "lm_head.weight": (dtype, (vocabulary, hidden)),
    }  # fmt: skip
    matrices = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = dtype, (hidden,)
        for name, shape in matrices.items():
            module = f"model.layers.{layer}.{name}"
            found |= {f"{module}.{key}": value for key, value in linear(*shape).items()}
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{module}.bias"] = dtype, shape[:1]
    return found


class Listed:
    """In place of a file: its tensors' names, types and shapes, all zeros."""

    def __init__(self, tensors: Layout, file: Path) -> None:
        self.entries = [
            Entry(file, name, shape, dtype, lambda a, b, s=shape, d=dtype: torch.zeros(b - a, *s[1:], dtype=d))
            for name, (dtype, shape) in tensors.items()
        ]

    def open(self, file: Path) -> Listed:
        return self

    def __enter__(self) -> list[Entry]:
        return self.entries

    def __exit__(self, *error: object) -> None:
        pass


class Checked(Exception):
    """All tensors have been looked at."""


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Layout], None]:
    """The loader, which checks each tensor's name, type and shape against its place, and reads none."""

    def check(folder: Path, tensors: Layout) -> None:
        filled: set[str] = set()

        def put(parts: Parts, place: places.Place, name: str, entry: Entry) -> None:
            places._check_shape(place, entry)
            entry.check(parts.dtype_of(parts.parameters[place.parameter.name]))
            filled.add(name)

        def complete(parts: Parts, place_of: dict[str, Any], left_over: list[str], _: Path) -> None:
            assert left_over == []
            assert filled == place_of.keys()
            raise Checked

        file = folder / "model.safetensors"
        file.touch()
        monkeypatch.setattr(loader, "Tensors", Listed(tensors, file))
        monkeypatch.setattr(loader, "put", put)
        monkeypatch.setattr(loader, "_check_complete", complete)
        with pytest.raises(Checked):
            loader.load_model(load_model_config(str(folder)), torch.float32, torch.device("cpu"))

    return check


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_public_checkpoint_has_its_place(
    name: str, checking: Callable[[Path, Layout], None], tmp_path: Path
) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config, LAYOUTS[name])
    checking(tmp_path, tensors)
    without = dict(tensors)
    del without[next(key for key in without if key.endswith(("scales", "weight_scale")))]
    with pytest.raises(AssertionError):
        checking(tmp_path, without)


@pytest.mark.parametrize("name", CONFIGS)
def test_its_shapes_load_as_random_weights(name: str, tmp_path: Path) -> None:
    """A layer of a quarter of the width."""
    config = {**CONFIGS[name], "num_hidden_layers": 1, "vocab_size": 512}
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        config[key] = max(1, config[key] // 4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loader.load_model(load_model_config(str(tmp_path), 64), torch.float32, torch.device("cpu"), "dummy")
    assert model.layers[0].mlp.up(torch.ones(2, config["hidden_size"])).isfinite().all()
