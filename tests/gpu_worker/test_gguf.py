"""GGUF's types of weights, and whole models: other families than the formats' harness has, splits, odd files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny_models
import tiny_modern
import tiny_moe
import torch
from family_rig import LENGTH, FamilyRig
from gguf import GGMLQuantizationType as T

from quire.gpu_worker.layers.formats.base import Weight, whole
from quire.gpu_worker.layers.formats.gguf import _TYPES, Blocks, Mixed
from quire.gpu_worker.layers.formats.registry import quantization
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
ROWS, COLUMNS = 6, 512


def blocks(name: str, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """Any bytes but for scales that are numbers."""
    drawn = np.random.default_rng(seed).normal(0, 1, (rows, COLUMNS)).astype(np.float32)
    return torch.from_numpy(gguf_files.quantized(drawn, T[name], seed).copy())


def values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(tensor.numpy(), T[name]))


def weight(*rows: int, experts: int | None = None) -> Weight:
    return Weight(tuple(map(whole, rows)), whole(COLUMNS), torch.float32, CPU, experts)


@pytest.mark.parametrize("name", _TYPES)
def test_values_are_those_of_the_gguf_package_to_the_bit(name: str) -> None:
    tensor = blocks(name, rows=40)
    assert torch.equal(Blocks(name).dequantize({"weight": tensor}, weight(40)), values(name, tensor))
    experts = tensor.view(4, 10, -1)
    codes = Blocks(name).codes({"weight": experts}, weight(10, experts=4))
    assert torch.equal(codes.values().view(40, -1), values(name, tensor))


@pytest.mark.parametrize(("one", "other"), itertools.combinations([n for n, t in _TYPES.items() if not t.table], 2))
def test_parts_of_two_types_are_codes_of_one_form(one: str, other: str) -> None:
    tensors = {"weight.0": blocks(one), "weight.1": blocks(other, 1, 4)}
    format = Mixed((Blocks(one), Blocks(other)))
    codes = format._codes(tensors, weight(6, 4))
    assert codes is not None
    want = torch.cat([values(one, tensors["weight.0"]), values(other, tensors["weight.1"])])
    assert torch.equal(codes.values(), want)
    assert torch.equal(format.dequantize(tensors, weight(6, 4)), want)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(format.linear(tensors, weight(6, 4))(x, None), x @ want.T, rtol=1e-4, atol=1e-3)


def test_a_part_of_floats_and_tables_that_differ_are_multiplied_too() -> None:
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    floats = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(1))
    for parts, tensors, want in (
        ((Blocks("Q4_K"), None), {"weight.0": blocks("Q4_K"), "weight.1": floats}, floats),
        ((Blocks("Q4_K"), Blocks("IQ4_NL")), {"weight.0": blocks("Q4_K"), "weight.1": blocks("IQ4_NL", 2, 4)},
         values("IQ4_NL", blocks("IQ4_NL", 2, 4))),
    ):  # fmt: skip
        whole_weight = torch.cat([values("Q4_K", tensors["weight.0"]), want])
        found = Mixed(parts).linear(tensors, weight(6, 4))(x, None)
        assert torch.allclose(found, x @ whole_weight.T, rtol=1e-4, atol=1e-3)


def test_a_type_that_is_not_read_is_named_with_its_module() -> None:
    with pytest.raises(ConfigError, match=r"lm_head has GGUF's type IQ2_XXS, which is not supported"):
        quantization({"quantization_config": {"quant_method": "gguf", "types": {"lm_head": "IQ2_XXS"}}})


# ---------------------------------------------------------------- models

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    name: module.ROWS[name]
    for module, names in (
        (tiny_models, ("llama-llama3", "llama-linear", "llama-yarn", "llama-bias-tied", "llama-mha-head16", "qwen3",
                       "gemma", "phi3", "phi3-longrope")),
        (tiny_modern, ("gemma2", "gemma3")),
        (tiny_moe, ("qwen2-moe", "qwen3-moe")),
    )
    for name in names
}  # fmt: skip
# What llama.cpp's architectures cannot say otherwise.
_FITTED: dict[str, dict[str, Any]] = {
    "llama-bias-tied": {"mlp_bias": False},
    "qwen2-moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": False},
    "qwen3-moe": {"mlp_only_layers": [], "use_sliding_window": False, "norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"num_hidden_layers": 7, "sliding_window_pattern": 6},
}


def family(name: str, folder: Path, **changes: Any) -> Path:
    kind, row = FAMILIES[name]
    return tiny_models.write(kind, folder, 3, {**row, **_FITTED.get(name, {}), **changes})


def greedy(folder: Path, count: int = 12) -> tuple[list[list[int]], torch.Tensor]:
    rig = FamilyRig(folder)
    prompts = tiny_models.random_prompts(4, seed=5, longest=60)
    (logits,) = rig.prompt_logits(prompts[1:2])
    return rig.greedy(prompts, count), logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_float_file_gives_what_the_folder_gives(name: str, tmp_path: Path) -> None:
    source = family(name, tmp_path / "source")
    file = gguf_files.export(source, tmp_path / "made" / "model.gguf")
    tokens, logits = greedy(file)
    want, expected = greedy(source)
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()
    assert tokens == want


def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path: Path) -> None:
    source = family("qwen3", tmp_path / "source")
    gguf_files.export(source, tmp_path / "split" / "model.gguf", lambda name, shape: T.Q8_0 if shape[-1] % 32 == 0
                      else T.F16, split=7)  # fmt: skip
    files = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(files) > 2
    one = gguf_files.export(source, tmp_path / "one" / "model.gguf", lambda name, shape: T.Q8_0 if shape[-1] % 32 == 0
                            else T.F16)  # fmt: skip
    want = greedy(one)[0]
    assert greedy(tmp_path / "split")[0] == want
    assert greedy(files[1])[0] == want
    files[1].unlink()
    with pytest.raises(ConfigError, match=rf"is one of {len(files)} files, and {files[1].name} is missing"):
        load_model_config(str(files[0]))


def test_outputs_tied_to_quantized_embeddings_are_multiplied_as_codes(tmp_path: Path) -> None:
    """A float copy for the product would be read whole for every token."""
    source = family("qwen3", tmp_path / "source", hidden_size=64, tie_word_embeddings=True)
    file = gguf_files.export(source, tmp_path / "model.gguf", lambda name, shape: T.Q8_0)
    model = load_model(load_model_config(str(file), LENGTH), torch.float32, CPU)
    want = gguf_files.values(file)["token_embd.weight"]
    assert torch.equal(model.embed(torch.arange(len(want))), want)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.lm_head(x), x @ want.T, rtol=1e-4, atol=1e-4)
    if model.lm_head.packed is not None:  # by the native kernels, and one copy of the codes is enough
        assert model.embed.packed is model.lm_head.packed
        assert model.lm_head.packed.nbytes < 1.5 * want.numel()


def test_a_tensor_without_a_place_and_a_missing_one_are_named(tmp_path: Path) -> None:
    source = family("qwen3", tmp_path / "source")
    extra = gguf_files.export(
        source, tmp_path / "extra.gguf",
        change=lambda writer: writer.add_tensor("blk.0.attn_extra.weight", np.ones(3, np.float32)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"extra\.gguf.*blk\.0\.attn_extra\.weight.*no place"):
        load_model(load_model_config(str(extra), LENGTH), torch.float32, CPU)
    less = gguf_files.export(
        source, tmp_path / "less.gguf", change=lambda writer: writer.kv_data[0].update(
            {"qwen3.block_count": gguf.GGUFValue(4, gguf.GGUFValueType.UINT32)}
        ),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"less\.gguf.*lack .*layers\.3\.self_attn\.q_proj\.weight"):
        load_model(load_model_config(str(less), LENGTH), torch.float32, CPU)


def test_ranks_that_would_cut_blocks_are_refused(tmp_path: Path) -> None:
    source = family("qwen3", tmp_path / "source", hidden_size=256, intermediate_size=256)
    file = gguf_files.export(
        source, tmp_path / "model.gguf", lambda name, shape: T.Q4_K if "ffn_down" in name else T.F32
    )
    with pytest.raises(ConfigError, match=r"layers\.0\.down\.weight: one process would hold 128 to 256"):
        load_model(load_model_config(str(file), LENGTH), torch.float32, CPU, group=Group(Shard(1, 2)))


_U32, _F32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32


@pytest.mark.parametrize(
    ("key", "value", "kind", "said"),
    [
        ("block_count", 20_000, _U32, "qwen3.block_count must be a positive integer of at most 10000, got 20000"),
        ("attention.head_count_kv", 5, _U32, "qwen3.attention.head_count 6 is not a multiple of "
         "qwen3.attention.head_count_kv 5; convert the model anew"),
        ("rope.freq_base", -1.0, _F32, "qwen3.rope.freq_base must be a positive number, got -1.0; convert"),
        ("attention.layer_norm_rms_epsilon", 0.0, _F32, "qwen3.attention.layer_norm_rms_epsilon must be a positive"),
        ("embedding_length", 64, _U32, "has shape (320, 48) where the metadata makes it (320, 64); download it again."),
        ("context_length", 20, _U32, "the derived max_model_len (20) of {file}; lower it"),
    ],
)  # fmt: skip
def test_errors_name_the_files_keys(key: str, value: float, kind: Any, said: str, tmp_path: Path) -> None:
    source = family("qwen3", tmp_path / "hidden_size")  # a folder's name stays as it is
    changed = {f"qwen3.{key}": gguf.GGUFValue(value, kind)}
    file = gguf_files.export(
        source, tmp_path / "hidden_size" / "model.gguf", change=lambda writer: writer.kv_data[0].update(changed)
    )
    with pytest.raises(ConfigError) as raised:
        load_model(load_model_config(str(file), LENGTH), torch.float32, CPU)
    text = str(raised.value)
    assert said.format(file=file) in text
    assert str(file) in text
    assert "config.json" not in text
