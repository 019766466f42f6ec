"""Paged attention: prefill chunks and decodes of any lengths, over keys and values scattered in blocks.

**Q-blocks.** With grouped heads, the G query heads that share a key head are folded into the rows of the query tile:
a tile of M rows holds M // G tokens times G heads, so a key is read once for all of them. Programs find their row by a
search in ``query_starts``, so one launch serves rows of any length, prefill and decode mixed.

**Splits.** A decode step has few tiles (rows x key heads), so the keys of each are shared out among ``splits``
programs whose partial results a second kernel joins. The number of splits follows from upper bounds (rows, the longest
context the batch may have), each program finds its own share from the real length when it runs: the launch grid never
changes between replays of a CUDA graph.

**Mixed steps** are one launch, or two when it pays to split the decodes.

Sums, softmax and the two products accumulate in float32; tiles of head_dim that is no power of two are masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..batch import StepBatch, StepShape

PROGRAMS_PER_SM = 4
MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one launch: rows and keys of a tile, splits of the keys, warps and pipeline stages."""

    block_m: int
    block_n: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q k^T before and in the softmax."""

    scale: float  # factor of the scores
    window: int | None = None  # a query at position p sees keys p - window + 1 .. p; None sees all
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0 is off
    # float32 [heads], ALiBi: slope * (key's position - query's) is added to the scaled and capped score.
    slopes: torch.Tensor | None = None
    # float32 [heads], a score of each head that counts in the softmax's sum and brings no value.
    sinks: torch.Tensor | None = None


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
    layer = LayerShape(q.shape[1], k_cache.shape[2], q.shape[2], scores.window, q.dtype, q.device)
    rows, longest, context = len(batch.context_lens), batch.max_query_len, batch.max_context_len
    for first, last, tiles in launches(layer, StepShape(rows, batch.num_decodes, len(q), longest, context)):
        launch(q, k_cache, v_cache, out, batch, scores, first, last, tiles)
    return out


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What of a layer tiles are chosen by."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def __call__(self, shape: StepShape) -> set[tuple[bool, Tiles]]:
        """As a ``batch.Chooser``: whether the rows are decodes, and the tiles, of each launch."""
        return {(last <= shape.decodes, tiles) for _, last, tiles in launches(self, shape)}


def launches(layer: LayerShape, shape: StepShape) -> list[tuple[int, int, Tiles]]:
    """First and last row (exclusive), and tiles, of each launch in a step of ``shape``."""
    rows, decodes, _, query_len, context = shape
    dim, dtype, memory, group = layer.head_dim, layer.dtype, _shared_memory(layer.device), layer.heads // layer.kv_heads
    context = context if layer.window is None else min(context, layer.window)
    decode = decode_tiles(dim, dtype, group, decodes * layer.kv_heads, context, _processors(layer.device), memory)
    if decodes == rows:
        return [(0, rows, decode)]
    prefill = prefill_tiles(dim, dtype, group, query_len, memory)
    if decodes and decode.splits > 1:
        return [(0, decodes, decode), (decodes, rows, prefill)]
    return [(0, rows, prefill)]


def decode_tiles(
    head_dim: int, dtype: torch.dtype, group: int, heads_in_batch: int, context: int, processors: int, memory: int
) -> Tiles:
    """Tiles for rows of one token. ``heads_in_batch`` is rows x key heads; ``context`` an upper bound of any row's."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and heads_in_batch * splits < PROGRAMS_PER_SM * processors
        and 2 * splits * MIN_KEYS_PER_SPLIT <= context
    ):
        splits *= 2
    return _fit(Tiles(max(16, _power(group)), 64 if dtype.itemsize == 2 else 32, splits), head_dim, dtype, memory)


def prefill_tiles(head_dim: int, dtype: torch.dtype, group: int, max_query_len: int, memory: int) -> Tiles:
    """Tiles for rows of up to ``max_query_len`` tokens."""
    # The accumulator lives in registers: 128 rows of 128 values over 8 warps. float32 products need three passes and
    # more registers still.
    wide, half = max(128, _power(head_dim)), dtype.itemsize == 2
    most = (128 if half else 32) * 128 // wide
    block_m = max(16, _power(group), min(most, _power(max_query_len * group)))
    tiles = Tiles(block_m, 64 if half else 32, warps=8 if block_m * wide >= 128 * 128 else 4)
    return _fit(tiles, head_dim, dtype, memory)


def _fit(tiles: Tiles, head_dim: int, dtype: torch.dtype, memory: int) -> Tiles:
    """Fewer keys a tile until the queries, and the keys and values in flight, fit shared memory.

    Block numbers come one stage before the keys they point at, so three stages have one tile of keys under way while
    another is used, and two would have none.
    """
    row = _power(head_dim) * dtype.itemsize
    while row * (tiles.block_m + 2 * (tiles.stages - 1) * tiles.block_n) > memory and tiles.stages > 1:
        if tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        else:
            tiles = replace(tiles, stages=tiles.stages - 1)
    return tiles


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: StepBatch,
    scores: Scores,
    first: int,
    last: int,
    tiles: Tiles,
) -> None:
    """Run rows first..last - 1 into ``out``. Rows before ``first`` must be decodes; splits need decodes alone."""
    from . import attention_jit

    heads, dim = q.shape[1:]
    kv_heads, padded = k_cache.shape[2], max(16, _power(dim))
    rows, group = last - first, heads // kv_heads
    decode = last <= batch.num_decodes
    # A decode row is one token, so row ``first`` starts at token ``first`` and no device value is waited for.
    tokens = rows if decode else len(q) - first
    q_blocks = rows if decode else tokens // (tiles.block_m // group) + rows
    partial = peaks = totals = out
    slopes = out if scores.slopes is None else scores.slopes
    sinks = out if scores.sinks is None else scores.sinks
    if tiles.splits > 1:
        partial = torch.empty((last, heads, tiles.splits, padded), dtype=torch.float32, device=q.device)
        peaks = torch.empty((last, heads, tiles.splits), dtype=torch.float32, device=q.device)
        totals = torch.empty_like(peaks)
    attention_jit.attention_kernel[(q_blocks, kv_heads, tiles.splits)](
        q, q.stride(0), q.stride(1),
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache, v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        out, out.stride(0), out.stride(1), partial, peaks, totals,
        batch.query_starts, batch.context_lens, batch.block_tables, batch.block_tables.stride(0),
        first, rows, dim, scores.scale, scores.softcap, slopes, sinks, scores.window or 0,
        DECODE=decode, GROUP=group, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PAGE=batch.block_size,
        DIM=padded, PADDED=padded != dim, SPLITS=tiles.splits,
        WINDOW=scores.window is not None, SOFTCAP=scores.softcap > 0,
        ALIBI=scores.slopes is not None, SINKS=scores.sinks is not None,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.splits > 1:
        attention_jit.reduce_kernel[(last, heads)](
            out, out.stride(0), out.stride(1), partial, peaks, totals, sinks, dim,
            DIM=padded, SPLITS=tiles.splits, SINKS=scores.sinks is not None,
            num_warps=4 if tiles.splits * padded > 2048 else 1,
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
        k, v = (c[pages].flatten(0, 1)[:context].float().repeat_interleave(group, 1) for c in (k_cache, v_cache))
        score = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scores.scale
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
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a program may use, less a margin for what the compiler adds."""
    if device.type != "cuda":
        return 160 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 99 * 1024) - 8 * 1024
