"""Triton code of ``logprobs``; read its docstring first."""

import triton
import triton.language as tl

INV_T = tl.constexpr(0)
NOT_A_LOGIT = tl.constexpr(float("-inf"))


@triton.jit
def _load(logits, slot, packed, thresholds, tokens, vocab, PROCESSED: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    """BLOCK logits of a row, NaN as -inf; beyond the vocabulary too."""
    x = tl.load(logits + tokens, mask=tokens < vocab, other=NOT_A_LOGIT)
    if PROCESSED:
        inv_t = tl.load(packed + slot * COLUMNS + INV_T).to(tl.float32, bitcast=True)
        if inv_t != 0.0:
            x = x * inv_t
            if HAS_THRESHOLD:
                x = tl.where(x >= tl.load(thresholds + slot), x, NOT_A_LOGIT)
    return tl.where(x == x, x, NOT_A_LOGIT)


@triton.jit(do_not_specialize_on_alignment=["slots", "packed", "thresholds", "tokens", "values", "sums", "ranks"])
def stats_kernel(
    logits, stride, slots, packed, thresholds, tokens, values, sums, ranks, vocab,
    PROCESSED: tl.constexpr, HAS_THRESHOLD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its maximum, then in one pass its sum and the rank."""
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    logits += slot * stride
    token = tl.load(tokens + i) + tl.zeros((1,), tl.int64)
    value = tl.max(_load(logits, slot, packed, thresholds, token, vocab, PROCESSED, HAS_THRESHOLD, COLUMNS), 0)
    peak = tl.full((BLOCK,), NOT_A_LOGIT, tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, _load(logits, slot, packed, thresholds, at, vocab, PROCESSED, HAS_THRESHOLD, COLUMNS))
    top = tl.max(peak, 0)
    # Subtracting an infinite maximum would give NaN: such a row's sum is the maximum itself, or 0 for -inf.
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    greater = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _load(logits, slot, packed, thresholds, at, vocab, PROCESSED, HAS_THRESHOLD, COLUMNS)
        total += tl.exp(x - shift)
        greater += (x > value).to(tl.int32)
    log_sum = shift + tl.log(tl.sum(total, 0))
    log_sum = tl.where(top == NOT_A_LOGIT, 0.0, log_sum)
    tl.store(values + i, value)
    tl.store(sums + i, log_sum)
    tl.store(ranks + i, 1 + tl.sum(greater, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "packed", "thresholds"])
def keys_kernel(
    logits, stride, slots, packed, thresholds, keys, vocab,
    PROCESSED: tl.constexpr, HAS_THRESHOLD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK keys of one row: the value's bits in their order above the complement of the id."""
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits + slot * stride, slot, packed, thresholds, at, vocab, PROCESSED, HAS_THRESHOLD, COLUMNS)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0: they are equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
    tl.store(keys + i.to(tl.int64) * vocab + at, key, mask=at < vocab)
