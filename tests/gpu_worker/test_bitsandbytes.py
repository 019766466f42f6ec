"""bitsandbytes' checkpoints, which its package writes here: the values it dequantizes to are what is multiplied by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_moe
import torch
from quantized_tables import CONFIGS, FOUR
from quantized_tables import bitsandbytes as bitsandbytes_tensors
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load

from quire.gpu_worker.layers.formats.base import Weight, whole
from quire.gpu_worker.layers.formats.bitsandbytes import Bits4, Int8, bitsandbytes
from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.dense import Dequantized
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.config import ConfigError

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
MODELS = {
    "llama": tiny_models.ROWS["llama-bias-tied"],
    "mixtral": tiny_moe.ROWS["mixtral"],
}
KEPT = ("lm_head", "embed_tokens", "gate", "norm", "input_layernorm", "post_attention_layernorm")


def checkpoints(method: str, model: str, folder: Path, block: int = 64, **values: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the float32 weights that bitsandbytes makes of it."""
    plain, quantized, config = folder / "plain", folder / "quantized", CONFIGS[method]
    kind, others = MODELS[model]
    for each in (plain, quantized):
        tiny_models.write(kind, each, 5, {**others, **SIZES, **values})
    stored, floats = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = floats[name] = tensor
        if name.endswith(".weight") and not set(KEPT) & set(name.split(".")):
            saved, floats[name] = bitsandbytes_tensors(tensor, config, block)
            stored |= {f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in saved.items()}
    save_file(floats, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    edit(quantized, quantization_config={"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, **config})
    return quantized, plain


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", CONFIGS)
def test_its_own_values_are_multiplied_by(method: str, model: str, tmp_path: Path, monkeypatch: Any) -> None:
    quantized, plain = checkpoints(method, model, tmp_path)
    want = hidden(load(plain))
    torch.testing.assert_close(hidden(load(quantized)), want, rtol=1e-4, atol=1e-4)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Coded, "linear", Dequantized.linear)
    monkeypatch.setattr(Coded, "experts", Dequantized.experts)
    assert torch.equal(hidden(load(quantized)), want)  # the same weights, so the same bits


def test_codes_are_bitsandbytes_values_to_the_bit_and_int8_to_its_second_rounding() -> None:
    matrix = torch.randn(96, 320, generator=torch.Generator().manual_seed(1))
    weight = Weight((whole(96),), whole(320), torch.float32, torch.device("cpu"))
    for config in CONFIGS.values():
        saved, want = bitsandbytes_tensors(matrix, config)
        format = bitsandbytes(config).format_of("model.layers.0.mlp.up_proj")
        tensors = format.tensors(weight)[0].sources.make(saved, (96, 320), "file: layer")
        got = format.codes(tensors, weight).values()
        if isinstance(format, Int8):
            torch.testing.assert_close(got, want, rtol=2e-7, atol=0)
            got = format.dequantize(tensors, weight)
        assert torch.equal(got, want)


def test_larger_blocks_and_other_storage_are_read(tmp_path: Path) -> None:
    quantized, plain = checkpoints("nf4", "llama", tmp_path, block=128)
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if tensors[name].dtype == torch.uint8 and name.endswith("proj.weight")]:
        tensors[name] = tensors[name].view(-1).view(torch.bfloat16)[:, None]
    save_file(tensors, quantized / "model.safetensors")
    torch.testing.assert_close(hidden(load(quantized)), hidden(load(plain)), rtol=1e-4, atol=1e-4)


def test_fused_modules_may_have_tables_of_their_own(tmp_path: Path) -> None:
    quantized, plain = checkpoints("nf4", "mixtral", tmp_path)
    tensors, floats = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    for module in ("model.layers.1.self_attn.k_proj", "model.layers.1.block_sparse_moe.experts.2.w3"):
        tensors[f"{module}.weight.quant_map"] *= 2  # exact, so the float weights are too
        floats[f"{module}.weight"] *= 2
    save_file(tensors, quantized / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    want = hidden(load(plain))
    torch.testing.assert_close(hidden(load(quantized)), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_ranks(quantized, 2)[1], want, rtol=1e-4, atol=1e-4)


def test_which_modules_are_quantized_is_told_by_the_files(tmp_path: Path) -> None:
    quantized, plain = checkpoints("nf4", "llama", tmp_path)
    edit(quantized, quantization_config={**CONFIGS["nf4"], "quant_method": "bitsandbytes",
                                         "llm_int8_skip_modules": ["no_such_module"]})  # fmt: skip
    tensors, floats = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(name)} | {name: floats[name]}
    save_file(tensors, quantized / "model.safetensors")
    torch.testing.assert_close(hidden(load(quantized)), hidden(load(plain)), rtol=1e-4, atol=1e-4)


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    for method in ("nf4-double", "int8"):
        quantized, _ = checkpoints(method, "llama", tmp_path / method)
        (quantized / "model.safetensors").unlink()
        assert hidden(load(quantized, load_format="dummy")).isfinite().all()


def test_which_modules_are_skipped_without_files() -> None:
    found = bitsandbytes({**FOUR, "llm_int8_skip_modules": ["model.layers.0.mlp", "o_proj"]}).format_of
    assert found("model.layers.0.self_attn.q_proj") == found("model.layers.10.mlp.up_proj") == Bits4("nf4", 64)
    assert [found(name) for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.3.self_attn.o_proj")] == (
        [None] * 3
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "says neither or both of load_in_4bit and load_in_8bit"),
        (
            {**FOUR, "bnb_4bit_quant_type": "nf5"},
            "bnb_4bit_quant_type 'nf5' is not supported; it may be 'nf4'",
        ),
        ({**FOUR, "bnb_4bit_quant_type": ["nf4"]}, r"bnb_4bit_quant_type \['nf4'\] is not supported"),
        ({**FOUR, "bnb_4bit_blocksize": 48}, "bnb_4bit_blocksize 48 is not supported"),
        ({**FOUR, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list of names"),
    ],
)
def test_configs_that_mean_nothing_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bitsandbytes(config)


MODULE = "model.layers.1.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def json_of(**values: Any) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        state = {**json.loads(bytes(tensor.tolist())), **values}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("method", "name", "change", "said"),
    [
        (
            "nf4",
            "weight",
            lambda t: t[:-1].clone(),
            "weight holds 8191 values of uint8 where its quant_state",
        ),
        ("nf4", "weight", None, "weight is not there, and other tensors of bitsandbytes are"),
        ("nf4", "weight.absmax", lambda t: t[1:].clone(), "absmax holds 255 values of float32 where .* 256 of float32"),
        ("nf4", "weight.absmax", lambda t: t.to(torch.uint8), "absmax holds 256 values of uint8 where"),
        ("nf4", "weight.absmax", lambda t: t / 0, "absmax holds numbers that are not finite"),
        ("int8", "SCB", lambda t: t * float("nan"), "SCB holds numbers that are not finite"),
        ("nf4", "weight.absmax", None, "weight.absmax is not there, and other tensors of bitsandbytes are"),
        ("nf4", "weight.quant_map", lambda t: t[:8].clone(), "quant_map holds 8 values"),
        ("nf4", STATE, None, "bitsandbytes__nf4 is not there"),
        ("nf4", STATE, lambda t: t[:9].clone(), "is no quant_state"),
        ("nf4", STATE, lambda t: torch.full((50000,), 91, dtype=torch.uint8), "is no quant_state .RecursionError"),
        ("nf4", STATE, lambda t: torch.full((70000,), 91, dtype=torch.uint8), "is no quant_state .ValueError: 70000"),
        ("nf4", STATE, json_of(blocksize=0), "sizes of blocks and an offset belong"),
        ("nf4", STATE, json_of(blocksize=96), "blocks of 96 values by its quant_state where its absmax makes them 64"),
        (
            "nf4",
            STATE,
            json_of(shape=[64, 256]),
            r"has shape \(64, 256\) by its quant_state where config.json",
        ),
        ("nf4-double", "weight.nested_absmax", lambda t: t.repeat(2), "nested_absmax holds 2 values"),
        ("nf4-double", "weight.nested_quant_map", None, "nested_quant_map is not there"),
        ("int8", "weight_format", lambda t: t + 1, "weight_format is 1, an order of one kind of GPU"),
        ("int8", "SCB", lambda t: t[1:].clone(), "SCB holds 127 values"),
        ("nf4", "weight", lambda t: t.bool(), "weight is bool, which bitsandbytes keeps no bytes in"),
        ("nf4", "weight", lambda t: t.view(torch.float8_e5m2), "weight is float8_e5m2, which bitsandbytes keeps no"),
        ("int8", "weight", lambda t: t.view(torch.uint8), "weight is uint8, where its SCB makes it int8"),
        ("int8", "weight", lambda t: t[1:].clone(), r"shape \(127, 128\) where config.json makes it \(128, 128\)"),
    ],
)
def test_bad_files_are_named(method: str, name: str, change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints(method, "llama", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    found = tensors.pop(f"{MODULE}.{name}")
    if change is not None:
        tensors[f"{MODULE}.{name}"] = change(found)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert str(error.value).startswith(str(quantized / "model.safetensors"))
    assert MODULE in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("block", "width"), [(64, 96), (128, 352), (32, 160), (64, 88)])
def test_rows_need_not_be_whole_blocks(block: int, width: int, tmp_path: Path) -> None:
    quantized, plain = checkpoints("nf4-double", "llama", tmp_path, block, intermediate_size=width)
    want = hidden(load(plain))
    torch.testing.assert_close(hidden(load(quantized)), want, rtol=1e-4, atol=1e-4)


def test_what_tears_a_row_or_a_word_is_refused(tmp_path: Path) -> None:
    quantized, _ = checkpoints("nf4", "llama", tmp_path / "words", intermediate_size=100)
    with pytest.raises(ConfigError, match=r"down_proj.weight has rows of 100 values in blocks of 64, and those"):
        load(quantized)
    quantized, _ = checkpoints("nf4", "llama", tmp_path / "ranks", num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ConfigError, match=r"would hold 0 to 32 of 128, .* units of 64; use another --tensor-parallel"):
        load(quantized, Group(Shard(0, 4)))
