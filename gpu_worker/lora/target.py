"""The products of a model to which adapters may add, and what one adapter has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..layers.formats.base import Part
from ..spec import Shard


@dataclass(frozen=True)
class Piece:
    """What one module of a checkpoint has of a product: outputs ``first`` to ``first + len(rows)`` of this process's.

    ``rows``: which outputs of the module these are; ``outputs``: how many the module has. ``padded``: its tensor may
    have more, which no token uses.
    """

    module: str
    outputs: int
    rows: np.ndarray
    first: int
    padded: bool = False


@dataclass(frozen=True)
class Target:
    """A product y = W x (+ what adapters add), by the name of its parameter without ".weight": "layers.0.qkv".

    ``columns``: the inputs that this process holds. ``pieces``: the modules that lie side by side in its outputs; those
    of ``experts`` one expert after another (0: it has none). ``kind``: "linear", "experts" or "table", of which rows of
    A are looked up. ``among``: of fully sharded adapters, the tensor ranks among which both matrices are divided, so
    that A x is the sum of all ranks' parts; ``by_rank``: A by its rows, else by its columns, and B by its rows.
    """

    name: str
    kind: str
    columns: Part
    pieces: tuple[Piece, ...]
    experts: int = 0
    among: Shard | None = None
    by_rank: bool = False

    def rows_of_a(self, rank: int) -> range:
        """Those that this process holds of the ``rank`` rows of an A."""
        return self.among.share(rank) if self.among is not None and self.by_rank else range(rank)

    @property
    def outputs(self) -> int:
        """Of the product, or of one expert's."""
        return sum(len(piece.rows) for piece in self.pieces[: self.each])

    @property
    def each(self) -> int:
        """Pieces of the product, or of one expert's."""
        return len(self.pieces) // max(1, self.experts)


@dataclass(frozen=True)
class Fused:
    """Modules of one layer whose adapters PEFT keeps as one parameter of all experts (``target_parameters``).

    ``outputs`` and ``inputs`` are those of an expert; ``target``: the name of a Target; ``parameter``: its name in the
    module, as transformers has it. ``first_expert``: of those that this process holds.
    """

    target: str
    parameter: str
    experts: int
    outputs: int
    inputs: int
    first_expert: int


@dataclass(frozen=True)
class Targets:
    """All targets of the part of a model that this process holds, by name.

    ``modules``: of the whole model, (name of a target, number of its piece), by each name that a module may have; -1
    for what another process holds. ``shapes``: (outputs, inputs) of each. ``fused``: by the module of the experts.
    """

    targets: Mapping[str, Target]
    modules: Mapping[str, tuple[str, int]]
    shapes: Mapping[str, tuple[int, int]]
    fused: Mapping[str, tuple[Fused, ...]]


def most_bytes(targets: Targets, rank: int, itemsize: int, panel: int = 1) -> int:
    """Of an adapter of ``rank`` with every product; outputs are filled up to multiples of ``panel``."""
    values = 0
    for target in targets.targets.values():
        held = -(-rank // target.among.size) if target.among is not None and target.by_rank else rank
        outputs = sum(-(-len(piece.rows) // panel) * panel for piece in target.pieces)
        values += len(target.pieces) * len(target.columns) * held + outputs * rank
    return values * itemsize


@dataclass(frozen=True, eq=False)
class Matrices:
    """What an adapter has for one piece, as far as this process holds it: y[rows] += scale * b (a x).

    ``a`` [rank, inputs], of a table [rank, vocabulary]; ``b`` [outputs, rank]. What ``Slots.kept`` gives on a CPU is in
    the order of what computes: of a table ``a`` is [vocabulary, rank], and for the native kernels ``b`` is in panels.
    ``first``: the first row of the whole A that ``a`` has, where it is divided by its rows (``Target.by_rank``).
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rank: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Of both."""
        return int(self.a.nbytes + self.b.nbytes)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: by target, what it has for each of the target's pieces, or None."""

    name: str
    matrices: Mapping[str, tuple[Matrices | None, ...]]

    @property
    def nbytes(self) -> int:
        """Of all its matrices."""
        return sum(each.nbytes for pieces in self.matrices.values() for each in pieces if each is not None)
