"""Products with a weight of codes (``codes.Codes``) on a GPU, which make values of codes in registers.

**Few rows** (a decode step). The time is that of reading the codes: the inner axis is cut into ``splits`` parts that
different programs sum, and ``linear``'s second kernel adds them up in one order, with the bias and the activation that
joins gate and up. **More rows** take larger tiles of the same kernel. **Many** (a prompt's): the values are made once,
a bounded piece of the weight at a time, and the vendor's library multiplies.

Sums are float32. Where all columns of a tile have one scale it multiplies the sum, and codes less their zeros, whole
numbers of up to 8 bits, are exact in x's type: less is rounded than with the weight's values in that type. Where a tile
has several scales its values are rounded to x's type, as ``Codes.values`` rounds them.

With ``--batch-invariant`` the tile, the parts and the order within follow from the weight's shape and the card alone,
and the library is not called.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import StepShape
from .activation import LIMIT, function, gated_activation_torch
from .card import Card, card_of
from .codes import Codes, PerGroup
from .linear import APART_ROWS, Tiles, join

STEPS = (16, 32, 256)
"""Up to so many rows take one tile each; what is beyond the last is multiplied by the library."""
LIBRARY_ROWS = STEPS[-1]
PIECE_BYTES = 1 << 27
"""Of the values that are made at a time for the library."""
_PIECE_ROWS = 64
"""A piece has a multiple of so many rows: what the library writes begins at an address that suits its fast kernels."""
_ALL = 1 << 30
"""As the columns of a group, or groups of a number: all there are."""
_VALUES_BLOCK = 32, 128


@dataclass(frozen=True)
class ByRows:
    """What of products with codes is chosen by the rows of a step, in any layer: as a ``batch.Chooser``."""

    def __call__(self, shape: StepShape) -> tuple[int]:
        return (bisect_left((*STEPS[:-1], min(APART_ROWS, LIBRARY_ROWS)), shape.tokens),)


@dataclass(frozen=True)
class Numbers:
    """``PerGroup`` as kernels read it: [groups, rows], so that the rows of a tile lie side by side."""

    base: torch.Tensor
    fine: torch.Tensor | None
    ratio: int

    @classmethod
    def of(cls, numbers: PerGroup, rows: int) -> Numbers:
        """Of a weight with ``rows``; of several experts' with a first dim of experts."""
        ratio = numbers.ratio if numbers.base.shape[-1] > 1 else _ALL
        fine = None if numbers.fine is None else _across(numbers.fine, rows)
        return cls(_across(numbers.base, rows), fine, ratio)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that a kernel takes; of what is not there another in its place."""
        return self.base, self.base if self.fine is None else self.fine


def _across(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., rows or 1, groups] -> [..., groups, rows]."""
    return (
        tensor.expand(*tensor.shape[:-2], rows, tensor.shape[-1])
        .transpose(-1, -2)
        .clone(memory_format=torch.contiguous_format)
    )


