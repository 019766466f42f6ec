"""Gated activations: act(gate) * up, from one fused projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

BLOCK = 1024


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up in float32, in the input's dtype.

    Args:
        gate_up: [T, 2 * I], gate in the first half, up in the second; rows contiguous.
        kind: "silu", "gelu" (exact) or "gelu_tanh".

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _TORCH:
        raise ValueError(_unknown(kind))
    from . import activation_jit

    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if count:
        activation_jit.gated_kernel[(count, -(-width // BLOCK))](
            gate_up, gate_up.stride(0), out, width, KIND=kind, BLOCK=BLOCK, num_warps=4
        )
    return out


def gated_activation_torch(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The twin of ``gated_activation``."""
    if kind not in _TORCH:
        raise ValueError(_unknown(kind))
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_TORCH[kind](gate) * up).to(gate_up.dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


def _unknown(kind: str) -> str:
    return f"Unknown activation {kind!r}. Must be one of {sorted(_TORCH)}."
