"""Mixture of experts: a router chooses ``top_k`` experts a token, whose outputs are summed with the router's weights.

How they are chosen is ``kernels/moe_routing.py``. The experts then run where the data is: on a GPU in grouped Triton
products (``kernels/moe.py``), on a CPU one expert after the other, below, or within a step's program
(``models/program_experts.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..batch import Chooser
from ..kernels import moe as kernels
from ..kernels import moe_routing
from ..spec import MoESpec
from . import dispatch
from .activation import gated_activation
from .linear import LEAST_ROWS, ExpertLinear, Linear


class Experts(NamedTuple):
    """The experts ``first .. first + E - 1`` of a layer."""

    gate_up: ExpertLinear
    """hidden -> 2 * width, the rows of gate before those of up."""
    down: ExpertLinear
    """width -> hidden."""
    first: int = 0
    activation: str = "silu"
    among: int = 0
    """Of how many experts, all ranks' together; 0: these are all."""


class MoE:
    """The experts ``first_expert .. first_expert + E_local - 1`` of a layer, and the router over all of them.

    Args:
        router: hidden -> ``spec.experts`` logits.
        gate_up, down: the local experts' linears, see ``Experts``.
        correction: float32 [experts], added to the scores when experts are chosen and left out of their weights.
    """

    def __init__(
        self,
        spec: MoESpec,
        router: Linear,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        first_expert: int = 0,
        correction: torch.Tensor | None = None,
    ) -> None:
        self.spec, self.router = spec, router
        self.correction = None if correction is None else correction.float()
        self.local = Experts(gate_up, down, first_expert, spec.activation, spec.experts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]: what the local experts contribute. Ranks with others sum their results."""
        if not len(self.local.gate_up):  # of few experts the other ranks have them all
            return torch.zeros_like(x)
        weights, ids = route(self.router(x), self.spec, self.correction)
        return (experts_grouped if dispatch.use_kernels(x) else experts_cpu)(x, weights, ids, self.local)

    def choosers(self, dtype: torch.dtype) -> set[Chooser]:
        """As ``Model.choosers``, of a model in ``dtype``."""
        return {kernels.ExpertsShape(self.spec.top_k, self.spec.experts, dtype)} if len(self.local.gate_up) else set()


def route(
    logits: torch.Tensor, spec: MoESpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [T, top_k], ids int64 [T, top_k]) of ``logits`` [T, experts]: see ``kernels.moe_routing``."""
    return (moe_routing.route if dispatch.use_kernels(logits) else moe_routing.route_torch)(logits, spec, correction)


def experts_grouped(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, local: Experts) -> torch.Tensor:
    """What the experts of ``local`` contribute to each token, on a GPU: [T, hidden], in x's dtype.

    The products and the sum are computed in float32, and each is rounded to x's dtype.

    Args:
        x: [T, hidden], last axis contiguous.
        weights: float32 [T, k], contiguous: the factors of the chosen experts' outputs.
        ids: int64 [T, k], contiguous: the chosen experts. Those that are not in ``local`` contribute nothing.

    Raises:
        ValueError: an unknown activation.
    """
    if not len(x):
        return torch.empty_like(x)
    gate_up, down, first, activation, among = local
    count = len(gate_up)
    blocks = kernels.align(ids, first, count, kernels.block_rows(ids.numel() // (among or count), x.dtype))
    layout = gate_up.laid_out(ids, first, among or count) or down.laid_out(ids, first, among or count)
    if layout is None:
        each = down.grouped(gate_up.grouped(x, blocks, activation), blocks, weights=weights)
    else:
        wide = gate_up.grouped(x, blocks)
        gate_up.add_grouped(x, wide, layout)
        wide = gated_activation(wide, activation)
        each = down.grouped(wide, blocks, weights=weights)
        down.add_grouped(wide, each, layout, weights)
    return kernels.sum_slots(each, ids, first, count)


def experts_cpu(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, local: Experts) -> torch.Tensor:
    """``experts_grouped`` for a CPU: the tokens of an expert together, so that its weight is read once.

    A token's sum runs over its experts by number, in float32, and products have a multiple of LEAST_ROWS rows: what a
    token gets does not depend on the others of its step (of odd counts MKL's threads sum some in another order).
    """
    gate_up, down, first, activation, _ = local
    out = torch.zeros(x.shape, dtype=torch.float32)
    slots = ids.flatten().argsort(stable=True)
    tokens, factors = slots // ids.shape[1], weights.flatten()[slots, None]
    counts = ids.flatten().bincount(minlength=first + len(gate_up)).tolist()
    stop = sum(counts[:first])
    for expert, count in enumerate(counts[first : first + len(gate_up)]):
        if not count:
            continue
        start, stop = stop, stop + count
        mine = tokens[start:stop]
        own = F.pad(x[mine], (0, 0, 0, -count % LEAST_ROWS))
        wide = gate_up.one(own, expert)
        if gate_up.adapted:
            gate_up.add(expert, mine, own[:count], wide[:count])
        wide = gated_activation(wide, activation)
        result = down.one(wide, expert)[:count]
        if down.adapted:
            down.add(expert, mine, wide[:count], result)
        out.index_add_(0, mine, result.float() * factors[start:stop])
    return out.to(x.dtype)
