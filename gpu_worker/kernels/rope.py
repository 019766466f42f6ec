"""Rotary positions applied to queries and keys, and keys and values written to the paged cache, in one pass."""

from __future__ import annotations

import torch

from .narrow import bits, is_narrow, kind_of, write


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q in place; write k, rotated, and v at their slots. k itself stays as it is: nothing reads it again.

    Args:
        q: [T, H, D]; k, v: [T, KH, D]; heads contiguous (views of a fused projection are fine).
        cos, sin: float32 [P, R/2], a row for each position; the first R <= D dimensions are rotated. None: none is.
        positions: int64 [T]; slots: int64 [T], -1 writes nothing.
        k_cache, v_cache: logical shape [num_blocks, block_size, KH, D], any strides but 1 for the last.
        interleaved: dimension 2i is rotated with 2i + 1 (GPT-J); else i with i + R/2 (NeoX's halves).
        k_scale, v_scale: of an fp8 cache.
    """
    from . import rope_jit

    tokens, heads, dim = q.shape
    if not tokens:
        return
    kv_heads, rotary = k.shape[1], cos is not None and sin is not None
    if cos is None or sin is None:
        cos, sin, half, heads = q, q, 0, 0  # no program for the queries, which stay as they are
    else:
        half = cos.shape[1]
    kind, k_cache, v_cache = kind_of(k_cache.dtype), bits(k_cache), bits(v_cache)
    rope_jit.rope_write_kernel[(tokens, heads + kv_heads)](
        q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1),
        cos, sin, cos.stride(0), positions, slots,
        k_cache, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache, v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        heads, k_cache.shape[1], half, dim, k_scale, v_scale, ROTARY=rotary, PAIRS=interleaved, CACHE=kind,
        HALF=max(2, 1 << (half - 1).bit_length()), DIM=max(2, 1 << (dim - 1).bit_length()), num_warps=1,
    )  # fmt: skip


def rope_write_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The twin of ``rope_write``."""
    if cos is not None and sin is not None:
        half = cos.shape[1]
        one, other = slice(half), slice(half, 2 * half)
        if interleaved:
            one, other = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        k = k.clone()
        for x in (q, k):
            first, second = x[..., one].float(), x[..., other].float()
            rotated = first * c - second * s, second * c + first * s
            x[..., one], x[..., other] = rotated[0].to(x.dtype), rotated[1].to(x.dtype)
    if bool((slots < 0).any()):
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    if is_narrow(k_cache.dtype):
        write(k_cache, k, slots, k_scale)
        write(v_cache, v, slots, v_scale)
        return
    size = k_cache.shape[1]
    at = (slots // size, slots % size)
    k_cache[at] = k.to(k_cache.dtype)
    v_cache[at] = v.to(v_cache.dtype)
