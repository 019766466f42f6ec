"""Mixture of experts on a GPU: each token through the experts it chose, one launch a product for all of them.

A *slot* is one choice of one token: number token * k + choice. ``align`` sorts the slots by expert and gives each
expert whole blocks of rows, so that a program multiplies its block by one expert's weight. How many blocks there are
follows from the shapes alone, as an upper bound: nothing is read back by the host, and a CUDA graph captures it all.
Results stay at their slots, so the sum over a token's slots has one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..batch import StepShape
from .activation import LIMIT, function, gated_activation_torch
from .card import Card, card_of
from .company import batch_invariant

_SUM_BLOCK = 1024


class Blocks(NamedTuple):
    """Slots in blocks, each of one expert."""

    slots: torch.Tensor
    """int32 [blocks, rows]; ``total`` in an empty place."""
    experts: torch.Tensor
    """int32 [blocks], which of the local experts; their number where a block is without work."""
    total: int
    """The number of slots, T * k."""


def block_rows(slots: int, dtype: torch.dtype) -> int:
    """Rows of a block where an expert has ``slots`` slots on average. Of few sizes, as each is compiled.

    Where bits must not depend on a row's company there is one: a product of other rows has other instructions.
    """
    if slots <= 16 and not batch_invariant():
        return 16
    # float32 products take three passes and more registers.
    return 32 if dtype.itemsize == 4 else 64 if slots <= 64 or batch_invariant() else 128


class Tiles(NamedTuple):
    """Shape of a product's launch, beside the rows of its blocks: rows of the weight and inner values of a tile."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def product_tiles(rows: int, dtype: torch.dtype, gated: bool, card: Card) -> Tiles:
    """The tiles of a product in blocks of ``rows``, with as many stages as fit the card's shared memory.

    Of few rows, with as many as leave room for a second program, which reads while the first begins or ends: such
    loops are short. One stage less is in memory than there are (``tests/gpu_worker/compiled`` has the bytes).
    """
    block_n, block_k, stages = 64, 64 if dtype.itemsize == 2 else 32, 4 if rows < 64 else 3
    stage = (rows + block_n * (2 if gated else 1)) * block_k * dtype.itemsize
    most = 1 + card.shared_processor // (2 * stage) if rows < 64 else card.shared // stage
    return Tiles(block_n, block_k, 8 if rows == 128 else 4, max(2, min(stages, most, card.shared // stage)))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """What of a layer's experts kernels are chosen by: ``top_k`` of ``experts`` are each token's."""

    top_k: int
    experts: int
    dtype: torch.dtype

    def __call__(self, shape: StepShape) -> set[tuple[int, int]]:
        """As a ``batch.Chooser``: of ``align`` and of the products. All else that they follow from is the model's."""
        slots = shape.tokens * self.top_k
        return {(_chunk(slots), block_rows(slots // self.experts, self.dtype))}


def _chunk(slots: int) -> int:
    """How many slots a program of ``align`` looks at together."""
    return 1024 if slots <= 1024 else 4096


def align(ids: torch.Tensor, first: int, count: int, rows: int) -> Blocks:
    """The slots of ``ids`` int64 [T, k], contiguous, whose experts are among ``first .. first + count - 1``, in blocks
    of ``rows``, at most 128. What lies in blocks without work is left as it was.
    """
    from . import moe_jit

    total, device = ids.numel(), ids.device
    blocks, chunk = _most_blocks(total, count, rows), _chunk(total)
    slots = torch.empty((blocks, rows), dtype=torch.int32, device=device)
    experts = torch.empty(blocks, dtype=torch.int32, device=device)
    if total:
        moe_jit.align_kernel[(count + 1,)](
            ids, slots, experts, total, first, count, rows, blocks,
            BINS=1 << count.bit_length(), CHUNK=chunk, num_warps=4 if chunk == 1024 else 8,
        )  # fmt: skip
    return Blocks(slots, experts, total)


def _most_blocks(total: int, count: int, rows: int) -> int:
    """Enough for ``total`` slots at ``count`` experts, however they choose."""
    return -(-(total + min(count, total) * (rows - 1)) // rows)


def align_torch(ids: torch.Tensor, first: int, count: int, rows: int) -> Blocks:
    """The twin of ``align``."""
    total, device = ids.numel(), ids.device
    blocks = _most_blocks(total, count, rows)
    expert = ids.flatten() - first
    # The others' slots are sorted behind every block with work.
    expert = torch.where((expert >= 0) & (expert < count), expert, count)
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add_(0, expert, torch.ones_like(expert))
    padded = (sizes + rows - 1) // rows * rows
    ends = padded.cumsum(0)
    shift = (ends - padded) - (sizes.cumsum(0) - sizes)
    expert, order = expert.sort(stable=True)
    local = expert < count
    slots = torch.full((blocks * rows,), total, dtype=torch.int32, device=device)
    slots[(torch.arange(total, device=device) + shift[expert])[local]] = order[local].int()
    starts = torch.arange(0, blocks * rows, rows, device=device)
    return Blocks(slots.view(-1, rows), torch.searchsorted(ends[:count], starts, right=True, out_int32=True), total)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    activation: str = "",
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The row of each slot, or of its token, times the weight of the slot's expert.

    Args:
        x: [T * k, in] or [T, in], last axis contiguous.
        weight: [E, out, in], contiguous; [E, 2 * out, in] where ``activation``, a gated one, joins the halves.
        bias: shaped like weight's first two axes, added to the product; or None.
        weights: [T, k], a factor for each slot's result; or None.

    Returns:
        [T * k, out], unset at slots whose expert is not local.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in ("", "swiglu_oai"):
        function(activation)
    from . import moe_jit

    rows, inner, card = blocks.slots.shape[1], x.shape[1], card_of(x.device)
    width = weight.shape[1] // (2 if activation else 1)
    block_n, block_k, warps, stages = product_tiles(rows, x.dtype, bool(activation), card)
    out = torch.empty((blocks.total, width), dtype=x.dtype, device=x.device)
    moe_jit.grouped_kernel[(len(blocks.slots), -(-width // block_n))](
        x, x.stride(0), weight, out if bias is None else bias, out if weights is None else weights, out,
        blocks.slots, blocks.experts, blocks.total, len(weight), width, inner, LIMIT,
        PER_ROW=blocks.total // len(x), ACTIVATION=activation, HAS_BIAS=bias is not None, WEIGHTED=weights is not None,
        EVEN=inner % block_k == 0, BLOCK_M=rows, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION=card.precision(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def grouped_product_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    activation: str = "",
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of ``grouped_product``; zero at slots whose expert is not local."""
    width = weight.shape[1] // (2 if activation else 1)
    out = torch.zeros((blocks.total, width), dtype=x.dtype, device=x.device)
    for slots, expert in zip(blocks.slots.long(), blocks.experts.tolist(), strict=True):
        mine = slots[slots < blocks.total]
        if expert == len(weight) or not len(mine):
            continue
        y = x[mine // (blocks.total // len(x))].float() @ weight[expert].float().T
        y = y if bias is None else y + bias[expert].float()
        y = gated_activation_torch(y, activation) if activation else y
        out[mine] = (y if weights is None else y * weights.flatten()[mine, None]).to(x.dtype)
    return out


def sum_slots(each: torch.Tensor, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """[T * k, width] -> [T, width]: each token's slots of local experts, in their order, summed in float32."""
    from . import moe_jit

    (tokens, top_k), width = ids.shape, each.shape[1]
    out = torch.empty((tokens, width), dtype=each.dtype, device=each.device)
    moe_jit.sum_kernel[(tokens, -(-width // _SUM_BLOCK))](
        each, ids, out, first, count, width, TOP_K=top_k, BLOCK=_SUM_BLOCK, num_warps=4
    )
    return out


def sum_slots_torch(each: torch.Tensor, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The twin of ``sum_slots``."""
    local = (ids >= first) & (ids < first + count)
    return each.float().unflatten(0, ids.shape).masked_fill(~local[..., None], 0).sum(1).to(each.dtype)
