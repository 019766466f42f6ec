"""`quire fit`: sizes against transformers' and the worker's own, what fits a card, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import tiny_models
import tiny_modern
import tiny_moe
import torch
import transformers

from quire.cli import cards, sizes
from quire.cli.main import run
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.layers.formats.at_load import AtLoad
from quire.gpu_worker.models.loader import size_of
from quire.gpu_worker.spec import WHOLE, Shard
from quire.proto.checkpoint.model_config import load_model_config

ROWS = {
    name: (row[0], row[1])
    for module in (tiny_models, tiny_gpt, tiny_modern, tiny_moe)
    for name, row in module.ROWS.items()
    if isinstance(row[0], str) and len(row) == 2
}
"""Of the tests of families: those whose reference is a class of transformers'."""

LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 6,
}  # fmt: skip


def write_config(folder: Path, prefix: str, values: dict[str, Any]) -> Any:
    """A config.json alone; transformers' model of it, without memory."""
    config = getattr(transformers, f"{prefix}Config")(**{**tiny_models.BASE, **values})
    kind = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    with torch.device("meta"):
        model = kind(config)
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    return model


@pytest.mark.parametrize("row", ROWS)
def test_parameters_are_those_of_transformers(row: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, *ROWS[row])
    found = sizes.sizes_of(load_model_config(str(tmp_path)))
    assert found.parameters == model.num_parameters() and not found.about
    assert found.active <= found.parameters
    assert (found.active < found.parameters) == (found.spec.moe is not None)


@pytest.mark.parametrize(("prefix", "narrow"), [("DeepseekV2", None), ("DeepseekV3", 12)])
def test_latent_attention_is_counted_too(prefix: str, narrow: int | None, tmp_path: Path) -> None:
    """Which transformers runs: the cache is as wide as if the attention were none."""
    model = write_config(tmp_path, prefix, LATENT | {"q_lora_rank": narrow})
    found = sizes.sizes_of(load_model_config(str(tmp_path)))
    assert found.about and found.parameters == model.num_parameters()
    assert found.token_bytes(2) == 3 * 6 * 2 * (16 + 8) * 2


@pytest.mark.parametrize("row", ["llama-bias-tied", "qwen3", "gemma2", "qwen2-moe", "phi"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=["whole", "half"])
def test_weights_and_cache_are_the_workers_own(row: str, shard: Shard, tmp_path: Path) -> None:
    """Bytes of weights in each format that is made at load, and of a token in each cache."""
    write_config(tmp_path, *ROWS[row])
    config = load_model_config(str(tmp_path))
    found = sizes.sizes_of(config, shard)
    formats = {fmt.name: fmt for fmt in sizes.formats_of(config)}
    for name, asked in {"bfloat16": None, "fp8": "fp8", "int8": "int8", "int4": "int4"}.items():
        spec, count, itemsize = size_of(config, None, torch.bfloat16, shard, AtLoad(asked))
        assert found.parameters == count
        assert found.weight_bytes(formats[name]) == pytest.approx(count * itemsize, rel=0.03)
    for dtype, kind in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "fp8")):
        assert found.token_bytes(sizes.ITEMSIZE[kind]) == KVCache.block_bytes(spec.local(shard), 1, dtype)
    assert found.token_bytes(1, int8=True) == KVCache.block_bytes(spec.local(shard), 1, torch.int8)


def test_a_window_bounds_what_is_read_and_not_what_is_kept(tmp_path: Path) -> None:
    write_config(tmp_path, "Mistral", {"sliding_window": 24})
    found = sizes.sizes_of(load_model_config(str(tmp_path)))
    assert found.token_bytes(2, context=10) == 10 * found.token_bytes(2)
    assert found.token_bytes(2, context=500) == 24 * found.token_bytes(2)


