"""compressed-tensors: what its package writes, and decompresses, are the weights that are multiplied here."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from thread_ranks import hidden, in_ranks, load
from tiny_quantized import change_tensors, write

from quire.gpu_worker.kernels.codes import Activations
from quire.gpu_worker.layers.formats.base import Part, Weight, whole
from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.compressed_tensors import Packed, Scales, compressed_tensors, unpacked
from quire.gpu_worker.layers.formats.dense import Dequantized
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
TOKEN = {"strategy": "token", "dynamic": True}
WEIGHTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "weight"}, None),
    "w4a16-asym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}, None),
    "w8a16": ("pack-quantized", {**INT8, "strategy": "channel"}, None),
    "w8a16-asym": ("pack-quantized", {**INT8, "strategy": "channel", "symmetric": False}, None),
    "w2": ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 16}, None),
    "w3": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 16}, None),
    "w7-asym": ("pack-quantized", {"num_bits": 7, "strategy": "channel", "symmetric": False}, None),
    "int-w8a16": ("naive-quantized", {**INT8, "strategy": "tensor"}, None),
    "int-asym": ("naive-quantized", {**INT8, "strategy": "group", "group_size": 16, "symmetric": False}, None),
    "w8a8": ("int-quantized", {**INT8, "strategy": "channel"}, {**INT8, **TOKEN}),
    "fp8": ("float-quantized", {**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "fp8-dynamic": ("float-quantized", {**FP8, "strategy": "channel"}, {**FP8, **TOKEN}),
    "fp8-block": (
        "float-quantized", {**FP8, "strategy": "block", "block_structure": [16, 32]},
        {**FP8, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
}  # fmt: skip


def scheme(name: str) -> QuantizationScheme:
    packing, weights, rows = WEIGHTS[name]
    inputs = None if rows is None else QuantizationArgs(**rows)
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs, format=packing
    )


def parameters(matrix: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales and zero points of ``args``, in the shapes that the package's modules have."""
    if args.strategy == "tensor":
        return calculate_qparams(matrix.min().view(1), matrix.max().view(1), args)
    if args.strategy == "channel":
        cut = matrix[:, None]
    elif args.strategy == "group":
        cut = matrix.unflatten(1, (-1, args.group_size))
    else:
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % wide, 0, -len(matrix) % high))
        cut = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    return calculate_qparams(cut.amin(-1), cut.amax(-1), args)