@dataclass(frozen=True)
class Held:
    """Codes as kernels read them. The planes are those of ``Codes``, of 8 bits as bytes.

    Attributes:
        rows, columns: of the weight, or of one expert's.
        padded: columns of the planes.
        zero: what is taken off every code; -1: ``zeros``, uint8 [groups, rows], has it.
        zero_ratio: groups that share an entry of ``zeros``.
        kind: what codes stand for: "whole" numbers, "e4m3", "e2m1", or entries of a "table" or of each row's "tables".
        experts: how many weights of this shape there are; 0: one, without a first dim.
    """

    planes: tuple[torch.Tensor, ...]
    bits: int
    rows: int
    columns: int
    padded: int
    group: int
    groups: int
    scales: Numbers
    zero: int
    zeros: torch.Tensor | None
    zero_ratio: int
    mins: Numbers | None
    kind: str
    table: torch.Tensor | None
    order: torch.Tensor | None
    experts: int

    @classmethod
    def of(cls, codes: Codes) -> Held:
        """The same weight. The caller may drop ``codes``."""
        several = [codes.scales] if codes.mins is None else [codes.scales, codes.mins]
        groups = max(map(_groups, several))
        zero, zeros, zero_ratio = -1, None, 1
        if isinstance(codes.zeros, int):
            zero = codes.zeros
        else:
            groups = max(groups, codes.zeros.shape[-1])
            zeros, zero_ratio = _across(codes.zeros, codes.rows), 1 if codes.zeros.shape[-1] > 1 else _ALL
        planes = codes.planes
        if codes.bits == 8:
            planes = (planes[0].contiguous().view(torch.int8 if codes.signed else torch.uint8),)
        experts = len(planes[0]) if planes[0].dim() == 3 else 0
        kind = codes.floats or "whole"
        if codes.table is not None and not codes.floats:
            # Of experts a table with more dims than one has a first one of them.
            kind = "table" if codes.table.dim() == 1 or (experts and codes.table.dim() == 2) else "tables"
        return cls(
            planes, codes.bits, codes.rows, codes.columns, codes.planes[0].shape[-1] * 32 // _first_width(codes.bits),
            codes.group if groups > 1 else _ALL, groups, Numbers.of(codes.scales, codes.rows), zero, zeros, zero_ratio,
            None if codes.mins is None else Numbers.of(codes.mins, codes.rows), kind, codes.table,
            codes.order, experts,
        )  # fmt: skip

    def sub(self, block_k: int) -> int:
        """Groups of a tile of ``block_k`` columns; 0: they do not begin where tiles do."""
        if self.group % block_k == 0:
            return 1
        return block_k // self.group if block_k % self.group == 0 else 0

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What kernels take: the order, three planes, scales, zeros, mins, the table; where there is none, another."""
        order = self.planes[0] if self.order is None else self.order
        planes = (*self.planes, self.planes[0], self.planes[0])[:3]
        zeros = self.planes[0] if self.zeros is None else self.zeros
        mins = self.scales if self.mins is None else self.mins
        table = self.scales.base if self.table is None else self.table
        return order, *planes, *self.scales.arguments, zeros, *mins.arguments, table

    def steps(self) -> tuple[int, ...]:
        """From one expert's values to the next one's, of each of ``tensors``; 0: one for all."""
        shared = [self.order is None or self.order.dim() == 1, *[False] * 8]
        shared.append(self.table is not None and self.table.dim() == 1)
        return tuple(
            0 if alike else tensor.stride(0) for alike, tensor in zip(shared, self.tensors(), strict=True)
        )  # fmt: skip

    def constants(self, block_k: int) -> dict[str, Any]:
        """What kernels are compiled for."""
        mins = self.scales if self.mins is None else self.mins
        return {
            "ORDERED": self.order is not None, "BITS": self.bits, "KIND": self.kind, "ZERO": self.zero,
            "ZERO_RATIO": self.zero_ratio, "GROUP": self.group, "SUB": self.sub(block_k), "RATIO": self.scales.ratio,
            "FINE": self.scales.fine is not None, "MINS": self.mins is not None, "MIN_RATIO": mins.ratio,
            "MIN_FINE": mins.fine is not None,
        }  # fmt: skip

    def sums(self, block_k: int) -> dict[str, Any]:
        """``constants``, and those of products alone."""
        even = self.order is None and self.columns == self.padded and self.padded % block_k == 0
        last = self.groups == 1 and self.mins is None
        return {**self.constants(block_k), "EVEN": even, "LAST": last}


def _first_width(bits: int) -> int:
    return next(width for width in (8, 4, 2) if bits & width)


def _groups(numbers: PerGroup) -> int:
    return numbers.base.shape[-1] * numbers.ratio if numbers.fine is None else numbers.fine.shape[-1]


def tiles_of(held: Held, tokens: int, dtype: torch.dtype, card: Card, activation: str = "") -> Tiles:
    """The tiles of ``tokens`` rows of x, at most LIBRARY_ROWS; equal for all numbers between two of STEPS."""
    few = tokens <= STEPS[1]
    block_m = 16 if tokens <= STEPS[0] else 32 if few else 64
    tiles = suited(Tiles(block_m, 64, 128 if few else 64, 1, 4, 1), held, dtype, card, activation)
    return fitting_splits(tiles, held, card, activation, waves=4 if few else 2)


def invariant_tiles(held: Held, dtype: torch.dtype, card: Card, activation: str = "") -> Tiles:
    """The tiles of a weight for any number of rows."""
    tiles = suited(Tiles(64, 64, 64, 1, 4, 1), held, dtype, card, activation)
    return fitting_splits(tiles, held, card, activation, waves=2)


def suited(tiles: Tiles, held: Held, dtype: torch.dtype, card: Card, activation: str) -> Tiles:
    """``tiles`` with as many columns as suit the weight's groups and x's type, and the stages that fit the card."""
    block_k = tiles.block_k
    if dtype.itemsize == 4:
        block_k, tiles = 32, tiles._replace(block_m=min(tiles.block_m, 32), block_n=32)
    elif held.kind in ("table", "tables"):  # which are read for each value, by an address of its own
        block_k = 32
    # Tiles of one group each multiply by a scale once. Of groups shorter than 32 several share a tile.
    while block_k > 32 and held.group % block_k and held.group >= 32:
        block_k //= 2
    # A tile of fewer columns is over sooner, so more of them are under way.
    return _fit(tiles._replace(block_k=block_k, stages={128: 3, 64: 4, 32: 5}[block_k]), held, dtype, activation, card)


def fitting_splits(tiles: Tiles, held: Held, card: Card, activation: str, waves: int) -> Tiles:
    """With the parts of the inner axis that give all processors ``waves`` programs."""
    blocks = -(-held.rows // (tiles.block_n * (2 if activation else 1)))
    # Less than four tiles of a part are over before the pipeline is full.
    most = max(1, held.padded // (4 * tiles.block_k))
    return tiles._replace(
        splits=min(_power_below(max(1, waves * card.processors // blocks)), _power_below(most), 16)
    )  # fmt: skip


def _fit(tiles: Tiles, held: Held, dtype: torch.dtype, activation: str, card: Card) -> Tiles:
    """Fewer stages until what is under way fits the card's shared memory, beside the tile that is multiplied."""
    codes = -(-held.bits * tiles.block_n * tiles.block_k // 8) * (2 if activation else 1)
    stage = tiles.block_m * tiles.block_k * dtype.itemsize + codes
    beside = tiles.block_n * tiles.block_k * 4
    while tiles.stages > 1 and beside + stage * tiles.stages > card.shared:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def product(
    x: torch.Tensor, held: Held, bias: torch.Tensor | None, tiles: Tiles, activation: str = ""
) -> torch.Tensor:  # fmt: skip
    """x [T, in] -> x @ weight.T + bias [T, out], in x's dtype; sums are float32.

    Args:
        x: [T, in], last axis contiguous; float16, bfloat16 or float32.
        bias: [out], or None.
        activation: "", or a gated one that joins the first and the second half of the outputs: [T, out / 2].

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in ("", "swiglu_oai"):
        function(activation)
    from . import coded_jit

    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, rows = len(x), held.rows
    width = rows // 2 if activation else rows
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    splits = tiles.splits
    apart = splits > 1 and tokens <= APART_ROWS
    partial = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device) if apart else out
    grid = -(-tokens // tiles.block_m) * -(-width // tiles.block_n), splits if apart else 1
    shift = out if bias is None else bias
    coded_jit.coded_kernel[grid](
        x, x.stride(0), *held.tensors(), shift, out, partial, tokens, width, rows, held.columns, held.padded,
        held.groups, LIMIT, ACTIVATION=activation, HAS_BIAS=bias is not None and not apart, SPLITS=splits, APART=apart,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, **held.sums(tiles.block_k),
        PRECISION=card_of(x.device).precision(x.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if apart:
        join(partial, bias, out, activation)
    return out


def product_torch(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, activation: str = ""
) -> torch.Tensor:  # fmt: skip
    """The twin of ``product``, with the values in float32."""
    y = x.float() @ codes.values().T
    y = y if bias is None else y + bias.float()
    return (gated_activation_torch(y, activation) if activation else y).to(x.dtype)


def values(held: Held, dtype: torch.dtype, first: int = 0, stop: int | None = None) -> torch.Tensor:
    """Rows ``first`` to ``stop`` of the weight, [stop - first, columns], as ``Codes.values`` makes them."""
    from . import coded_jit

    stop = held.rows if stop is None else stop
    out = torch.empty((stop - first, held.columns), dtype=dtype, device=held.planes[0].device)
    block_n, block_k = _VALUES_BLOCK
    coded_jit.values_kernel[(-(-(stop - first) // block_n), -(-held.padded // block_k))](
        *held.tensors(), out, first, stop, held.rows, held.columns, held.padded, held.groups,
        **held.constants(block_k), BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


def library_product(x: torch.Tensor, held: Held, bias: torch.Tensor | None) -> torch.Tensor:
    """``product`` of many rows, by the vendor's library: with values that are made a piece of the weight at a time."""
    step = PIECE_BYTES // max(1, held.columns * x.element_size())
    step = max(_PIECE_ROWS, step // _PIECE_ROWS * _PIECE_ROWS)
    if step >= held.rows:
        return torch.nn.functional.linear(x, values(held, x.dtype), bias)
    out = torch.empty((len(x), held.rows), dtype=x.dtype, device=x.device)
    for first in range(0, held.rows, step):
        stop = min(held.rows, first + step)
        torch.mm(x, values(held, x.dtype, first, stop).T, out=out[:, first:stop])
    return out if bias is None else out.add_(bias)


def _power_below(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)