# ---------------------------------------------------------------- what fits


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The command's exit code and its JSON."""
    code = run(["fit", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_model_on_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures that can be worked out by hand: 8.03 billion parameters, 128 KiB a token, 3.35 TB/s."""
    write_config(tmp_path, "Llama", LLAMA_8B)
    code, found = asked(capsys, str(tmp_path), "--gpu", "h100")
    assert (code, found["parameters"], found["kv_bytes_per_token"]) == (0, 8_030_261_248, 131_072)
    formats = {each["format"]: each for each in found["formats"]}
    half = formats["bfloat16"]
    read = 2 * (8_030_261_248 - 128256 * 4096) + 4096 * 131_072  # all but the embedding, and half of 8192 tokens
    assert half["smallest"]["devices"] == 1 and half["weights_bytes"] == 2 * 8_030_261_248
    assert half["smallest"]["decode_one"] == pytest.approx(3.35e12 / read, rel=0.001)
    assert formats["int8"]["smallest"]["rows"] > half["smallest"]["rows"]
    assert formats["float32"]["smallest"]["prefill"] == 0  # the sheet's products are of bfloat16


def test_more_devices_where_one_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "Llama", LLAMA_8B)
    _, found = asked(capsys, str(tmp_path), "--gpu", "RTX 4090")
    devices = {each["format"]: each["smallest"]["devices"] for each in found["formats"]}
    assert devices["float32"] == 2 and devices["int4"] == 1
    code, found = asked(
        capsys, str(tmp_path), "--gpu", "RTX-4090", "-tp", "1", "--hf-overrides.num_hidden_layers", "400"
    )
    assert code == 1 and not found["fits"]
    assert run(["fit", str(tmp_path), "--gpu", "RTX-4090", "-tp", "3"]) == 78
    assert "32 attention heads cannot be shared out" in capsys.readouterr().err


def test_a_quantized_checkpoint_is_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AWQ: 4 bits, and 16 + 4 bits of scale and zero for each 128 weights of the layers."""
    write_config(tmp_path, "Llama", LLAMA_8B)
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(told))
    _, found = asked(capsys, str(tmp_path))
    (only,) = found["formats"]
    layers = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    assert only["format"] == "awq"
    assert only["weights_bytes"] == round(layers * (4 + 20 / 128) / 8 + 2 * (2 * 128256 * 4096 + 65 * 4096))


def test_the_table_and_what_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["fit", "--gpu", "cpu", "--kv-cache-dtype", "int8"]) == 0
    out = capsys.readouterr().out
    assert "2.16 million" in out and "--quantization int4" in out
    assert run(["fit"]) == 0 and " --dtype bfloat16" in capsys.readouterr().out  # where the columns before it are full
    assert run(["fit", "-tp", "0"]) == 78 and "tensor_parallel_size" in capsys.readouterr().err
    assert run(["fit", "--kv-cache-dtype", "int8"]) == 78 and "for CPUs" in capsys.readouterr().err
    assert run(["fit", "--gpu", "RTX-4091"]) == 78
    assert "did you mean RTX-4090?; known are A10," in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["fit", "nobody/nothing"]) == 78 and "to be had from the hub" in capsys.readouterr().err


def test_a_model_that_runs_in_one_process_is_not_shared_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's own sizes: known parameters, and no remedy that would not help."""
    large = {
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
        "topk_group": 4, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "max_position_embeddings": 163840,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(large))
    assert run(["fit", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "about 671.03 billion, 37.55 billion" in said
    assert "the weights alone are larger; use a larger --gpu" in said and "--tensor-parallel-size" not in said
    assert run(["fit", str(tmp_path), "-tp", "8"]) == 78
    assert "runs in one process; leave out --tensor-parallel-size" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(large | {"first_k_dense_replace": "x"}))
    assert run(["fit", str(tmp_path)]) == 78 and "first_k_dense_replace must be a pos" in capsys.readouterr().err


def test_names_that_drivers_give() -> None:
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA L40S",
        "NVIDIA GeForce RTX 4090",
    )
    found = [cards.sheet_of_device(name) for name in names]
    assert [each and each.name for each in found] == ["H100", "H100-PCIe", "A100-40GB", "L40S", "RTX-4090"]
    assert cards.sheet_of_device("Tesla K80") is None


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from quire.cli.main import run; code = run(['fit']); "
        "sys.exit(code or ('torch' in sys.modules and 9))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_active_parameters_are_those_of_the_chosen_experts(tmp_path: Path) -> None:
    """Mixtral: two of eight experts for a token, each of three matrices of 48 by 96, in three layers."""
    write_config(tmp_path, "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2})
    found = sizes.sizes_of(load_model_config(str(tmp_path)))
    assert found.parameters - found.active == 3 * 6 * 3 * 48 * 96
    assert found.hit(1) == 0.25 and found.hit(2) == 1 - 0.75**2