def quantize(name: str, module: str, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    found = scheme(name)
    scales, zeros = parameters(matrix, found.weights)
    compressor = BaseCompressor.get_value_from_registry(found.format)
    state = {"weight": matrix, "weight_scale": scales, "weight_zero_point": zeros}
    if found.input_activations is not None and not found.input_activations.dynamic:
        state["input_scale"] = torch.tensor([0.02])
    kept = compressor.compress(state, found)
    return kept, compressor.decompress(kept, found)["weight"]


def config(*names: str, **settings: Any) -> dict[str, Any]:
    """A quantization_config of a group for each name, as the package writes it."""
    groups = {f"group_{at}": json.loads(scheme(name).model_dump_json()) for at, name in enumerate(names)}
    return {
        "quant_method": "compressed-tensors", "config_groups": groups, "format": WEIGHTS[names[0]][0],
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "version": "0.20.0", **settings,
    }  # fmt: skip


CASES = [
    *((name, "llama") for name in WEIGHTS), ("w4a16-asym", "phi3"), ("fp8", "phi3"), ("w4a16", "mixtral"),
    ("w8a16-asym", "deepseek"), ("w8a8", "qwen2-moe"), ("fp8-block", "deepseek"), ("fp8", "mixtral"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model"), CASES)
def test_the_weights_are_what_the_package_decompresses(name: str, model: str, tmp_path: Path, monkeypatch: Any) -> None:
    values = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
    values |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_key_value_heads": 2}
    quantized, plain = write(tmp_path, model, functools.partial(quantize, name), config(name), values)
    want = hidden(load(plain))
    if name != "w8a8":  # whose rows are rounded; see below
        torch.testing.assert_close(hidden(load(quantized)), want, atol=2e-5, rtol=1e-5)
    monkeypatch.setattr(Coded, "linear", Dequantized.linear)
    monkeypatch.setattr(Coded, "experts", Dequantized.experts)
    assert torch.equal(hidden(load(quantized)), want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=2e-5, rtol=1e-5)


def test_int8_rows_are_multiplied_as_the_file_says(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "llama", functools.partial(quantize, "w8a8"), config("w8a8"))
    want, got = hidden(load(plain)), hidden(load(quantized))
    error = (got - want).norm() / want.norm()
    assert 1e-4 < error < 0.05


def test_groups_of_different_formats_in_one_file(tmp_path: Path) -> None:
    names = ("w8a8", "w4a16", "fp8-block", "w3")
    found = config(*names, format="mixed-precision", ignore=["re:.*layers\\.2.*", "lm_head"])
    targets = (["re:.*self_attn.*"], ["Linear"], ["re:.*down_proj$"], ["model.layers.1.mlp.down_proj"])
    for group, names_ in zip(found["config_groups"].values(), targets, strict=True):
        group["targets"] = names_

    def each(module: str, matrix: torch.Tensor) -> Any:
        if ".layers.2." in module:
            return {"weight": matrix}, matrix
        exact = module == "model.layers.1.mlp.down_proj"
        name = "w3" if exact else "fp8-block" if "down" in module else "w8a8" if "attn" in module else "w4a16"
        return quantize(name, module, matrix)

    quantized, plain = write(tmp_path, "llama", each, found)
    got, want = hidden(load(quantized)), hidden(load(plain))
    assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dense", [True, False])
def test_words_of_both_packings(bits: int, dense: bool) -> None:
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    each = 32 // bits
    if dense:
        whole_row = (codes[..., None] >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(-2).unflatten(-1, (-1, 32))
        words = (whole_row.long() << torch.arange(32)).sum(-1)
    else:
        padded = torch.nn.functional.pad(codes, (0, -64 % each)).unflatten(-1, (-1, each))
        words = (padded.long() << (torch.arange(each) * bits)).sum(-1)
    assert torch.equal(unpacked(words.int(), bits, dense)[:, :64], codes)


def test_words_that_are_not_filled_are_told_by_their_number(tmp_path: Path) -> None:
    def padded(module: str, matrix: torch.Tensor) -> Any:
        tensors, floats = quantize("w3", module, matrix)
        codes = unpacked(tensors["weight_packed"], 3, dense=True)[:, : matrix.shape[1]]
        ten = torch.nn.functional.pad(codes, (0, -matrix.shape[1] % 10)).unflatten(-1, (-1, 10))
        return {**tensors, "weight_packed": (ten.long() << (torch.arange(10) * 3)).sum(-1).int()}, floats

    values = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
    quantized, plain = write(tmp_path, "llama", padded, config("w3"), values)
    torch.testing.assert_close(hidden(load(quantized)), hidden(load(plain)), atol=2e-5, rtol=1e-5)


def test_a_share_has_the_zero_points_of_its_rows_and_groups() -> None:
    format = Packed(4, Scales("group", (1, 32), symmetric=False))
    matrix = torch.randn(48, 128)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=False)
    scales, zeros = parameters(matrix, args)
    made = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = compressor.compress({"weight": matrix, "weight_scale": scales, "weight_zero_point": zeros}, made)
    want = compressor.decompress(tensors, made)["weight"]
    rows, columns = Part(48, 20, 48), Part(128, 48, 128)  # within a word of zero points, and within a group
    mine = {**tensors, "weight_packed": tensors["weight_packed"][20:, 6:], "weight_scale": scales[20:]}
    found = format.codes(mine, Weight((rows,), columns, torch.float32, CPU))
    assert found.group == 16
    assert torch.equal(found.values(), want[20:, 48:])


def test_what_the_file_says_of_activations_is_kept() -> None:
    def rows(name: str, **changes: Any) -> Any:
        found = config(name)
        found["config_groups"]["group_0"]["input_activations"].update(changes)
        format = compressed_tensors(found).format_of("model.layers.0.mlp.up_proj")
        weight = Weight((whole(32), whole(32)), whole(64), torch.float32, CPU)
        tensors = {each.name: torch.zeros(1, dtype=each.dtype) for each in format.tensors(weight)}
        tensors["weight"] = torch.zeros(64, 64).to(tensors["weight"].dtype)
        tensors["weight_scale"] = torch.ones(2) if name == "fp8" else torch.ones(64, 1)
        tensors |= {"input_scale": torch.tensor([2.0, 2.0]), "input_zero_point": torch.tensor([3, 3])}
        return format.codes(tensors, weight).activations

    assert rows("w8a8") == Activations("int8")
    assert rows("w8a8", symmetric=False) == Activations("int8", symmetric=False)
    assert rows("w8a8", num_bits=4) is None
    static = rows("w8a8", symmetric=False, strategy="tensor", dynamic=False)
    assert (static.scale.tolist(), static.zero.tolist()) == ([2.0], [3])
    assert rows("fp8").scale.tolist() == [2.0]
    assert rows("fp8-dynamic", strategy="group", group_size=32) == Activations("fp8", 32)


def test_names_expressions_and_classes() -> None:
    found = config("w4a16", "w8a16", "w2")
    groups = list(found["config_groups"].values())
    groups[0]["targets"], groups[1]["targets"], groups[2]["targets"] = ["Linear"], ["re:model.*down"], ["a.down"]
    found["ignore"] = ["lm_head", "re:.*gate$"]
    format_of = compressed_tensors(found).format_of
    bits = {"model.a.q": 4, "model.a.down_proj": 8, "a.down": 2, "b.model.down": 4}
    assert {name: format_of(name).bits for name in bits} == bits
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.embed_tokens", "transformer.wte"):
        assert format_of(name) is None
    groups[0]["targets"] = ["Embedding"]
    format_of = compressed_tensors(found).format_of
    assert (format_of("model.embed_tokens").bits, format_of("model.a.q")) == (4, None)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{UP}.weight_scale"), rf"lack {UP}\.weight_scale"),
        (lambda t: t.pop(f"{UP}.weight_packed"), rf"lack {UP}\.weight_packed"),
        (lambda t: t.pop(f"{UP}.weight_zero_point"), rf"lack {UP}\.weight_zero_point"),
        (
            lambda t: t.update({f"{UP}.weight_scale": torch.ones(96, 5)}),
            r"model\.safetensors: .*up_proj\.weight_scale has shape \(96, 5\) where config\.json makes it \(96, 6\)",
        ),
        (
            lambda t: t[f"{UP}.weight_scale"].fill_(float("inf")),
            r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight_scale holds NaN or infinity",
        ),
        (
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].to(torch.uint8)}),
            r"up_proj\.weight_packed is uint8, where config\.json's quantization makes it int32",
        ),
        (
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].long() + 2**32}),
            r"up_proj\.weight_packed is int64 and holds values from \d+ to \d+, where .* makes it int32",
        ),
        (lambda t: t.update({f"{UP}.weight_g_idx": torch.zeros(48, dtype=torch.int32)}), r"hold .*weight_g_idx, which"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "llama", functools.partial(quantize, "w4a16-asym"), config("w4a16-asym"))
    change_tensors(quantized, change)
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert "\n" not in str(error.value)


