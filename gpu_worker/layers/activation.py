"""Activations of an MLP, plain and gated: the kernel on a GPU, torch's functions in the model's dtype on a CPU."""

from __future__ import annotations

import torch

from ..kernels.activation import LIMIT, function
from . import dispatch


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(x) of a plain MLP; ``kind`` is silu, gelu (exact), gelu_tanh, relu, relu2 or quick_gelu."""
    if dispatch.use_kernels(x):
        from ..kernels.activation import activation as kernel

        return kernel(x, kind)
    return function(kind)(x)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 2 * I] -> [T, I], activation(first half) * second half. The CPU may work within ``gate_up``.

    ``kind`` is one of ``activation``'s, or swiglu_oai: min(gate, 7) * sigmoid(1.702 * gate) * (clamp(up, -7, 7) + 1).
    """
    if dispatch.use_kernels(gate_up):
        from ..kernels.activation import gated_activation as kernel

        return kernel(gate_up, kind)
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "swiglu_oai":
        return function("quick_gelu")(gate.clamp_(max=LIMIT)).mul_(up.clamp_(-LIMIT, LIMIT).add_(1))
    return function(kind)(gate).mul_(up)
