"""Triton code of ``marks``; read its docstring first."""

import triton
import triton.language as tl

LEAST = tl.constexpr(float("-inf"))


# The number of slots changes from step to step: nothing may be compiled for one of them.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["values", "tokens"])
def mark_kernel(
    values, stride, tokens, out, count,
    BY_TOKEN: tl.constexpr, NAN: tl.constexpr, FORBIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK slots: their tokens to the first ``count`` places of ``out``, what is told of them to the next."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < count
    token = tl.load(tokens + slot, mask=inside, other=0)
    at = slot.to(tl.int64) * stride
    if BY_TOKEN:
        at += token
    value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    told = tl.where(value > LEAST, token, tl.where(value != value, NAN, FORBIDDEN))
    tl.store(out + slot, token.to(tl.int32), mask=inside)
    tl.store(out + count + slot, told.to(tl.int32), mask=inside)
