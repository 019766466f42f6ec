"""Low-rank adapters on a GPU: y += scale * B (A x) for the rows of a step, each by the adapter that it has.

Rows lie in blocks, each of one *group*: the adapter in one slot, or in one slot and for one expert (number
slot * experts + expert). The layout is made once a step where it follows from the rows, by the host (``lay_out``), and
once a layer where the router has its say, by the device (``lay_out_experts``). ``shrink`` makes A x of each block and
``expand`` adds B of that to the product, both for all modules that lie side by side in it (q, k and v, for example) in
one launch. Blocks without work, ranks beyond an adapter's, and modules that it leaves alone end a program at once, so a
CUDA graph with room for all that may be holds these launches too. Sums are float32, in one order: the inner axis of
``shrink`` is cut into parts that different programs sum, and ``expand`` adds them up from the first part on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..batch import StepShape
from .card import Card, card_of
from .company import batch_invariant

FEW_ROWS = 128
"""Up to so many rows blocks have 16, and the inner axis is cut."""
_SPLITS, _PART = 8, 512
"""At most so many parts of the inner axis, each of at least so many values."""
_BINS = 1024


class Layout(NamedTuple):
    """Rows in blocks, each of one group."""

    order: torch.Tensor
    """int32 [blocks, rows]; ``total`` in an empty place."""
    groups: torch.Tensor
    """int32 [blocks]; the number of groups where a block is without work."""
    total: int
    """Rows of the product."""


@dataclass(frozen=True)
class Stack:
    """What all slots have for one product, G groups of P modules side by side, of ranks up to R.

    ``a`` [G, P, R, inputs], of a table of embeddings [G, its rows, R]; ``b`` [G, outputs, R], both contiguous and of
    one dtype; ``ranks`` int32 [G, P, 3]: the rank (0: the adapter leaves the module alone), and the first of its rows
    in A that this process has, and their number; ``scales`` float32 [G, P]; ``pieces`` int32 [P, 3]: the module's first
    output in the product, their number, the first one's row in B. ``widest``: outputs of the largest module. ``rank``:
    R of ``b``, where A is cut by its rows among processes and ``a`` has fewer.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    pieces: torch.Tensor
    widest: int

    @property
    def rank(self) -> int:
        """The highest rank."""
        return self.b.shape[2]

    @property
    def each(self) -> int:
        """Modules side by side."""
        return self.pieces.shape[0]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(each.nbytes for each in (self.a, self.b, self.ranks, self.scales, self.pieces))


@dataclass(frozen=True)
class AdaptedRows:
    """What of adapters' kernels is chosen by the rows of a step: as a ``batch.Chooser``. ``top_k`` of ``experts``: of
    each token's; 0: of layers without experts."""

    dtype: torch.dtype
    top_k: int = 0
    experts: int = 0

    def __call__(self, shape: StepShape) -> set[tuple[int, bool]]:
        if not self.top_k:
            return {(block_rows(shape.tokens, self.dtype), _few(shape.tokens))}
        slots = shape.tokens * self.top_k
        return {(expert_rows(slots, self.experts, self.dtype), _few(slots))}


def _few(rows: int) -> bool:
    return rows <= FEW_ROWS or batch_invariant()


def block_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of a block in a step of ``rows``. Of few sizes, as each is compiled; of one where bits must not depend on a
    row's company."""
    if rows <= FEW_ROWS and not batch_invariant():
        return 16
    return 32 if dtype.itemsize == 4 else 64


def expert_rows(slots: int, experts: int, dtype: torch.dtype) -> int:
    """The same where ``slots`` are shared out among ``experts``."""
    return 16 if slots // max(1, experts) <= 16 and not batch_invariant() else block_rows(FEW_ROWS + 1, dtype)


