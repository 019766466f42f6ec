"""A format of codes whose tensors are those of ``Codes``: for tests of what multiplies them, whatever file has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.gpu_worker.kernels.codes import Activations, Codes, PerGroup
from quire.gpu_worker.layers.formats.base import Axis, Stored, Tensors, Weight
from quire.gpu_worker.layers.formats.coded import Coded
from quire.gpu_worker.layers.formats.registry import Quantization, register

CONFIG = {"quant_method": "toy_codes", "group_size": 32}
BYTES = {"quant_method": "toy_codes"}
KEPT = ("lm_head", "embed_tokens", "gate", "router")


@dataclass(frozen=True)
class ToyCodes(Coded):
    """Codes of 4 bits, and a float16 scale and a zero for each group."""

    group: int

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        groups = Axis(self.group)
        return (
            Stored("codes", Axis(), Axis(8), torch.int32), Stored("scales", Axis(), groups, torch.float16),
            Stored("zeros", Axis(), groups, torch.uint8),
        )  # fmt: skip

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        scales = PerGroup(tensors["scales"])
        return Codes((tensors["codes"],), 4, weight.shape[1], self.group, scales, tensors["zeros"])


@dataclass(frozen=True)
class ToyBytes(Coded):
    """int8 with a float32 scale for each row, multiplied with int8 rows."""

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return Stored("codes", Axis(), Axis(4), torch.int32), Stored("scales", columns=None, dtype=torch.float32)

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        columns, scales = weight.shape[1], PerGroup(tensors["scales"][..., None])
        rows = Activations("int8")
        return Codes((tensors["codes"],), 8, columns, columns, scales, signed=True, activations=rows)


@register("toy_codes")
def toy_codes(config: Mapping[str, Any]) -> Quantization:
    """``group_size`` columns have a scale; without it rows do, of int8."""
    kept, format = set(KEPT), ToyCodes(config["group_size"]) if "group_size" in config else ToyBytes()
    return Quantization(lambda module: None if kept & set(module.split(".")) else format)
