"""Weights of codes on a GPU: for up to some hundred rows values are made in registers, for more a piece at a time for
the vendor's library; or, where bits must not depend on a row's company, by one tile for any number of rows."""

from __future__ import annotations

import torch

from ...batch import Chooser
from ...kernels import w8a8
from ...kernels.activation import gated_activation
from ...kernels.card import card_of
from ...kernels.coded import LIBRARY_ROWS, ByRows, Held, invariant_tiles, library_product, product, tiles_of
from ...kernels.coded_experts import grouped_product
from ...kernels.codes import Codes
from ...kernels.company import batch_invariant
from ...kernels.moe import Blocks
from ...kernels.w8a8 import HeldNarrow
from .base import Run

CHOOSERS: frozenset[Chooser] = frozenset({ByRows()})
"""What products with codes choose by the shape of a step, as ``Model.choosers``."""


class CudaCoded:
    """x [T, in] -> [T, out] with a weight of codes; with ``activation``, a gated one: [T, out / 2], joined halves."""

    __slots__ = ("_activation", "_held", "_invariant")

    def __init__(self, held: Held, activation: str = "") -> None:
        self._held, self._activation = held, activation
        self._invariant = batch_invariant()

    @property
    def held(self) -> Held:
        """The weight as kernels read it."""
        return self._held

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        held, activation = self._held, self._activation
        if not self._invariant and len(x) > LIBRARY_ROWS:
            y = library_product(x, held, bias)
            return gated_activation(y, activation) if activation else y
        card = card_of(x.device)
        if self._invariant:
            tiles = invariant_tiles(held, x.dtype, card, activation)
        else:
            tiles = tiles_of(held, len(x), x.dtype, card, activation)
        return product(x, held, bias, tiles, activation)

    def joined(self, activation: str) -> Run:
        """The same with the outputs' halves joined by a gated activation."""
        return CudaCoded(self._held, activation)


class CudaNarrow(CudaCoded):
    """As ``CudaCoded``, by rows that are made as narrow as the weight's bytes."""

    __slots__ = ("_weight",)

    def __init__(self, weight: HeldNarrow, activation: str = "") -> None:
        super().__init__(weight.held, activation)
        self._weight = weight

    @property
    def kind(self) -> str:
        """What the rows become: "int8" or "fp8"."""
        return self._weight.rows.kind

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        card = card_of(x.device)
        if self._invariant:
            tiles = w8a8.invariant_tiles(self._weight, card, self._activation)
        else:
            tiles = w8a8.tiles_of(self._weight, len(x), card, self._activation)
        return w8a8.product(x, self._weight, bias, tiles, self._activation)

    def joined(self, activation: str) -> Run:
        """The same with the outputs' halves joined by a gated activation."""
        return CudaNarrow(self._weight, activation)


def cuda_product(codes: Codes, device: torch.device) -> CudaCoded | CudaNarrow:
    """The product with ``codes`` on the card ``device``."""
    if w8a8.takes(codes, card_of(device)):
        return CudaNarrow(HeldNarrow.of(codes))
    return CudaCoded(Held.of(codes))


class CudaCodedExperts:
    """Experts' weights of codes."""

    def __init__(self, codes: Codes) -> None:
        self.held = Held.of(codes)

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        raise NotImplementedError("these weights are multiplied together, on a GPU")

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return grouped_product(x, self.held, bias, blocks, activation, weights)
