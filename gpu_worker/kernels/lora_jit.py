"""Triton code of ``lora``; read its docstring first."""

import triton
import triton.language as tl

from .moe_jit import _experts_at


@triton.jit
def _chosen(ids, slots, at, total, first, experts, mine, TOP_K: tl.constexpr):
    """int32: the local experts of those of the choices ``at`` whose token has the slot ``mine``; else ``experts``."""
    slot = tl.load(slots + at // TOP_K, mask=at < total, other=-1)
    return tl.where(slot == mine, _experts_at(ids, at, total, first, experts), experts)


@triton.jit(do_not_specialize=["total", "first"])
def count_kernel(
    ids, slots, sizes, total, first, experts, TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """How many choices one slot's tokens have made of each local expert. BINS is a power of two above ``experts``."""
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    found = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, total, CHUNK):
        found += tl.histogram(_chosen(ids, slots, start + lane, total, first, experts, mine, TOP_K), BINS)
    tl.store(sizes + mine.to(tl.int64) * experts + bins, found, mask=bins < experts)


@triton.jit(do_not_specialize=["total", "first", "rows", "blocks"])
def place_kernel(
    ids, slots, sizes, order, of, total, first, experts, groups, rows, blocks,
    TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The blocks of one group of a slot and an expert; of the program behind the last, those without work."""
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    before = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, mine, BINS):
        size = tl.load(sizes + start + bins, mask=start + bins < mine, other=0)
        before += (size + rows - 1) // rows
    begin = tl.sum(before, 0)
    size = tl.load(sizes + mine, mask=mine < groups, other=1)
    if size == 0:
        return
    end = blocks
    if mine < groups:
        end = begin + (size + rows - 1) // rows
        filled = begin.to(tl.int64) * rows
        for start in range(0, total, CHUNK):
            found = _chosen(ids, slots, start + lane, total, first, experts, mine // experts, TOP_K)
            here = (found == mine % experts).to(tl.int32)
            tl.store(order + filled + tl.cumsum(here, 0) - 1, start + lane, mask=here > 0)
            filled += tl.sum(here, 0)
        rest = filled + tl.arange(0, 128)  # of the last block, which has 128 places at most
        tl.store(order + rest, tl.zeros((128,), dtype=tl.int32) + total, mask=rest < end.to(tl.int64) * rows)
    for block in range(begin, end, 128):
        at = block + tl.arange(0, 128)
        tl.store(of + at, tl.zeros((128,), dtype=tl.int32) + mine, mask=at < end)


@triton.jit(do_not_specialize=["total"])
def shrink_kernel(
    x, x_row, a, shrunk, order, of, ranks, total, groups, inner, each, held, rank,
    PER_ROW: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one group times BLOCK_N rows of a module's A, over one of SPLITS parts of the inner axis.

    A has ``held`` rows for each module at most, and ``shrunk`` places for ``rank``.
    """
    block = tl.program_id(0)
    group = tl.load(of + block).to(tl.int64)
    if group >= groups:
        return
    tiles = tl.cdiv(held, BLOCK_N)
    piece = tl.program_id(1) // tiles
    start = tl.program_id(1) % tiles * BLOCK_N
    module = group * each + piece
    first = tl.load(ranks + module * 3 + 1)
    count = tl.load(ranks + module * 3 + 2)
    if start >= count:
        return
    slot = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    at_n = start + tl.arange(0, BLOCK_N)
    at_k = tl.arange(0, BLOCK_K)
    filled = slot < total
    within = at_n < count
    part = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS) * BLOCK_K
    begin = tl.program_id(2) * part
    x_at = x + (slot // PER_ROW)[:, None] * x_row + at_k[None, :]
    a_at = a + (module * held + at_n)[None, :] * inner + at_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(begin, tl.minimum(begin + part, inner), BLOCK_K):
        if EVEN:
            rows = tl.load(x_at + k, mask=filled[:, None], other=0.0)
            w = tl.load(a_at + k, mask=within[None, :], other=0.0)
        else:
            left = at_k < inner - k
            rows = tl.load(x_at + k, mask=filled[:, None] & left[None, :], other=0.0)
            w = tl.load(a_at + k, mask=within[None, :] & left[:, None], other=0.0)
        acc = tl.dot(rows.to(w.dtype), w, acc, input_precision=PRECISION)
    row = (tl.program_id(2).to(tl.int64) * total + slot) * each + piece
    at = shrunk + row[:, None] * rank + (first + at_n)[None, :]
    tl.store(at, acc, mask=filled[:, None] & within[None, :])


@triton.jit(do_not_specialize=["total"])
def expand_kernel(
    shrunk, ids, b, y, y_row, weights, order, of, pieces, ranks, scales, total, groups, outputs, each, rank, entries,
    TABLE: tl.constexpr, WEIGHTED: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a module for BLOCK_M rows of one group: y += scale * B (the parts of ``shrunk``, added up).

    TABLE: ``shrunk`` is A of embeddings, with a row for each of ``entries`` of each group, looked up by ``ids``.
    """
    block = tl.program_id(0)
    group = tl.load(of + block).to(tl.int64)
    if group >= groups:
        return
    piece = tl.program_id(2)
    module = group * each + piece
    whole = tl.load(ranks + module * 3)
    width = tl.load(pieces + piece * 3 + 1)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (whole == 0) | (tl.program_id(1) * BLOCK_N >= width):
        return
    slot = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    filled = slot < total
    within = column < width
    at_k = tl.arange(0, BLOCK_K)
    if TABLE:
        row = group * entries + tl.load(ids + slot, mask=filled, other=0)
    else:
        row = slot * each + piece
    row_at = shrunk + row[:, None] * rank + at_k[None, :]
    b_row = group * outputs + tl.load(pieces + piece * 3 + 2)
    b_at = b + (b_row + column)[None, :] * rank + at_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, whole, BLOCK_K):
        left = at_k < whole - k
        mask = filled[:, None] & left[None, :]
        rows = tl.load(row_at + k, mask=mask, other=0.0)
        for split in range(1, SPLITS):
            rows += tl.load(row_at + k + split * (total.to(tl.int64) * each * rank), mask=mask, other=0.0)
        w = tl.load(b_at + k, mask=within[None, :] & left[:, None], other=0.0)
        acc = tl.dot(rows.to(w.dtype), w, acc, input_precision=PRECISION)
    acc *= tl.load(scales + module)
    if WEIGHTED:
        acc *= tl.load(weights + slot, mask=filled, other=0.0)[:, None]
    mask = filled[:, None] & within[None, :]
    at = y + slot[:, None] * y_row + (tl.load(pieces + piece * 3) + column)[None, :]
    tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=mask)
