"""Triton code of ``rope``."""

import triton
import triton.language as tl

from .narrow_jit import stored


@triton.jit
def _rotated(x, one, other, rotary, c, s):
    """Both halves of the head at ``x``, rotated."""
    first = tl.load(x + one, mask=rotary, other=0.0).to(tl.float32)
    second = tl.load(x + other, mask=rotary, other=0.0).to(tl.float32)
    return (first * c - second * s).to(x.dtype.element_ty), (second * c + first * s).to(x.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_write_kernel(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head,
    cos, sin, table_stride, positions, slots,
    k_cache, k_block, k_offset, k_cache_head, v_cache, v_block, v_offset, v_cache_head,
    heads, block_size, half, dim, k_scale, v_scale,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, CACHE: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head of one token: query heads first, then the key heads, which also carry their values along.

    Without ROTARY there are key heads alone.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head - heads
    if ROTARY:
        at = tl.arange(0, HALF)
        rotary = at < half
        one = at
        other = half + at
        if PAIRS:
            one = 2 * at
            other = 2 * at + 1
        position = tl.load(positions + token)
        c = tl.load(cos + position * table_stride + at, mask=rotary, other=0.0)
        s = tl.load(sin + position * table_stride + at, mask=rotary, other=0.0)
    # Each branch has its own pointer: choosing one of two is more than Triton 3.6's compiler for AMD can do.
    if head < heads:
        if ROTARY:
            x = q + token * q_token + head * q_head
            rotated_first, rotated_second = _rotated(x, one, other, rotary, c, s)
            tl.store(x + one, rotated_first, mask=rotary)
            tl.store(x + other, rotated_second, mask=rotary)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block = slot // block_size
            offset = slot % block_size
            out = k_cache + block * k_block + offset * k_offset + kv_head * k_cache_head
            whole = tl.arange(0, DIM)
            rest = whole < dim
            source = k + token * k_token + kv_head * k_head
            if ROTARY:
                key_first, key_second = _rotated(source, one, other, rotary, c, s)
                tl.store(out + one, stored(key_first, k_scale, k_cache.dtype.element_ty, CACHE), mask=rotary)
                tl.store(out + other, stored(key_second, k_scale, k_cache.dtype.element_ty, CACHE), mask=rotary)
                rest = (whole >= 2 * half) & (whole < dim)
            key = tl.load(source + whole, mask=rest)
            tl.store(out + whole, stored(key, k_scale, k_cache.dtype.element_ty, CACHE), mask=rest)
            value = tl.load(v + token * v_token + kv_head * v_head + whole, mask=whole < dim)
            out = v_cache + block * v_block + offset * v_offset + kv_head * v_cache_head
            tl.store(out + whole, stored(value, v_scale, v_cache.dtype.element_ty, CACHE), mask=whole < dim)
