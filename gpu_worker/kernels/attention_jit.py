"""Triton code of ``attention``; read its docstring first."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _first_block(start, row, first_row, BLOCK_Q: tl.constexpr):
    """The number of a row's first Q-block, ``start`` being its first token.

    Far enough from the row before for any lengths, so the grid needs no table made on the host; numbers left over
    between rows are empty. The rows before ``first_row`` have one token each.
    """
    return (start - first_row) // BLOCK_Q + row - first_row


@triton.jit
def _find_row(query_starts, first_row, rows, q_block, BLOCK_Q: tl.constexpr):
    """The row that Q-block ``q_block`` belongs to, by bisection."""
    low = first_row
    high = first_row + rows
    while low < high:
        middle = (low + high) // 2
        if _first_block(tl.load(query_starts + middle), middle, first_row, BLOCK_Q) <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in units of log 2."""
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s * LOG2E


@triton.jit
def _over_tiles(
    acc, peak, total, q, k_head, v_head, table, positions, low, high, end, scale, softcap, slope, dim,
    k_block, k_offset, v_block, v_offset, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Online softmax over key tiles low..high. ``end`` is the first key that may not be read.

    Without MASKED every key of every tile is seen by every query of the tile.
    """
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
        if MASKED:
            # Memory past a row's end is not zeroed: what is there must not be multiplied, not even by 0.
            k = tl.load(k_at, mask=(keys < end)[None, :] & (at_d < dim)[:, None], other=0.0)
            v = tl.load(v_at, mask=(keys < end)[:, None] & (at_d < dim)[None, :], other=0.0)
        elif PADDED:
            k = tl.load(k_at, mask=(at_d < dim)[:, None], other=0.0)
            v = tl.load(v_at, mask=(at_d < dim)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        s = _scores(q, k.to(q.dtype), scale, softcap, SOFTCAP, PRECISION)
        if ALIBI:
            s += slope[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            s = tl.where(seen, s, NOTHING)
        new_peak = tl.maximum(peak, tl.max(s, 1))
        base = new_peak
        if MASKED:
            base = tl.where(new_peak == NOTHING, 0.0, new_peak)  # a query that has seen no key yet
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _place_of(query_starts, first_row, rows, q_block, DECODE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Q-block ``q_block``: its row, the row's first token in the step and its length, the block's first token in it."""
    if DECODE:
        row = first_row + q_block
        return row, tl.load(query_starts + row), 1, 0
    else:
        row = _find_row(query_starts, first_row, rows, q_block, BLOCK_Q)
        start = tl.load(query_starts + row)
        first = (q_block - _first_block(start, row, first_row, BLOCK_Q)) * BLOCK_Q
        return row, start, tl.load(query_starts + row + 1) - start, first


@triton.jit
def _keys_of(
    past, first, length, split, window,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
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
    if SPLITS > 1:
        share = (high - low + SPLITS - 1) // SPLITS
        low = low + split * share
        high = tl.minimum(low + share, high)
    return low, high, whole, end


@triton.jit
def _nothing_seen(sinks, heads, inside, SINKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The largest score of each query and the sum of its weights, before any key."""
    peak = tl.full((BLOCK_M,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS and SPLITS == 1:
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
    do_not_specialize=["table_stride", "first_row", "rows", "window"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_tables"],
)
def attention_kernel(
    q, q_token, q_head, k_cache, k_block, k_offset, k_head, v_cache, v_block, v_offset, v_head,
    out, out_token, out_head, partial, peaks, totals,
    query_starts, context_lens, block_tables, table_stride, first_row, rows, dim, scale, softcap, slopes, sinks,
    window,
    DECODE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One Q-block (BLOCK_M // GROUP tokens of one row, with every query head of one key head) and one split of keys."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, start, length, first = _place_of(query_starts, first_row, rows, tl.program_id(0), DECODE, BLOCK_Q)
    if first >= length:
        return
    past = tl.load(context_lens + row) - length

    at_m = tl.arange(0, BLOCK_M)
    at_d = tl.arange(0, DIM)
    token = first + at_m // GROUP
    inside = (token < length) & (at_m < BLOCK_Q * GROUP)
    positions = past + token
    heads = kv_head * GROUP + at_m % GROUP
    tokens = (start + token).to(tl.int64)
    within = inside[:, None] & (at_d < dim)[None, :]
    queries = tl.load(q + tokens[:, None] * q_token + heads[:, None] * q_head + at_d[None, :], mask=within, other=0.0)
    low, high, whole, end = _keys_of(past, first, length, split, window, WINDOW, SPLITS, BLOCK_Q, BLOCK_N)

    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    peak, total = _nothing_seen(sinks, heads, inside, SINKS, SPLITS, BLOCK_M)
    slope = peak
    if ALIBI:
        slope = tl.load(slopes + heads, mask=inside, other=0.0) * LOG2E
    k_at = k_cache + kv_head.to(tl.int64) * k_head
    v_at = v_cache + kv_head.to(tl.int64) * v_head
    table = block_tables + row.to(tl.int64) * table_stride
    masked_from = low
    if not WINDOW:
        masked_from = tl.maximum(tl.minimum(whole, high), low)
        acc, peak, total = _over_tiles(
            acc, peak, total, queries, k_at, v_at, table, positions, low, masked_from, end, scale, softcap, slope, dim,
            k_block, k_offset, v_block, v_offset, window,
            False, WINDOW, SOFTCAP, ALIBI, PRECISION, PAGE, BLOCK_N, DIM, PADDED,
        )  # fmt: skip
    acc, peak, total = _over_tiles(
        acc, peak, total, queries, k_at, v_at, table, positions, masked_from, high, end, scale, softcap, slope, dim,
        k_block, k_offset, v_block, v_offset, window,
        True, WINDOW, SOFTCAP, ALIBI, PRECISION, PAGE, BLOCK_N, DIM, PADDED,
    )  # fmt: skip

    if SPLITS > 1:
        place = (tokens * (tl.num_programs(1) * GROUP) + heads) * SPLITS + split
        _store_share(partial, peaks, totals, place, acc, peak, total, inside, DIM)
    else:
        # Rows of padding have seen nothing: zeros.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = tokens[:, None] * out_token + heads[:, None] * out_head + at_d[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=within)


@triton.jit
def reduce_kernel(
    out, out_token, out_head, partial, peaks, totals, sinks, dim,
    DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one token and head; splits that had no keys have a total of 0 and are not read."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at_s = tl.arange(0, SPLITS)
    at_d = tl.arange(0, DIM)
    place = (token * tl.num_programs(1) + head) * SPLITS + at_s
    peak = tl.load(peaks + place)
    total = tl.load(totals + place)
    top = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
    share = tl.where(total > 0.0, tl.exp2(peak - tl.where(top == NOTHING, 0.0, top)), 0.0)
    acc = tl.load(partial + place[:, None] * DIM + at_d[None, :], mask=(total > 0.0)[:, None], other=0.0)
    whole = tl.sum(share * total, 0)
    if SINKS:
        whole += tl.exp2(sink - top)
    result = tl.sum(acc * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + token * out_token + head * out_head + at_d, result.to(out.dtype.element_ty), mask=at_d < dim)
