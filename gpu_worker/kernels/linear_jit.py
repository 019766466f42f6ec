"""Triton code of ``linear``; read its docstring first."""

import triton
import triton.language as tl

from .moe_jit import _join


@triton.jit
def _tile(m_blocks, n_blocks):
    """(m, n) of this program: eight blocks of rows go through the weight together, so that they share what the L2
    cache has of both."""
    at = tl.program_id(0)
    first = at // (8 * n_blocks) * 8
    among = tl.minimum(m_blocks - first, 8)
    within = at % (8 * n_blocks)
    return first + within % among, within // among


@triton.jit
def _rounded_product(a, b):
    """a * b in float32, rounded before anything is added to it.

    Compilers make one rounding of a product and a sum that takes it. A part that is stored is rounded before it is
    added, so one that is added at once has to be, or the bits would differ. An addition of 0 is left alone, as it
    makes 0 of -0.
    """
    return tl.fma(a, b, tl.zeros(a.shape, tl.float32))


@triton.jit
def _sum_part(
    x_at, w_at, up_at, at_k, filled, within, begin, end, inner,
    GATED: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The products over the inner values from ``begin`` to ``end``, of the rows and, if GATED, of those of up."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
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
    return acc, up


# The number of tokens changes from step to step: to specialise on it would compile anew in the middle of serving.
@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x, x_row, weight, weight_row, bias, out, partial, tokens, width, inner, limit,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of x times BLOCK_N of weight's (of gate's and of up's, with ACTIVATION).

    The inner axis is cut into SPLITS parts, each summed for itself. APART: this program has one of them, and leaves
    its sum in ``partial`` [SPLITS, tokens, weight's rows] for ``join_kernel``. Else it has all, and adds them up as
    that does, so that the bits are the same.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    m, n = _tile(tl.cdiv(tokens, BLOCK_M), tl.cdiv(width, BLOCK_N))
    token = (m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    at_k = tl.arange(0, BLOCK_K)
    filled = token < tokens
    within = column < width
    x_at = x + token[:, None] * x_row + at_k[None, :]
    w_at = weight + column[None, :] * weight_row + at_k[:, None]
    up_at = weight + (column + width)[None, :] * weight_row + at_k[:, None]
    part = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS) * BLOCK_K
    if APART:
        first_part = tl.program_id(1)
        parts = 1
    else:
        first_part = 0
        parts = SPLITS
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in range(first_part, first_part + parts):
        begin = split * part
        acc, up = _sum_part(
            x_at, w_at, up_at, at_k, filled, within, begin, tl.minimum(begin + part, inner), inner,
            GATED, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        total += acc
        if GATED:
            total_up += up
    mask = filled[:, None] & within[None, :]
    if APART:
        at = partial + (token + first_part * tokens)[:, None] * (width * 2 if GATED else width) + column[None, :]
        tl.store(at, total, mask=mask)
        if GATED:
            tl.store(at + width, total_up, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
            if GATED:
                total_up += tl.load(bias + width + column, mask=within, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total = _join(total, total_up, limit, ACTIVATION)
        at = out + token[:, None] * width + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def join_kernel(
    partial, bias, out, tokens, width, limit,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row: the parts' sums from the first part on, the bias, the activation."""
    GATED: tl.constexpr = ACTIVATION != ""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(SPLITS):
        row = partial + (token + split * tokens) * (width * 2 if GATED else width)
        total += tl.load(row + at, mask=within, other=0.0)
        if GATED:
            up += tl.load(row + width + at, mask=within, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=within, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + width + at, mask=within, other=0.0).to(tl.float32)
    if GATED:
        total = _join(total, up, limit, ACTIVATION)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=within)
