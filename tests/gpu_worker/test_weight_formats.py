"""Weight formats by the seam alone: three that are defined here, loaded from checkpoints of theirs, and multiplied.

Each is one class and one registered function. A checkpoint is a tiny random one whose linear layers are quantized
here; what it must compute is what the same model computes with the weights that the format's formula gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_moe
import tiny_remote
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from thread_ranks import hidden, in_ranks, load

from quire.gpu_worker.kernels import card
from quire.gpu_worker.kernels.moe import Blocks, grouped_product
from quire.gpu_worker.layers.formats import registry
from quire.gpu_worker.layers.formats.base import Axis, ExpertProducts, Part, Run, Stored, Tensors, Weight
from quire.gpu_worker.layers.formats.dense import Dequantized
from quire.gpu_worker.layers.formats.registry import Quantization, register
from quire.gpu_worker.models.loader import size_of
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import ConfigError

GROUP = 8  # columns that share a scale, in two of the formats
KEPT = ("lm_head", "output", "gate", "embed_tokens", "tok_embeddings", "norm")  # what stays a float


def unless_kept(format: Any, config: Mapping[str, Any]) -> Quantization:
    """``format`` for every module but those that the config keeps as floats."""
    kept = config.get("modules_to_not_convert", ())
    return Quantization(lambda module: None if any(part in kept for part in module.split(".")) else format)


# --- int8 with a scale for each row, multiplied as it is: nothing of the weight's size is made ---


@dataclass(frozen=True)
class Rows8(Dequantized):
    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return Stored("weight", dtype=torch.int8), Stored("scales", columns=None, dtype=torch.float32)

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        return (tensors["weight"].float() * tensors["scales"][..., None]).to(weight.dtype)

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        assert tensors["weight"].shape == weight.shape
        assert tensors["scales"].shape == weight.shape[:1]
        return lambda x, bias: Rows8Experts({k: v[None] for k, v in tensors.items()}).one(x, bias, 0)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        assert tensors["weight"].shape == (weight.experts, *weight.shape)
        return Rows8Experts(tensors)


class Rows8Experts:
    def __init__(self, tensors: Tensors) -> None:
        self.codes, self.scales = tensors["weight"], tensors["scales"]

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        y = F.linear(x, self.codes[expert].to(x.dtype)) * self.scales[expert].to(x.dtype)
        return y if bias is None else y + bias

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        matrices = self.codes.to(x.dtype) * self.scales[..., None].to(x.dtype)
        return grouped_product(x, matrices, bias, blocks, activation, weights)


@register("toy_rows8")
def rows8(config: Mapping[str, Any]) -> Quantization:
    return unless_kept(Rows8(), config)


def quantize_rows8(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = matrix.abs().amax(1) / 127
    codes = (matrix / scales[:, None]).round().to(torch.int8)
    return {"weight": codes, "scales": scales}, codes * scales[:, None]


class Column8(Rows8):
    """The same with the scales in a column, and without a product of its own."""

    linear, experts = Dequantized.linear, Dequantized.experts

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return Stored("weight", dtype=torch.int8), Stored("weight_scale", columns=Axis(0), dtype=torch.float32)

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        return (tensors["weight"].float() * tensors["weight_scale"]).to(weight.dtype)


@register("toy_column8")
def column8(config: Mapping[str, Any]) -> Quantization:
    return unless_kept(Column8(), config)


def quantize_column8(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, floats = quantize_rows8(matrix)
    return {"weight": tensors["weight"], "weight_scale": tensors["scales"][:, None]}, floats


# --- GPTQ's layout: 4 bits, eight in an int32 along the columns; zeros eight along the rows; groups in any order ---


@dataclass(frozen=True)
class Words4(Dequantized):
    group: int

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        eight, groups, i32 = Axis(8), Axis(self.group, uncut=True), torch.int32
        return (
            Stored("qweight", Axis(), eight, i32, transposed=True),
            Stored("qzeros", eight, groups, i32, transposed=True),
            Stored("scales", Axis(), groups, torch.float16, transposed=True),
            Stored("g_idx", Axis(0), Axis(), i32),
        )

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        codes = (tensors["qweight"][..., None] >> SHIFTS & 15).flatten(-2)  # [..., rows, columns]
        zeros = (tensors["qzeros"][..., None, :] >> SHIFTS[:, None] & 15).flatten(-3, -2)  # [..., rows, groups]
        group = tensors["g_idx"][..., :1, :].long()
        assert (tensors["g_idx"] == group).all(), "fused parts share one order"
        index = group.expand(codes.shape)
        return ((codes - zeros.gather(-1, index)) * tensors["scales"].float().gather(-1, index)).to(weight.dtype)


SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


@register("toy_words4")
def words4(config: Mapping[str, Any]) -> Quantization:
    return unless_kept(Words4(config["group_size"]), config)


def quantize_words4(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = matrix.shape
    order = torch.arange(columns).flip(0) // GROUP  # act-order: a column's group is not its place's
    scales = (torch.rand(rows, columns // GROUP, generator=torch.Generator().manual_seed(rows)) * 0.05 + 0.01).half()
    zeros = torch.arange(rows * (columns // GROUP)).view(rows, -1).int() % 5 + 6
    wide = scales.float()[:, order]
    codes = (matrix / wide + zeros[:, order]).round().clamp(0, 15).int()
    tensors = {
        "qweight": (codes.unflatten(1, (-1, 8)) << SHIFTS).sum(2).int().t(),
        "qzeros": (zeros.unflatten(0, (-1, 8)) << SHIFTS[:, None]).sum(1).int().t(),
        "scales": scales.t(), "g_idx": order.int(),
    }  # fmt: skip
    return tensors, (codes - zeros[:, order]) * wide


# --- FP8: one scale for the checkpoint's tensor and one for each block of rows and columns ---


@dataclass(frozen=True)
class Blocks8(Dequantized):
    size: int

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        block = Axis(self.size)
        return (
            Stored("weight", dtype=torch.float8_e4m3fn), Stored("weight_scale", Axis(0, 1), None, torch.float32),
            Stored("weight_scale_inv", block, block, torch.float32),
        )  # fmt: skip

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        # A part's blocks begin at its own first row.
        per_part = [-(-len(part) // self.size) for part in weight.parts]
        blocks = tensors["weight_scale_inv"].split(per_part, -2)
        wide = [
            each.repeat_interleave(self.size, -2)[..., : len(part), :]
            for each, part in zip(blocks, weight.parts, strict=True)
        ]
        scales = torch.cat(wide, -2).repeat_interleave(self.size, -1)[..., : weight.shape[1]]
        whole = tensors["weight_scale"].repeat_interleave(torch.tensor([len(part) for part in weight.parts]), -1)
        return (tensors["weight"].float() * scales * whole[..., None]).to(weight.dtype)


@register("toy_blocks8")
def blocks8(config: Mapping[str, Any]) -> Quantization:
    return unless_kept(Blocks8(config["block"]), config)


def quantize_blocks8(matrix: torch.Tensor, size: int = GROUP) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    shape = [-(-n // size) for n in matrix.shape]
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(matrix.numel())) + 0.5
    wide = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: matrix.shape[0], : matrix.shape[1]]
    whole = matrix.abs().max() / 448
    codes = (matrix / whole / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": whole, "weight_scale_inv": scales}, codes.float() * wide * whole


# --- checkpoints ---

TOYS = {
    "toy_rows8": (quantize_rows8, {}), "toy_column8": (quantize_column8, {}),
    "toy_words4": (quantize_words4, {"group_size": GROUP}),
    "toy_blocks8": (quantize_blocks8, {"block": GROUP}),
}  # fmt: skip
MODELS = {
    "llama": tiny_models.ROWS["llama-bias-tied"],
    "phi3": tiny_models.ROWS["phi3"],
    "internlm2": tiny_remote.ROWS["internlm2"],  # and there their heads take turns
    "mixtral": tiny_moe.ROWS["mixtral"],
}


def checkpoints(method: str, model: str, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the float weights that it stands for."""
    plain, quantized = folder / "plain", folder / "quantized"
    quantize, values = TOYS[method]
    for each in (plain, quantized):
        each.mkdir(exist_ok=True)
        tiny_models.write(*MODELS[model][:1], each, 5, MODELS[model][1])
    tensors, floats = load_file(plain / "model.safetensors"), {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight") or set(KEPT) & set(name.split(".")) or tensor.dim() != 2:
            stored[name] = floats[name] = tensor
            continue
        kept, floats[name] = quantize(tensor)
        stored |= {f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in kept.items()}
    save_file(stored, quantized / "model.safetensors")
    save_file({name: tensor.float().contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method, "modules_to_not_convert": KEPT, **values, **settings
    }  # fmt: skip
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", TOYS)
def test_a_format_gives_the_models_result_in_any_number_of_ranks(method: str, model: str, tmp_path: Path) -> None:
    quantized, plain = checkpoints(method, model, tmp_path)
    want, alone = hidden(load(plain)), hidden(load(quantized))
    if method == "toy_rows8":
        torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)
    else:  # the same weights, so the same bits
        assert torch.equal(alone, want)
    for each in in_ranks(quantized, 2):
        torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-5)


