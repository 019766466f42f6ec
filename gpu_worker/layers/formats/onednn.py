"""Float weights in the blocks that oneDNN's product reads, on a CPU. The caller may drop the tensor."""

from __future__ import annotations

import torch

from .base import ExpertProducts, Run, Tensors, Weight
from .plain import Plain, PlainExperts

# Rows that a packed weight is laid out for; one layout serves every count of rows (measured 1 to 2048).
PACK_ROWS = 32


class OneDNN(Plain):
    """float32 and bfloat16."""

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        packed = torch.ops.mkldnn._reorder_linear_weight(tensors["weight"], PACK_ROWS)
        run = torch.ops.mkldnn._linear_pointwise
        return lambda x, bias: run(x, packed, bias, "none", [], "")

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        return _Experts(tensors["weight"])


class _Experts(PlainExperts):
    """Not packed, as the experts are in one tensor that stays."""

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.matrices[expert], bias, "none", [], "")
