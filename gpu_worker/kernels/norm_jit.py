"""Triton code of ``norm``."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, x_stride, residual, residual_stride, weight, out, total, width, eps,
    HAS_RESIDUAL: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; the row is read once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        past = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        # Rounded to the tensor's type before it is normalised, as the sum that later layers read.
        value = (value.to(tl.float32) + past.to(tl.float32)).to(value.dtype)
        tl.store(total + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    mean = tl.sum(wide * wide, 0) / width
    tl.store(out + row * width + at, (wide * tl.rsqrt(mean + eps) * scale).to(value.dtype), mask=inside)
