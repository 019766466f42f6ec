"""Products with a fixed weight, x @ weight.T + bias, beside the vendor's library: for few rows, and for equal bits.

**Few rows** (a decode step of up to 16). The time is that of reading the weight, so what counts is that all processors
read from the start to the end. The inner axis is cut into ``splits`` parts that different programs sum, and a second
kernel adds them up from the first part on, never in the order in which they are done. Where gate and up are one weight
the activation that joins them is computed on the sums, so that neither half is written and read again. (The residual is
not added here: the next norm's kernel adds it to what it reads anyway.) Which tiles are best, and whether they beat the
library, is measured on the card: ``layers/formats/measured.py``.

**Equal bits in any company** (``--batch-invariant``). Libraries choose another kernel, and so another order of sums,
for another number of rows. Here the tile, the cut of the inner axis and the order within follow from the weight's shape
and the card alone. A long prompt's programs walk through all parts one after the other and add them up as the second
kernel does, which saves memory and changes no bit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..batch import StepShape
from .activation import LIMIT, function, gated_activation_torch
from .card import Card, card_of

STEPS = (1, 4, 16)
"""Numbers of rows that are measured; each stands for those above the one before."""
FEW_ROWS = STEPS[-1]
APART_ROWS = 256
"""Up to so many rows different programs sum the parts. With more there are programs enough, and each sums all parts."""
_JOIN_BLOCK = 1024


@dataclass(frozen=True)
class ByRows:
    """What of products is chosen by the rows of a step, in any layer: as a ``batch.Chooser``."""

    def __call__(self, shape: StepShape) -> tuple[int]:
        return (bisect_left((*STEPS, APART_ROWS), shape.tokens),)


class Tiles(NamedTuple):
    """Shape of a launch: rows of x, rows of the weight and inner values of a tile; parts of the inner axis."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


def few_rows_tiles(width: int, inner: int, dtype: torch.dtype, activation: str, card: Card) -> list[Tiles]:
    """What is worth measuring for up to FEW_ROWS rows times a weight of ``width`` outputs."""
    found: dict[Tiles, None] = {}
    block_k = 128 if dtype.itemsize == 2 else 32
    for block_n in (32, 64):
        blocks = -(-width // block_n)
        for waves in (1, 2, 4):
            # Less than four tiles of a part are over before the pipeline is full.
            most = max(1, inner // (4 * block_k))
            splits = min(_power_below(max(1, waves * card.processors // blocks)), _power_below(most), 32)
            found[_fit(Tiles(16, block_n, block_k, splits, 4, 5), dtype, activation, card)] = None
    return list(found)


def invariant_tiles(width: int, inner: int, dtype: torch.dtype, card: Card) -> Tiles:
    """The tiles of a weight for any number of rows. 64 rows are what Hopper's widest instructions take."""
    half = dtype.itemsize == 2
    block_n, block_k = (128, 64) if half else (32, 32)
    blocks = -(-width // block_n)
    most = max(1, inner // (8 * block_k))
    splits = min(_power_below(max(1, 2 * card.processors // blocks)), _power_below(most), 16)
    return _fit(Tiles(64 if half else 32, block_n, block_k, splits, 4, 4), dtype, "", card)


def _fit(tiles: Tiles, dtype: torch.dtype, activation: str, card: Card) -> Tiles:
    """Fewer stages, then fewer inner values, until what is under way fits the card's shared memory."""
    row = tiles.block_m + tiles.block_n * (2 if activation else 1)
    while row * tiles.block_k * tiles.stages * dtype.itemsize > card.shared and tiles.block_k > 16:
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        else:
            tiles = tiles._replace(block_k=tiles.block_k // 2)
    return tiles


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles, activation: str = ""
) -> torch.Tensor:
    """x [T, in] -> x @ weight.T + bias [T, out], in x's dtype; sums are float32.

    Args:
        x, weight: [T, in] and [out, in], last axis contiguous, of one dtype.
        bias: [out], or None.
        activation: "", or a gated one that joins the first and the second half of the outputs: [T, out / 2].

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in ("", "swiglu_oai"):
        function(activation)
    from . import linear_jit

    if x.stride(1) != 1:
        x = x.contiguous()
    (tokens, inner), all_rows = x.shape, weight.shape[0]
    width = all_rows // 2 if activation else all_rows
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    splits = tiles.splits
    apart = splits > 1 and tokens <= APART_ROWS
    partial = torch.empty((splits, tokens, all_rows), dtype=torch.float32, device=x.device) if apart else out
    grid = -(-tokens // tiles.block_m) * -(-width // tiles.block_n), splits if apart else 1
    shift = out if bias is None else bias
    linear_jit.product_kernel[grid](
        x, x.stride(0), weight, weight.stride(0), shift, out, partial, tokens, width, inner, LIMIT,
        ACTIVATION=activation, HAS_BIAS=bias is not None and not apart, EVEN=inner % tiles.block_k == 0, SPLITS=splits,
        APART=apart, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        PRECISION=card_of(x.device).precision(x.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if apart:
        join(partial, bias, out, activation)
    return out


def join(partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, activation: str) -> None:
    """Add up ``partial`` [splits, T, rows] from the first part on, add ``bias``, and leave that in ``out`` [T, rows];
    with an ``activation``, its joined halves in ``out`` [T, rows / 2]."""
    from . import linear_jit

    tokens, width = out.shape
    linear_jit.join_kernel[(tokens, -(-width // _JOIN_BLOCK))](
        partial, out if bias is None else bias, out, tokens, width, LIMIT,
        ACTIVATION=activation, HAS_BIAS=bias is not None, SPLITS=len(partial), BLOCK=_JOIN_BLOCK, num_warps=4,
    )  # fmt: skip


def product_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles, activation: str = ""
) -> torch.Tensor:
    """The twin of ``product``."""
    y = x.float() @ weight.float().T
    y = y if bias is None else y + bias.float()
    return (gated_activation_torch(y, activation) if activation else y).to(x.dtype)


def _power_below(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)
