"""What a weight format answers: which tensors a weight is made of, how they are cut, and how x is multiplied by them.

A *weight* is a linear layer's matrix [rows, columns], that is [out, in]. Its rows are one or several *parts*, each a
module of the checkpoint: q, k and v in one weight, gate and up in another. A tensor-parallel rank holds some rows of
each part, or some columns. A format says how the tensors that it keeps a weight in follow those rows and columns; the
loader does the rest, for any number of ranks: it finds the tensors, cuts them, and stacks those of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ....proto.config import ConfigError

if TYPE_CHECKING:  # sizes of models are asked for by processes without torch
    import torch

    from ...kernels.moe import Blocks


class TensorError(ConfigError):
    """What a tensor of a weight holds means nothing. The loader puts its file and name before ``said``.

    ``stored``: its name as in ``Stored``. ``part``: which of the weight's parts it is of, counted over those that this
    process holds of all experts.
    """

    def __init__(self, stored: str, said: str, part: int = 0) -> None:
        super().__init__(f"{stored} {said}")
        self.stored, self.said, self.part = stored, said, part


CHOOSING = ("router.weight", "shared_gate.weight")
"""How names of weights end whose few outputs choose experts, or scale what experts give."""


@dataclass(frozen=True)
class Part:
    """Rows (or columns) ``start`` to ``stop`` of ``total``."""

    total: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def whole(size: int) -> Part:
    """All of it."""
    return Part(size, 0, size)


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer as far as one process holds it: ``parts`` are its rows, ``dtype`` the model's.

    ``experts``: None, or how many weights of this shape its tensors hold, in a first dim before rows and columns.
    ``gated``: the first half of the rows are gates, the second half what they are applied to.
    ``chooses``: one of CHOOSING. Every tensor rank has all of it, and all must find the same.
    """

    parts: tuple[Part, ...]
    columns: Part
    dtype: torch.dtype
    device: torch.device
    experts: int | None = None
    gated: bool = False
    chooses: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight, or of one expert's."""
        return sum(map(len, self.parts)), len(self.columns)

    @property
    def numel(self) -> int:
        """Values of the weight, or of one expert's."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Axis:
    """How one dim of a tensor follows the rows, or the columns, of its weight.

    ``unit`` neighbours take ``width`` places of the tensor. 1 and 1: a place each. 8 and 1: an int32 of eight values of
    4 bits, or a scale of a group of eight. 256 and 144: blocks of 144 bytes. A rank's share must be whole units.
    ``unit`` 0: ``width`` places for each tensor of the checkpoint, whatever its size (a scale of the whole tensor);
    in memory each part has them, also where the checkpoint has one tensor for several parts.
    ``uncut``: every rank holds all of it.
    ``dense``: where the last unit is not whole, it takes no more places than it needs.
    """

    unit: int = 1
    width: int = 1
    uncut: bool = False
    dense: bool = False

    def cut(self, part: Part, name: str) -> Part:
        """The places of ``part``. Raises ConfigError, with ``name``, where it begins or ends within a unit."""
        if not self.unit:
            return Part(self.width, 0, self.width if len(part) else 0)
        total = self._places(part.total)
        if self.uncut:
            return Part(total, 0, total if len(part) else 0)
        if part.start % self.unit or (part.stop % self.unit and part.stop != part.total):
            raise ConfigError(
                f"{name}: one process would hold {part.start} to {part.stop} of {part.total}, and the format keeps "
                f"them in units of {self.unit}; use another --tensor-parallel-size."
            )
        return Part(total, part.start // self.unit * self.width, self._places(part.stop))

    def _places(self, count: int) -> int:
        """Of the first ``count``."""
        if self.dense:
            return -(-count * self.width // self.unit)
        return -(-count // self.unit) * self.width

    def order(self, rows: np.ndarray, name: str) -> np.ndarray:
        """The tensor's places in order, where the weight's rows are the checkpoint's ``rows``. Raises ConfigError."""
        if self.unit == self.width == 1:
            return rows
        units = rows[: len(rows) // self.unit * self.unit].reshape(-1, self.unit)
        first = units[:, :1]
        if units.size != rows.size or (first % self.unit).any() or (units != first + np.arange(self.unit)).any():
            raise ConfigError(f"{name}: the model's order of rows would tear the format's units of {self.unit} apart.")
        return (first // self.unit * self.width + np.arange(self.width)).ravel()


@dataclass(frozen=True)
class Sources:
    """Tensors of a module that a checkpoint has in another form than a format's, and what makes the format's of them.

    ``names``: what follows the module's name. They may have any shape and dtype, and those that a checkpoint lacks are
    left out. ``make(found, shape, where)`` gives all of the module's ``Stored`` tensors of these sources, of its
    ``shape`` (rows, columns), before they are cut for a rank; it raises ConfigError, which begins with ``where``.
    """

    names: tuple[str, ...]
    make: Callable[[Mapping[str, torch.Tensor], tuple[int, int], str], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Stored:
    """One tensor of a weight. ``name`` follows the module's in a checkpoint: "weight", "qweight", "scales".

    In memory it is [rows, columns], or [rows] where ``columns`` is None, with one dim more in front for experts.
    ``dtype``: None is the model's; a tensor of the checkpoint is cast from another float, or from a wider integer
    whose values fit.
    ``transposed``: the checkpoint has [columns, rows].
    ``convert``: of a tensor with all experts in it, applied to each expert's piece before its shape is checked.
    ``sources``: what it is made of, where no tensor of a checkpoint has its name.
    ``sparse``: it is a sparse tensor (COO) of the weight's own rows and columns.
    ``part``: which of the weight's parts it holds, by number, where each part has tensors of its own; their keys in
    ``Tensors`` are then "weight.0", "weight.1".
    """

    name: str
    rows: Axis = Axis()
    columns: Axis | None = Axis()
    dtype: torch.dtype | None = None
    transposed: bool = False
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    sources: Sources | None = None
    sparse: bool = False
    part: int | None = None

    @property
    def key(self) -> str:
        """Its name among the tensors of its weight."""
        return self.name if self.part is None else f"{self.name}.{self.part}"


Tensors = Mapping[str, "torch.Tensor"]
Run = Callable[["torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
"""(x [T, in], bias [out] or None) -> x @ weight.T + bias [T, out], in x's dtype."""


class ExpertProducts(Protocol):
    """The product with the weights of several experts."""

    def one(self, x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        """x [T, in] -> [T, out] by one expert's weight, with its ``bias`` [out] or None. Called on a CPU."""

    def grouped(
        self, x: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, activation: str = "",
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """``kernels.moe.grouped_product`` with these weights, ``bias`` being [E, out] or None. Called on a GPU."""


class Format(Protocol):
    """A format with its settings. Formats of equal settings are equal, so that those of fused parts can be compared."""

    def tensors(self, weight: Weight) -> Sequence[Stored]:
        """The tensors that ``weight`` is made of."""

    def dequantize(self, tensors: Tensors, weight: Weight) -> torch.Tensor:
        """The weight itself, [rows, columns] or [E, rows, columns], in ``weight.dtype``."""

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        """The product with ``weight``. Called once, when the tensors are loaded: what is packed is packed here."""

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        """``linear`` for the weights of several experts."""
