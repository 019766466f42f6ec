"""int8 weights times rows that become int8 too ("W8A8"), on a CPU: sums are whole numbers, and exact.

    y = scale of the row * scale of the output * (q . w - zero of the row * sum of w)

Where each row's scale is its own and has no zero, quire's native kernels multiply, as for ``--quantization int8``, here
with the file's numbers. All else is torch's product of int8 matrices.
"""

from __future__ import annotations

import torch

from ...kernels.codes import Activations, Codes
from ...kernels.cpu.library import library
from ...kernels.cpu.linear import PackedWeight, pack_int8
from ...kernels.moe import Blocks
from .base import ExpertProducts, Run, Weight
from .native import NativeExperts, NativeRun


def takes(codes: Codes, weight: Weight) -> bool:
    """Whether ``linear`` and ``experts`` multiply ``codes``: int8 by one scale an output, on a CPU, by int8 rows."""
    rows = codes.activations
    plain = isinstance(codes.zeros, int) and codes.zeros == 0 and codes.table is codes.mins is codes.order is None
    one_group = codes.group >= codes.columns and codes.scales.fine is None
    int8 = rows is not None and rows.kind == "int8" and not rows.group
    return weight.device.type == "cpu" and codes.bits == 8 and codes.signed and plain and one_group and int8


def linear(codes: Codes, weight: Weight) -> Run:
    """The product with ``codes``."""
    return NativeRun(_packed(codes, weight)) if _native(codes) else Int8Run(codes)


def experts(codes: Codes, weight: Weight) -> ExpertProducts:
    """``linear`` for experts."""
    each = [codes.expert(expert) for expert in range(weight.experts or 0)]
    if _native(codes):
        return NativeExperts([_packed(one, weight) for one in each])
    return Int8Experts([Int8Run(one) for one in each])


def _native(codes: Codes) -> bool:
    rows = codes.activations
    return library() is not None and rows is not None and rows.scale is None and rows.symmetric


def _packed(codes: Codes, weight: Weight) -> PackedWeight:
    scales = codes.scales.values()[..., 0].expand(codes.rows)
    return pack_int8(codes.codes()[:, : codes.columns], scales, weight.gated)


class Int8Run:
    """The product with one weight, of [out, in], by torch."""

    __slots__ = ("_rows", "_scales", "_sums", "_weight")

    def __init__(self, codes: Codes) -> None:
        self._rows: Activations = codes.activations or Activations("int8")
        self._weight = codes.codes()[:, : codes.columns].contiguous()
        self._scales = codes.scales.values()[..., 0]
        self._sums = self._weight.sum(1, dtype=torch.int32)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, scales, zeros = self._rows.narrowed(x.float())
        sums = torch._int_mm(q.to(torch.int8), self._weight.t()).float()
        if zeros is not None:
            sums -= zeros[..., :1] * self._sums
        y = sums * scales[..., :1] * self._scales
        y += q.mul_(0).sum(1, keepdim=True)  # of a row with NaN, which int8 does not have, NaN
        return (y if bias is None else y + bias).to(x.dtype)


class Int8Experts:
    """An ``Int8Run`` for each expert."""

    def __init__(self, runs: list[Int8Run]) -> None:
        self._runs = runs

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return self._runs[expert](x, bias)

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        raise NotImplementedError("these weights are for a CPU")