def test_a_weight_is_not_made_where_the_format_multiplies_itself(tmp_path: Path, monkeypatch: Any) -> None:
    quantized, _ = checkpoints("toy_rows8", "mixtral", tmp_path)
    monkeypatch.setattr(Rows8, "dequantize", None)
    hidden(load(quantized))


def test_random_weights_of_a_format_need_no_file(tmp_path: Path) -> None:
    quantized, _ = checkpoints("toy_words4", "llama", tmp_path)
    (quantized / "model.safetensors").unlink()
    assert hidden(load(quantized, load_format="dummy")).isfinite().all()


def test_what_a_format_takes_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    quantized, plain = checkpoints("toy_rows8", "phi3", tmp_path)
    _, count, each = size_of(load_model_config(str(quantized), 64), None, torch.float32, Shard())
    tensors = load_file(quantized / "model.safetensors").values()
    assert count * each == pytest.approx(sum(tensor.nbytes for tensor in tensors))
    assert size_of(load_model_config(str(plain), 64), None, torch.float32, Shard())[1:] == (count, 4)


# --- what cannot be is refused, in one line ---


def test_a_share_that_begins_within_a_block_is_refused(tmp_path: Path) -> None:
    TOYS["toy_blocks32"] = (lambda matrix: quantize_blocks8(matrix, 32), {"block": 32})
    register("toy_blocks32")(blocks8)
    quantized, plain = checkpoints("toy_blocks32", "llama", tmp_path)
    assert torch.equal(hidden(load(quantized)), hidden(load(plain)))  # 48 columns: the last block has 16
    with pytest.raises(ConfigError, match=r"would hold 0 to 24 of 48, .* units of 32; use another --tensor-parallel"):
        load(quantized, Group(Shard(0, 2)))
    del TOYS["toy_blocks32"]


