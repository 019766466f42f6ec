"""SqueezeLLM: codes of 3 or 4 bits, which each row looks up in a table of its own, and a sparse matrix that is added.

    weight[n, k] = lookup_table[n, code[k, n]] + S[n, k]

qweight is packed as GPTQ packs it. S is stored by rows of the weight (CSR: ``rows`` [N + 1] are the ends, ``cols`` and
``vals`` the entries); of a few rows, ``full_row_indices`` [X], all values lie in ``full_rows`` [K, X]. A module may
have neither. What S says of an entry is added to the table's value. (SqueezeAILab/SqueezeLLM: squeezellm/quant.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ....proto.config import ConfigError
from ...kernels.codes import COLUMN_UNIT, Codes, PerGroup
from .base import Axis, ExpertProducts, Run, Sources, Stored, TensorError, Tensors, Weight
from .coded import Coded, experts_of, product_of
from .dense import dense
from .packed import part_of, planes_of
from .registry import Quantization, register

_AGAIN = "download the file again"
_CSR = ("rows", "cols", "vals")
_LEAST = 4  # of x's rows: torch sums a single one by another kernel, with other roundings
_FULL = ("full_rows", "full_row_indices")


def _indices(tensor: torch.Tensor, below: int, where: str) -> torch.Tensor:
    """``tensor`` as int64, once all of it is known to be 0 to ``below`` - 1."""
    if tensor.is_floating_point() or tensor.dim() != 1:
        raise ConfigError(f"{where} holds no list of whole numbers; {_AGAIN}.")
    if bad := tensor[(tensor < 0) | (tensor >= below)].tolist()[:1]:
        raise ConfigError(f"{where} holds {bad[0]}, which must be 0 to {below - 1}; {_AGAIN}.")
    return tensor.long()


def _sparse(found: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Mapping[str, torch.Tensor]:
    """S of a module, float32 COO of ``shape``."""
    for names in (_CSR, _FULL):
        if lacking := [name for name in names if name not in found and any(other in found for other in names)]:
            raise ConfigError(f"{where}.{lacking[0]} is not there, and what it belongs to is; {_AGAIN}.")
    places, values = [torch.empty(2, 0, dtype=torch.int64)], [torch.empty(0)]
    if "rows" in found:
        columns, vals = _indices(found["cols"], shape[1], f"{where}.cols"), found["vals"].flatten()
        ends = _indices(found["rows"], len(columns) + 1, f"{where}.rows")
        lengths = ends.diff()
        if len(vals) != len(columns) or len(lengths) != shape[0] or ends[0] or lengths.sum() != len(columns):
            raise ConfigError(
                f"{where}.rows ends {len(lengths)} rows and {int(ends[-1:].sum())} entries where there are {shape[0]} "
                f"rows, {len(columns)} cols and {len(vals)} vals; {_AGAIN}."
            )
        if (lengths < 0).any():
            raise ConfigError(f"{where}.rows does not rise; {_AGAIN}.")
        places.append(torch.stack((torch.arange(shape[0]).repeat_interleave(lengths), columns)))
        values.append(vals.float())
    if "full_rows" in found:
        full, rows = found["full_rows"], _indices(found["full_row_indices"], shape[0], f"{where}.full_row_indices")
        if full.shape != (shape[1], len(rows)):
            raise ConfigError(
                f"{where}.full_rows has shape {tuple(full.shape)} where config.json makes it {(shape[1], len(rows))}; "
                "check that config.json belongs to these weights."
            )
        places.append(torch.stack((rows.repeat_interleave(shape[1]), torch.arange(shape[1]).repeat(len(rows)))))
        values.append(full.float().t().flatten())
    if not all(each.isfinite().all() for each in values):
        raise ConfigError(f"{where}.vals or full_rows holds numbers that are not finite; {_AGAIN}.")
    return {
        "sparse": torch.sparse_coo_tensor(
            torch.cat(places, 1), torch.cat(values), shape, check_invariants=True
        ).coalesce()
    }


class Rows(NamedTuple):
    """A sparse matrix by its rows: ``ends`` int32 [rows + 1], ``columns`` int32 and ``values`` float32 [entries]."""

    ends: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Rows:
        """Of a coalesced COO [rows, columns]."""
        rows, columns = matrix.indices()
        ends = F.pad(rows.bincount(minlength=len(matrix)).cumsum(0), (1, 0))
        return cls(ends.int(), columns.int(), matrix.values())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> float32 [T, rows]. Each sum runs over a row's entries in order, whatever T is."""
        if not len(self.columns):
            return x.new_zeros(len(x), len(self.ends) - 1, dtype=torch.float32)
        missing = max(0, _LEAST - len(x))
        columns = F.pad(x.float(), (0, 0, 0, missing)).t().contiguous()
        found = F.embedding_bag(
            self.columns, columns, self.ends, mode="sum", per_sample_weights=self.values, include_last_offset=True
        )
        return found[:, : len(x)].t()