def most_blocks(rows: int, groups: int, size: int) -> int:
    """Enough blocks of ``size`` for ``rows``, whichever of ``groups`` they have."""
    return -(-(rows + min(groups, rows) * (size - 1)) // size)


def lay_out(slots: np.ndarray, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows whose ``slots`` int32 [T] are among ``count`` (-1: none), in blocks of ``size``.

    Gives ``order`` int32 [blocks, size] and ``groups`` int32 [blocks], as ``Layout`` has them. Rows of a slot keep
    their order.
    """
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    sizes = np.bincount(slots[order], minlength=count)
    blocks = -(-sizes // size)
    placed = np.full(int(blocks.sum()) * size, len(slots), np.int32)
    shift = (blocks.cumsum() - blocks) * size - (sizes.cumsum() - sizes)
    placed[np.arange(len(order)) + np.repeat(shift, sizes)] = order
    return placed.reshape(-1, size), np.repeat(np.arange(count, dtype=np.int32), blocks)


def lay_out_experts(
    ids: torch.Tensor, slots: torch.Tensor, first: int, experts: int, count: int, size: int
) -> Layout:  # fmt: skip
    """The choices of ``ids`` int64 [T, k], contiguous, by slot and expert, in blocks of ``size``, at most 128.

    Those whose expert is among ``first .. first + experts - 1`` and whose token has one of ``count`` slots: ``slots``
    int32 [T], -1: none. A choice is row token * k + number. What lies in blocks without work is left as it was.
    """
    from . import lora_jit

    total, groups, device = ids.numel(), count * experts, ids.device
    blocks, chunk = most_blocks(total, groups, size), 1024 if total <= 1024 else 4096
    order = torch.empty((blocks, size), dtype=torch.int32, device=device)
    of = torch.empty(blocks, dtype=torch.int32, device=device)
    sizes = torch.empty(groups, dtype=torch.int32, device=device)
    if total:
        warps = 4 if chunk == 1024 else 8
        lora_jit.count_kernel[(count,)](
            ids, slots, sizes, total, first, experts, TOP_K=ids.shape[1], BINS=1 << experts.bit_length(), CHUNK=chunk,
            num_warps=warps,
        )  # fmt: skip
        lora_jit.place_kernel[(groups + 1,)](
            ids, slots, sizes, order, of, total, first, experts, groups, size, blocks, TOP_K=ids.shape[1], BINS=_BINS,
            CHUNK=chunk, num_warps=warps,
        )  # fmt: skip
    return Layout(order, of, total)


def lay_out_experts_torch(
    ids: torch.Tensor, slots: torch.Tensor, first: int, experts: int, count: int, size: int
) -> Layout:  # fmt: skip
    """The twin of ``lay_out_experts``."""
    expert = ids.cpu() - first
    slot = slots.cpu().long()[:, None]
    group = torch.where((expert >= 0) & (expert < experts) & (slot >= 0), slot * experts + expert, -1)
    order, groups = lay_out(group.flatten().int().numpy(), count * experts, size)
    more = most_blocks(ids.numel(), count * experts, size) - len(groups)
    order = np.concatenate([order, np.full((more, size), ids.numel(), np.int32)])
    groups = np.concatenate([groups, np.full(more, count * experts, np.int32)])
    return Layout(torch.from_numpy(order).to(ids.device), torch.from_numpy(groups).to(ids.device), ids.numel())


class Tiles(NamedTuple):
    """Shape of a launch: outputs (of ``shrink``: ranks) and inner values of a tile, parts of the inner axis."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int


def shrink_tiles(few: bool, inner: int, rank: int, itemsize: int) -> Tiles:
    """Of A x. With few rows as many programs as there are parts read a module's A."""
    block_k = (128 if few else 64) if itemsize == 2 else 32
    splits = min(_SPLITS, _power_below(max(1, inner // _PART))) if few else 1
    return Tiles(_rank_block(rank), block_k, splits, 4, 3)


def expand_tiles(rank: int, itemsize: int) -> Tiles:
    """Of B (A x)."""
    return Tiles(64, min(_rank_block(rank), 32 if itemsize == 4 else 64), 1, 4, 2)


def _rank_block(rank: int) -> int:
    """A power of two, as large as the products of matrix units need at least."""
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


def parts_of(rows: int, inner: int) -> int:
    """How many parts of sums ``shrink`` leaves for a product of ``rows``."""
    return shrink_tiles(_few(rows), inner, 16, 2).splits


def shrink(x: torch.Tensor, stack: Stack, layout: Layout, whole: bool = False) -> torch.Tensor:
    """A x of each row in ``layout``, float32 [parts, rows of the product, P, R], in parts that are to be added up.

    Args:
        x: [T, inputs] or [T * k, inputs], last axis contiguous; of a product with k rows for each of x row T * k reads
            row T.
        whole: what this process has no part in is 0, so that processes can add theirs up; else it is unset.
    """
    from . import lora_jit

    if x.stride(1) != 1:
        x = x.contiguous()
    card, inner = card_of(x.device), x.shape[1]
    few, held = _few(layout.total), stack.a.shape[2]
    tiles = shrink_tiles(few, inner, held, max(x.dtype.itemsize, stack.a.dtype.itemsize))
    make = torch.zeros if whole else torch.empty
    shrunk = make((tiles.splits, layout.total, stack.each, stack.rank), dtype=torch.float32, device=x.device)
    if len(layout.groups):
        grid = len(layout.groups), stack.each * -(-held // tiles.block_n), tiles.splits
        lora_jit.shrink_kernel[grid](
            x, x.stride(0), stack.a, shrunk, layout.order, layout.groups, stack.ranks, layout.total, len(stack.scales),
            inner, stack.each, held, stack.rank, PER_ROW=layout.total // len(x), SPLITS=tiles.splits,
            EVEN=inner % tiles.block_k == 0, BLOCK_M=layout.order.shape[1], BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k, PRECISION=card.precision(stack.a.dtype), num_warps=tiles.warps,
            num_stages=_stages(tiles, layout.order.shape[1], max(x.dtype.itemsize, stack.a.dtype.itemsize), card),
        )  # fmt: skip
    return shrunk


def _stages(tiles: Tiles, rows: int, itemsize: int, card: Card) -> int:
    stage = (rows + tiles.block_n) * tiles.block_k * itemsize
    return max(1, min(tiles.stages, card.shared // stage))


def expand(
    shrunk: torch.Tensor, stack: Stack, layout: Layout, y: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    """Add to ``y`` [rows, outputs], last axis contiguous, what the adapters make of ``shrunk``, which ``shrink`` gave.

    ``weights``: float32 [T, k], contiguous, a factor for what each row is given; or None.
    """
    _expand(shrunk, shrunk, stack, layout, y, weights)


def expand_table(ids: torch.Tensor, stack: Stack, layout: Layout, y: torch.Tensor) -> None:
    """Add to the embeddings ``y`` [T, width] what the adapters have for ``ids`` int64 [T]: B A[:, id]."""
    _expand(stack.a, ids, stack, layout, y, None)


def _expand(
    shrunk: torch.Tensor, ids: torch.Tensor, stack: Stack, layout: Layout, y: torch.Tensor, weights: torch.Tensor | None
) -> None:
    from . import lora_jit

    if not len(layout.groups):
        return
    table = shrunk is stack.a
    tiles = expand_tiles(stack.rank, stack.b.dtype.itemsize)
    grid = len(layout.groups), -(-stack.widest // tiles.block_n), stack.each
    lora_jit.expand_kernel[grid](
        shrunk, ids, stack.b, y, y.stride(0), y if weights is None else weights, layout.order, layout.groups,
        stack.pieces, stack.ranks, stack.scales, layout.total, len(stack.scales), stack.b.shape[1], stack.each,
        stack.rank, stack.a.shape[1], TABLE=table, WEIGHTED=weights is not None, SPLITS=1 if table else len(shrunk),
        BLOCK_M=layout.order.shape[1], BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        PRECISION=card_of(y.device).precision(stack.b.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def add_torch(
    x: torch.Tensor, stack: Stack, layout: Layout, y: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    """The twin of ``shrink`` and ``expand``, without rounding between them; of a table ``x`` are ids int64 [T]."""
    table = x.dim() == 1
    for rows, group in zip(layout.order.long(), layout.groups.tolist(), strict=True):
        mine = rows[rows < layout.total] if group < len(stack.scales) else rows[:0]
        for piece, (first, outputs, row) in enumerate(stack.pieces.tolist()):
            rank = int(stack.ranks[group, piece, 0]) if len(mine) else 0
            if not rank:
                continue
            of = mine // (layout.total // len(x))
            if table:
                shrunk = stack.a[group, x[of], :rank].float()
            else:
                shrunk = x[of].float() @ stack.a[group, piece, :rank].float().T
            added = shrunk @ stack.b[group, row : row + outputs, :rank].float().T * stack.scales[group, piece]
            added = added if weights is None else added * weights.flatten()[mine, None]
            part = y[mine, first : first + outputs]
            y[mine, first : first + outputs] = (part.float() + added).to(y.dtype)


def _power_below(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)
