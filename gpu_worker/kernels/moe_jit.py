"""Triton code of ``moe``; read its docstring first."""

import triton
import triton.language as tl

from .activation_jit import _act


@triton.jit
def _join(gate, up, limit, KIND: tl.constexpr):
    """The gated activation of two float32 blocks."""
    if KIND == "swiglu_oai":
        return _act(tl.minimum(gate, limit), "quick_gelu") * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
    return _act(gate, KIND) * up


@triton.jit
def _experts_at(ids, at, total, first, count):
    """int32: the local experts of the slots ``at``; ``count`` for those of other ranks and beyond ``total``."""
    expert = tl.load(ids + at, mask=at < total, other=-1) - first
    return tl.where((at < total) & (expert >= 0) & (expert < count), expert, count).to(tl.int32)


# What changes from step to step is not specialised on: that would compile anew in the middle of serving.
@triton.jit(do_not_specialize=["total", "rows", "blocks", "first"])
def align_kernel(ids, slots, experts, total, first, count, rows, blocks, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """The blocks of one of the ``count`` local experts; of the program behind the last, those without work.

    Each counts all experts' slots for itself, so that one launch does it: nobody waits for another's sums, and places
    follow from the slots alone. BINS is a power of two above ``count``.
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    sizes = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, total, CHUNK):
        sizes += tl.histogram(_experts_at(ids, start + lane, total, first, count), BINS)
    padded = tl.where(bins < count, (sizes + rows - 1) // rows * rows, 0)
    begin = tl.sum(tl.where(bins < mine, padded, 0), 0)
    end = begin + tl.sum(tl.where(bins == mine, padded, 0), 0)
    if mine < count:
        filled = begin
        for start in range(0, total, CHUNK):
            here = (_experts_at(ids, start + lane, total, first, count) == mine).to(tl.int32)
            tl.store(slots + filled + tl.cumsum(here, 0) - 1, start + lane, mask=here > 0)
            filled += tl.sum(here, 0)
        rest = filled + tl.arange(0, 128)  # of the last block, which has 128 places at most
        tl.store(slots + rest, tl.zeros((128,), dtype=tl.int32) + total, mask=rest < end)
    else:
        end = blocks * rows
    for block in range(begin // rows, end // rows, 128):
        at = block + tl.arange(0, 128)
        tl.store(experts + at, tl.zeros((128,), dtype=tl.int32) + mine, mask=at < end // rows)


@triton.jit(do_not_specialize=["total"])
def grouped_kernel(
    x, x_row, weight, bias, weights, out, slots, experts, total, count, width, inner, limit,
    PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M slots of one expert times BLOCK_N of its weight's rows (of gate's and of up's, with ACTIVATION).

    Blocks are the grid's fast axis: programs at work together share an expert's rows. PER_ROW slots read one row of x.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= count:
        return
    slot = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_k = tl.arange(0, BLOCK_K)
    filled = slot < total
    within = column < width
    # The first of the expert's rows in weight and bias.
    first = expert * width
    if GATED:
        first = first * 2
    x_at = x + (slot // PER_ROW)[:, None] * x_row + at_k[None, :]
    w_at = weight + (first + column)[None, :] * inner + at_k[:, None]
    up_at = w_at + tl.cast(width, tl.int64) * inner
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        if EVEN:
            rows = tl.load(x_at + k, mask=filled[:, None], other=0.0)
            w = tl.load(w_at + k, mask=within[None, :], other=0.0)
        else:
            left = at_k < inner - k
            rows = tl.load(x_at + k, mask=filled[:, None] & left[None, :], other=0.0)
            w = tl.load(w_at + k, mask=within[None, :] & left[:, None], other=0.0)
        acc = tl.dot(rows, w, acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                w = tl.load(up_at + k, mask=within[None, :], other=0.0)
            else:
                w = tl.load(up_at + k, mask=within[None, :] & (at_k < inner - k)[:, None], other=0.0)
            up = tl.dot(rows, w, up, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + first + column, mask=within, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + first + width + column, mask=within, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = _join(acc, up, limit, ACTIVATION)
    if WEIGHTED:
        acc *= tl.load(weights + slot, mask=filled, other=0.0)[:, None]
    at = out + slot[:, None] * width + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=filled[:, None] & within[None, :])


@triton.jit
def sum_kernel(each, ids, out, first, count, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(ids + slot) - first
        # What lies at other ranks' slots was never written.
        there = tl.where((expert >= 0) & (expert < count), width, 0)
        total += tl.load(each + slot * width + at, mask=at < there, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)
