"""Triton code of ``coded``; read its docstring first.

A tile of the weight is [BLOCK_N, BLOCK_K] codes, and the product is made the other way round, weight times x's columns:
so a tile is multiplied as it lies, without a transposition, and Hopper takes it from registers.
"""

import triton
import triton.language as tl

from .linear_jit import _rounded_product, _tile
from .moe_jit import _join


@triton.jit
def _plane(plane, row, within, k, words, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """int32 [BLOCK_N, BLOCK_K]: the values of one plane, from column ``k`` on.

    A word is taken apart by halves, so that the thread that has it holds all its values, side by side. Shifted by a
    range instead, each would be another thread's, which loads the word again and stores 16 bits at a time.
    """
    PER: tl.constexpr = 32 // WIDTH
    at = k // PER + tl.arange(0, BLOCK_K // PER)
    found = tl.load(
        plane + row[:, None] * words + at[None, :], mask=within[:, None] & (at < words)[None, :], other=0
    )  # fmt: skip
    parts = tl.join(found, found >> 16)
    parts = tl.join(parts, parts >> 8)
    parts = tl.join(parts, parts >> 4)
    if WIDTH <= 2:
        parts = tl.join(parts, parts >> 2)
    if WIDTH == 1:
        parts = tl.join(parts, parts >> 1)
    return tl.reshape(parts & ((1 << WIDTH) - 1), (BLOCK_N, BLOCK_K))


@triton.jit
def _codes(
    plane, plane_b, plane_c, row, within, k, padded,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_N, BLOCK_K]; of 8 bits what ``plane`` has, int8 or uint8."""
    if BITS == 8:
        at = k + tl.arange(0, BLOCK_K)
        mask = within[:, None] & (at < padded)[None, :]
        return tl.load(plane + row[:, None] * padded + at[None, :], mask=mask, other=0)
    else:
        FIRST: tl.constexpr = 4 if BITS >= 4 else 2
        codes = _plane(plane, row, within, k, padded // (32 // FIRST), FIRST, BLOCK_N, BLOCK_K)
        if BITS == 6 or BITS == 7:
            codes |= _plane(plane_b, row, within, k, padded // 16, 2, BLOCK_N, BLOCK_K) << 4
        if BITS == 3:
            codes |= _plane(plane_b, row, within, k, padded // 32, 1, BLOCK_N, BLOCK_K) << 2
        if BITS == 5:
            codes |= _plane(plane_b, row, within, k, padded // 32, 1, BLOCK_N, BLOCK_K) << 4
        if BITS == 7:
            codes |= _plane(plane_c, row, within, k, padded // 32, 1, BLOCK_N, BLOCK_K) << 6
        return codes


@triton.jit
def _whole(codes, zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes less ``zero`` in ``dtype``, exactly; ``zero`` is a float32.

    A code is put below a one that is so high that the code's bits are the last ones of a float: the difference of two
    such floats is that of the codes. Conversions of integers take a card four to eight times as long.
    """
    if codes.dtype == tl.int8:
        return (codes.to(tl.float32) - zero).to(dtype)
    elif dtype == tl.float16:
        return (codes.to(tl.int32) | 0x6400).to(tl.int16).to(dtype, bitcast=True) - (zero + 1024.0).to(dtype)
    elif dtype == tl.bfloat16 and BITS < 8:
        return (codes | 0x4300).to(tl.int16).to(dtype, bitcast=True) - (zero + 128.0).to(dtype)
    else:
        return ((codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)).to(dtype)


@triton.jit
def _meant(codes, table, row, within, KIND: tl.constexpr, BITS: tl.constexpr):
    """What codes stand for that are no whole numbers: float16 of the small floats, which is exact, or float32."""
    codes = codes.to(tl.int32)
    if KIND == "e4m3":
        # The bits of a float16 whose exponent counts from 8 lower; subnormal numbers come out right as well.
        bits = ((codes & 128) << 8) | ((codes & 127) << 7)
        return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    elif KIND == "e2m1":
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    elif KIND == "table":
        return tl.load(table + codes)
    else:
        return tl.load(table + row[:, None] * (1 << BITS) + codes, mask=within[:, None], other=0.0)


@triton.jit
def _numbers(base, fine, row, within, group, rows, RATIO: tl.constexpr, FINE: tl.constexpr):
    """float32: those of rows ``row`` and groups ``group``, of tensors [groups, rows]."""
    found = tl.load(base + (group // RATIO).to(tl.int64) * rows + row, mask=within, other=0.0).to(tl.float32)
    if FINE:
        found *= tl.load(fine + group.to(tl.int64) * rows + row, mask=within, other=0).to(tl.float32)
    return found


@triton.jit
def _spread(
    base, fine, row, within, k, rows, groups, GROUP: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr,
    FINE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A number for each row and column of a tile: [BLOCK_N, 1] where all columns are of one group (SUB 1), else
    [BLOCK_N, BLOCK_K]. SUB: groups of a tile; 0: they do not begin where tiles do."""
    if SUB == 1:
        group = tl.minimum(k // GROUP, groups - 1)
        return _numbers(base, fine, row, within, group, rows, RATIO, FINE)[:, None]
    elif SUB == 0:
        group = tl.minimum((k + tl.arange(0, BLOCK_K)) // GROUP, groups - 1)
        return _numbers(base, fine, row[:, None], within[:, None], group[None, :], rows, RATIO, FINE)
    else:
        group = tl.minimum(k // GROUP + tl.arange(0, SUB), groups - 1)
        each = _numbers(base, fine, row[:, None], within[:, None], group[None, :], rows, RATIO, FINE)
        wide = tl.broadcast_to(each[:, :, None], (BLOCK_N, SUB, BLOCK_K // SUB))
        return tl.reshape(wide, (BLOCK_N, BLOCK_K))


@triton.jit
def _zero(
    zeros, row, within, k, rows, groups, ZERO: tl.constexpr, ZERO_RATIO: tl.constexpr, GROUP: tl.constexpr,
    SUB: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What is taken off the codes of a tile, as ``_spread`` has it. ZERO -1: ``zeros`` has it."""
    if ZERO == -1:
        return _spread(zeros, zeros, row, within, k, rows, groups, GROUP, SUB, ZERO_RATIO, False, BLOCK_N, BLOCK_K)
    else:
        return tl.full((1, 1), ZERO, tl.float32)


@triton.jit
def _tile_values(
    plane, plane_b, plane_c, zero, table, row, within, k, padded,
    BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of ``dtype``: what codes stand for, less ``zero``."""
    codes = _codes(plane, plane_b, plane_c, row, within, k, padded, BITS, BLOCK_N, BLOCK_K)
    if KIND == "whole":
        return _whole(codes, zero, BITS, dtype)
    else:
        values = _meant(codes, table, row, within, KIND, BITS)
        if ZERO != 0:
            values = values.to(tl.float32) - zero
        return values.to(dtype)


@triton.jit
def _of_tile(
    scales, scales_fine, zeros, mins, mins_fine, row, within, k, rows, groups,
    ZERO: tl.constexpr, ZERO_RATIO: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr,
    FINE: tl.constexpr, MINS: tl.constexpr, MIN_RATIO: tl.constexpr, MIN_FINE: tl.constexpr, LAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(The zero, the scale, what is subtracted at last) of the tile from column ``k`` on; without them a 0."""
    zero = _zero(zeros, row, within, k, rows, groups, ZERO, ZERO_RATIO, GROUP, SUB, BLOCK_N, BLOCK_K)
    scale = tl.zeros((1, 1), tl.float32)
    least = tl.zeros((1, 1), tl.float32)
    if not LAST:
        scale = _spread(
            scales, scales_fine, row, within, k, rows, groups, GROUP, SUB, RATIO, FINE, BLOCK_N, BLOCK_K
        )  # fmt: skip
    if MINS:
        least = _spread(
            mins, mins_fine, row, within, k, rows, groups, GROUP, SUB, MIN_RATIO, MIN_FINE, BLOCK_N, BLOCK_K
        )  # fmt: skip
    return zero, scale, least


@triton.jit
def _multiplied(
    acc, columns, sums, plane, plane_b, plane_c, table, zero, scale, least, row, within, k, padded,
    BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, SUB: tl.constexpr, MINS: tl.constexpr,
    LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc`` [BLOCK_N, BLOCK_M] and the products with BLOCK_K ``columns`` of x [BLOCK_K, BLOCK_M].

    Where a tile has one group its scale multiplies the sum of the products, in float32: the codes themselves, whole
    numbers, are exact in x's type. LAST: there is one group in all, and the scale comes at the end.
    """
    dtype: tl.constexpr = columns.dtype if SUB == 1 else tl.float32
    values = _tile_values(
        plane, plane_b, plane_c, zero, table, row, within, k, padded, BITS, KIND, ZERO, BLOCK_N, BLOCK_K, dtype
    )
    if LAST:
        acc = tl.dot(values, columns, acc, input_precision=PRECISION)
    elif SUB == 1:
        acc += tl.dot(values, columns, input_precision=PRECISION) * scale
        if MINS:
            acc -= least * sums[None, :]
    else:
        values *= scale
        if MINS:
            values -= least
        acc = tl.dot(values.to(columns.dtype), columns, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _columns(
    x_at, order, filled, k, inner, padded, ORDERED: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """[BLOCK_K, BLOCK_M]: what columns ``k`` on of a weight are multiplied by, of rows of x that begin at ``x_at``."""
    at = k + tl.arange(0, BLOCK_K)
    if ORDERED:
        at = tl.load(order + at, mask=at < padded, other=inner)
    if EVEN:
        return tl.load(x_at + at[:, None], mask=filled[None, :], other=0.0)
    else:
        return tl.load(x_at + at[:, None], mask=filled[None, :] & (at < inner)[:, None], other=0.0)


@triton.jit
def _times_last(
    acc, scales, scales_fine, row, within, rows, groups, GROUP: tl.constexpr, RATIO: tl.constexpr, FINE: tl.constexpr,
    LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A sum of ``_sum_part``, times the scale of the only group there is, if LAST."""
    if LAST:
        scale = _spread(scales, scales_fine, row, within, 0, rows, groups, GROUP, 1, RATIO, FINE, BLOCK_N, BLOCK_K)
        acc = _rounded_product(acc, tl.broadcast_to(scale, acc.shape))
    return acc


@triton.jit
def _sum_part(
    x_at, order, plane, plane_b, plane_c, scales, scales_fine, zeros, mins, mins_fine, table,
    row, filled, within, begin, end, rows, up_rows, inner, padded, groups,
    GATED: tl.constexpr, ORDERED: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    ZERO: tl.constexpr, ZERO_RATIO: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr,
    FINE: tl.constexpr, MINS: tl.constexpr, MIN_RATIO: tl.constexpr, MIN_FINE: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products over the columns from ``begin`` to ``end``, of the rows and, if GATED, of those ``up_rows`` on.

    ``x_at`` [1, BLOCK_M] are where rows of x begin; ``filled`` which there are.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # Numbers of single rows are too narrow for the pipeline of the loop's other loads: of few rows, whose time is that
    # of loads, a tile's are read beside the tile before it; not where each of its columns has some of its own.
    AHEAD: tl.constexpr = SUB == 1 and BLOCK_M <= 32
    zero, scale, least = _of_tile(
        scales, scales_fine, zeros, mins, mins_fine, row, within, begin, rows, groups, ZERO, ZERO_RATIO, GROUP, SUB,
        RATIO, FINE, MINS, MIN_RATIO, MIN_FINE, LAST, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if GATED:
        up_zero, up_scale, up_least = _of_tile(
            scales, scales_fine, zeros, mins, mins_fine, row + up_rows, within, begin, rows, groups, ZERO, ZERO_RATIO,
            GROUP, SUB, RATIO, FINE, MINS, MIN_RATIO, MIN_FINE, LAST, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    for k in range(begin, end, BLOCK_K):
        if AHEAD:
            this_zero, this_scale, this_least = zero, scale, least
        zero, scale, least = _of_tile(
            scales, scales_fine, zeros, mins, mins_fine, row, within, k + BLOCK_K * AHEAD, rows, groups, ZERO,
            ZERO_RATIO, GROUP, SUB, RATIO, FINE, MINS, MIN_RATIO, MIN_FINE, LAST, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if not AHEAD:
            this_zero, this_scale, this_least = zero, scale, least
        columns = _columns(x_at, order, filled, k, inner, padded, ORDERED, EVEN, BLOCK_K)
        sums = tl.sum(columns.to(tl.float32), 0) if MINS and SUB == 1 else filled
        acc = _multiplied(
            acc, columns, sums, plane, plane_b, plane_c, table, this_zero, this_scale, this_least, row, within, k,
            padded, BITS, KIND, ZERO, SUB, MINS, LAST, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        if GATED:
            if AHEAD:
                this_zero, this_scale, this_least = up_zero, up_scale, up_least
            up_zero, up_scale, up_least = _of_tile(
                scales, scales_fine, zeros, mins, mins_fine, row + up_rows, within, k + BLOCK_K * AHEAD, rows, groups,
                ZERO, ZERO_RATIO, GROUP, SUB, RATIO, FINE, MINS, MIN_RATIO, MIN_FINE, LAST, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if not AHEAD:
                this_zero, this_scale, this_least = up_zero, up_scale, up_least
            up = _multiplied(
                up, columns, sums, plane, plane_b, plane_c, table, this_zero, this_scale, this_least, row + up_rows,
                within, k, padded, BITS, KIND, ZERO, SUB, MINS, LAST, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
    if GATED:
        up = _times_last(
            up, scales, scales_fine, row + up_rows, within, rows, groups, GROUP, RATIO, FINE, LAST, BLOCK_N, BLOCK_K
        )
    acc = _times_last(acc, scales, scales_fine, row, within, rows, groups, GROUP, RATIO, FINE, LAST, BLOCK_N, BLOCK_K)
    return acc, up


@triton.jit
def _leave(
    total, total_up, bias, out, partial, token, row, filled, within, first_part, tokens, width, rows, limit,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Bring sums [BLOCK_N, BLOCK_M] to where they go: a part's (APART) for ``join_kernel``, all parts' as outputs."""
    GATED: tl.constexpr = ACTIVATION != ""
    mask = within[:, None] & filled[None, :]
    if APART:
        at = partial + (token + first_part * tokens)[None, :] * rows + row[:, None]
        tl.store(at, total, mask=mask)
        if GATED:
            tl.store(at + width, total_up, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + row, mask=within, other=0.0).to(tl.float32)[:, None]
            if GATED:
                total_up += tl.load(bias + width + row, mask=within, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total = _join(total, total_up, limit, ACTIVATION)
        tl.store(out + token[None, :] * width + row[:, None], total.to(out.dtype.element_ty), mask=mask)


# The number of tokens changes from step to step: to specialise on it would compile anew in the middle of serving.
@triton.jit(do_not_specialize=["tokens"])
def coded_kernel(
    x, x_row, order, plane, plane_b, plane_c, scales, scales_fine, zeros, mins, mins_fine, table, bias, out, partial,
    tokens, width, rows, inner, padded, groups, limit,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ORDERED: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, ZERO: tl.constexpr, ZERO_RATIO: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr,
    RATIO: tl.constexpr, FINE: tl.constexpr, MINS: tl.constexpr, MIN_RATIO: tl.constexpr, MIN_FINE: tl.constexpr,
    LAST: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of x times BLOCK_N of weight's (of gate's and of up's, with ACTIVATION); the parts of the inner axis
    are as in ``linear_jit.product_kernel``."""
    GATED: tl.constexpr = ACTIVATION != ""
    m, n = _tile(tl.cdiv(tokens, BLOCK_M), tl.cdiv(width, BLOCK_N))
    token = (m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    filled = token < tokens
    within = row < width
    part = tl.cdiv(tl.cdiv(padded, BLOCK_K), SPLITS) * BLOCK_K
    if APART:
        first_part = tl.program_id(1)
        parts = 1
    else:
        first_part = 0
        parts = SPLITS
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for split in range(first_part, first_part + parts):
        begin = split * part
        acc, up = _sum_part(
            x + token[None, :] * x_row, order, plane, plane_b, plane_c, scales, scales_fine, zeros, mins, mins_fine,
            table, row, filled, within, begin, tl.minimum(begin + part, padded), rows, width, inner, padded, groups,
            GATED, ORDERED, EVEN, BITS, KIND, ZERO, ZERO_RATIO, GROUP, SUB, RATIO, FINE, MINS, MIN_RATIO, MIN_FINE,
            LAST, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        total += acc
        if GATED:
            total_up += up
    _leave(
        total, total_up, bias, out, partial, token, row, filled, within, first_part, tokens, width, rows, limit,
        ACTIVATION, HAS_BIAS, APART,
    )  # fmt: skip


@triton.jit
def values_kernel(
    order, plane, plane_b, plane_c, scales, scales_fine, zeros, mins, mins_fine, table, out,
    first, stop, rows, inner, padded, groups,
    ORDERED: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, ZERO_RATIO: tl.constexpr,
    GROUP: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr, FINE: tl.constexpr, MINS: tl.constexpr,
    MIN_RATIO: tl.constexpr, MIN_FINE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The values of BLOCK_N rows and BLOCK_K columns, of the rows ``first`` to ``stop``, which ``out`` begins with."""
    row = (first + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    within = row < stop
    k = tl.program_id(1) * BLOCK_K
    zero = _zero(zeros, row, within, k, rows, groups, ZERO, ZERO_RATIO, GROUP, SUB, BLOCK_N, BLOCK_K)
    values = _tile_values(
        plane, plane_b, plane_c, zero, table, row, within, k, padded, BITS, KIND, ZERO, BLOCK_N, BLOCK_K, tl.float32
    )
    values *= _spread(scales, scales_fine, row, within, k, rows, groups, GROUP, SUB, RATIO, FINE, BLOCK_N, BLOCK_K)
    if MINS:
        values -= _spread(
            mins, mins_fine, row, within, k, rows, groups, GROUP, SUB, MIN_RATIO, MIN_FINE, BLOCK_N, BLOCK_K
        )  # fmt: skip
    at = k + tl.arange(0, BLOCK_K)
    if ORDERED:
        at = tl.load(order + at, mask=at < padded, other=inner)
    tl.store(
        out + (row - first)[:, None] * inner + at[None, :], values.to(out.dtype.element_ty),
        mask=within[:, None] & (at < inner)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["total"])
def coded_grouped_kernel(
    x, x_row, order, plane, plane_b, plane_c, scales, scales_fine, zeros, mins, mins_fine, table,
    order_step, plane_step, plane_b_step, plane_c_step, scales_step, scales_fine_step, zeros_step, mins_step,
    mins_fine_step, table_step, bias, weights, out, slots, experts, total, count, width, rows, inner, padded, groups,
    limit,
    PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    ORDERED: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    ZERO_RATIO: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, RATIO: tl.constexpr, FINE: tl.constexpr,
    MINS: tl.constexpr, MIN_RATIO: tl.constexpr, MIN_FINE: tl.constexpr, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M slots of one expert times BLOCK_N of its weight's rows, as ``moe_jit.grouped_kernel``. The steps are from
    one expert's values to the next one's, of each tensor."""
    GATED: tl.constexpr = ACTIVATION != ""
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= count:
        return
    slot = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    filled = slot < total
    within = row < width
    acc, up = _sum_part(
        x + (slot // PER_ROW)[None, :] * x_row, order + expert * order_step, plane + expert * plane_step,
        plane_b + expert * plane_b_step, plane_c + expert * plane_c_step, scales + expert * scales_step,
        scales_fine + expert * scales_fine_step, zeros + expert * zeros_step, mins + expert * mins_step,
        mins_fine + expert * mins_fine_step, table + expert * table_step, row, filled, within, 0, padded, rows, width,
        inner, padded, groups, GATED, ORDERED, EVEN, BITS, KIND, ZERO, ZERO_RATIO, GROUP, SUB, RATIO, FINE, MINS,
        MIN_RATIO, MIN_FINE, LAST, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        at = bias + expert * rows + row
        acc += tl.load(at, mask=within, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(at + width, mask=within, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = _join(acc, up, limit, ACTIVATION)
    if WEIGHTED:
        acc *= tl.load(weights + slot, mask=filled, other=0.0)[None, :]
    at = out + slot[None, :] * width + row[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=within[:, None] & filled[None, :])