def test_wider_whole_numbers_are_read_where_they_fit(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "llama", functools.partial(quantize, "w8a8"), config("w8a8"))
    name = f"{UP}.weight"
    found = load_file(quantized / "model.safetensors")[name]
    change_tensors(quantized, lambda t: t.update({name: found.to(torch.int32)}))
    load(quantized)
    change_tensors(quantized, lambda t: t.update({name: found.to(torch.int32) + 1000}))
    with pytest.raises(
        ConfigError, match=r"up_proj\.weight is int32 and holds values from 8\d\d to 11\d\d, where .*int8"
    ):
        load(quantized)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_activations_are_divided_by_no_scale_of_0_or_less(scale: float, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "llama", functools.partial(quantize, "fp8"), config("fp8"))
    change_tensors(quantized, lambda t: t.update({"model.layers.0.mlp.down_proj.input_scale": torch.tensor([scale])}))
    with pytest.raises(ConfigError, match=r"down_proj\.input_scale must be above 0, as activations"):
        load(quantized)
    load(quantized, load_format="dummy")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "row"}, r"group_0\.weights\.strategy is row; it must be one of tensor, channel"),
        ({"strategy": "group", "group_size": 0}, r"group_size is 0; it must be a number of columns above 0"),
        ({"strategy": "block", "block_structure": [128]}, r"block_structure is \[128\]; it must be two sizes"),
        ({"num_bits": 1}, "are int of 1 bits in pack-quantized; they must be int of 2 to 8"),
        ({"num_bits": 4, "type": "float"}, "are floats of 4 bits in pack-quantized"),
        ({"actorder": "group"}, "has actorder group, .* quantize with actorder weight"),
        ({"symmetric": "maybe"}, "symmetric is maybe; it must be true or false"),
    ],
)
def test_weights_that_are_not_understood_are_refused(change: dict[str, Any], said: str) -> None:
    found = config("w4a16")
    found["config_groups"]["group_0"]["weights"].update(change)
    with pytest.raises(ConfigError, match=said):
        compressed_tensors(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "nvfp4-pack-quantized"}, "has the format nvfp4-pack-quantized; it must be one of pack-quantized"),
        ({"config_groups": []}, "config_groups must be a table"),
        ({"ignore": ["re:("]}, "ignore holds a regular expression that cannot be read"),
        ({"ignore": ["re:(a+)+$"]}, "holds a regular expression that cannot be read .repeated groups"),
        ({"ignore": "lm_head"}, "ignore must be a list of names"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
    ],
)
def test_settings_that_are_not_understood_are_refused(change: dict[str, Any], said: str) -> None:
    found = config("w4a16", **change)
    if isinstance(found["config_groups"], dict):
        found["config_groups"]["group_0"]["format"] = None
    with pytest.raises(ConfigError, match=said):
        compressed_tensors(found)
