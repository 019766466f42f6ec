"""Paged attention: prefill chunks and decodes of any lengths, over keys and values scattered in blocks.

**Q-blocks.** With grouped heads, the G query heads that share a key head are folded into the rows of the query tile:
a tile of M rows holds M // G tokens times G heads, so a key is read once for all of them. Programs find their row by a
search in a table of lengths, so one launch serves rows of any length.

**Mixed steps** are two launches: decodes have tiles of their own, for in a prefill's a row of one token would leave
most of the products to nobody. Of a prefill's Q-blocks those that see most keys start first.

**Splits.** A decode step has few tiles (rows x key heads), so the keys of each are shared out among several programs
whose partial results a second kernel joins. Their number follows from upper bounds (rows, the longest context the
batch may have) and the card's size, each program finds its own share from the real length when it runs: the launch
grid never changes between replays of a CUDA graph.

**Batch-invariant** attention (``company.py``) gives a row the same bits in any company, and a token the same as a
decode and within a prompt: one launch and one tile for all rows, no splits, and one loop over the keys.

Sums, softmax and the two products accumulate in float32; tiles of head_dim that is no power of two are masked. What
follows from a step's shape is worked out for its first layer and kept with the batch for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import StepBatch, StepShape
from .attention_flash import FlashPrefill, flash_in_use
from .attention_tiles import MAX_SPLITS, LayerShape, Tiles, Variant, launches, power
from .card import card_of
from .company import batch_invariant
from .narrow import bits, is_narrow, kind_of, read
from .scores import Scores

JOINED = 8
"""Splits that the joining kernel reads at a time."""


@dataclass(slots=True)
class Launch:
    """One launch of the kernel, for every layer of one kind in one step."""

    decode: bool
    tiles: Tiles
    rows: int
    splits: int
    grid: tuple[int, int]
    order: torch.Tensor  # int32 [rows], in which order they come; of decodes unread
    order_starts: torch.Tensor  # int32 [rows], tokens before each in that order
    partial: torch.Tensor | None  # float32 [tokens, heads, splits, padded head_dim], what each split has summed
    peaks: torch.Tensor | None  # float32 [tokens, heads, splits]
    totals: torch.Tensor | None
    constants: dict[str, Any] = field(default_factory=dict)  # what it is compiled for


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: StepBatch, scores: Scores,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of every token of ``batch`` to its row's keys; [T, heads, head_dim], contiguous.

    Args:
        q: [T, heads, head_dim], last axis contiguous.
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim], last axis contiguous, other strides free.
            This step's keys and values are already in them.
        batch: rows, lengths and block tables. Rows with context length 0 are padding: nothing is read, the result is 0.
        out: where the result goes, shaped like q and contiguous; None: new memory.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not len(q):
        return out
    for each in launches_of(q, k_cache, batch, scores):
        if isinstance(each, Launch):
            launch(q, k_cache, v_cache, out, batch, scores, each)
        else:
            each.run(q, k_cache, v_cache, out, scores)
    return out


def launches_of(
    q: torch.Tensor, k_cache: torch.Tensor, batch: StepBatch, scores: Scores
) -> list[Launch | FlashPrefill]:
    """What attention of this kind launches in this step; made by the first layer that asks, and kept."""
    plans = batch.plans
    if plans is None:
        plans = batch.plans = {}
    key = (*q.shape[1:], k_cache.shape[2], q.dtype, scores.kind)
    found = plans.get(key)
    if found is None:
        found = plans[key] = _launches(q, k_cache, batch, scores)
    return found


def _launches(q: torch.Tensor, k_cache: torch.Tensor, batch: StepBatch, scores: Scores) -> list[Launch | FlashPrefill]:
    narrow = is_narrow(k_cache.dtype)
    layer = LayerShape(q.shape[1], k_cache.shape[2], q.shape[2], scores.window, q.dtype, q.device, narrow)
    shape = StepShape(len(batch.context_lens), batch.num_decodes, len(q), batch.max_query_len, batch.max_context_len)
    flash = flash_in_use()
    if flash is not None and (batch_invariant() or not flash.takes(q, scores)):
        flash = None
    return [
        FlashPrefill(flash, batch)
        if flash is not None and not variant.decode
        else plan_launch(q, k_cache, batch, scores, variant, splits)
        for variant, splits in launches(layer, shape)
    ]


def plan_launch(
    q: torch.Tensor, k_cache: torch.Tensor, batch: StepBatch, scores: Scores, variant: Variant, splits: int = 1
) -> Launch:
    """The launch of ``variant`` over the decodes of ``batch``; over its other rows, or all of them if invariant."""
    (heads, dim), kv_heads, decodes = q.shape[1:], k_cache.shape[2], batch.num_decodes
    group, padded, tiles = heads // kv_heads, max(16, power(dim)), variant.tiles
    order = order_starts = batch.query_starts
    first, rows = 0, decodes
    if not variant.decode:
        first = 0 if batch_invariant() else decodes
        rows = len(batch.context_lens) - first
        order, order_starts = _order(batch, first)
    # A decode is one token, so the others start at token ``first`` and no device value is waited for.
    blocks = rows if variant.decode else (len(q) - first) // (tiles.block_m // group) + rows
    partial = peaks = totals = None
    if variant.split:
        partial = torch.empty((rows, heads, splits, padded), dtype=torch.float32, device=q.device)
        peaks = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
        totals = torch.empty_like(peaks)
    constants = {
        "DECODE": variant.decode, "GROUP": group, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "PAGE": batch.block_size, "DIM": padded, "PADDED": padded != dim, "SPLIT": variant.split,
        "WINDOW": scores.window is not None, "SOFTCAP": scores.softcap > 0, "ALIBI": scores.slopes is not None,
        "SINKS": scores.sinks is not None, "ONE_LOOP": batch_invariant(),
        "CACHE": kind_of(k_cache.dtype),
        "PRECISION": card_of(q.device).precision(q.dtype), "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    grid = (blocks * kv_heads, splits)
    return Launch(variant.decode, tiles, rows, splits, grid, order, order_starts, partial, peaks, totals, constants)


def _order(batch: StepBatch, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from ``first`` on, int32, the longest contexts first, and the tokens before each in that order."""
    rows, decodes, starts = len(batch.context_lens), batch.num_decodes, batch.query_starts
    if decodes == rows:
        return torch.arange(first, rows, dtype=torch.int32, device=starts.device), starts
    if batch.order is None or batch.order_starts is None:
        order = batch.context_lens[decodes:].argsort(descending=True, stable=True)
        lengths = starts.diff()[decodes:][order]
        batch.order, batch.order_starts = (order + decodes).int(), (lengths.cumsum(0) - lengths).int()
    if first == decodes:
        return batch.order, batch.order_starts
    ahead = torch.arange(first, decodes, dtype=torch.int32, device=starts.device)
    return torch.cat((ahead, batch.order)), torch.cat((ahead, batch.order_starts + decodes))


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: StepBatch,
    scores: Scores,
    plan: Launch,
) -> None:
    """Run the rows of ``plan`` into ``out``."""
    from . import attention_jit

    dim, (inner, outer) = q.shape[2], scores.factors
    k_cache, v_cache = bits(k_cache), bits(v_cache)
    partial = out if plan.partial is None else plan.partial
    peaks = out if plan.peaks is None else plan.peaks
    totals = out if plan.totals is None else plan.totals
    slopes = out if scores.slopes is None else scores.slopes
    sinks = out if scores.sinks is None else scores.sinks
    attention_jit.attention_kernel[plan.grid](
        q, q.stride(0), q.stride(1),
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache, v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        out, out.stride(0), out.stride(1), partial, peaks, totals,
        batch.query_starts, batch.context_lens, batch.block_tables, batch.block_tables.stride(0),
        plan.order, plan.order_starts, plan.rows, k_cache.shape[2], plan.splits, dim,
        inner, outer, scores.v_scale, slopes, sinks, scores.window or 0,
        **plan.constants,
    )  # fmt: skip
    if plan.partial is not None:
        padded = plan.constants["DIM"]
        attention_jit.reduce_kernel[(plan.rows, q.shape[1])](
            out, out.stride(0), out.stride(1), partial, peaks, totals, sinks, plan.splits, dim,
            DIM=padded, MOST=MAX_SPLITS, BLOCK_S=JOINED, SINKS=scores.sinks is not None,
            num_warps=4 if padded >= 128 else 2,
        )  # fmt: skip


def paged_attention_torch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: StepBatch, scores: Scores
) -> torch.Tensor:
    """The twin of ``paged_attention``: one row at a time, in float32. The oracle, not the fast path of the CPU."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k_cache.shape[2]
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for row, context in enumerate(contexts):
        if not context:
            continue
        begin, end = starts[row], starts[row + 1]
        pages = batch.block_tables[row, : -(-context // batch.block_size)].long()
        k, v = (read(c, pages).flatten(0, 1)[:context].repeat_interleave(group, 1) for c in (k_cache, v_cache))
        score = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scores.product_scale
        if scores.softcap:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        keys = torch.arange(context, device=q.device)
        at = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        if scores.slopes is not None:
            score += scores.slopes[:, None, None] * (keys - at)
        seen = keys <= at
        if scores.window is not None:
            seen &= keys > at - scores.window
        score = score.masked_fill(~seen, float("-inf"))
        if scores.sinks is not None:
            score = torch.cat((score, scores.sinks[:, None, None].expand(-1, end - begin, 1)), dim=-1)
        weights = score.softmax(-1)[..., :context]
        out[begin:end] = (torch.einsum("hqk,khd->qhd", weights, v) * scores.v_scale).to(q.dtype)
    return out
