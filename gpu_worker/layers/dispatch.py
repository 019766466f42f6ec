"""Who computes: Triton kernels where the data is on a GPU, torch elsewhere. One place, so that tests can choose."""

from __future__ import annotations

import torch


def use_kernels(x: torch.Tensor) -> bool:
    """Whether ``x`` goes through the Triton kernels."""
    return x.is_cuda
