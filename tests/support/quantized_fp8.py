"""FP8: a scale of the tensor with static activations, and blocks of 128x128, as DeepSeek's.

Both are written here, by the formula of the formats: values by their largest magnitude / 448, and scales in float32. No
package writes either on a CPU (transformers' quantizer of blocks refuses it).
"""

from __future__ import annotations

from pathlib import Path

import quantized
import torch

E4M3 = torch.float8_e4m3fn


def by_tensor(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax() / 448
    return {"weight": (weight / scale).to(E4M3), "weight_scale": scale, "input_scale": torch.tensor(0.02)}


def by_block(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    cut = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128))
    scales = cut.unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448
    return {"weight": (weight / wide(scales, rows, columns)).to(E4M3), "weight_scale_inv": scales}


def wide(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def write_tensors(source: Path, out: Path) -> None:
    quantized.rewritten(source, out, by_tensor, {"quant_method": "fp8", "activation_scheme": "static"})


def write_blocks(source: Path, out: Path) -> None:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantized.rewritten(source, out, by_block, config)


def dequantized_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = quantized.by_module(quantized.stored(folder), "weight_scale")
    return {f"{name}.weight": each["weight"].float() * each["weight_scale"] for name, each in found.items()}


def dequantized_blocks(folder: Path) -> dict[str, torch.Tensor]:
    found = quantized.by_module(quantized.stored(folder), "weight_scale_inv")
    return {
        f"{name}.weight": each["weight"].float() * wide(each["weight_scale_inv"], *each["weight"].shape)
        for name, each in found.items()
    }


WRITERS = [
    quantized.Writer("fp8", write_tensors, dequantized_tensors),
    quantized.Writer("fp8-blocks", write_blocks, dequantized_blocks, served=False),
]
