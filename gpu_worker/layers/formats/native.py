"""Float weights in the panels that quire's own CPU kernels read, as they are or made int8 or int4. The caller may drop
the tensor.
"""

from __future__ import annotations

import torch

from ...kernels.cpu.library import I4, I8
from ...kernels.cpu.linear import GROUP, PackedWeight, multiply, pack
from ...kernels.moe import Blocks
from .base import ExpertProducts, Run, Tensors, Weight
from .plain import Plain


class Native(Plain):
    """float32 and bfloat16. A row's product has the same bits in any batch, whatever the number of threads."""

    kind: int | None = None
    """How weights are kept: a type of ``kernels.cpu.library``; None: as they are."""

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        return NativeRun(pack(tensors["weight"], self.kind, weight.gated))

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        return NativeExperts([pack(matrix, self.kind, weight.gated) for matrix in tensors["weight"]])


class Int8(Native):
    """int8 with a scale for each output; activations become int8 with a scale for each row at each product."""

    kind = I8
    bits = 8.0


class Int4(Native):
    """int4 with a bfloat16 scale for each 128 inputs of an output; activations become int8 in the same groups."""

    kind = I4
    bits = 4 + 16 / GROUP


class NativeRun:
    """The product with one weight; ``packed`` is what a step program reads."""

    __slots__ = ("packed",)

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``bias`` is what the packed weight was given before (``Linear.bias``)."""
        return multiply(x, self.packed)


class NativeExperts:
    """A packed weight for each expert."""

    def __init__(self, packed: list[PackedWeight]) -> None:
        self.packed = packed

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        """``bias`` is what the packed weight was given before (``ExpertLinear.bias``)."""
        return multiply(x, self.packed[expert])

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        raise NotImplementedError("these weights are packed for a CPU")
