"""Activations of an MLP: act(x), and act(gate) * up of one fused projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

BLOCK = 1024
LIMIT = 7.0
"""swiglu_oai keeps the gate at or below it, and up within it on both sides."""


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x) in float32, in the input's dtype.

    Args:
        x: [T, I], rows contiguous.
        kind: "silu", "gelu" (exact), "gelu_tanh", "relu", "relu2" (relu squared) or "quick_gelu".

    Raises:
        ValueError: an unknown kind.
    """
    function(kind)
    return _launch(x, x.shape[1], kind, False)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up in float32, in the input's dtype.

    Args:
        gate_up: [T, 2 * I], gate in the first half, up in the second; rows contiguous.
        kind: one of ``activation``'s, or "swiglu_oai" (gpt-oss): quick_gelu(min(gate, 7)) * (clamp(up, -7, 7) + 1).

    Raises:
        ValueError: an unknown kind.
    """
    if kind != "swiglu_oai":
        function(kind)
    return _launch(gate_up, gate_up.shape[1] // 2, kind, True)


def _launch(x: torch.Tensor, width: int, kind: str, gated: bool) -> torch.Tensor:
    from . import activation_jit

    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if len(x):
        activation_jit.activation_kernel[(len(x), -(-width // BLOCK))](
            x, x.stride(0), out, width, LIMIT, KIND=kind, GATED=gated, BLOCK=BLOCK, num_warps=4
        )
    return out


def activation_torch(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The twin of ``activation``."""
    return function(kind)(x.float()).to(x.dtype)


def gated_activation_torch(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The twin of ``gated_activation``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if kind == "swiglu_oai":
        gate, up, kind = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1, "quick_gelu"
    return (function(kind)(gate) * up).to(gate_up.dtype)


def function(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation as torch computes it, in its argument's dtype and a new tensor."""
    if kind not in _TORCH:
        raise ValueError(f"Unknown activation {kind!r}. Must be one of {sorted(_TORCH)}.")
    return _TORCH[kind]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square_()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
    "quick_gelu": _quick_gelu,
}
