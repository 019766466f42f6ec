"""``--quantization``: a float checkpoint whose layers are made int8 or int4 while it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import tiny_moe
import torch
from paged_runner import PagedRunner, Row

from quire.gpu_worker.kernels.cpu.library import BF16, F32, I4, I8, library
from quire.gpu_worker.layers.formats import at_load
from quire.gpu_worker.layers.formats.at_load import AtLoad
from quire.gpu_worker.models.loader import load_model, size_of
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
DEMO = Path(__file__).resolve().parents[2] / "demo_model"
KINDS = {"int8": I8, "int4": I4}
MOST_ERROR = {"int8": 0.05, "int4": 0.5}
"""Of the demo model's logits, as a share of their size."""

needs_kernels = pytest.mark.skipif(library() is None, reason="no native CPU kernels here")


def load(folder: Path, quantization: str | None = None, dtype: torch.dtype = torch.float32, **flags):
    return load_model(load_model_config(str(folder), 256), dtype, CPU, quantization=quantization, **flags)


def logits(model) -> torch.Tensor:
    """Of 40 tokens of one sequence."""
    ids = torch.arange(40) * 37 % model.spec.vocab_size
    return PagedRunner(model).step([(Row(ids.tolist()), 40)]).float()


@needs_kernels
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_layers_are_quantized_and_compute_the_same_within_its_error(method):
    whole, narrow = load(DEMO), load(DEMO, method)
    assert narrow.layers[0].attention.qkv.packed.struct.type == KINDS[method]
    assert narrow.lm_head.packed.struct.type == KINDS[method]
    want, got = logits(whole), logits(narrow)
    error = (got - want).norm() / want.norm()
    assert 0 < error < MOST_ERROR[method]


@needs_kernels
def test_a_bfloat16_model_is_quantized_too():
    model = load(DEMO, "int4", torch.bfloat16, quantize_lm_head=False)
    assert model.lm_head.packed.struct.type == BF16
    x = torch.randn(3, model.spec.hidden_size).bfloat16()
    assert model.layers[0].mlp.up(x).dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize(
    ("method", "asked", "kind"),
    [("int8", None, I8), ("int8", False, F32), ("int4", None, I4), ("int4", True, I4), ("int4", False, F32)],
)
def test_the_lm_head_by_choice(method, asked, kind):
    assert load(DEMO, method, quantize_lm_head=asked).lm_head.packed.struct.type == kind


@needs_kernels
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_experts_are_quantized_and_their_router_is_not(method, tmp_path):
    kind, values, *_ = tiny_moe.ROWS["qwen2-moe"]
    folder = tiny_models.write(kind, tmp_path, 0, values)
    model = load(folder, method)
    block = next(block.mlp for block in model.layers if hasattr(block.mlp, "experts"))
    assert {packed.struct.type for packed in block.experts.local.gate_up.packed} == {KINDS[method]}
    assert block.experts.router.packed.struct.type == F32
    assert logits(model).isfinite().all()


def test_what_it_takes_is_known_before_it_is_loaded():
    config = load_model_config(str(DEMO), 256)
    sizes = {}
    for method in (None, "int8", "int4", "fp8"):
        spec, count, each = size_of(config, None, torch.float32, Shard(), AtLoad(method))
        sizes[method] = count * each
    table = spec.vocab_size * spec.hidden_size * 4
    layers = sizes[None] - table
    assert sizes["int8"] == pytest.approx(table + layers / 4, rel=0.01)
    assert sizes["int4"] == pytest.approx(table + layers * 4.125 / 32, rel=0.01)
    assert sizes["fp8"] == pytest.approx(sizes["int8"] + (0 if spec.tied else table * 3 / 4), rel=0.01)


def test_what_cannot_be_made_is_refused(tmp_path, monkeypatch):
    config = load_model_config(str(DEMO), 256)
    with pytest.raises(ConfigError, match="quantization=int8 is for CPUs and GPUs, and the device is xpu"):
        load_model(config, torch.float32, torch.device("xpu"), quantization="int8")
    quantized = replace(config, hf={**config.hf, "quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ConfigError, match=r"model config \(gptq\) does not match .* argument \(int4\)"):
        load_model(quantized, torch.float32, CPU, quantization="int4")
    with pytest.raises(ConfigError, match="quantize_lm_head needs a quantization"):
        load_model(config, torch.float32, CPU, quantize_lm_head=True)
    monkeypatch.setattr(at_load, "library", lambda: None)
    with pytest.raises(ConfigError, match="needs the native CPU kernels"):
        load_model(config, torch.float32, CPU, quantization="int8")
