"""Triton code of ``sampling``; read its docstring first. Launched without fused multiply-adds, to round as numpy."""

import triton
import triton.language as tl

INV_T = tl.constexpr(0)
SEED_LOW = tl.constexpr(4)
SEED_HIGH = tl.constexpr(5)
NOT_A_LOGIT = tl.constexpr(float("-inf"))


@triton.jit
def _float(packed, column: tl.constexpr):
    return tl.load(packed + column).to(tl.float32, bitcast=True)


@triton.jit
def _philox_round(c0, c1, c2, c3, k0, k1):
    a = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    b = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    return tl.umulhi(b, c2) ^ c1 ^ k0, b * c2, tl.umulhi(a, c0) ^ c3 ^ k1, a * c0


@triton.jit
def gumbel(position, blocks, k0, k1):
    """Noise of tokens 4 * blocks .. 4 * blocks + 3, float32 [4 * N]. All uint32; ``blocks`` [N]."""
    c0 = tl.zeros_like(blocks) + position
    c1 = blocks
    c2 = tl.zeros_like(blocks)
    c3 = tl.zeros_like(blocks)
    k0 = tl.zeros_like(blocks) + k0
    k1 = tl.zeros_like(blocks) + k1
    w0 = tl.full(blocks.shape, 0x9E3779B9, tl.uint32)
    w1 = tl.full(blocks.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + w0
        k1 = k1 + w1
    x = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    v = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994039535522)
    u = 1.0 - v
    gap = tl.where(u == 1.0, 1.0, u - 1.0)
    exponential = tl.where(u == 1.0, v, tl.log(u) * tl.div_rn(v, gap))
    return -tl.log(exponential)


@triton.jit
def _winner(values, nan, SIZE: tl.constexpr):
    """(The largest of ``values`` [SIZE], where it lies), the first of equals.

    The first ``nan`` wins, as in argmax, over infinity too: so the row is refused (``marks``), and not drawn from what
    is left of it.
    """
    value, at = tl.max(tl.where(nan, NOT_A_LOGIT, values), 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.min(tl.where(nan, tl.arange(0, SIZE), SIZE), 0)
    return tl.where(first < SIZE, float("nan"), value), tl.where(first < SIZE, first, at)


@triton.jit(do_not_specialize_on_alignment=["packed", "positions"])
def draw_kernel(
    logits, stride, packed, positions, thresholds, best, best_ids, vocab, splits, first_block, skip,
    HAS_THRESHOLD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner of one row within BLOCK tokens; the logits are of tokens 4 * first_block + skip, ..."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    packed += row * COLUMNS
    inv_t = _float(packed, INV_T)
    tokens = split * BLOCK + tl.arange(0, BLOCK) - skip
    inside = (tokens >= 0) & (tokens < vocab)
    s = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=inside, other=NOT_A_LOGIT).to(tl.float32)
    nan = s != s
    if inv_t != 0.0:
        s = s * inv_t
        position = tl.load(positions + row).to(tl.uint32)
        k0 = tl.load(packed + SEED_LOW).to(tl.uint32, bitcast=True)
        k1 = tl.load(packed + SEED_HIGH).to(tl.uint32, bitcast=True)
        blocks = (first_block + split * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        total = s + gumbel(position, blocks, k0, k1)
        if HAS_THRESHOLD:
            total = tl.where(s >= tl.load(thresholds + row), total, NOT_A_LOGIT)
        s = total
    value, at = _winner(s, nan, BLOCK)
    tl.store(best + row * splits + split, value)
    tl.store(best_ids + row * splits + split, split * BLOCK + at - skip)


@triton.jit
def reduce_kernel(best, best_ids, out, splits, vocab, SPLITS: tl.constexpr):
    """The winner of one row among its splits; the lowest split, so the lowest id, of equals."""
    row = tl.program_id(0)
    at = tl.arange(0, SPLITS)
    value = tl.load(best + row * splits + at, mask=at < splits, other=NOT_A_LOGIT)
    _, winner = _winner(value, value != value, SPLITS)
    token = tl.load(best_ids + row * splits + tl.minimum(winner, splits - 1))
    # Rows of NaN must not name a token outside the vocabulary either.
    tl.store(out + row, tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64))
