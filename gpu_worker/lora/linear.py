"""Linear layers to which adapters add: the same as without, where no row of a step has one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.lora import Layout
from ..layers.activation import gated_activation
from ..layers.linear import ExpertLinear, Linear
from .card import CardSlots
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
        return lambda x: gated_activation(self(x), activation) if self.slots.adds(self.target) else run(x)


class AdaptedExperts(ExpertLinear):
    """The same of experts."""

    adapted = True

    def __init__(self, base: ExpertLinear, slots: Slots, target: str) -> None:
        self.__dict__.update(base.__dict__)
        self.slots, self.target = slots, target

    def laid_out(self, ids: torch.Tensor, first: int, among: int) -> Layout | None:
        slots = self.slots
        if not (isinstance(slots, CardSlots) and slots.adds(self.target)):
            return None
        return slots.lay_out_experts(self.target, ids, first, among)

    def add_grouped(
        self, x: torch.Tensor, y: torch.Tensor, layout: Layout, weights: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        if isinstance(self.slots, CardSlots):
            self.slots.add_experts(self.target, x, y, layout, weights)

    def add(self, expert: int, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.slots.active:
            self.slots.add_expert(self.target, expert, rows, x, y)
