"""RMSNorm and LayerNorm, with the residual addition fused in."""

from __future__ import annotations

import torch
from torch.nn import functional

Normed = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
) -> Normed:
    """x / rms(x) * weight over the last axis, computed in float32, in x's dtype.

    Args:
        x: [T, D] or [T, heads, D], last axis contiguous (heads of a fused projection are fine).
        weight: [D], or [heads, D] where each head has its own; contiguous.
        residual: shaped like x; x is added to it first, and the sum is normalised and returned as the second value.
        plus_one: Gemma's form, multiply by 1 + weight.
    """
    return _launch(x, weight, None, eps, residual, False, plus_one)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> Normed:
    """(x - mean) / standard deviation * weight + bias, otherwise as ``rms_norm``; weight and bias may be None."""
    return _launch(x, weight, bias, eps, residual, True, False)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    centred: bool,
    plus_one: bool,
) -> Normed:
    from . import norm_jit

    width = x.shape[-1]
    rows = x if x.dim() == 3 else x.reshape(-1, 1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total, past = out, out
    if residual is not None:
        total, past = torch.empty_like(out), residual.contiguous()
    if x.numel():
        block = max(16, 1 << (width - 1).bit_length())
        norm_jit.norm_kernel[(rows.shape[0], rows.shape[1])](
            rows, rows.stride(0), rows.stride(1), past,
            out if weight is None else weight, 0 if weight is None or weight.dim() == 1 else width,
            out if bias is None else bias, 0 if bias is None or bias.dim() == 1 else width,
            out, total, width, eps,
            CENTRED=centred, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, PLUS_ONE=plus_one, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out if residual is None else (out, total)


def rms_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
) -> Normed:
    """The twin of ``rms_norm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = weight.float() + 1 if plus_one else weight.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), x)


def layer_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> Normed:
    """The twin of ``layer_norm``."""
    if residual is not None:
        x = x + residual
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype) if residual is None else (normed.to(x.dtype), x)
