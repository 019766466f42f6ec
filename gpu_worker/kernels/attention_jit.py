"""Triton code of ``attention``; read its docstring first."""

import triton
import triton.language as tl

from .narrow_jit import widened

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _first_block(start, at, BLOCK_Q: tl.constexpr):
    """The number of the first Q-block of the row that comes ``at``-th, ``start`` tokens coming before it.

    Far enough from the row before for any lengths, so the grid needs no table of blocks; numbers left over between
    rows are empty.
    """
    return start // BLOCK_Q + at


@triton.jit
def _find_row(starts, rows, q_block, BLOCK_Q: tl.constexpr):
    """Which row, in the order of ``starts``, Q-block ``q_block`` belongs to; by bisection."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        if _first_block(tl.load(starts + middle), middle, BLOCK_Q) <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _read(at, there, dims, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of keys or values. Memory past a row's end is not zeroed: what is there must not be multiplied, not even
    by 0."""
    if MASKED:
        return tl.load(at, mask=there & dims, other=0.0)
    elif PADDED:
        return tl.load(at, mask=dims, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _over_tiles(
    acc, peak, total, q, k_head, v_head, table, positions, low, high, end, inner, outer, slope, dim,
    k_block, k_offset, v_block, v_offset, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Online softmax over key tiles low..high. ``end`` is the first key that may not be read.

    Peaks are in units of log 2. A plain score stays what the product gave, and ``inner`` (the scale times log2 e)
    comes in one instruction with the subtraction of the peak; others are brought to those units one by one. Without
    MASKED every key of every tile is seen by every query of the tile.
    """
    PLAIN: tl.constexpr = not SOFTCAP and not ALIBI
    at_d = tl.arange(0, DIM)
    at_n = tl.arange(0, BLOCK_N)
    for tile in range(low, high):
        keys = tile * BLOCK_N + at_n
        if MASKED:
            block = tl.load(table + keys // PAGE, mask=keys < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys // PAGE).to(tl.int64)
        offset = keys % PAGE
        k_at = k_head + (block * k_block + offset * k_offset)[None, :] + at_d[:, None]
        v_at = v_head + (block * v_block + offset * v_offset)[:, None] + at_d[None, :]
        k = _read(k_at, (keys < end)[None, :], (at_d < dim)[:, None], MASKED, PADDED)
        v = _read(v_at, (keys < end)[:, None], (at_d < dim)[None, :], MASKED, PADDED)
        s = tl.dot(q, widened(k, q.dtype, CACHE), input_precision=PRECISION)
        if SOFTCAP:
            # cap * tanh(x) = cap * (2 sigmoid(2x) - 1); ``inner`` is 2 * scale / cap, ``outer`` cap * log2 e
            s = outer * (2.0 * tl.sigmoid(s * inner) - 1.0)
        elif ALIBI:
            s *= inner
        if ALIBI:
            s += slope[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            s = tl.where(seen, s, NOTHING)
        highest = tl.max(s, 1)
        if PLAIN:
            highest *= inner
        new_peak = tl.maximum(peak, highest)
        base = new_peak
        if MASKED:
            base = tl.where(new_peak == NOTHING, 0.0, new_peak)  # a query that has seen no key yet
        if PLAIN:
            p = tl.exp2(s * inner - base[:, None])
        else:
            p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), widened(v, q.dtype, CACHE), acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _place_of(query_starts, order, order_starts, rows, q_block, DECODE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Q-block ``q_block``: its row, the row's first token in the step and its length, the block's first token in it,
    which is below 0 for a number left over.

    Rows come as ``order`` says, and the last block of a row, which sees most keys, comes first: the work that takes
    longest starts first, and what is left when processors run out of it is short.
    """
    if DECODE:
        return q_block, tl.load(query_starts + q_block), 1, 0
    else:
        at = _find_row(order_starts, rows, q_block, BLOCK_Q)
        row = tl.load(order + at)
        start = tl.load(query_starts + row)
        length = tl.load(query_starts + row + 1) - start
        before = q_block - _first_block(tl.load(order_starts + at), at, BLOCK_Q)
        return row, start, length, ((length + BLOCK_Q - 1) // BLOCK_Q - 1 - before) * BLOCK_Q


@triton.jit
def _keys_of(
    past, first, length, split, splits, window,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key tiles [low, high) that some query of the block sees, of this split's share; and ``whole``, ``end``.

    ``past`` keys lie before the row's first token of this step. Tiles before ``whole`` lie at or before the first
    query's position; ``end`` is the first key that may not be read.
    """
    end = past + tl.minimum(first + BLOCK_Q, length)
    end = tl.maximum(end, 0)
    low = 0
    if WINDOW:
        low = tl.maximum(past + first - window + 1, 0) // BLOCK_N
    high = (end + BLOCK_N - 1) // BLOCK_N
    whole = tl.maximum(past + first + 1, 0) // BLOCK_N
    if SPLIT:
        share = (high - low + splits - 1) // splits
        low = low + split * share
        high = tl.minimum(low + share, high)
    return low, high, whole, end


@triton.jit
def _nothing_seen(sinks, heads, inside, SINKS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr):
    """The largest score of each query and the sum of its weights, before any key."""
    peak = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS and not SPLIT:
        # As if a key without a value had been seen first. With splits, the reduction adds it, once for all of them.
        peak = tl.load(sinks + heads, mask=inside, other=0.0) * LOG2E
        total += 1.0
    return peak, total


@triton.jit
def _store_share(partial, peaks, totals, place, acc, peak, total, inside, DIM: tl.constexpr):
    """What one split has seen; ``reduce_kernel`` joins the splits."""
    tl.store(peaks + place, peak, mask=inside)
    tl.store(totals + place, total, mask=inside)
    tl.store(partial + place[:, None] * DIM + tl.arange(0, DIM)[None, :], acc, mask=(inside & (total > 0.0))[:, None])


# Values that change from step to step are not specialised on: that would compile anew in the middle of serving.
@triton.jit(
    do_not_specialize=["table_stride", "rows", "splits", "window"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_tables", "order", "order_starts"],
)
def attention_kernel(
    q, q_token, q_head, k_cache, k_block, k_offset, k_head, v_cache, v_block, v_offset, v_head, out, out_token,
    out_head, partial, peaks, totals, query_starts, context_lens, block_tables, table_stride, order, order_starts, rows,
    kv_heads, splits, dim, inner, outer, v_scale, slopes, sinks, window,
    DECODE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, ONE_LOOP: tl.constexpr, PRECISION: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """One Q-block (BLOCK_M // GROUP tokens of one row, with every query head of one key head) and one split of keys.

    ONE_LOOP: tiles that need no mask take one all the same, so that a key counts the same in any tile of queries.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # A block's heads start together: their keys lie in one page.
    kv_head, split, q_block = tl.program_id(0) % kv_heads, tl.program_id(1), tl.program_id(0) // kv_heads
    row, start, length, first = _place_of(query_starts, order, order_starts, rows, q_block, DECODE, BLOCK_Q)
    if first < 0:
        return
    past = tl.load(context_lens + row) - length
    at_m, at_d = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    token = first + at_m // GROUP
    inside = (token < length) & (at_m < BLOCK_Q * GROUP)
    positions = past + token
    heads = kv_head * GROUP + at_m % GROUP
    tokens = (start + token).to(tl.int64)
    within = inside[:, None] & (at_d < dim)[None, :]
    queries = tl.load(q + tokens[:, None] * q_token + heads[:, None] * q_head + at_d[None, :], mask=within, other=0.0)
    low, high, whole, end = _keys_of(past, first, length, split, splits, window, WINDOW, SPLIT, BLOCK_Q, BLOCK_N)

    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    peak, total = _nothing_seen(sinks, heads, inside, SINKS, SPLIT, BLOCK_M)
    slope = peak
    if ALIBI:
        slope = tl.load(slopes + heads, mask=inside, other=0.0) * LOG2E
    k_at, v_at = k_cache + kv_head.to(tl.int64) * k_head, v_cache + kv_head.to(tl.int64) * v_head
    table = block_tables + row.to(tl.int64) * table_stride
    masked_from = low
    if not WINDOW and not ONE_LOOP:
        masked_from = tl.maximum(tl.minimum(whole, high), low)
        acc, peak, total = _over_tiles(
            acc, peak, total, queries, k_at, v_at, table, positions, low, masked_from, end, inner, outer, slope, dim,
            k_block, k_offset, v_block, v_offset, window,
            False, WINDOW, SOFTCAP, ALIBI, PRECISION, PAGE, BLOCK_N, DIM, PADDED, CACHE,
        )  # fmt: skip
    acc, peak, total = _over_tiles(
        acc, peak, total, queries, k_at, v_at, table, positions, masked_from, high, end, inner, outer, slope, dim,
        k_block, k_offset, v_block, v_offset, window,
        True, WINDOW, SOFTCAP, ALIBI, PRECISION, PAGE, BLOCK_N, DIM, PADDED, CACHE,
    )  # fmt: skip
    if CACHE != "":
        acc *= v_scale
    if SPLIT:
        place = (tokens * (kv_heads * GROUP) + heads) * splits + split
        _store_share(partial, peaks, totals, place, acc, peak, total, inside, DIM)
    else:
        # Rows of padding have seen nothing: zeros.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = tokens[:, None] * out_token + heads[:, None] * out_head + at_d[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    out, out_token, out_head, partial, peaks, totals, sinks, splits, dim,
    DIM: tl.constexpr, MOST: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one token and head, BLOCK_S at a time; those that had no keys have a total of 0 and are not
    read. MOST, a power of two, is the most splits there may be."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at_d = tl.arange(0, DIM)
    base = (token * tl.num_programs(1) + head) * splits
    top = tl.max(tl.load(peaks + base + tl.arange(0, MOST), mask=tl.arange(0, MOST) < splits, other=NOTHING), 0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
    level = tl.where(top == NOTHING, 0.0, top)
    whole = 0.0
    if SINKS:
        whole += tl.exp2(sink - top)
    acc = tl.zeros((DIM,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        at_s = first + tl.arange(0, BLOCK_S)
        total = tl.load(totals + base + at_s, mask=at_s < splits, other=0.0)
        peak = tl.load(peaks + base + at_s, mask=at_s < splits, other=NOTHING)
        share = tl.where(total > 0.0, tl.exp2(peak - level), 0.0)
        seen = tl.load(partial + (base + at_s)[:, None] * DIM + at_d[None, :], mask=(total > 0.0)[:, None], other=0.0)
        acc += tl.sum(seen * share[:, None], 0)
        whole += tl.sum(share * total, 0)
    result = acc / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + token * out_token + head * out_head + at_d, result.to(out.dtype.element_ty), mask=at_d < dim)
