"""Triton code of ``penalties``. Launched without fused multiply-adds, to round as numpy does."""

import triton
import triton.language as tl

REPETITION = tl.constexpr(6)
FREQUENCY = tl.constexpr(7)
PRESENCE = tl.constexpr(8)
USES = tl.constexpr(9)
PENALTIES = tl.constexpr(256)
SEEN = tl.constexpr(1 << 30)


@triton.jit
def _float(packed, column: tl.constexpr):
    return tl.load(packed + column).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["rows", "packed"])
def penalise_kernel(
    logits, stride, counts, counts_stride, rows, packed, vocab, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK tokens of one slot. Only logits of tokens that the row has are read and written."""
    slot = tl.program_id(0)
    packed += slot * COLUMNS
    if (tl.load(packed + USES) & PENALTIES) != 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        seen = tl.load(counts + tl.load(rows + slot) * counts_stride + tokens, mask=tokens < vocab, other=0)
        has = seen != 0
        logits += slot.to(tl.int64) * stride
        x = tl.load(logits + tokens, mask=has, other=0.0)
        repetition = _float(packed, REPETITION)
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        count = (seen & (SEEN - 1)).to(tl.float32)
        x -= _float(packed, FREQUENCY) * count
        x -= _float(packed, PRESENCE) * (count > 0).to(tl.float32)
        tl.store(logits + tokens, x, mask=has)
