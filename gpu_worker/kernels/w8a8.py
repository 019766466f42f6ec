"""Products of narrow rows with a narrow weight on a GPU ("W8A8"): int8 with int8, sums int32; fp8 (e4m3) with fp8.

A first kernel makes each row of x narrow, as ``codes.Activations`` says: with a scale of the row, of each group of its
columns, or of the file. The second multiplies bytes on the card's matrix units and applies both sides' scales to the
sums. Few rows have parts of the inner axis that ``linear``'s second kernel adds up, as in ``coded``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .activation import LIMIT, function
from .card import Card
from .coded import STEPS, Held, fitting_splits
from .codes import Activations, Codes
from .linear import APART_ROWS, Tiles, join

BLOCK = 128
"""Columns of a tile; groups that have scales of their own are as long."""
_NARROW_BLOCK = 1024


@dataclass(frozen=True)
class HeldNarrow:
    """A weight of bytes, and how rows that it multiplies are made narrow.

    ``sums``: float32 [rows], of each output's codes, where rows have zeros; None elsewhere.
    """

    held: Held
    rows: Activations
    sums: torch.Tensor | None

    @classmethod
    def of(cls, codes: Codes) -> HeldNarrow:
        """``codes`` that ``takes`` takes."""
        rows = codes.activations
        if rows is None:
            raise ValueError("these codes are multiplied with rows as they are")
        held, sums = Held.of(codes), None
        if rows.zero is not None or not rows.symmetric:
            sums = codes.codes()[:, : codes.columns].sum(1, dtype=torch.int32).float()
        return cls(replace(held, planes=(held.planes[0].view(torch.int8),)), rows, sums)

    @property
    def grouped(self) -> bool:
        """Whether columns have scales of groups."""
        return self.rows.group > 0


def takes(codes: Codes, card: Card) -> bool:
    """Whether ``card`` multiplies ``codes`` with rows as narrow as their file says. Elsewhere rows stay as they are."""
    rows, one_group = codes.activations, codes.group >= codes.columns
    if rows is None or codes.bits != 8 or codes.planes[0].dim() == 3 or codes.scales.fine is not None:
        return False
    if codes.order is not None or codes.mins is not None or not isinstance(codes.zeros, int) or codes.zeros != 0:
        return False
    alike = one_group if not rows.group else rows.group == codes.group == BLOCK and codes.scales.ratio == 1
    if not alike or (rows.group and (rows.scale is not None or not rows.symmetric)):
        return False
    if rows.kind == "int8":
        return codes.signed and codes.table is None and (card.backend != "cuda" or int(card.arch) >= 80)
    # AMD's fp8 of gfx942 has another bias; what has none of its own is made of bits, with rows as they are.
    return codes.floats == "e4m3" and card.backend in ("", "cuda") and (not card.backend or int(card.arch) >= 89)


def tiles_of(weight: HeldNarrow, tokens: int, card: Card, activation: str = "") -> Tiles:
    """The tiles of ``tokens`` rows; equal for all numbers between two of STEPS."""
    few = tokens <= STEPS[1]
    block_m = 16 if tokens <= STEPS[0] else 32 if few else 64 if tokens <= STEPS[2] else 128
    # Sums of a group are added to those of the groups before, and take as many registers again.
    block_n = 128 if block_m == 128 and not activation and not weight.grouped else 64
    tiles = Tiles(block_m, block_n, BLOCK, 1, 8 if block_m == 128 else 4, 4 if few else 3)
    tiles = _fit(tiles, activation, card)
    if tokens > APART_ROWS:
        return tiles
    return fitting_splits(tiles, weight.held, card, activation, waves=4 if few else 2)


def invariant_tiles(weight: HeldNarrow, card: Card, activation: str = "") -> Tiles:
    """The tiles of a weight for any number of rows."""
    tiles = _fit(Tiles(64, 64, BLOCK, 1, 4, 3), activation, card)
    return fitting_splits(tiles, weight.held, card, activation, waves=2)


def _fit(tiles: Tiles, activation: str, card: Card) -> Tiles:
    """Fewer stages until what is under way fits the card's shared memory."""
    row = tiles.block_m + tiles.block_n * (2 if activation else 1)
    while row * tiles.block_k * tiles.stages > card.shared and tiles.stages > 2:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def narrowed(x: torch.Tensor, rows: Activations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [T, in] as ``Activations.narrowed`` makes it: int8 [T, in], or e4m3's bytes, float32 scales [T, groups], and
    zeros [T] or None."""
    from . import w8a8_jit

    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, columns = x.shape
    group = rows.group or columns
    groups = -(-columns // group)
    q = torch.empty((tokens, columns), dtype=torch.int8, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    dynamic = rows.scale is None
    has_zeros = not rows.symmetric if dynamic else rows.zero is not None
    zeros = torch.empty(tokens, dtype=torch.float32, device=x.device) if has_zeros else None
    if tokens:
        given = scales if rows.scale is None else rows.scale
        w8a8_jit.narrow_kernel[(tokens, groups)](
            x, x.stride(0), given, given if rows.zero is None else rows.zero, q, scales,
            scales if zeros is None else zeros, columns, groups, KIND=rows.kind, STATIC=not dynamic,
            ZERO=rows.zero is not None, ZEROS=has_zeros, GROUP=group, BLOCK=min(_NARROW_BLOCK, _power_from(group)),
            num_warps=4 if group > BLOCK else 1,
        )  # fmt: skip
    return q, scales, zeros


def product(
    x: torch.Tensor, weight: HeldNarrow, bias: torch.Tensor | None, tiles: Tiles, activation: str = ""
) -> torch.Tensor:  # fmt: skip
    """``coded.product`` with rows that are made narrow first: the same arguments, result and errors."""
    if activation not in ("", "swiglu_oai"):
        function(activation)
    from . import w8a8_jit

    held, tokens = weight.held, len(x)
    width = held.rows // 2 if activation else held.rows
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    q, scales, zeros = narrowed(x, weight.rows)
    splits = tiles.splits
    apart = splits > 1 and tokens <= APART_ROWS
    partial = torch.empty((splits, tokens, held.rows), dtype=torch.float32, device=x.device) if apart else out
    shift = out if bias is None else bias
    grid = -(-tokens // tiles.block_m) * -(-width // tiles.block_n), splits if apart else 1
    w8a8_jit.rows_kernel[grid](
        q, scales, scales if zeros is None else zeros, held.planes[0], held.scales.base,
        scales if weight.sums is None else weight.sums, shift, out, partial, tokens, width, held.rows, held.columns,
        held.padded, scales.shape[1], LIMIT, KIND=weight.rows.kind, ACTIVATION=activation,
        HAS_BIAS=bias is not None and not apart, ZEROS=zeros is not None, GROUPED=weight.grouped, SPLITS=splits,
        APART=apart, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if apart:
        join(partial, bias, out, activation)
    return out


def _power_from(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
