"""The loaded parameters of one process, as the decoder and the encoder take them."""

from __future__ import annotations

import torch

from ..batch import Chooser
from ..layers.formats.table import CodedTable, Table
from ..layers.linear import ExpertLinear, Linear
from ..layers.norm import LayerNorm, RMSNorm
from ..spec import DecoderSpec


class Weights:
    """The loaded parameters of one process by name: linear layers, those of experts, tables that are kept as codes, and
    other tensors.
    """

    def __init__(
        self, spec: DecoderSpec, linears: dict[str, Linear], experts: dict[str, ExpertLinear],
        tables: dict[str, CodedTable], tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self.linears, self.experts, self.tensors = spec, linears, experts, tensors
        self._tables = tables
        self.dtype, self.device = dtype, device

    def choosers(self) -> frozenset[Chooser]:
        """``Linear.choosers`` of all linear layers."""
        return frozenset().union(*(linear.choosers for linear in self.linears.values()))

    def table(self, name: str) -> Table | None:
        """The table ``name`` of embeddings, where this process has it."""
        return self._tables.get(name, self.tensors.get(name))

    def norm(self, name: str, kind: str | None = None) -> RMSNorm | LayerNorm:
        """The norm ``name``, of the model's kind unless another is given."""
        spec, weight, bias = self.spec, self.tensors.get(f"{name}.weight"), self.tensors.get(f"{name}.bias")
        if (kind or spec.norm) == "ln":
            return LayerNorm(weight, bias, spec.norm_eps)
        if weight is None:
            raise KeyError(f"{name}.weight")
        return RMSNorm(weight, spec.norm_eps, spec.norm_plus_one)
