"""Triton code of ``activation``."""

import triton
import triton.language as tl


@triton.jit
def _act(x, KIND: tl.constexpr):
    """The activation of a float32 block."""
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # tanh(y) = 2 sigmoid(2y) - 1, so half of 1 + tanh(y) is sigmoid(2y).
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    else:  # relu, relu2
        x = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
        if KIND == "relu2":
            x = x * x
    return x


@triton.jit
def activation_kernel(
    source, stride, out, width, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(source + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == "swiglu_oai":
            x = tl.minimum(x, limit)
            x = _act(x, "quick_gelu") * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
        else:
            x = _act(x, KIND) * up
    else:
        x = _act(x, KIND)
    tl.store(out + row * width + at, x.to(out.dtype.element_ty), mask=inside)
