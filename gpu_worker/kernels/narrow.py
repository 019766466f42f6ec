"""Caches of 8 bits: how keys and values are stored in them, and the definition of that in torch.

fp8 (e4m3fn or e5m2): stored = x / scale, rounded to the nearest, ties to even, what is too large to the largest number
there is; read = stored * scale, with a scale for the keys of a layer and one for its values (``Scores``). Attention
multiplies what is stored: the scale of the keys goes into that of the scores, that of the values behind the sum.

int8: each head of each token has a scale of its own, its largest magnitude / 127. They lie, float32, behind the numbers
of their page: [block_size * head_dim] int8, then [block_size] float32.
"""

from __future__ import annotations

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_BYTES = 4
"""Of one key or value in an int8 cache."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a cache of ``dtype`` holds something else than numbers of the model's dtype."""
    return dtype in FLOAT8 or dtype == torch.int8


def kind_of(dtype: torch.dtype) -> str:
    """What the Triton kernels call a cache of ``dtype``."""
    return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(dtype, "")


def page_bytes(block_size: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's keys, or values, of a block."""
    return block_size * (dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0))


def bits(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every operation knows: uint8 for fp8."""
    return cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache


def encode(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x as an fp8 cache holds it, in ``dtype``. NaN stays NaN."""
    most = torch.finfo(dtype).max
    # By a tensor: CUDA's division by a number multiplies by its inverse, which rounds otherwise.
    return (x.float() / torch.full((), scale, device=x.device)).clamp_(-most, most).to(dtype)


def encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as int8 [..., D] and scales float32 [...]. NaN becomes a scale of NaN, infinity an infinite one."""
    x = x.float()
    scales = x.abs().amax(-1) / 127
    divisor = scales.where((scales > 0) & scales.isfinite(), 1.0)[..., None]
    return (x / divisor).nan_to_num_(0.0).clamp_(-127, 127).round_().to(torch.int8), scales


def page_scales(cache: torch.Tensor) -> torch.Tensor:
    """The scales of an int8 cache [num_blocks, block_size, kv_heads, head_dim]: float32 [num_blocks, block_size,
    kv_heads], a view of the same memory."""
    blocks, size, heads, dim = cache.shape
    page, _, head, _ = cache.stride()
    start, shape = cache.storage_offset() + size * dim, (blocks, size, heads)
    found = torch.empty(0, dtype=torch.float32, device=cache.device)
    return found.set_(cache.untyped_storage(), start // 4, shape, (page // 4, 1, head // 4))


def write(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, scale: float) -> None:
    """Write x [T, kv_heads, head_dim] to ``slots`` [T] of a narrow cache in its logical shape."""
    size = cache.shape[1]
    at = slots // size, slots % size
    if cache.dtype == torch.int8:
        codes, scales = encode_int8(x)
        cache[at], page_scales(cache)[at] = codes, scales
    else:
        bits(cache)[at] = bits(encode(x, cache.dtype, scale))


def read(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """``pages`` [N] of a cache of any dtype: float32 [N, block_size, kv_heads, head_dim], of fp8 without the scale."""
    found = bits(cache)[pages]
    if cache.dtype == torch.int8:
        return found.float() * page_scales(cache)[pages][..., None]
    return found.view(cache.dtype).float()
