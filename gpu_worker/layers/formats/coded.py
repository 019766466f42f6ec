"""The base of quantized formats whose values are made of small codes: a format says which, and inherits its products.

``codes`` turns the tensors of a checkpoint into ``kernels.codes.Codes``; what multiplies them is chosen here, by the
device: quire's native kernels on a CPU, Triton's on a GPU, and where neither can, the float weight made at load.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.codes import Codes
from ...kernels.cpu.codes import PackedCodes, can_pack, pack_codes
from ...kernels.cpu.library import library
from . import int8_rows
from .base import ExpertProducts, Run, Stored, Tensors, Weight
from .cuda_coded import CudaCodedExperts, cuda_product
from .dense import Dequantized, dense
from .native import NativeExperts, NativeRun
from .table import CodedTable, Table


class Coded(Dequantized):
    """A format of codes."""

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        """The weight, or all experts', as codes. The caller may drop ``tensors`` then. Raises ConfigError for numbers
        that mean nothing (a group that is not there), with the tensor's name.
        """
        raise NotImplementedError

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        return self.codes(tensors, weight).values(weight.dtype)

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        return product_of(self.codes(tensors, weight), weight)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        if not weight.experts:  # a rank without any of the few there are
            return dense(weight).experts({"weight": torch.empty(0, *weight.shape, dtype=weight.dtype)}, weight)
        return experts_of(self.codes(tensors, weight), weight)


def product_of(codes: Codes, weight: Weight) -> Run:
    """The product with ``codes`` on the weight's device."""
    if int8_rows.takes(codes, weight):
        return int8_rows.linear(codes, weight)
    if _native(codes, weight):
        return NativeRun(pack_codes(codes, weight.gated))
    if weight.device.type == "cuda":
        return cuda_product(codes, weight.device)
    return dense(weight).linear({"weight": codes.values(weight.dtype)}, weight)


def experts_of(codes: Codes, weight: Weight) -> ExpertProducts:
    """``product_of`` for experts."""
    if int8_rows.takes(codes, weight):
        return int8_rows.experts(codes, weight)
    if _native(codes, weight):
        return NativeExperts([pack_codes(codes.expert(each), weight.gated) for each in range(weight.experts or 0)])
    if weight.device.type == "cuda":
        return CudaCodedExperts(codes)
    return dense(weight).experts({"weight": codes.values(weight.dtype)}, weight)


class Given(Coded):
    """A weight whose codes are there already."""

    def __init__(self, codes: Codes) -> None:
        self._given = codes

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        return ()

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        return self._given


def table_of(codes: Codes, weight: Weight, product: Run | None = None) -> Table:
    """``codes`` as a table of embeddings. ``product``: the one with the same codes, if there is one."""
    if _native(codes, weight):
        shared = product.packed if isinstance(product, NativeRun) else None
        return CodedTable(shared if isinstance(shared, PackedCodes) else pack_codes(codes), weight.dtype)
    if weight.device.type == "cpu" and library() is not None:  # a step's program reads floats, or what is packed
        return codes.values(weight.dtype)
    return CodedTable(codes, weight.dtype)


def _native(codes: Codes, weight: Weight) -> bool:
    """Whether quire's kernels for CPUs multiply ``codes``, in float32 whatever the model's dtype."""
    return weight.device.type == "cpu" and library() is not None and can_pack(codes)
