"""Paged attention's cases for tests: rows over a shuffled cache with garbage in unused slots, and the definition."""

from __future__ import annotations

import torch

from quire.gpu_worker.batch import StepBatch


def batch_of(lens: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> StepBatch:
    """A step of rows of (query length, context length), decodes first, with these blocks."""
    starts, positions = [0], []
    for count, context in lens:
        starts.append(starts[-1] + count)
        positions += range(context - count, context)
    width, contexts = max(map(len, tables)), [context for _, context in lens]
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64), positions=torch.tensor(positions),
        slots=torch.zeros(len(positions), dtype=torch.int64), query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        num_decodes=sum(count == 1 for count, _ in lens), max_query_len=max(c for c, _ in lens),
        max_context_len=max(contexts), block_size=block_size, host_query_starts=starts, host_context_lens=contexts,
    )  # fmt: skip


def native_cache(kv_heads: int, blocks: int, size: int, dim: int, fill: float, dtype: torch.dtype = torch.float32):
    """Keys and values [blocks, size, kv_heads, dim] in the native layout, all ``fill`` and its negative."""
    k = torch.full((kv_heads, blocks, dim, size), fill, dtype=dtype).permute(1, 3, 0, 2)
    v = torch.full((kv_heads, blocks, size, dim), -fill, dtype=dtype).permute(1, 2, 0, 3)
    return k, v


def definition(q, lens, rows, scale, window=None, softcap=0.0, slopes=None, sinks=None) -> torch.Tensor:
    """Attention of q [T, heads, dim] over each row's (keys, values) [context, kv_heads, dim], in float64."""
    out, start = [], 0
    for (count, context), (k, v) in zip(lens, rows, strict=True):
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + count].double(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        position, key = torch.arange(context - count, context)[:, None], torch.arange(context)[None]
        if slopes is not None:
            scores += slopes.double()[:, None, None] * (key - position)
        hidden = key > position
        if window:
            hidden |= key <= position - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :context], values))
        start += count
    return torch.cat(out).float()