def _sum(dense_part: torch.Tensor, sparse_part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = dense_part.float() + sparse_part
    return (out if bias is None else out + bias.float()).to(dense_part.dtype)


class SparseRun:
    """The product by ``dense_part``, and by sparse rows."""

    def __init__(self, dense_part: Run, rows: Rows) -> None:
        self.dense, self._rows = dense_part, rows

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _sum(self.dense(x, None), self._rows.product(x), bias)


class SparseExperts:
    """The products of experts by ``dense_part`` on a CPU, and by each expert's sparse rows."""

    def __init__(self, dense_part: ExpertProducts, rows: list[Rows]) -> None:
        self.dense, self._rows = dense_part, rows

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return _sum(self.dense.one(x, None, expert), self._rows[expert].product(x), bias)

    def grouped(self, *arguments: Any, **named: Any) -> torch.Tensor:
        raise NotImplementedError("these weights are packed for a CPU")


@dataclass(frozen=True)
class SqueezeLLM(Coded):
    """``bits`` of a code: 3 or 4."""

    bits: int

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        words = Axis(32, 3) if self.bits == 3 else Axis(8)
        sources = Sources((*_CSR, *_FULL), _sparse)
        return (
            Stored("qweight", Axis(), words, torch.int32, transposed=True),
            Stored("lookup_table", Axis(), Axis(0, 1 << self.bits), torch.float32),
            Stored("sparse", dtype=torch.float32, sources=sources, sparse=True),
        )

    def codes(self, tensors: Tensors, weight: Weight) -> Codes:
        """Of what the tables say, without the sparse part."""
        words, table, columns = tensors["qweight"], tensors["lookup_table"], weight.shape[1]
        if (odd := ~table.isfinite().all(-1).flatten()).any():
            said = f"holds numbers that are not finite; {_AGAIN}."
            raise TensorError("lookup_table", said, part_of(int(odd.nonzero()[0]), weight.parts))
        if self.bits == 3 or columns % COLUMN_UNIT:
            planes = planes_of(words, self.bits, columns, None)
        else:
            planes = (words,)
        ones = torch.ones(*words.shape[:-2], 1, 1, device=words.device)
        return Codes(planes, self.bits, columns, max(1, columns), PerGroup(ones), table=table)

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        return self.codes(tensors, weight).values().add_(tensors["sparse"].to_dense()).to(weight.dtype)

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        by_table, sparse = product_of(self.codes(tensors, weight), weight), tensors["sparse"].coalesce()
        if not sparse.values().numel():
            return by_table
        return SparseRun(by_table, Rows.of(sparse))

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        sparse = tensors["sparse"].coalesce()
        if not sparse.values().numel():
            return experts_of(self.codes(tensors, weight), weight)
        if weight.device.type != "cpu":  # whose products end with the activation, before which S is to be added
            return dense(weight).experts({"weight": self.dequantize(tensors, weight)}, weight)
        rows = [Rows.of(sparse[expert].coalesce()) for expert in range(len(sparse))]
        return SparseExperts(experts_of(self.codes(tensors, weight), weight), rows)


@register("squeezellm")
def squeezellm(config: Mapping[str, Any]) -> Quantization:
    """Of a quant_config.json, which says wbits alone. What has no qweight is a float weight."""
    bits = config.get("wbits")
    if type(bits) is not int or bits not in (3, 4):
        raise ConfigError(f"quant_config.json: wbits={bits!r} is not supported; SqueezeLLM has 3 or 4.")
    skip = (r"sparse_threshold\..*", r".*\.startrows")
    return Quantization(lambda module: SqueezeLLM(bits), skip, marks=(".qweight",), pickled=True)
