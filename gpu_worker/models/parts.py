"""The parameters of one process while they fill up: tensors become linear layers as soon as their last row is there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..layers.formats.at_load import NOTHING, AtLoad
from ..layers.formats.base import Format, Weight
from ..layers.formats.coded import Coded, Given, table_of
from ..layers.formats.dense import PLAIN, dense
from ..layers.formats.summary import Summary
from ..layers.formats.table import CodedTable, Table
from ..layers.linear import ExpertLinear, Linear, weight_of
from ..spec import DecoderSpec, Shard
from .files import trim
from .parameters import Parameter, parameters
from .weights import Weights

TRIM_BYTES = 2**24
"""Tensors of so many bytes are read before freed memory goes back to the system: each time it does, what is read next
has its pages made anew, which takes longer than to copy into them."""


class Parts:
    """``parameters`` are the tensors to fill, by name: a weight's are those of its format, of ``formats`` or plain.

    ``at_load``: which of the plain ones are made narrower.
    """

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, shard: Shard, formats: Mapping[str, Format],
        at_load: AtLoad = NOTHING,
    ) -> None:  # fmt: skip
        self.spec, self.dtype, self.device, self.formats = spec, dtype, device, formats
        self._at_load = at_load
        self._whole = {parameter.name: parameter for parameter in parameters(spec, shard)}
        self.parameters = {
            each.name: each for parameter in self._whole.values()
            for each in in_tensors(parameter, formats, dtype, device)
        }  # fmt: skip
        self.summary = Summary()
        self._linears: dict[str, Linear] = {}
        self._experts: dict[str, ExpertLinear] = {}
        self._tables: dict[str, CodedTable] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._open: dict[str, torch.Tensor] = {}
        self._sparse: dict[str, dict[int, torch.Tensor]] = {}  # pieces of each parameter, by part
        self._untrimmed = 0  # bytes of tensors finished since the last ``trim``
        self._left = {
            name: {index for index, part in enumerate(p.parts) if len(part)} for name, p in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            if not self._left[name]:  # a rank without any of the few experts there are
                self.finish(parameter, self.zeros(parameter))

    def dtype_of(self, parameter: Parameter) -> torch.dtype:
        """The dtype of its tensor in memory."""
        if parameter.stem == "correction.bias":
            return torch.float32
        return (parameter.stored and parameter.stored.dtype) or self.dtype

    def zeros(self, parameter: Parameter) -> torch.Tensor:
        """A tensor for the whole of ``parameter``, of zeros."""
        layout = torch.sparse_coo if parameter.stored is not None and parameter.stored.sparse else torch.strided
        return torch.zeros(parameter.shape, dtype=self.dtype_of(parameter), device=self.device, layout=layout)

    def _empty(self, parameter: Parameter) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=self.dtype_of(parameter), device=self.device)

    def take_sparse(self, parameter: Parameter, index: int, piece: torch.Tensor) -> None:
        """Take ``piece`` as part ``index`` of a sparse parameter."""
        pieces = self._sparse.setdefault(parameter.name, {})
        pieces[index] = piece.to(self.device)
        left = self._left[parameter.name]
        left.discard(index)
        if not left:
            del self._sparse[parameter.name]
            self.finish(parameter, torch.cat([pieces[part] for part in sorted(pieces)]))

    def rows(self, parameter: Parameter, index: int) -> torch.Tensor:
        """The place of part ``index`` in the parameter's tensor, made at the first call."""
        whole = self._open.get(parameter.name)
        if whole is None:
            whole = self._open[parameter.name] = self._empty(parameter)
        start = sum(map(len, parameter.parts[:index]))
        return whole[start : start + len(parameter.parts[index])]

    def filled(self, parameter: Parameter, index: int) -> None:
        """Part ``index`` is complete."""
        left = self._left[parameter.name]
        left.discard(index)
        if not left and parameter.name in self._open:
            whole = self._open.pop(parameter.name)
            self._untrimmed += whole.nbytes
            self.finish(parameter, whole)
            del whole
            if self._untrimmed >= TRIM_BYTES:
                self._trim()

    def finish(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        """Take ``tensor`` as the whole of ``parameter``, on its device; the last of a weight's makes the linear."""
        self._left[parameter.name].clear()
        self._tensors[parameter.name] = tensor
        if parameter.stored is not None:
            weight = self._whole[parameter.weight]
            names = [each.name for each in in_tensors(weight, self.formats, self.dtype, self.device)]
            if all(name in self._tensors for name in names):
                stem = len(weight.name.removesuffix("weight"))
                self._make(weight, {name[stem:]: self._tensors.pop(name) for name in names})

    def _make(self, parameter: Parameter, tensors: dict[str, torch.Tensor]) -> None:
        weight, name = parameter.as_weight(self.dtype, self.device), parameter.name.removesuffix(".weight")
        special = self.formats.get(parameter.name) or self._at_load.format_of(parameter.name)
        format = special or dense(weight)
        if parameter.kind == "table":
            self._make_table(parameter.name, format, tensors, weight)
            return
        made: Linear | ExpertLinear
        if weight.experts is None:
            made = self._linears[name] = Linear(format, tensors, weight)
        else:
            apart = {key: _by_expert(tensor, weight.experts) for key, tensor in tensors.items()}
            made = self._experts[name] = ExpertLinear(format, apart, weight)
        if weight.experts != 0:
            self.summary.add(name, weight, tensors, special is not None, made.product)

    def _make_table(self, parameter: str, format: Format, tensors: dict[str, torch.Tensor], weight: Weight) -> None:
        """Keep a table of embeddings, as codes where it has such: the same ones that outputs tied to it multiply."""
        name = parameter.removesuffix(".weight")
        table: Table | None = None
        sizes: dict[str, torch.Tensor] = {}
        head: Linear | None = None
        if isinstance(format, Coded):
            codes = format.codes(tensors, weight)
            sizes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
            tensors.clear()  # of the largest weight two copies are enough
            if self.spec.tied and name == "embed":
                head = self._linears["lm_head"] = Linear(Given(codes), {}, weight)
                self.summary.add("lm_head", weight, sizes, True, head.product)
            table = table_of(codes, weight, None if head is None else head.product)
        if isinstance(table, CodedTable):
            self._tables[parameter] = table
            self.summary.add_table(name, weight, sizes, table if head is None else None)
            return
        self._tensors[parameter] = format.dequantize(tensors, weight) if table is None else table
        self.summary.add_table(name, weight)

    def _trim(self) -> None:
        self._untrimmed = 0
        trim()

    def missing(self) -> list[tuple[str, int]]:
        """(parameter, part) still without rows, in the model's order."""
        return [(name, part) for name, left in self._left.items() for part in sorted(left)]

    def weights(self) -> Weights:
        """The finished parameters."""
        self._trim()
        if self.spec.tied and "embed.weight" in self._tensors and "lm_head" not in self._linears:
            table = self._tensors["embed.weight"]
            weight = weight_of(table)
            format = self._at_load.format_of("lm_head.weight")
            made = self._linears["lm_head"] = Linear(format or dense(weight), {"weight": table}, weight)
            self.summary.add("lm_head", weight, {"weight": table}, format is not None, made.product)
        for name in [name for name in self._tensors if name.endswith(".bias")]:
            owner = name.removesuffix(".bias")
            if owner in self._linears:
                self._linears[owner].bias = self._tensors.pop(name)
            elif owner in self._experts:
                experts = self._experts[owner]
                experts.bias = _by_expert(self._tensors.pop(name), len(experts))
        return Weights(
            self.spec, self._linears, self._experts, self._tables, self._tensors, self.dtype, self.device
        )  # fmt: skip


def _by_expert(tensor: torch.Tensor, experts: int) -> torch.Tensor:
    """[E * rows, ...] -> [E, rows, ...]."""
    if tensor.is_sparse:
        rows, tensor = len(tensor) // max(1, experts), tensor.coalesce()
        row, column = tensor.indices()
        places = torch.stack((row // max(1, rows), row % max(1, rows), column))
        return torch.sparse_coo_tensor(places, tensor.values(), (experts, rows, tensor.shape[1]), check_invariants=True)
    return tensor.view(experts, len(tensor) // max(1, experts), *tensor.shape[1:])


def in_tensors(
    parameter: Parameter, formats: Mapping[str, Format], dtype: torch.dtype, device: torch.device
) -> list[Parameter]:
    """The tensors that ``parameter`` is kept in: itself, or a weight's by its format."""
    format = formats.get(parameter.name)
    if format is None and parameter.kind not in ("linear", "experts"):
        return [parameter]
    return [parameter.in_tensor(each) for each in (format or PLAIN).tensors(parameter.as_weight(dtype, device))]
