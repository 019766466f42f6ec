"""What an attention layer makes of its scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q k^T before and in the softmax. Raises ValueError on a scale that is not above 0."""

    scale: float  # factor of the scores
    window: int | None = None  # a query at position p sees keys p - window + 1 .. p; None sees all
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0 is off
    # float32 [heads], ALiBi: slope * (key's position - query's) is added to the scaled and capped score.
    slopes: torch.Tensor | None = None
    # float32 [heads], a score of each head that counts in the softmax's sum and brings no value.
    sinks: torch.Tensor | None = None
    # What is stored in an fp8 cache is multiplied by these when it is read (``narrow.py``).
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")

    @property
    def product_scale(self) -> float:
        """Factor of the product of a query with a key as it is stored."""
        return self.scale * self.k_scale

    @property
    def factors(self) -> tuple[float, float]:
        """``inner`` and ``outer`` of the kernel: what the product is multiplied by, and what a capped one is after."""
        if self.softcap:
            return 2.0 * self.product_scale / self.softcap, self.softcap * LOG2E
        return self.product_scale * LOG2E, 1.0

    @property
    def kind(self) -> tuple[int | None, bool, bool, bool]:
        """What the kernel is compiled for and its grid made by: layers of one kind share a step's launches."""
        return self.window, self.softcap > 0, self.slopes is not None, self.sinks is not None
