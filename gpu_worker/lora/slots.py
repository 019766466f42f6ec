"""The adapters that are served: ``count`` slots, what each adds to the products of a model, and which row has which.

y[row] += scale * B (A x[row]), summed in float32 in one order, whatever the other rows of the step: by the native
kernels (kernels/cpu/src/adapt.c), or where there are none by torch; on a GPU by Triton's (``card.py``). A slot is
changed between two steps and at once, for what is installed lies ready on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..kernels.cpu import adapt as native
from ..layers.linear import LEAST_ROWS
from ..parallel.parallel import Group
from .target import Adapter, Matrices, Piece, Target, Targets, most_bytes


@dataclass(frozen=True)
class LoraSpec:
    """Which adapters a model may have: so many at a time, of ranks up to ``max_rank``, in ``dtype`` (None: the
    model's). ``fully_sharded``: tensor ranks divide both matrices."""

    slots: int
    max_rank: int
    dtype: torch.dtype | None = None
    fully_sharded: bool = False


class Slots:
    """``count`` slots for adapters of ``targets``, whose ranks are at most ``max_rank``.

    ``active``: whether some row of this step has an adapter; only then does any product look here. ``dtype``: what the
    matrices are rounded to. ``native``: whether the CPU's kernels compute.
    """

    def __init__(
        self, targets: Targets, count: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        self.group = group or Group()  # the ranks that fully sharded adapters are divided among
        self.targets, self.count, self.max_rank, self.dtype, self.device = targets, count, max_rank, dtype, device
        self.native = device.type == "cpu" and native.native_adapters()
        self.active = False
        self._held: list[Adapter | None] = [None] * count
        self._products = {name: NativeProduct(target, count)
                          for name, target in targets.targets.items()
                          if self.native and target.among is None}  # fmt: skip
        self._rows: Any = self._rows_of(np.zeros(0, np.int32))
        self._tokens: Any = self._rows
        self._outputs: Any = self._rows

    # ------------------------------------------------------------ slots

    @property
    def kept_dtype(self) -> torch.dtype:
        """What matrices are read as: float32 where the CPU computes in it, after they were rounded to ``dtype``."""
        return self.dtype if self.native and self.dtype in native.TYPES else torch.float32

    def kept(self, adapter: Adapter) -> Adapter:
        """``adapter``, which was just read, as it is kept in memory; ``ready`` takes it."""
        return Adapter(
            adapter.name,
            {
                name: tuple(None if each is None else self._ready(each, self.targets.targets[name]) for each in pieces)
                for name, pieces in adapter.matrices.items()
            },
        )

    @property
    def most_bytes(self) -> int:
        """Of an adapter with every product and the highest rank, as it is kept in memory."""
        panel = native.PANEL if self.native else 1
        return most_bytes(self.targets, self.max_rank, self.kept_dtype.itemsize, panel)

    def has(self, adapter: Adapter) -> bool:
        """Whether ``adapter``, which is kept, is in a slot with its own memory."""
        return any(held is adapter for held in self._held)

    def begin_load(self, slot: int) -> None:
        """No row of a step from the next one on has ``slot``, until something is installed there."""
        self.install(slot, None)

    def ready(self, slot: int, adapter: Adapter) -> Adapter:
        """What is kept as ``install`` takes it for ``slot``, which ``begin_load`` was called for. In any one thread."""
        return adapter

    def put_away(self) -> None:
        """Give back all memory of the device that slots have; they are empty from now on."""
        self.clear()

    def bring_back(self) -> None:
        """There is memory for all slots again."""

    def _ready(self, of: Matrices, target: Target) -> Matrices:
        a = of.a.t() if target.kind == "table" else of.a
        b = native.panels(of.b) if target.name in self._products else of.b
        return replace(of, a=a.contiguous(), b=b.contiguous())

    def install(self, slot: int, adapter: Adapter | None) -> None:
        """From the next step on rows of ``slot`` have ``adapter``, which ``ready`` gave; None: the slot is empty."""
        self._held[slot] = adapter
        for name, product in self._products.items():
            product.install(slot, None if adapter is None else adapter.matrices.get(name))

    def holds(self, slot: int) -> bool:
        """Whether rows may name ``slot``."""
        return 0 <= slot < self.count and self._held[slot] is not None

    def clear(self) -> None:
        """Empty all slots."""
        self.active = False
        for slot, held in enumerate(self._held):
            if held is not None:
                self.install(slot, None)

    def product(self, name: str) -> NativeProduct:
        """What the native kernels add to the product ``name``. It stays at its address."""
        return self._products[name]

    # ------------------------------------------------------------ the rows of a step

    def look_up(self, slots: np.ndarray) -> None:
        """A step begins whose rows have ``slots`` int32 [R], -1: no adapter. Without any it is not ``active``."""
        self.active = bool((slots >= 0).any())

    def begin(self, tokens: np.ndarray, outputs: np.ndarray | None = None) -> None:
        """A step whose tokens have the adapters ``tokens`` int32 [T], -1: none; products behind the last attention are
        of ``outputs`` [S] alone (None: of all). Without any adapter the step is not ``active``."""
        self.look_up(tokens)
        if self.active:
            self._rows = self._tokens = self._outputs = self._rows_of(tokens)
            if outputs is not None and not np.array_equal(chosen := tokens[outputs], tokens):
                self._outputs = self._rows_of(chosen)

    def _rows_of(self, host: np.ndarray) -> Any:
        return _Rows(host)

    def adds(self, name: str) -> bool:
        """Whether adapters of this step's rows may add to the product ``name``."""
        return self.active

    def end(self) -> None:
        """No product adds anything until the next ``begin``."""
        self.active = False

    def to_outputs(self, part: slice = slice(None)) -> None:
        """From here on products are of the outputs, or of those of ``part``."""
        if self.active:
            whole = part.start in (0, None) and part.stop in (None, len(self._outputs.host))
            self._rows = self._outputs if whole else self._rows_of(self._outputs.host[part])

    def use(self, slots: np.ndarray) -> None:
        """Products are of rows with the adapters ``slots`` int32 [T]."""
        self._rows = self._rows_of(slots)

    # ------------------------------------------------------------ products

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``y`` [T, outputs] and what the rows' adapters add to the product ``name`` of ``x`` [T, inputs]; may be ``y``
        itself."""
        if self.targets.targets[name].among is not None:
            self._add_divided(name, x, y)
            return y
        if self.native:
            product = self._products[name].struct
            if not product.most_rank:
                return y
            wide = y.float()
            native.add(product, self._rows.slots, self.count, _float(x), wide)
            return wide.to(y.dtype)
        for slot, rows in self._rows.groups():
            for piece, of in self._pieces(slot, name):
                self._add_piece(y, x[rows], rows, piece.first, of)
        return y

    def _add_divided(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """``add`` of fully sharded adapters: A x is the sum of all ranks' parts, which they exchange once. Which rows
        there are, and of which adapters, is the same in all of them."""
        groups = [(rows, self._pieces(slot, name)) for slot, rows in self._rows.groups()]
        most = max((of.rank for _, pieces in groups for _, of in pieces), default=0)
        if not most:
            return
        each = {piece.module: at for at, piece in enumerate(self.targets.targets[name].pieces)}
        shrunk = torch.zeros(len(x), len(each), most)
        for rows, pieces in groups:
            for piece, of in pieces:
                part = _product(x[rows].to(of.a.dtype), of.a).float()
                shrunk[rows, each[piece.module], of.first : of.first + len(of.a)] = part
        shrunk = self.group.all_reduce(shrunk)
        for rows, pieces in groups:
            for piece, of in pieces:
                of_piece = shrunk[rows, each[piece.module], : of.rank].to(of.b.dtype)
                added = _product(of_piece, of.b) * of.scale
                y[rows, piece.first : piece.first + added.shape[1]] += added.to(y.dtype)

    def add_expert(self, name: str, expert: int, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """The same of one expert, in place; the step's tokens ``rows`` int64 [T] were chosen for it."""
        chosen = _Rows(self._rows.host[rows.numpy()])
        if self.native:
            product = self._products[name].struct
            if product.most_rank:
                wide = y.float()
                native.add(product, chosen.slots, self.count, _float(x), wide, expert)
                y.copy_(wide)
            return
        for slot, at in chosen.groups():
            for piece, of in self._pieces(slot, name, expert):
                self._add_piece(y, x[at], at, piece.first, of)

    def add_embedding(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The same of the embeddings ``x`` [T, width] of ``ids`` int64 [T], which count from this process's first."""
        target = self.targets.targets.get("embed")
        if target is None:
            return x
        if self.native:
            product = self._products["embed"].struct
            if not product.most_rank:
                return x
            wide = x.float()
            native.add_rows(product, self._rows.slots, self.count, ids.to(torch.int32), wide)
            return wide.to(x.dtype)
        for slot, rows in self._rows.groups():
            for _, of in self._pieces(slot, "embed"):
                _add(x, rows, 0, of.a[ids[rows]], of)
        return x

    def _pieces(self, slot: int, name: str, expert: int = 0) -> list[tuple[Piece, Matrices]]:
        held, target = self._held[slot], self.targets.targets[name]
        found = held.matrices.get(name) if held is not None else None
        if found is None:
            return []
        part = slice(expert * target.each, (expert + 1) * target.each)
        pairs = zip(target.pieces[part], found[part], strict=True)
        return [(piece, of) for piece, of in pairs if of is not None]

    @staticmethod
    def _add_piece(y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, first: int, of: Matrices) -> None:
        _add(y, rows, first, _product(x.to(of.a.dtype), of.a), of)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of as many rows that a row has the same bits in any company."""
    missing = -len(x) % LEAST_ROWS
    return F.linear(F.pad(x, (0, 0, 0, missing)) if missing else x, weight)[: len(x)]


def _add(y: torch.Tensor, rows: torch.Tensor, first: int, shrunk: torch.Tensor, of: Matrices) -> None:
    added = _product(shrunk, of.b) * of.scale
    y[rows, first : first + added.shape[1]] += added.to(y.dtype)


def _float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in native.TYPES else x.float()


class _Rows:
    """The adapter of each row: ``host`` int32 [T], and the same as a tensor."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = np.ascontiguousarray(host, np.int32)
        self.slots = torch.from_numpy(self.host)
        self._groups: list[tuple[int, torch.Tensor]] | None = None

    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """(slot, int64 rows) of each adapter that some row has."""
        if self._groups is None:
            self._groups = [
                (slot, torch.from_numpy(np.flatnonzero(self.host == slot)))
                for slot in np.unique(self.host[self.host >= 0]).tolist()
            ]
        return self._groups


class NativeProduct:
    """A target as the native kernels read it: ``struct`` with a table of [slots, experts, pieces]."""

    def __init__(self, target: Target, slots: int) -> None:
        self._experts, self._each = max(1, target.experts), target.each
        count = self._experts * self._each
        self._pieces = (native.Piece * max(1, self._each))(
            *(native.Piece(piece.first, len(piece.rows)) for piece in target.pieces[: self._each])
        )
        self._table = (native.Adapter * max(1, slots * count))()
        self._held: list[Sequence[Matrices | None] | None] = [None] * slots
        self.struct = native.Adapted(
            self._each, self._experts, len(target.columns), 0, addressof(self._pieces), addressof(self._table)
        )

    @property
    def address(self) -> int:
        """Of ``struct``."""
        return addressof(self.struct)

    def install(self, slot: int, pieces: Sequence[Matrices | None] | None) -> None:
        """As ``Slots.install``, of this product."""
        if pieces is None and self._held[slot] is None:
            return
        self._held[slot] = pieces  # what the table points to
        count = self._experts * self._each
        for at in range(count):
            of = None if pieces is None else pieces[at]
            entry = self._table[slot * count + at]
            if of is None:
                entry.a = entry.b = None
                entry.rank = 0
            else:
                entry.a, entry.b, entry.scale = of.a.data_ptr(), of.b.data_ptr(), of.scale
                entry.rank, entry.type = of.rank, native.TYPES[of.a.dtype]
        held = (each for pieces in self._held if pieces is not None for each in pieces if each is not None)
        self.struct.most_rank = max((each.rank for each in held), default=0)
