"""Float weights on a GPU: for few rows what was measured to be fastest, else the vendor's library; or, where bits must
not depend on a row's company, one Triton product for any number of rows."""

from __future__ import annotations

import torch

from ...kernels.card import card_of
from ...kernels.company import batch_invariant
from ...kernels.linear import FEW_ROWS, invariant_tiles, product
from .base import Run, Tensors, Weight
from .measured import Table, library, table_of
from .plain import Plain


class Cuda(Plain):
    """One tensor [out, in], as ``Plain``'s."""

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        matrix = tensors["weight"]
        if batch_invariant():
            return InvariantProduct(matrix)
        # Tensor ranks measure each for itself. A router rounded in two ways would choose two experts for one token.
        return MeasuredProduct(matrix, table_of(matrix.device), unmeasured=weight.gated or weight.chooses)


CUDA = Cuda()


class InvariantProduct:
    """x [T, in] -> [T, out], each row with the same bits for any T."""

    __slots__ = ("_matrix", "_tiles")

    def __init__(self, matrix: torch.Tensor) -> None:
        width, inner = matrix.shape
        self._matrix = matrix
        self._tiles = invariant_tiles(width, inner, matrix.dtype, card_of(matrix.device))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, self._matrix, bias, self._tiles)


class MeasuredProduct:
    """x [T, in] -> [T, out] by what ``table`` found for T rows.

    With ``activation``, a gated one: [T, out / 2], the halves joined by it. ``unmeasured``: by the library for any T,
    as where there will be one, and the product without it is not worth measuring.
    """

    __slots__ = ("_activation", "_few", "_matrix", "_table")

    def __init__(self, matrix: torch.Tensor, table: Table, activation: str = "", unmeasured: bool = False) -> None:
        self._matrix, self._table, self._activation = matrix, table, activation
        self._few = [None] * FEW_ROWS if unmeasured else table.few_rows(matrix, activation)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = len(x)
        tiles = self._few[rows - 1] if 0 < rows <= FEW_ROWS else None
        if tiles is None:
            return library(x, self._matrix, bias, self._activation)
        return product(x, self._matrix, bias, tiles, self._activation)

    def joined(self, activation: str) -> Run:
        """The same with the outputs' halves joined by a gated activation."""
        return MeasuredProduct(self._matrix, self._table, activation)
