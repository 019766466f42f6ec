"""Products of tiles in Triton's interpreter as a GPU's instructions make them: all rows of a tile alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreter_bf16 import widened
from kernel_device import DEVICE


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy sums a row by its place in the tile. So products of tiles are made in float64 here and rounded: what is
    left is the order of the tiles, which is the kernels'."""
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def values(handle: Any) -> np.ndarray:
        bf16 = handle.dtype.scalar == tl.bfloat16
        return (widened(handle.data) if bf16 else handle.data).astype(np.float64)

    def dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        return TensorHandle((values(a) @ values(b)).astype(np.float32) + total.data, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
