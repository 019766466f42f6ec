"""The gated MLP: one product for gate and up, the activation, one product down."""

from __future__ import annotations

import torch

from .activation import gated_activation
from .linear import Linear


class GatedMLP:
    """down(activation(gate(x)) * up(x)); ``activation`` is silu, gelu or gelu_tanh."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(gated_activation(self.gate_up(x), self.activation))
