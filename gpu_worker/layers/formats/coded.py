"""The base of quantized formats whose values are made of small codes: a format says which, and inherits its products.

``codes`` turns the tensors of a checkpoint into ``kernels.codes.Codes``; what multiplies them is chosen here, by the
device: quire's native kernels on a CPU, Triton's on a GPU, and where neither can, the float weight made at load.
"""

from __future__ import annotations

import torch

from ...kernels.codes import Codes
from . import int8_rows
from .base import ExpertProducts, Run, Tensors, Weight
from .dense import Dequantized, dense


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
        return experts_of(self.codes(tensors, weight), weight)


def product_of(codes: Codes, weight: Weight) -> Run:
    """The product with ``codes`` on the weight's device."""
    if int8_rows.takes(codes, weight):
        return int8_rows.linear(codes, weight)
    return dense(weight).linear({"weight": codes.values(weight.dtype)}, weight)


def experts_of(codes: Codes, weight: Weight) -> ExpertProducts:
    """``product_of`` for experts."""
    if int8_rows.takes(codes, weight):
        return int8_rows.experts(codes, weight)
    return dense(weight).experts({"weight": codes.values(weight.dtype)}, weight)
