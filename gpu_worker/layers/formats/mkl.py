"""Float weights in the blocks that MKL's product reads, on a CPU. The caller may drop the tensor."""

from __future__ import annotations

import torch

from .base import Run, Tensors, Weight
from .onednn import PACK_ROWS
from .plain import Plain


class MKL(Plain):
    """float32 alone. Experts are multiplied as they are."""

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        matrix = tensors["weight"]
        packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix, PACK_ROWS)
        run = torch.ops.mkl._mkl_linear
        # The op reads the unpacked weight only when told another count of rows than x has; here it is told x's own.
        shape = torch.empty(1, dtype=matrix.dtype).expand(matrix.shape)
        return lambda x, bias: run(x, packed, shape, bias, x.shape[0])
