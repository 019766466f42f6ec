"""Linear layers to which adapters add: the same as without, where no row of a step has one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..layers.activation import gated_activation
from ..layers.linear import ExpertLinear, Linear
from .slots import Slots


class AdaptedLinear(Linear):
    """``base``, and what ``slots`` add to the product ``target``."""

    __slots__ = ("base", "slots", "target")

    def __init__(self, base: Linear, slots: Slots, target: str) -> None:
        for name in Linear.__slots__:
            setattr(self, name, getattr(base, name))
        self.base, self.slots, self.target = base, slots, target

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = super().__call__(x)
        return self.slots.add(self.target, x, y) if self.slots.active else y

    def joined(self, activation: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        run = super().joined(activation)
        if run is None:
            return None
        return lambda x: gated_activation(self(x), activation) if self.slots.active else run(x)


class AdaptedExperts(ExpertLinear):
    """The same of experts."""

    adapted = True

    def __init__(self, base: ExpertLinear, slots: Slots, target: str) -> None:
        self.__dict__.update(base.__dict__)
        self.slots, self.target = slots, target

    def add(self, expert: int, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.slots.active:
            self.slots.add_expert(self.target, expert, rows, x, y)
