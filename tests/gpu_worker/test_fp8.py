"""FP8 checkpoints: the weights are the bytes' values times the scales to the last bit, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import hidden, in_ranks, load
from tiny_quantized import change_tensors, write

from quire.gpu_worker.kernels.codes import Activations
from quire.gpu_worker.layers.formats.base import Part, Weight, whole
from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.dense import Dequantized
from quire.gpu_worker.layers.formats.fp8 import FP8, e4m3, fp8
from quire.proto.config import ConfigError

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
BLOCK = (16, 32)


def narrow(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (matrix / scales).clamp(-448, 448).to(E4M3)


def by_tensor(module: str, matrix: torch.Tensor) -> Any:
    scale = matrix.abs().max() / 448
    weight = narrow(matrix, scale)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def by_tensor_static(module: str, matrix: torch.Tensor) -> Any:
    tensors, floats = by_tensor(module, matrix)
    old = "act_scale" if "down" in module or "w2" in module else "input_scale"  # what AutoFP8 called it first
    return {**tensors, old: torch.tensor([0.01])}, floats


def by_row(module: str, matrix: torch.Tensor) -> Any:
    scales = matrix.abs().amax(1, keepdim=True) / 448
    weight = narrow(matrix, scales)
    return {"weight": weight, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}, weight.float() * scales


def by_block(module: str, matrix: torch.Tensor) -> Any:
    shape = [-(-size // unit) for size, unit in zip(matrix.shape, BLOCK, strict=True)]
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(len(module))) * 1e-3 + 1e-4
    wide = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: len(matrix), : matrix.shape[1]]
    weight = narrow(matrix, wide)
    return {"weight": weight, "weight_scale_inv": scales}, weight.float() * wide


def by_block_of_powers(module: str, matrix: torch.Tensor) -> Any:
    shape = [-(-size // unit) for size, unit in zip(matrix.shape, BLOCK, strict=True)]
    powers = torch.randint(110, 118, shape, generator=torch.Generator().manual_seed(len(module)), dtype=torch.uint8)
    scales = powers.view(torch.float8_e8m0fnu)
    wide = (2.0 ** (powers.float() - 127)).repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    wide = wide[: len(matrix), : matrix.shape[1]]
    weight = narrow(matrix, wide)
    return {"weight": weight, "weight_scale_inv": scales}, weight.float() * wide


CONFIGS: dict[Any, dict[str, Any]] = {
    by_tensor: {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
    by_tensor_static: {"quant_method": "fp8", "activation_scheme": "static"},
    by_row: {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []},
    by_block: {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
    by_block_of_powers: {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": list(BLOCK)},
}
CASES = [
    (by_tensor, "llama"), (by_tensor, "phi3"), (by_tensor, "mixtral"), (by_tensor_static, "qwen2-moe"),
    (by_row, "llama"), (by_row, "deepseek"), (by_block, "phi3"), (by_block, "deepseek"), (by_block, "qwen2-moe"),
    (by_block_of_powers, "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("quantize", "model"), CASES)
def test_the_weights_are_the_files_to_the_last_bit_in_any_number_of_ranks(
    quantize: Any, model: str, tmp_path: Path, monkeypatch: Any
) -> None:
    quantized, plain = write(tmp_path, model, quantize, CONFIGS[quantize])
    want = hidden(load(plain))
    for each in (hidden(load(quantized)), *in_ranks(quantized, 2)):
        torch.testing.assert_close(each, want, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(Coded, "linear", Dequantized.linear)
    monkeypatch.setattr(Coded, "experts", Dequantized.experts)
    assert torch.equal(hidden(load(quantized)), want)


def test_every_byte_has_its_value() -> None:
    bytes = torch.arange(256, dtype=torch.uint8)
    found = e4m3(CPU)
    assert found.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert found[0x7E] == 448
    assert found[1] == 2.0**-9
    weight = Weight((whole(2),), whole(128), torch.float32, CPU)
    numbers = bytes.where(found.isfinite(), 0)
    tensors = {"weight": numbers.view(E4M3).view(2, 128), "weight_scale": torch.tensor([3.0])}
    values = FP8("tensor").codes(tensors, weight).values()
    assert torch.equal(values, tensors["weight"].float() * 3)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_bytes_that_are_no_numbers_are_refused(byte: int, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.weight"].view(torch.uint8)[3, 5] = byte

    quantized, _ = write(tmp_path, "llama", by_tensor, CONFIGS[by_tensor])
    change_tensors(quantized, change)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: {UP}\.weight holds NaN \(0x7F or 0xFF in e4m3\)"):
        load(quantized)


def test_a_share_that_begins_within_a_block_has_that_blocks_scales() -> None:
    matrix = torch.randn(200, 300)
    shape = (-(-200 // 128), -(-300 // 128))
    tensors = {"weight": matrix.to(E4M3), "weight_scale_inv": torch.rand(shape)}
    format = fp8({"weight_block_size": [128, 128]}).format_of("model.layers.0.mlp.down_proj")
    full = format.codes(tensors, Weight((whole(200),), whole(300), torch.float32, CPU)).values()
    rows, columns = Part(200, 100, 200), Part(300, 192, 300)
    mine = {**tensors, "weight": tensors["weight"][100:, 192:]}
    found = format.codes(mine, Weight((rows,), columns, torch.float32, CPU))
    assert found.group == 64
    assert torch.equal(found.values(), full[100:, 192:])


def test_what_the_file_says_of_activations_is_kept() -> None:
    weight = Weight((whole(32), whole(32)), whole(64), torch.float32, CPU)
    tensors = {"weight": torch.zeros(64, 64).to(E4M3), "weight_scale": torch.ones(2)}
    dynamic = fp8({}).format_of("q_proj").codes(tensors, weight)
    assert dynamic.activations == Activations("fp8")
    static = fp8({"activation_scheme": "static"}).format_of("q_proj")
    found = static.codes({**tensors, "input_scale": torch.tensor([0.5, 2.0])}, weight).activations
    assert found.scale.tolist() == [2.0]  # the larger of the fused ones
    assert fp8({"weight_block_size": [128, 128]}).format_of("q_proj").group == 128


def test_modules_are_skipped_by_name() -> None:
    found = fp8({"modules_to_not_convert": ["model.layers.0.mlp", "lm_head"], "ignored_layers": ["a.b"]})
    for name in ("model.layers.0.mlp.gate_proj", "lm_head", "a.b", "model.lm_head"):
        assert found.format_of(name) is None
    for name in ("model.layers.0.mlp2.gate_proj", "a.bc", "model.layers.10.mlp.gate_proj"):
        assert found.format_of(name) is not None


def test_tensors_of_a_cache_are_no_weights(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "llama", by_tensor, CONFIGS[by_tensor])
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_proj.output_scale")}
    change_tensors(quantized, lambda tensors: tensors.update(scales))
    assert hidden(load(quantized)).isfinite().all()


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "mixtral", by_block, CONFIGS[by_block])
    (quantized / "model.safetensors").unlink()
    assert hidden(load(quantized, load_format="dummy")).isfinite().all()


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{UP}.weight_scale"), rf"lack {UP}\.weight_scale"),
        (
            lambda t: t.update({f"{UP}.weight_scale": torch.ones(3)}),
            r"model\.safetensors: .*up_proj\.weight_scale has shape \(3,\) where config\.json makes it \(1,\)",
        ),
        (
            lambda t: t.update({f"{UP}.weight_scale": torch.tensor(float("nan"))}),
            r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight_scale holds NaN or infinity",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight_scale": torch.tensor(float("inf"))}),
            r"model\.safetensors: model\.layers\.0\.self_attn\.k_proj\.weight_scale holds NaN or infinity",
        ),
        (
            lambda t: t.update({f"{UP}.weight": torch.zeros(96, 48)}),
            r"some but not all shards of .*gate_proj, model\.layers\.1\.mlp\.up_proj are quantized",
        ),
        (
            lambda t: t.update({f"{UP}.weight_scale": torch.ones((), dtype=torch.int32)}),
            r"model\.safetensors: .*up_proj\.weight_scale is int32",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "llama", by_tensor, CONFIGS[by_tensor])
    change_tensors(quantized, change)
    with pytest.raises(ConfigError, match=said) as error:
        load(quantized)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"activation_scheme": "sometimes"}, "activation_scheme is sometimes; it must be static or dynamic"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two sizes"),
        ({"weight_block_size": [0, 128]}, "must be two sizes above 0"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "set activation_scheme to dynamic"),
        ({"fmt": "e5m2"}, "fmt is e5m2; weights must be e4m3"),
        ({"ignored_layers": "lm_head"}, "ignored_layers must be a list"),
    ],
)
def test_settings_that_are_not_understood_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fp8(config)
