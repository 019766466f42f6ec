"""Triton code of ``w8a8``; read its docstring first."""

import triton
import triton.language as tl

from .coded_jit import _leave
from .linear_jit import _rounded_product, _tile


@triton.jit
def _rounded(value):
    """float32 to the nearest whole number, of two equally near the even one; up to 2^22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _on_grid(value):
    """float32 to the nearest that e4m3 has, of two equally near the even one: the conversion is exact then, which
    Triton's interpreter does not round as cards do."""
    exponent = value.to(tl.int32, bitcast=True) & 0x7F800000
    step = (tl.maximum(exponent, 121 << 23) - (3 << 23)).to(tl.float32, bitcast=True)
    return _rounded(value / step) * step


@triton.jit
def narrow_kernel(
    x, x_row, given, given_zero, q, scales, zeros, columns, groups,
    KIND: tl.constexpr, STATIC: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and group: its scale (and zero) and its values. The program of a group that is the whole row goes
    through it twice, BLOCK columns at a time. Values that are no numbers have no byte: their scale becomes NaN."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    most = 127.0 if KIND == "int8" else 448.0
    begin = group * GROUP
    end = tl.minimum(begin + GROUP, columns)
    lane = tl.arange(0, BLOCK)
    x += token * x_row
    if STATIC:
        scale = tl.load(given)
        zero = tl.load(given_zero).to(tl.float32) if ZERO else 0.0
    else:
        high = tl.zeros((BLOCK,), dtype=tl.float32)
        low = tl.zeros((BLOCK,), dtype=tl.float32)
        for at in range(begin, end, BLOCK):
            value = tl.load(x + at + lane, mask=at + lane < end, other=0.0).to(tl.float32)
            high = tl.maximum(high, value)
            low = tl.minimum(low, value)
        top, bottom = tl.max(high, 0), tl.min(low, 0)
        if ZEROS:
            scale = tl.div_rn(top - bottom, 255.0)
            zero = _rounded(-128.0 - tl.div_rn(bottom, tl.where(scale > 0.0, scale, 1.0)))
        else:
            scale = tl.div_rn(tl.maximum(top, -bottom), most)
            zero = 0.0
    if ZEROS:
        tl.store(zeros + token, zero)
    by = tl.where(scale > 0.0, scale, 1.0)
    unknown = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(begin, end, BLOCK):
        value = tl.load(x + at + lane, mask=at + lane < end, other=0.0).to(tl.float32)
        value = tl.div_rn(value, by)
        unknown += tl.where(value == value, 0.0, value)
        if KIND == "int8":
            found = tl.minimum(tl.maximum(_rounded(value) + zero, -128.0), 127.0).to(tl.int8)
        else:
            value = _on_grid(tl.minimum(tl.maximum(value, -most), most))
            found = value.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        tl.store(q + token * columns + at + lane, found, mask=at + lane < end)
    tl.store(scales + token * groups + group, scale + tl.sum(unknown, 0))


@triton.jit
def _narrow_dot(weight, columns, acc, KIND: tl.constexpr, BLOCK_K: tl.constexpr):
    """``acc`` and the products of bytes; in float32 no more than BLOCK_K of fp8 are added up less exactly."""
    if KIND == "int8":
        return tl.dot(weight, columns, acc, out_dtype=tl.int32)
    else:
        weight = weight.to(tl.float8e4nv, bitcast=True)
        columns = columns.to(tl.float8e4nv, bitcast=True)
        return tl.dot(weight, columns, acc, max_num_imprecise_acc=BLOCK_K)


@triton.jit
def _narrow_part(
    q_at, w_at, up_at, scales_at, row, up_rows, token, filled, within, x_scales, begin, end, rows, inner, groups,
    KIND: tl.constexpr, GATED: tl.constexpr, GROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products over the columns from ``begin`` to ``end``, of int8 whole numbers. GROUPED: a tile of columns has
    scales of its own on both sides, which multiply its sums."""
    kind: tl.constexpr = tl.int32 if KIND == "int8" and not GROUPED else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=kind)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=kind)
    lane = tl.arange(0, BLOCK_K)
    for k in range(begin, end, BLOCK_K):
        left = lane < inner - k
        columns = tl.load(q_at + k, mask=filled[None, :] & left[:, None], other=0)
        weight = tl.load(w_at + k, mask=within[:, None] & left[None, :], other=0)
        if GROUPED:
            none = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if KIND == "int8" else tl.float32)
            group = tl.minimum(k // BLOCK_K, groups - 1)
            own = tl.load(x_scales + token * groups + group, mask=filled, other=0.0)[None, :]
            at = scales_at + group.to(tl.int64) * rows + row
            each = tl.load(at, mask=within, other=0.0).to(tl.float32)[:, None]
            acc += _narrow_dot(weight, columns, none, KIND, BLOCK_K).to(tl.float32) * each * own
        else:
            acc = _narrow_dot(weight, columns, acc, KIND, BLOCK_K)
        if GATED:
            weight = tl.load(up_at + k, mask=within[:, None] & left[None, :], other=0)
            if GROUPED:
                each = tl.load(at + up_rows, mask=within, other=0.0).to(tl.float32)[:, None]
                up += _narrow_dot(weight, columns, none, KIND, BLOCK_K).to(tl.float32) * each * own
            else:
                up = _narrow_dot(weight, columns, up, KIND, BLOCK_K)
    return acc, up


@triton.jit
def _scaled(acc, sums, scales, row, within, zero, own, ZEROS: tl.constexpr, GROUPED: tl.constexpr):
    """Sums of whole numbers as float32. ``zero`` of x rows is taken off, times the sum of each output."""
    if GROUPED:
        return acc
    else:
        acc = acc.to(tl.float32)
        if ZEROS:
            acc -= tl.load(sums + row, mask=within, other=0.0)[:, None] * zero[None, :]
        acc *= tl.load(scales + row, mask=within, other=0.0).to(tl.float32)[:, None]
        return _rounded_product(acc, tl.broadcast_to(own[None, :], acc.shape))


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    q, x_scales, x_zeros, weight, scales, sums, bias, out, partial, tokens, width, rows, inner, padded, groups, limit,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ZEROS: tl.constexpr, GROUPED: tl.constexpr,
    SPLITS: tl.constexpr, APART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M narrow rows times BLOCK_N of weight's (of gate's and of up's, with ACTIVATION). Of the SPLITS parts this
    program has one (APART), or all, one after the other."""
    GATED: tl.constexpr = ACTIVATION != ""
    m, n = _tile(tl.cdiv(tokens, BLOCK_M), tl.cdiv(width, BLOCK_N))
    token = (m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = (n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    filled = token < tokens
    within = row < width
    lane = tl.arange(0, BLOCK_K)
    q_at = q + token[None, :] * inner + lane[:, None]
    w_at = weight + row[:, None] * padded + lane[None, :]
    up_at = weight + (row + width)[:, None] * padded + lane[None, :]
    own = tl.load(x_scales + token, mask=filled, other=0.0) if not GROUPED else filled
    zero = tl.load(x_zeros + token, mask=filled, other=0.0) if ZEROS else filled
    part = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS) * BLOCK_K
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
        acc, up = _narrow_part(
            q_at, w_at, up_at, scales, row, width, token, filled, within, x_scales, begin,
            tl.minimum(begin + part, inner), rows, inner, groups, KIND, GATED, GROUPED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        once = tl.where(split == 0, zero.to(tl.float32), 0.0) if ZEROS else zero
        total += _scaled(acc, sums, scales, row, within, once, own, ZEROS, GROUPED)
        if GATED:
            total_up += _scaled(up, sums, scales, row + width, within, once, own, ZEROS, GROUPED)
    _leave(
        total, total_up, bias, out, partial, token, row, filled, within, first_part, tokens, width, rows, limit,
        ACTIVATION, HAS_BIAS, APART,
    )  # fmt: skip
