"""Paged attention on a CPU: pages gathered into small buffers that stay in the cache, then torch's fused attention.

What measuring taught: a fresh allocation costs more than the gather, a gather of more than about 2 MB more than the
attention; the query heads of a group go in as rows of one product; masks are made once a step, not once a layer.

The physical order of the cache is [kv_heads, num_blocks, block_size, head_dim]; others work, slower. Where the native
kernels are on they do this instead (``kernels/cpu/attention.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..batch import StepBatch
from ..kernels import narrow
from ..kernels.attention import Scores

# Values of keys gathered at a time; with the values' own that is 2 MB of float32.
_GATHER = 1 << 18
# Query rows of a prefill tile that needs a mask.
_TILE = 128
# Scores of all heads in a tile at a time, where they or a bias of theirs are written out: 8 MB.
_SCORES = 1 << 21


@dataclass(slots=True)
class _Decodes:
    """Decode rows of one rounded width: ``pages`` [rows * width] block ids, ``mask`` [rows, 1, width * block_size].

    ``rows`` is a slice where they are neighbours, which saves copies of queries and results.
    """

    rows: torch.Tensor | slice
    count: int
    pages: torch.Tensor
    mask: torch.Tensor
    first: torch.Tensor  # [rows, 1], the first key gathered
    context: torch.Tensor  # [rows, 1]
    _distances: torch.Tensor | None = None

    def distances(self) -> torch.Tensor:
        """Keys' positions less the query's, float32, shaped like ``mask``; made by the first layer that asks."""
        if self._distances is None:
            past = self.first - self.context + 1 + torch.arange(self.mask.shape[-1])
            self._distances = past.float()[:, None]
        return self._distances


@dataclass(slots=True)
class _Prefill:
    """Tokens ``start`` to ``stop`` of the step; the first sits at ``position``, and ``first_key`` is gathered first."""

    start: int
    stop: int
    position: int
    first_key: int
    pages: torch.Tensor


def _rounded(blocks: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ...: rows of one width share a product.

    A row's width comes from its own context alone, for another width sums in another order: so a row's result has the
    same bits in any batch.
    """
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if blocks <= power * 3 // 4 else power


