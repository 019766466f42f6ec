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
        x: [..., D], rows contiguous and evenly spaced (a slice of a fused projection is fine).
        weight: [D].
        residual: like x; x is added to it first, and the sum is normalised and returned as the second value.
        plus_one: Gemma's form, multiply by 1 + weight.
    """
    from . import norm_jit

    rows = x.reshape(-1, x.shape[-1])
    width = rows.shape[1]
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total, past = out, rows
    if residual is not None:
        past = residual.reshape(-1, width)
        total = torch.empty_like(out)
    if len(rows):
        block = max(16, 1 << (width - 1).bit_length())
        norm_jit.rms_norm_kernel[(len(rows),)](
            rows, rows.stride(0), past, past.stride(0), weight, out, total, width, eps,
            HAS_RESIDUAL=residual is not None, PLUS_ONE=plus_one, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    if residual is None:
        return out.view(x.shape)
    return out.view(x.shape), total.view(x.shape)


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
