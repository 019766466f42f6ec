"""Triton code of ``norm``."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, x_token, x_head, residual, weight, weight_head, bias, bias_head, out, total, width, eps,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row (a token, or a head of one); the row is read once. CENTRED is LayerNorm, else RMSNorm."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = token * tl.num_programs(1) + head
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + token * x_token + head * x_head + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        past = tl.load(residual + row * width + at, mask=inside, other=0.0)
        # Rounded to the tensor's type before it is normalised, as the sum that later layers read.
        value = (value.to(tl.float32) + past.to(tl.float32)).to(value.dtype)
        tl.store(total + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    result = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    if HAS_WEIGHT:
        scale = tl.load(weight + head * weight_head + at, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale += 1.0
        result = result * scale
    if HAS_BIAS:
        result += tl.load(bias + head * bias_head + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, result.to(value.dtype), mask=inside)
