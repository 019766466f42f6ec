"""The gated MLP: one product for gate and up, the activation, one product down."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import dispatch
from .linear import Linear


class GatedMLP:
    """down(activation(gate(x)) * up(x)); ``activation`` is silu, gelu or gelu_tanh."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(gated_activation(self.gate_up(x), self.activation))


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """[T, 2 * I] -> [T, I], activation(first half) * second half. The CPU works within ``gate_up``."""
    if dispatch.use_kernels(gate_up):
        from ..kernels.activation import gated_activation as kernel

        return kernel(gate_up, kind)
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none").mul_(up)
