"""``--kv-cache-dtype``: what is chosen, the checkpoint's scales and measured ones, and a model over such caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gpt
import tiny_models
import tiny_modern
import tiny_moe
import torch
from narrow_caches import DTYPES, NarrowRunner, RoundedRunner
from paged_runner import CPU, PagedRunner, Row
from safetensors.torch import load_file, save_file

from quire.gpu_worker.kernels.narrow import FLOAT8
from quire.gpu_worker.models.cache_dtype import resolve_cache_dtype
from quire.gpu_worker.models.kv_scales import scales_to_read, set_scales
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import ModelConfig, load_model_config
from quire.proto.config import ConfigError, EngineArgs

E4M3, E5M2 = FLOAT8
TABLES = {**tiny_models.ROWS, **tiny_gpt.ROWS, **tiny_modern.ROWS, **tiny_moe.ROWS}
FAMILIES = ["qwen2-window", "bloom", "gemma2", "gpt-oss", "mistral-full"]
"""Biases and a window, ALiBi, a soft cap, sinks, one key head."""


def write(row: str, folder: Path, **changes) -> Path:
    kind, values, *_ = TABLES[row]
    return tiny_models.write(kind, folder, 0, {**values, **changes})


def load(folder: Path, dtype: torch.dtype, measure: bool = False):
    scales, config = scales_to_read(dtype, measure), load_model_config(str(folder), 256)
    model = load_model(config, torch.float32, CPU, kv_scales=scales)
    set_scales(model, dtype, measure, scales, 256)
    return model


def run(runner: PagedRunner) -> torch.Tensor:
    """Logits of three sequences, in chunks and in company, then of some decodes."""
    rows = [Row(prompt) for prompt in tiny_models.random_prompts(3, seed=5, shortest=40, longest=70)]
    told = [runner.step([(rows[0], 23)]), runner.step([(rows[0], 1), (rows[1], 30), (rows[2], 9)])]
    told += [runner.step([(row, 1) for row in rows]) for _ in range(4)]
    return torch.cat(told)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILIES)
def test_logits_are_those_of_rounded_keys_and_values(row, dtype, tmp_path, monkeypatch):
    folder = write(row, tmp_path)
    narrow, plain = load(folder, dtype, measure=True), load(folder, torch.float32)
    if dtype in FLOAT8:
        narrow.set_kv_scales([(0.03 * (1 + layer), 0.017) for layer in range(narrow.spec.num_layers)])
    got, floats = run(NarrowRunner(narrow, dtype)), run(PagedRunner(plain))
    wanted = run(RoundedRunner(plain, dtype, narrow.kv_scales, monkeypatch))
    # Sums in another order turn a key here and there to the other side of a tie, far less than rounding itself does.
    assert (got - wanted).norm() < 0.1 * (got - floats).norm()
    assert (got - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_has_the_same_logits_in_chunks_alone_and_in_company(dtype, tmp_path):
    model = load(write("llama", tmp_path), dtype)
    prompts = tiny_models.random_prompts(3, seed=5, shortest=40, longest=70)
    alone, company = NarrowRunner(model, dtype), NarrowRunner(model, dtype, seed=1)
    whole, row, others = Row(prompts[0]), Row(prompts[0]), [Row(prompt) for prompt in prompts[1:]]
    alone.step([(whole, len(prompts[0]) - 2)])
    company.step([(row, 17), (others[0], 20)])
    company.step([(row, len(prompts[0]) - 19), (others[1], 33)])
    for _ in range(2):
        wanted = alone.step([(whole, 1)])
        got = company.step([(row, 1), (others[0], 1), (others[1], 1)])
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-5)


def scaled(folder: Path, scales: dict[str, float], to: Path) -> Path:
    """The checkpoint with more tensors."""
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{name: torch.tensor(value) for name, value in scales.items()}}, to / "model.safetensors")
    return to


LAYER = "model.layers.{}.self_attn."
NAMES = {
    "AutoFP8": ({"kv_scale": 0.5}, (0.5, 0.5)),
    "vLLM": ({"k_scale": 0.5, "v_scale": 0.25}, (0.5, 0.25)),
    "attn": ({"attn.k_scale": 0.5, "attn.v_scale": 0.25, "attn.q_scale": 3.0}, (0.5, 0.25)),
    "ModelOpt": ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),
    "fused": ({"qkv_proj.k_scale": 0.5, "qkv_proj.v_scale": 0.25}, (0.5, 0.25)),
    "outputs": ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25}, (0.5, 0.25)),
    "keys alone": ({"k_scale": 0.5}, (0.5, 0.5)),
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_checkpoints_scales_are_found_by_any_name(kind, tmp_path, caplog):
    names, wanted = NAMES[kind]
    folder = scaled(write("llama", tmp_path / "a"), {LAYER.format(1) + n: x for n, x in names.items()}, tmp_path / "b")
    model = load(folder, E4M3)
    assert model.kv_scales == [(1.0, 1.0), wanted, (1.0, 1.0)]
    scores = model.layers[1].attention.scores
    assert (scores.k_scale, scores.v_scale) == wanted
    assert "2 of 3 layers have no scales" in caplog.text
    for dtype, measure in ((torch.float32, False), (torch.int8, False)):  # which have no use for them
        assert load(folder, dtype, measure).kv_scales == [(1.0, 1.0)] * 3
    assert load(folder, E4M3, measure=True).kv_scales == load(tmp_path / "a", E4M3, measure=True).kv_scales


def test_scales_of_another_family_and_without_the_prefix(tmp_path):
    folder = write("bloom", tmp_path / "a")
    made = scaled(
        folder, {"h.1.self_attention.k_scale": 0.5, "transformer.h.0.self_attention.v_scale": 2.0}, tmp_path / "b"
    )
    assert load(made, E5M2).kv_scales[:2] == [(2.0, 2.0), (0.5, 0.5)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [0.5, 0.5]])
def test_a_scale_that_cannot_be_is_refused(value, tmp_path):
    folder = scaled(write("llama", tmp_path / "a"), {LAYER.format(0) + "k_scale": value}, tmp_path / "b")
    with pytest.raises(ConfigError, match=r"self_attn\.k_scale has .*one number above 0"):
        load(folder, E4M3)
    load(folder, torch.float32)


def test_measured_scales_are_powers_of_two_that_hold_what_was_measured(tmp_path):
    folder = write("llama", tmp_path)
    scales = load(folder, E4M3, measure=True).kv_scales
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert load(folder, E4M3, measure=True).kv_scales == scales
    finally:
        torch.set_num_threads(threads)
    seen = PagedRunner(load(folder, torch.float32))
    for cache in seen.k + seen.v:
        cache.zero_()
    run(seen)
    for (k, v), keys, values in zip(scales, seen.k, seen.v, strict=True):
        assert torch.tensor([k, v]).log2().frac().eq(0).all()
        assert keys.abs().max() / k < 448 and values.abs().max() / v < 448  # of another prompt
        assert keys.abs().max() / k > 50 and values.abs().max() / v > 25


def resolve(name: str, hf: dict | None = None, path: str = "", dtype=torch.bfloat16, device: str = "cpu", **flags):
    args = EngineArgs(model="m", kv_cache_dtype=name, **flags).check()
    config = ModelConfig(path, {"architectures": ["LlamaForCausalLM"], **(hf or {})}, 128, 300)
    return resolve_cache_dtype(args, config, dtype, torch.device(device))


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CT, MODELOPT = {"quant_method": "compressed-tensors"}, {"quant_method": "modelopt"}


def asking(**changes):
    return {"hf": {"quantization_config": {**CT, "kv_cache_scheme": {**SCHEME, **changes}}}}


def test_what_a_name_is():
    names = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2,
             "int8": torch.int8, "int8_per_token_head": torch.int8}  # fmt: skip
    assert {name: resolve(name) for name in names} == names


@pytest.mark.parametrize(
    "quantization",
    [
        {**CT, "kv_cache_scheme": SCHEME}, {**MODELOPT, "kv_cache_scheme": SCHEME},
        {**MODELOPT, "quantization": {"kv_cache_quant_algo": "FP8"}}, {**MODELOPT, "kv_cache_quant_algo": "FP8"},
    ],
)  # fmt: skip
def test_auto_is_what_the_checkpoint_asks_for(quantization):
    hf = {"quantization_config": quantization}
    assert resolve("auto", hf) == E4M3
    assert resolve("bfloat16", hf) == torch.bfloat16
    with pytest.raises(ConfigError, match="fp8_e5m2 kv-cache is not supported with fp8 checkpoints"):
        resolve("fp8_e5m2", hf)


def test_auto_by_the_file_beside_config_json(tmp_path):
    for algo, wanted in (("FP8", E4M3), (None, torch.bfloat16), ("NVFP4", torch.bfloat16)):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": algo}}))
        assert resolve("auto", path=str(tmp_path)) == wanted
    (tmp_path / "hf_quant_config.json").write_text("[" * 100000)
    with pytest.raises(ConfigError, match="is no JSON"):
        resolve("auto", path=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("float16", {}, "kv_cache_dtype=float16 is not the model's dtype, bfloat16"),
        ("int8", {"device": "cuda"}, "kv_cache_dtype=int8 is for CPUs"),
        ("fp8", {"attention_backend": "flash"}, "attention_backend=flash does not read a KV cache of fp8"),
        ("fp4", {}, "Unknown kv_cache_dtype: 'fp4'. Must be one of"),
        ("auto", asking(num_bits=4), "num_bits=4"),
        ("auto", asking(strategy="attn_head"), "one scale"),
        ("auto", asking(symmetric=False), "symmetric"),
    ],
)  # fmt: skip
def test_what_is_refused(name, flags, said):
    with pytest.raises(ConfigError, match=said):
        resolve(name, **flags)
