"""The halves of a layer behind attention: an MLP, gated or plain, or experts with what every token shares.

Of a model in several tensor ranks each gives its part of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..batch import Chooser
from ..spec import DecoderSpec, Shard
from .activation import activation, gated_activation
from .linear import ExpertLinear, Linear
from .moe import MoE


class MLP:
    """down(act(gate(x)) * up(x)), or down(act(up(x))): ``prefix`` names the Linears among ``linears``."""

    def __init__(self, spec: DecoderSpec, linears: Mapping[str, Linear], prefix: str) -> None:
        self.gated = f"{prefix}gate_up" in linears
        self.up = linears[f"{prefix}gate_up" if self.gated else f"{prefix}up"]
        self.down = linears[f"{prefix}down"]
        self.kind = spec.activation
        self._joined = self.up.joined(self.kind) if self.gated else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self._joined is not None:
            return self.down(self._joined(x))
        wide = self.up(x)
        return self.down(gated_activation(wide, self.kind) if self.gated else activation(wide, self.kind))

    def choosers(self, dtype: torch.dtype) -> set[Chooser]:
        """As ``Model.choosers``, of a model in ``dtype``."""
        return set()


class MoEBlock:
    """The experts of one layer that this rank holds, and its part of the MLP that every token goes through."""

    def __init__(
        self, spec: DecoderSpec, linears: Mapping[str, Linear], experts: Mapping[str, ExpertLinear],
        tensors: Mapping[str, torch.Tensor], prefix: str, shard: Shard,
    ) -> None:  # fmt: skip
        moe = spec.moe
        if moe is None:
            raise ValueError("this spec has no experts")
        self.experts = MoE(
            moe, linears[f"{prefix}router"], experts[f"{prefix}experts_gate_up"], experts[f"{prefix}experts_down"],
            shard.share(moe.experts).start, tensors.get(f"{prefix}correction.bias"),
        )  # fmt: skip
        self.shared = MLP(spec, linears, f"{prefix}shared_") if moe.shared_width else None
        self.shared_gate = linears.get(f"{prefix}shared_gate")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        out = self.experts(x)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * _sigmoid(self.shared_gate(x))
        return out + shared

    def choosers(self, dtype: torch.dtype) -> set[Chooser]:
        """As ``Model.choosers``, of a model in ``dtype``."""
        return self.experts.choosers(dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Of x [T, 1], with the same bits for a row whatever T is.

    On a CPU torch computes what is left over of its vectors, of 64 values at most, with another exponential.
    """
    return torch.sigmoid(x if x.is_cuda else x.expand(-1, 64).contiguous())[:, :1]
