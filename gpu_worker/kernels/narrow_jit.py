"""Triton code of ``narrow``: fp8 by its bits, so that every card computes the same, those without fp8 instructions too.

KIND is "e4m3", "e5m2", or "" for a cache of the pointer's own type.
"""

import triton
import triton.language as tl


@triton.jit
def widened(x, dtype, KIND: tl.constexpr):
    """What a tile of a cache holds, in ``dtype``. The bits of fp8, moved, are those of a float16: e5m2's of the same
    number, e4m3's of a 256th. No number of either is lost in float16 or bfloat16."""
    if KIND == "":
        return x.to(dtype)
    else:
        wide = x.to(tl.int16)
        if KIND == "e5m2":
            half = (wide << 8).to(tl.float16, bitcast=True)
        else:
            bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits).to(tl.int16)
            half = bits.to(tl.float16, bitcast=True) * 256.0
        return half.to(dtype)


@triton.jit
def stored(x, scale, dtype, KIND: tl.constexpr):
    """x as the cache holds it: rounded to the nearest, ties to even, fp8 at most the largest there is. NaN stays."""
    if KIND == "":
        return x.to(dtype)
    else:
        E4M3: tl.constexpr = KIND == "e4m3"
        SHIFT: tl.constexpr = 20 if E4M3 else 21  # bits of a float32's mantissa that go
        BIAS: tl.constexpr = 120 * 8 if E4M3 else 112 * 4  # between the exponents, as it stands in the code
        MOST: tl.constexpr = 448.0 if E4M3 else 57344.0
        LEAST: tl.constexpr = 0.015625 if E4M3 else 0.00006103515625  # with a leading 1
        # A float32 whose last bit is worth the least number there is: added to one without a leading 1, it rounds it.
        MAGIC: tl.constexpr = 16384.0 if E4M3 else 128.0
        MAGIC_BITS: tl.constexpr = 141 << 23 if E4M3 else 134 << 23
        x = tl.div_rn(x.to(tl.float32), scale)
        size = tl.abs(x)
        size = tl.where(size > MOST, MOST, size)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - BIAS
        small = (size + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
        code = tl.where(size < LEAST, small, normal)
        code = tl.where(x != x, 0x7F, code)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
