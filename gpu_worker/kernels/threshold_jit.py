"""Triton code of ``threshold``; read its docstring first. Launched without fused multiply-adds, to round as numpy."""

import triton
import triton.language as tl

INV_T = tl.constexpr(0)
LOG_MIN_P = tl.constexpr(1)
TOP_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
BY_TOP_K = tl.constexpr(2)
BY_TOP_P = tl.constexpr(4)
BY_MIN_P = tl.constexpr(8)
NOT_A_LOGIT = tl.constexpr(float("-inf"))
ENDLESS = tl.constexpr(float("inf"))
UNIT = tl.constexpr(2.0**42)
REACH = tl.constexpr(24.0)
# Where a row's bounds lie: values, float32, and what was counted, int64.
LO, HI, TOP, BOTTOM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TARGET, COUNT_LO, COUNT_HI, MASS_HI = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _float(packed, column: tl.constexpr):
    return tl.load(packed + column).to(tl.float32, bitcast=True)


@triton.jit
def _key(s):
    """float32 -> uint32 in the same order."""
    bits = s.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _unkey(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scaled(logits, at, vocab, inv_t):
    """Scaled logits of tokens ``at``, float32; -inf beyond the vocabulary."""
    return tl.load(logits + at, mask=at < vocab, other=NOT_A_LOGIT).to(tl.float32) * inv_t


@triton.jit
def _mass(s, top):
    """What a token adds to a mass: its unnormalised probability in units of 2^-42, int64."""
    return (tl.exp(s - top) * UNIT).to(tl.int64)


@triton.jit
def _share(mass, top_p):
    """The mass that top_p of ``mass`` is."""
    return tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _wants(packed, filters, vocab):
    """(the row has a top_k, k, it has a top_p, top_p), as far as ``filters`` are on."""
    k = tl.load(packed + TOP_K)
    top_p = _float(packed, TOP_P)
    drawn = _float(packed, INV_T) != 0.0
    by_k = drawn & ((filters & BY_TOP_K) != 0) & (k > 0) & (k < vocab)
    by_p = drawn & ((filters & BY_TOP_P) != 0) & (top_p < 1.0)
    return by_k, k, by_p, top_p


@triton.jit
def _least(packed, filters, top, ignored):
    """The lowest value that min_p leaves; -inf where it is not looked at."""
    log_min_p = _float(packed, LOG_MIN_P)
    # Without a min_p of its own the row has -inf here, which an infinite top would make NaN.
    by_min_p = ((filters & BY_MIN_P) != 0) & (ignored == 0) & (log_min_p > NOT_A_LOGIT)
    return tl.where(by_min_p, top + log_min_p, NOT_A_LOGIT)


@triton.jit(do_not_specialize_on_alignment=["packed"])
def peaks_kernel(
    logits, stride, packed, tops, bottoms, counts, vocab, splits,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest and the smallest finite value of CHUNK tokens of one row."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    inv_t = _float(packed + row * COLUMNS, INV_T)
    logits += row.to(tl.int64) * stride
    peak = tl.full((BLOCK,), NOT_A_LOGIT, tl.float32)
    bottom = tl.full((BLOCK,), ENDLESS, tl.float32)
    if inv_t != 0.0:
        for start in range(0, CHUNK, BLOCK):
            s = _scaled(logits, split * CHUNK + start + tl.arange(0, BLOCK), vocab, inv_t)
            peak = tl.maximum(peak, s)
            bottom = tl.minimum(bottom, tl.where(s > NOT_A_LOGIT, s, ENDLESS))
    tl.store(tops + row * splits + split, tl.max(peak, 0))
    tl.store(bottoms + row * splits + split, tl.min(bottom, 0))
    if split == 0:
        tl.store(counts + row, 0)


@triton.jit
def _ends(tops, bottoms, row, splits, SPLITS: tl.constexpr):
    """The row's largest and smallest finite values."""
    at = tl.arange(0, SPLITS)
    top = tl.max(tl.load(tops + row * splits + at, mask=at < splits, other=NOT_A_LOGIT), 0)
    bottom = tl.min(tl.load(bottoms + row * splits + at, mask=at < splits, other=ENDLESS), 0)
    return top, bottom


@triton.jit
def _pivots(lo, hi, top, bottom, least, FIRST: tl.constexpr, PIVOTS: tl.constexpr):
    """Values, falling, at which a pass weighs what lies at or above. The first pass' last is ``least``: the whole."""
    at = tl.arange(0, PIVOTS)
    steps: tl.constexpr = PIVOTS - 1 if FIRST else PIVOTS
    high = tl.minimum(hi, top)
    low = tl.maximum(lo, bottom)
    if FIRST:
        low = tl.maximum(tl.maximum(low, least), top - REACH)
    pivots = tl.maximum(high - (high - low) * ((at + 1).to(tl.float32) / steps), low)
    pivots = tl.where(at >= steps - 1, low, pivots)
    if FIRST:
        pivots = tl.where(at == PIVOTS - 1, least, pivots)
    return pivots


@triton.jit
def _few(lo, hi, top, bottom, count_lo, count_hi, both, ROOM: tl.constexpr):
    """Whether so few tokens are left that each can be looked at, and from where to where they lie, the end excluded."""
    sound = (top > NOT_A_LOGIT) & (top < ENDLESS)
    every = count_lo <= ROOM
    # Fewer finite logits than top_k: its edge is -inf, and all that is finite is what top_p looks at.
    finite = (hi <= bottom) & (count_hi <= ROOM)
    some = (count_lo - count_hi <= ROOM) & (both == 0)
    start = tl.where(every | (finite == 0), lo, hi)
    end = tl.where(every | finite, ENDLESS, hi)
    return sound & (every | finite | some), start, end


@triton.jit
def _narrowed(
    bounds, tallies, weights, row, splits, by_k, by_p, top_p, least,
    FIRST: tl.constexpr, SPLITS: tl.constexpr, PIVOTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The bounds of a row after a pass: those before it, moved by what the pass weighed. FIRST: it was the first."""
    bounds += row * 4
    tallies += row * 4
    lo, hi = tl.load(bounds + LO), tl.load(bounds + HI)
    top, bottom = tl.load(bounds + TOP), tl.load(bounds + BOTTOM)
    target, mass_hi = tl.load(tallies + TARGET), tl.load(tallies + MASS_HI)
    count_lo, count_hi = tl.load(tallies + COUNT_LO), tl.load(tallies + COUNT_HI)
    at = tl.arange(0, SPLITS)[:, None]
    place = weights + (row.to(tl.int64) * splits + at) * (2 * PIVOTS) + tl.arange(0, PIVOTS)[None, :]
    counts = tl.sum(tl.load(place, mask=at < splits, other=0), 0)
    masses = tl.sum(tl.load(place + PIVOTS, mask=at < splits, other=0), 0)
    pivots = _pivots(lo, hi, top, bottom, least, FIRST, PIVOTS)
    if FIRST:
        target = tl.where(by_k, target, _share(tl.max(masses, 0), top_p))
    reached = tl.where(by_k, counts, masses) >= target
    missed = reached == 0
    if not FIRST:
        # Where few are left already the pass weighed nothing.
        few, _, _ = _few(lo, hi, top, bottom, count_lo, count_hi, by_k & by_p, ROOM)
        reached = reached & (few == 0)
        missed = missed & (few == 0)
    lo = tl.maximum(lo, tl.max(tl.where(reached, pivots, NOT_A_LOGIT), 0))
    hi = tl.minimum(hi, tl.min(tl.where(missed, pivots, ENDLESS), 0))
    count_lo = tl.minimum(count_lo, tl.min(tl.where(reached, counts, 1 << 60), 0))
    count_hi = tl.maximum(count_hi, tl.max(tl.where(missed, counts, 0), 0))
    mass_hi = tl.maximum(mass_hi, tl.max(tl.where(missed, masses, 0), 0))
    return lo, hi, top, bottom, target, count_lo, count_hi, mass_hi


@triton.jit
def _store(place, a, b, c, d):
    """Four numbers side by side."""
    tl.store(place, a)
    tl.store(place + 1, b)
    tl.store(place + 2, c)
    tl.store(place + 3, d)


@triton.jit(do_not_specialize=["filters"], do_not_specialize_on_alignment=["packed"])
def search_kernel(
    logits, stride, packed, filters, tops, bottoms, past_bounds, past_tallies, past_weights,
    bounds, tallies, weights, vocab, splits,
    PASS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PIVOTS: tl.constexpr, ROOM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One pass over CHUNK tokens of one row: what lies at or above each pivot, counted and weighed."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    packed += row * COLUMNS
    by_k, k, by_p, top_p = _wants(packed, filters, vocab)
    if not (by_k | by_p):
        return
    if PASS == 0:
        top, bottom = _ends(tops, bottoms, row, splits, SPLITS)
        least = _least(packed, filters, top, by_k)
        lo = tl.full((), NOT_A_LOGIT, tl.float32)
        hi = tl.full((), ENDLESS, tl.float32)
        target = k.to(tl.int64)
        count_lo = tl.zeros((), tl.int64) + vocab
        count_hi = tl.zeros((), tl.int64)
        mass_hi = tl.zeros((), tl.int64)
    else:
        least = _least(packed, filters, tl.load(past_bounds + row * 4 + TOP), by_k)
        lo, hi, top, bottom, target, count_lo, count_hi, mass_hi = _narrowed(
            past_bounds,
            past_tallies,
            past_weights,
            row,
            splits,
            by_k,
            by_p,
            top_p,
            least,
            PASS == 1,
            SPLITS,
            PIVOTS,
            ROOM,
        )
    if split == 0:
        _store(bounds + row * 4, lo, hi, top, bottom)
        _store(tallies + row * 4, target, count_lo, count_hi, mass_hi)
    if PASS > 0:
        few, _, _ = _few(lo, hi, top, bottom, count_lo, count_hi, by_k & by_p, ROOM)
        if few:
            return
    pivots = _pivots(lo, hi, top, bottom, least, PASS == 0, PIVOTS)
    inv_t = _float(packed, INV_T)
    logits += row.to(tl.int64) * stride
    # Mass and count in one number: fewer than 256 blocks add to each place.
    acc = tl.zeros((PIVOTS, BLOCK), tl.int64)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=STAGES):
        at = split * CHUNK + start + tl.arange(0, BLOCK)
        s = _scaled(logits, at, vocab, inv_t)
        weight = tl.where(at < vocab, (_mass(s, top) << 8) + 1, 0)
        acc += tl.where(s[None, :] >= pivots[:, None], weight[None, :], 0)
    place = weights + (row.to(tl.int64) * splits + split) * (2 * PIVOTS) + tl.arange(0, PIVOTS)
    tl.store(place, tl.sum(acc & 255, 1))
    tl.store(place + PIVOTS, tl.sum(acc >> 8, 1))


@triton.jit(do_not_specialize=["filters"], do_not_specialize_on_alignment=["packed"])
def gather_kernel(
    logits, stride, packed, filters, bounds, tallies, weights, found, counts, vocab, splits,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PIVOTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of CHUNK tokens of one row the values that may be the edge, to ``found`` in any order, if they are few."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    packed += row * COLUMNS
    by_k, _, by_p, top_p = _wants(packed, filters, vocab)
    if not (by_k | by_p):
        return
    least = tl.full((), NOT_A_LOGIT, tl.float32)
    lo, hi, top, bottom, _, count_lo, count_hi, _ = _narrowed(
        bounds, tallies, weights, row, splits, by_k, by_p, top_p, least, False, SPLITS, PIVOTS, ROOM
    )
    few, start, end = _few(lo, hi, top, bottom, count_lo, count_hi, by_k & by_p, ROOM)
    if not few:
        return
    inv_t = _float(packed, INV_T)
    logits += row.to(tl.int64) * stride
    for block in range(0, CHUNK, BLOCK):
        at = split * CHUNK + block + tl.arange(0, BLOCK)
        s = _scaled(logits, at, vocab, inv_t)
        mine = (at < vocab) & (s >= start) & (s < end)
        here = tl.sum(mine.to(tl.int32), 0)
        if here > 0:
            place = tl.atomic_add(counts + row, here) + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(found + row.to(tl.int64) * ROOM + place, s, mask=mine & (place < ROOM))


@triton.jit
def _edge_among(keys, weights, base, lo, hi, target):
    """The largest key t in [lo, hi) such that ``base`` and the weights of ``keys`` >= t are ``target`` or more.

    lo always reaches it, hi never does. A sum changes at a key alone, so the largest t is one of ``keys``.
    """
    while hi > lo + 1:
        middle = lo + (hi - lo) // 2
        if base + tl.sum(tl.where(keys >= middle, weights, 0), 0) >= target:
            lo = middle
        else:
            hi = middle
    return lo


@triton.jit
def _among_few(s, there, count, k, top_p, top, least, lo, hi, target, base, by_k, by_p):
    """The threshold of a row from the values that may be its edge, s [ROOM] where ``there``."""
    keys = tl.where(there, _key(s), 0)
    first = _key(lo)
    last = tl.minimum(_key(hi), _key(top) + 1)
    lowest = least
    ones = there.to(tl.int64)
    masses = tl.where(there, _mass(s, top), 0)
    if by_k:
        if count + base >= k:
            lowest = tl.maximum(lowest, _unkey(_edge_among(keys, ones, base, first, last, k.to(tl.int64))))
        if by_p:
            first = _key(lowest)
            masses = tl.where(s >= lowest, masses, 0)
            share = _share(tl.sum(masses, 0), top_p)
            lowest = tl.maximum(lowest, _unkey(_edge_among(keys, masses, 0, first, _key(top) + 1, share)))
    else:
        lowest = tl.maximum(lowest, _unkey(_edge_among(keys, masses, base, first, last, target)))
    return lowest


@triton.jit
def _weight(s, top, MASS: tl.constexpr):
    """What a token adds: its mass, or one."""
    if MASS:
        return _mass(s, top)
    return tl.full(s.shape, 1, tl.int64)


@triton.jit
def _total(logits, vocab, inv_t, top, lowest, BLOCK: tl.constexpr):
    """The mass of all tokens with s >= lowest."""
    acc = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        s = _scaled(logits, at, vocab, inv_t)
        acc += tl.where((at < vocab) & (s >= lowest), _mass(s, top), 0)
    return tl.sum(acc, 0)


@triton.jit
def _edge_of_row(logits, vocab, inv_t, top, lo, hi, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """``_edge_among`` all tokens of a row, read anew for each step.

    Each pass also finds the nearest real keys on both sides of the middle and moves the bounds onto them, so it ends
    after about log2(number of distinct values) passes.
    """
    while hi > lo + 1:
        middle = lo + (hi - lo) // 2
        acc = tl.zeros((BLOCK,), tl.int64)
        above = tl.full((BLOCK,), 0xFFFFFFFF, tl.uint32)
        below = tl.zeros((BLOCK,), tl.uint32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = _scaled(logits, at, vocab, inv_t)
            key = _key(s)
            is_above = (key >= middle) & (at < vocab)
            acc += tl.where(is_above, _weight(s, top, MASS), 0)
            above = tl.where(is_above, tl.minimum(above, key), above)
            below = tl.where(is_above, below, tl.maximum(below, key))
        if tl.sum(acc, 0) >= target:
            lo = tl.minimum(tl.min(above, 0), hi - 1)
        else:
            hi = tl.maximum(tl.max(below, 0), lo) + 1
    return lo


@triton.jit
def _among_all(logits, vocab, inv_t, k, top_p, top, least, lo, hi, by_k, by_p, BLOCK: tl.constexpr):
    """The threshold of a row in which many tokens may be the edge: equal ones, mostly. One program reads them all."""
    first = _key(lo)
    last = tl.minimum(_key(hi), _key(top) + 1)
    lowest = least
    if by_k:
        edge = _edge_of_row(logits, vocab, inv_t, top, first, last, k.to(tl.int64), False, BLOCK)
        lowest = tl.maximum(lowest, _unkey(edge))
        first = _key(lowest)
        last = _key(top) + 1
    if by_p:
        share = _share(_total(logits, vocab, inv_t, top, lowest, BLOCK), top_p)
        edge = _edge_of_row(logits, vocab, inv_t, top, first, last, share, True, BLOCK)
        lowest = tl.maximum(lowest, _unkey(edge))
    return lowest


@triton.jit(do_not_specialize=["filters"], do_not_specialize_on_alignment=["packed"])
def finish_kernel(
    logits, stride, packed, filters, tops, bottoms, bounds, tallies, weights, found, counts, out, vocab, splits,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PIVOTS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program a row: its threshold."""
    row = tl.program_id(0)
    packed += row * COLUMNS
    inv_t = _float(packed, INV_T)
    lowest = tl.full((), NOT_A_LOGIT, tl.float32)
    if inv_t != 0.0:
        top, bottom = _ends(tops, bottoms, row, splits, SPLITS)
        by_k, k, by_p, top_p = _wants(packed, filters, vocab)
        lowest = _least(packed, filters, top, False)
        if by_k | by_p:
            nothing = tl.full((), NOT_A_LOGIT, tl.float32)
            lo, hi, top, bottom, target, count_lo, count_hi, mass_hi = _narrowed(
                bounds, tallies, weights, row, splits, by_k, by_p, top_p, nothing, False, SPLITS, PIVOTS, ROOM
            )
            few, start, end = _few(lo, hi, top, bottom, count_lo, count_hi, by_k & by_p, ROOM)
            if few:
                at = tl.arange(0, ROOM)
                count = tl.load(counts + row)
                there = at < count
                s = tl.load(found + row.to(tl.int64) * ROOM + at, mask=there, other=NOT_A_LOGIT)
                # What lies above the values that were gathered.
                base = tl.where(by_k, count_hi, mass_hi)
                base = tl.where(end == ENDLESS, 0, base)
                lowest = _among_few(s, there, count, k, top_p, top, lowest, start, hi, target, base, by_k, by_p)
            else:
                row_of = logits + row.to(tl.int64) * stride
                if (top == NOT_A_LOGIT) | (top == ENDLESS):  # what was weighed means nothing
                    lo = tl.full((), NOT_A_LOGIT, tl.float32)
                    hi = tl.full((), ENDLESS, tl.float32)
                lowest = _among_all(row_of, vocab, inv_t, k, top_p, top, lowest, lo, hi, by_k, by_p, BLOCK)
    tl.store(out + row, lowest)
