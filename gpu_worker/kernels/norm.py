"""RMSNorm, with the residual addition fused in."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight over the last axis, computed in float32, in x's dtype.

    Args:
        x: [T, D] or [T, heads, D], last axis contiguous (heads of a fused projection are fine).
        weight: [D].
        residual: shaped like x; x is added to it first, and the sum is normalised and returned as the second value.
        plus_one: Gemma's form, multiply by 1 + weight.
    """
    from . import norm_jit

    width = x.shape[-1]
    rows = x if x.dim() == 3 else x.reshape(-1, 1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total, past = out, out
    if residual is not None:
        total, past = torch.empty_like(out), residual.contiguous()
    if x.numel():
        block = max(16, 1 << (width - 1).bit_length())
        norm_jit.rms_norm_kernel[(rows.shape[0], rows.shape[1])](
            rows, rows.stride(0), rows.stride(1), past, weight, out, total, width, eps,
            HAS_RESIDUAL=residual is not None, PLUS_ONE=plus_one, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out if residual is None else (out, total)


def rms_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The twin of ``rms_norm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = weight.float() + 1 if plus_one else weight.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), x)