class AttentionPlan:
    """What every layer with one window shares in one step: rows in groups, their pages, their masks."""

    def __init__(self, batch: StepBatch, window: int | None, dtype: torch.dtype, page_values: int) -> None:
        """``page_values``: values of keys in a block, all heads."""
        starts = batch.host_query_starts or batch.query_starts.tolist()
        lens = batch.host_context_lens or batch.context_lens.tolist()
        self.block_size, self.window = batch.block_size, window
        self.decodes = self._plan_decodes(batch, lens[: batch.num_decodes], dtype, page_values)
        self.prefills = [
            self._plan_prefill(batch, row, starts[row], starts[row + 1], lens[row])
            for row in range(batch.num_decodes, len(lens))
            if starts[row + 1] > starts[row]
        ]

    def _first_key(self, position: int) -> int:
        """The first key that a query at ``position`` sees, rounded down to its block's first."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first - first % self.block_size

    def _plan_decodes(self, batch: StepBatch, lens: list[int], dtype: torch.dtype, page_values: int) -> list[_Decodes]:
        size = self.block_size
        widths = {row: _rounded(-(-(n - self._first_key(n - 1)) // size)) for row, n in enumerate(lens) if n}
        order = sorted(widths, key=widths.__getitem__)
        groups, at = [], 0
        while at < len(order):
            # Rows of one width, as many as fit the buffer.
            width = widths[order[at]]
            most = at + max(1, _GATHER // (width * page_values))
            end = at + 1
            while end < min(most, len(order)) and widths[order[end]] == width:
                end += 1
            groups.append(self._decode_group(batch, order[at:end], lens, width, dtype))
            at = end
        return groups

    def _decode_group(
        self, batch: StepBatch, rows: list[int], lens: list[int], width: int, dtype: torch.dtype
    ) -> _Decodes:
        size = self.block_size
        index = torch.tensor(rows)
        context = torch.tensor([lens[row] for row in rows])[:, None]
        first = torch.tensor([self._first_key(lens[row] - 1) for row in rows])[:, None]
        # A row with fewer blocks than the group reads its last one again, under the mask.
        column = torch.minimum(first // size + torch.arange(width), (context - 1) // size)
        pages = batch.block_tables[index].gather(1, column)
        key = first + torch.arange(width * size)
        hidden = key >= context
        if self.window is not None:
            hidden |= key < context - self.window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        neighbours = rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows)
        where = slice(rows[0], rows[-1] + 1) if neighbours else index
        return _Decodes(where, len(rows), pages.flatten(), mask[:, None], first, context)

    def _plan_prefill(self, batch: StepBatch, row: int, start: int, stop: int, context: int) -> _Prefill:
        position = context - (stop - start)
        first = self._first_key(position)
        pages = batch.block_tables[row, first // self.block_size : -(-context // self.block_size)]
        return _Prefill(start, stop, position, first, pages.contiguous())


class _Buffers:
    """Scratch that grows and is used again: page faults cost more than copies.

    Made outside inference mode, so that callers within it and outside may share it.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < count:
            with torch.inference_mode(False):
                flat = self._flat[name, dtype] = torch.empty(count + count // 4, dtype=dtype)
        return flat[:count].view(shape)

    def tile_mask(self, rows: int, before: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Mask [rows, before + rows]: column c is the key ``before`` keys before the tile's first query, plus c.

        All tiles are corners of one template: a query sees the keys up to its own, less those its window lost.
        """
        template = self._masks.get((window, dtype))
        if template is None or template.shape[1] < before + _TILE:
            reach = before + before // 2
            query = torch.arange(_TILE)[:, None]
            key = torch.arange(-reach, _TILE)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            template = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._masks[window, dtype] = template
        first = template.shape[1] - _TILE - before
        return template[:rows, first : first + before + rows]

    def biased(self, mask: torch.Tensor, slopes: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """mask + slopes * distances in float32, until the next call."""
        shape = torch.broadcast_shapes(mask.shape, slopes.shape, distances.shape)
        return torch.addcmul(mask, slopes, distances, out=self.take("bias", shape, torch.float32))


_buffers = _Buffers()


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: StepBatch,
    scores: Scores,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, head_dim] over each row's own pages -> [T, heads, head_dim].

    ``plan`` saves planning again for each layer. Pages must hold finite values, also where nothing was written yet.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    if plan is None:
        plan = AttentionPlan(batch, scores.window, q.dtype, k_cache.shape[1] * kv_heads * dim)
    q = q.view(tokens, kv_heads, heads // kv_heads, dim)
    # Shaped for scores [kv_heads, group, queries, keys].
    slopes, sinks = (None if x is None else x.view(kv_heads, -1, 1, 1) for x in (scores.slopes, scores.sinks))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        keys = _gather("k", k_cache, group.pages, group.count, q.dtype)
        values = _gather("v", v_cache, group.pages, group.count, q.dtype)
        query = q[group.rows].transpose(0, 1)  # [kv_heads, rows, group, dim]
        mask = group.mask[None]
        if slopes is not None:
            mask = _buffers.biased(mask, slopes.transpose(1, 2), group.distances())
        seen = _attend(query, keys, values, mask, scores, None if sinks is None else sinks.transpose(1, 2))
        out[group.rows] = seen.transpose(0, 1)
    for row in plan.prefills:
        keys = _gather("k", k_cache, row.pages, 1, q.dtype)
        values = _gather("v", v_cache, row.pages, 1, q.dtype)
        _prefill(q, out, keys, values, row, scores, slopes, sinks)
    out = out.view(tokens, heads, dim)
    return out if scores.v_scale == 1.0 else out.mul_(scores.v_scale)


def _gather(name: str, cache: torch.Tensor, pages: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The keys or values of ``pages`` as [kv_heads, rows, keys, head_dim]; those of 8 bits in ``dtype``."""
    blocks, size, kv_heads, dim = cache.shape
    if narrow.is_narrow(cache.dtype):
        wide = _buffers.take(name, (kv_heads, len(pages), size, dim), dtype)
        wide.copy_(narrow.read(cache, pages).permute(2, 0, 1, 3))
        return wide.view(kv_heads, rows, -1, dim)
    physical = cache.permute(2, 0, 1, 3)
    if not physical.is_contiguous():
        found = physical.index_select(1, pages)
    else:
        out = _buffers.take(name, (kv_heads, len(pages), size * dim), cache.dtype)
        found = torch.index_select(physical.view(kv_heads, blocks, size * dim), 1, pages, out=out)
    return found.view(kv_heads, rows, -1, dim)


def _prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row: _Prefill,
    scores: Scores,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One row's chunk: a plain causal product where it starts its sequence, else tiles under a corner of the mask."""
    count, window = row.stop - row.start, scores.window
    bare = slopes is None and sinks is None
    plain = row.position == 0 and (window is None or window >= count) and not scores.softcap and bare
    step = count if plain else _TILE
    if not bare:  # something of every head's scores is written out
        step = max(_TILE // 8, min(step, _SCORES // (q.shape[1] * q.shape[2] * (row.position + count))))
    for at in range(0, count, step):
        n = min(step, count - at)
        position = row.position + at
        first = row.first_key
        if window is not None:
            first = max(first, position - window + 1)
        end = position + n
        shape = (q.shape[1], q.shape[2], end - first, q.shape[3])
        k = keys[:, :, first - row.first_key : end - row.first_key].expand(shape)
        v = values[:, :, first - row.first_key : end - row.first_key].expand(shape)
        mask = None if plain else _buffers.tile_mask(n, position - first, window, q.dtype)
        if mask is not None and slopes is not None:
            distances = torch.arange(first, end) - torch.arange(position, end)[:, None]
            mask = _buffers.biased(mask, slopes, distances.float())
        tokens = slice(row.start + at, row.start + at + n)
        seen = _attend(q[tokens].permute(1, 2, 0, 3), k, v, mask, scores, sinks)
        out[tokens] = seen.permute(2, 0, 1, 3)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    of: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v over the last two dims; no mask is causal (and has no soft cap and no sinks)."""
    if mask is None or not (of.softcap or sinks is not None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=of.product_scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    if of.softcap:
        scores.mul_(of.product_scale / of.softcap).tanh_().mul_(of.softcap)
    else:
        scores.mul_(of.product_scale)
    scores += mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = scores.sub_(peak).exp_()
        weights /= weights.sum(-1, keepdim=True).add_((sinks - peak).exp_())
    return torch.matmul(weights.to(v.dtype), v)
