"""A format that no package writes, to test the harness by: int8 codes with a float16 scale for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantized
import torch

from quire.gpu_worker.kernels.codes import Codes, PerGroup, pack
from quire.gpu_worker.layers.formats.base import Axis, Stored, Tensors, Weight
from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.registry import Quantization, register


@dataclass(frozen=True)
class Toy(Coded):
    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return Stored("codes", dtype=torch.int8), Stored("scales", columns=Axis(0), dtype=torch.float16)

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        columns = weight.shape[1]
        return Codes(pack(tensors["codes"], 8), 8, columns, columns, PerGroup(tensors["scales"]), signed=True)


@register("toy_rows")
def toy(config: Mapping[str, Any]) -> Quantization:
    kept = config["kept"]
    return Quantization(lambda module: None if set(kept) & set(module.split(".")) else Toy())


def quantize(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).half()
    return {"codes": (weight / scales).round().clamp(-127, 127).to(torch.int8), "scales": scales}


def write(source: Path, out: Path) -> None:
    quantized.rewritten(source, out, quantize, {"quant_method": "toy_rows", "kept": quantized.KEPT})


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    found = quantized.by_module(quantized.stored(folder), "codes")
    return {f"{name}.weight": each["codes"].float() * each["scales"].float() for name, each in found.items()}


WRITERS = [quantized.Writer("toy", write, dequantized, served=False)]
