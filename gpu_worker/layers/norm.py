"""Norms: the kernel on a GPU, few and in-place operations on a CPU.

Weights are [hidden], or [heads, head_dim] for x [T, heads, head_dim] where each head has its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import dispatch


class Norm:
    """What every kind is called for."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``x`` [..., hidden]."""
        return self._kernel(x, None) if dispatch.use_kernels(x) else self._norm(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); None stands for zero. The CPU adds into ``residual`` itself."""
        if residual is None:
            return self(x), x
        if dispatch.use_kernels(x):
            return self._kernel(x, residual)
        residual += x
        return self._norm(residual), residual

    def _kernel(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        raise NotImplementedError

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RMSNorm(Norm):
    """x * rsqrt(mean(x^2) + eps) * w, in float32 inside; ``plus_one`` is Gemma's 1 + w."""

    def __init__(self, weight: torch.Tensor, eps: float, plus_one: bool = False) -> None:
        self.weight, self.eps, self.plus_one = weight, eps, plus_one
        self._cpu_weight = weight.float() + 1 if plus_one else weight

    def _kernel(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        from ..kernels.norm import rms_norm

        return rms_norm(x, self.weight, self.eps, residual, self.plus_one)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        if self.plus_one or x.dtype == torch.float32:
            return (wide * scale).mul_(self._cpu_weight).to(x.dtype)
        return (wide * scale).to(x.dtype).mul_(self._cpu_weight)


class LayerNorm(Norm):
    """(x - mean) * rsqrt(variance + eps) * w + b, in float32 inside and rounded once; w and b may be None."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def _kernel(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        from ..kernels.norm import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps, residual)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if all(each is None or each.dim() == 1 for each in (weight, bias)):
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        if weight is not None:
            normed *= weight
        if bias is not None:
            normed += bias
        return normed.to(x.dtype)


class NoNorm(Norm):
    """In the place of a norm that a model lacks: the sum with the residual alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else residual + x
        return total, total


class ResidualFromNorm(Norm):
    """``norm`` where its result, and not the sum it was given, is the residual from there on (BLOOM, ChatGLM)."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm.add(x, residual)[0]
        return normed, normed
