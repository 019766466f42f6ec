"""Triton code of ``activation``."""

import triton
import triton.language as tl


@triton.jit
def gated_kernel(gate_up, stride, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh(y) = 2 sigmoid(2y) - 1, so half of 1 + tanh(y) is sigmoid(2y).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * width + at, (gate * up.to(tl.float32)).to(up.dtype), mask=inside)
