"""Float weights as they are: one tensor [out, in]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...kernels.moe import Blocks, grouped_product
from .base import ExpertProducts, Run, Stored, Tensors, Weight


class Plain:
    """Torch's own product; on a GPU that is the vendor's library."""

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return (Stored("weight"),)

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        return tensors["weight"]

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        matrix = tensors["weight"]
        return lambda x, bias: F.linear(x, matrix, bias)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        return PlainExperts(tensors["weight"])


class PlainExperts:
    """Experts' weights in one tensor [E, out, in]."""

    def __init__(self, matrices: torch.Tensor) -> None:
        self.matrices = matrices

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return F.linear(x, self.matrices[expert], bias)

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return grouped_product(x, self.matrices, bias, blocks, activation, weights)
