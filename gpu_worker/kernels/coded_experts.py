"""Experts whose weights are codes, on a GPU: ``moe.grouped_product`` with values that are made in registers.

What multiplies is ``coded``'s, and blocks of slots are ``moe``'s; read both first.
"""

from __future__ import annotations

import torch

from .activation import LIMIT, function
from .card import Card, card_of
from .coded import Held, suited
from .linear import Tiles
from .moe import Blocks


def grouped_tiles(held: Held, rows: int, dtype: torch.dtype, card: Card, activation: str = "") -> Tiles:
    """The tiles of a product in blocks of ``rows``; ``splits`` is 1."""
    tiles = Tiles(rows, 64, 128 if rows < 64 else 64, 1, 8 if rows == 128 else 4, 1)
    return suited(tiles, held, dtype, card, activation)._replace(block_m=rows)


def grouped_product(
    x: torch.Tensor,
    held: Held,
    bias: torch.Tensor | None,
    blocks: Blocks,
    activation: str = "",
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``moe.grouped_product`` with the experts of ``held``: the same arguments, result and errors."""
    if activation not in ("", "swiglu_oai"):
        function(activation)
    from . import coded_jit

    card = card_of(x.device)
    width = held.rows // (2 if activation else 1)
    tiles = grouped_tiles(held, blocks.slots.shape[1], x.dtype, card, activation)
    out = torch.empty((blocks.total, width), dtype=x.dtype, device=x.device)
    coded_jit.coded_grouped_kernel[(len(blocks.slots), -(-width // tiles.block_n))](
        x, x.stride(0), *held.tensors(), *held.steps(), out if bias is None else bias,
        out if weights is None else weights, out, blocks.slots, blocks.experts, blocks.total, held.experts, width,
        held.rows, held.columns, held.padded, held.groups, LIMIT, PER_ROW=blocks.total // len(x),
        ACTIVATION=activation, HAS_BIAS=bias is not None, WEIGHTED=weights is not None, **held.sums(tiles.block_k),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, PRECISION=card.precision(x.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