def test_fused_parts_of_two_formats_are_refused(tmp_path: Path) -> None:
    quantized, _ = checkpoints("toy_rows8", "llama", tmp_path, modules_to_not_convert=[*KEPT, "k_proj"])
    with pytest.raises(ConfigError, match=r"some but not all shards of model\.layers\.0\.self_attn\.q_proj, "):
        load(quantized)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.scales"), r"lack model\.layers\.1\.mlp\.up_proj\.scales"),
        (lambda t: t.update(more=torch.ones(1)), r"hold more, which"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(96, 48)}),
            r"up_proj\.weight is float32, where config\.json's quantization makes it int8",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.scales": torch.ones(96, 2)}),
            r"up_proj\.scales has shape \(96, 2\) where config\.json makes it \(96,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = checkpoints("toy_rows8", "llama", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        load(quantized)


def test_a_method_is_registered_once() -> None:
    assert register("toy_rows8")(rows8) is rows8
    with pytest.raises(ValueError, match=r"toy_rows8 is registered already, by .*test_weight_formats"):
        register("toy_rows8")(column8)


def test_a_method_that_nobody_registered_is_named(tmp_path: Path) -> None:
    quantized, _ = checkpoints("toy_rows8", "llama", tmp_path, quant_method="new")
    with pytest.raises(
        ConfigError, match=r"Unknown quantization method: new. Must be one of .*; use the model's float"
    ):
        load(quantized)


def test_axes() -> None:
    assert Axis(8).cut(Part(96, 48, 96), "w") == Part(12, 6, 12)
    assert Axis(256, 144).cut(Part(512, 256, 512), "w") == Part(288, 144, 288)
    assert Axis(128).cut(Part(200, 128, 200), "w") == Part(2, 1, 2)
    assert Axis(8, uncut=True).cut(Part(96, 48, 96), "w") == Part(12, 0, 12)
    assert Axis(0).cut(Part(96, 48, 96), "w") == Part(1, 0, 1)
    assert len(Axis(0).cut(Part(96, 0, 0), "w")) == 0
    swapped = np.r_[8:16, 0:8]
    assert Axis(4, 2).order(swapped, "w").tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match="w: the model's order of rows would tear"):
        Axis(4).order(np.r_[2:6, 0:2, 6:8], "w")


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "said"),
    [
        ("awq", 60, torch.float16, "The quantization method awq is not supported for the current GPU. "
         rf"Minimum capability: {card.OLDEST}. Current capability: 60\."),
        ("awq_marlin", 90, torch.float32, "torch.float32 is not supported for quantization method awq_marlin. "
         r"Supported dtypes: \[torch.float16, torch.bfloat16\]"),
        ("awq", 90, torch.bfloat16, None), ("fp8", 80, torch.float32, None), (None, 60, torch.float32, None),
    ],
)  # fmt: skip
def test_what_a_gpu_cannot_run_is_named(
    name: str | None, arch: int, dtype: torch.dtype, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "card_of", lambda device: card.Card("one", "cuda", arch, 1, 1, 1))
    hf = {"quantization_config": name and {"quant_method": name}}
    for device in ("cpu", "cuda"):
        if device == "cpu" or said is None:
            registry.check_device(hf, dtype, torch.device(device))
        else:
            with pytest.raises(ConfigError, match=said):
                registry.check_device(hf, dtype, torch.device(device))
