"""The slots of adapters on a GPU: memory for all of them from the start, and what of a step's rows kernels are told.

Each slot has its own place in the stacks of each product (``kernels.lora.Stack``), as large as the highest rank, so
what adapters take is there when the KV cache is sized, and CUDA graphs find them where they were captured. An adapter
is copied into its slot's place by the thread that read it, on a stream of its own, behind the steps that were launched
before the slot was given away; steps launched meanwhile have no row of that slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..kernels import lora as kernels
from ..kernels.lora import Layout, Stack
from ..parallel.parallel import Group
from ..transfer import Upload
from .slots import Slots
from .target import Adapter, Matrices, Target, Targets


class CardSlots(Slots):
    """``Slots`` whose products are Triton's (``kernels/lora.py``). ``ready`` may be called by one thread beside the
    compute thread's calls; all else is the compute thread's."""

    def __init__(
        self, targets: Targets, count: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__(targets, count, max_rank, dtype, device, group)
        self.upload, self._stream = Upload(device), torch.cuda.Stream(device)
        self._lock = threading.Lock()  # of the stacks, while they are written to or given back
        self._given: dict[int, torch.cuda.Event] = {}  # of slots to be loaded: behind the steps that may read them
        self._served: dict[str, set[int]] = {}  # by product, the slots whose adapters add to it
        self._stacks: dict[str, Stack] = {}
        self._present: set[int] = set()  # slots that rows of this step have
        self._rehearsing = False
        self.bring_back()

    # ------------------------------------------------------------ slots

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.dtype

    def kept(self, adapter: Adapter) -> Adapter:
        return adapter

    def put_away(self) -> None:
        self.clear()
        with self._lock:
            self._stacks = {}

    def bring_back(self) -> None:
        with self._lock:
            for name, target in self.targets.targets.items():
                if name not in self._stacks:
                    self._stacks[name] = empty_stack(target, self.count, self.max_rank, self.dtype, self.device)

    def begin_load(self, slot: int) -> None:
        self.install(slot, None)
        launched = torch.cuda.Event()
        launched.record()
        self._given[slot] = launched

    @torch.inference_mode()
    def ready(self, slot: int, adapter: Adapter) -> Adapter:
        """Copied into the place of ``slot``. Where the lease ends meanwhile nobody reads what is there."""
        if (launched := self._given.get(slot)) is not None:
            self._stream.wait_event(launched)
        for name, target in self.targets.targets.items():
            with self._lock, torch.cuda.stream(self._stream):
                if (stack := self._stacks.get(name)) is not None:  # else the worker sleeps
                    write(stack, target, slot, adapter.matrices.get(name))
                    self._stream.synchronize()
        return Adapter(adapter.name, dict.fromkeys(adapter.matrices, ()))

    def install(self, slot: int, adapter: Adapter | None) -> None:
        self._given.pop(slot, None)
        super().install(slot, adapter)
        for name in self.targets.targets:
            served = self._served.setdefault(name, set())
            (served.add if adapter is not None and name in adapter.matrices else served.discard)(slot)

    # ------------------------------------------------------------ the rows of a step

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps in here run as if every row had an adapter, of every product: to compile kernels, to measure memory
        and to record graphs."""
        self._rehearsing, self.active = True, True
        try:
            yield
        finally:
            self._rehearsing = self.active = False

    def look_up(self, slots: np.ndarray) -> None:
        super().look_up(slots)
        self.active |= self._rehearsing

    def begin(self, tokens: np.ndarray, outputs: np.ndarray | None = None) -> None:
        if self._rehearsing:
            tokens = np.zeros_like(tokens)
        self.upload.begin()
        self._present = set(np.unique(tokens).tolist())
        super().begin(tokens, outputs)

    def _rows_of(self, host: np.ndarray) -> Rows:
        return Rows(host, self)

    @contextmanager
    def recorded(self, rows: RecordedRows) -> Iterator[None]:
        """A graph is captured in here, whose rows are ``rows``."""
        with self.rehearsal():
            self._rows = self._tokens = self._outputs = rows
            yield

    def fill(self, rows: RecordedRows) -> None:
        """The next replay of what was recorded with ``rows`` is of this step's tokens."""
        rows.fill(self._tokens)

    # ------------------------------------------------------------ products

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.adds(name) and len(y):
            stack, layout = self._stacks[name], self._rows.layout(len(y))
            if self.targets.targets[name].among is None:
                shrunk = kernels.shrink(x, stack, layout)
            else:
                parts = kernels.shrink(x, stack, layout, whole=True)
                shrunk = self.group.all_reduce(parts.sum(0, keepdim=True) if len(parts) > 1 else parts)
            kernels.expand(shrunk, stack, layout, y)
        return y

    def add_embedding(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if "embed" in self._stacks and self.adds("embed"):
            kernels.expand_table(ids, self._stacks["embed"], self._rows.layout(len(x)), x)
        return x

    def lay_out_experts(self, name: str, ids: torch.Tensor, first: int, among: int) -> Layout:
        """The choices ``ids`` int64 [T, k] for the experts of the product ``name``, from ``first`` on, of ``among``."""
        size = kernels.expert_rows(ids.numel(), among, self.dtype)
        count = self.targets.targets[name].experts
        return kernels.lay_out_experts(ids, self._rows.slots(), first, count, self.count, size)

    def add_experts(
        self, name: str, x: torch.Tensor, y: torch.Tensor, layout: Layout, weights: torch.Tensor | None
    ) -> None:  # fmt: skip
        """``add`` of the experts' products ``y`` [T * k, outputs], for the choices in ``layout``."""
        if self.adds(name):
            stack = self._stacks[name]
            kernels.expand(kernels.shrink(x, stack, layout), stack, layout, y, weights)

    def adds(self, name: str) -> bool:
        """All tensor ranks find it alike; it is so for each product in what is recorded."""
        return self.active and (self._rehearsing or not self._present.isdisjoint(self._served.get(name, ())))


class Rows:
    """The adapter of each row: ``host`` int32 [T]. What kernels are told is made where it is asked for, once."""

    def __init__(self, host: np.ndarray, of: CardSlots) -> None:
        self.host, self._of = np.ascontiguousarray(host, np.int32), of
        self._layout: Layout | None = None
        self._slots: torch.Tensor | None = None

    def layout(self, rows: int) -> Layout:
        """The rows in blocks. Raises ValueError for a product of other ``rows``."""
        if rows != len(self.host):
            raise ValueError(f"adapters of {len(self.host)} rows are to be added to {rows} rows")
        if self._layout is None:
            of = self._of
            order, groups = kernels.lay_out(self.host, of.count, kernels.block_rows(rows, of.dtype))
            ordered, grouped = of.upload(order, groups)
            self._layout = Layout(ordered, grouped, rows)
        return self._layout

    def slots(self) -> torch.Tensor:
        """int32 [T]: the slot of each row's adapter, -1: none."""
        if self._slots is None:
            (self._slots,) = self._of.upload(self.host)
        return self._slots


class RecordedRows(Rows):
    """The same for a graph of ``size`` rows, in memory that stays: ``fill`` it before each replay."""

    def __init__(self, size: int, of: CardSlots) -> None:
        super().__init__(np.full(size, -1, np.int32), of)
        self._size = kernels.block_rows(size, of.dtype)
        blocks = kernels.most_blocks(size, of.count, self._size)
        order = torch.full((blocks, self._size), size, dtype=torch.int32, device=of.device)
        groups = torch.full((blocks,), of.count, dtype=torch.int32, device=of.device)
        self._layout = Layout(order, groups, size)
        self._slots = torch.full((size,), -1, dtype=torch.int32, device=of.device)

    def fill(self, rows: Rows) -> None:
        """The next replay is of ``rows``, at most as many."""
        layout, of = self.layout(len(self.host)), self._of
        slots = np.full(len(self.host), -1, np.int32)
        slots[: len(rows.host)] = rows.host
        order, groups = kernels.lay_out(slots, of.count, self._size)
        every = np.full(len(layout.groups), of.count, np.int32)
        every[: len(groups)] = groups
        ordered, grouped, told = of.upload(order, every, slots)
        layout.order[: len(order)].copy_(ordered)
        layout.groups.copy_(grouped)
        self.slots().copy_(told)


def empty_stack(target: Target, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> Stack:
    """Memory for ``count`` adapters of ``target``."""
    each, groups, inputs = target.each, count * max(1, target.experts), len(target.columns)
    rows = _rows_of_b(target)
    held = -(-max_rank // target.among.size) if target.among is not None and target.by_rank else max_rank
    a = (groups, inputs, max_rank) if target.kind == "table" else (groups, each, held, inputs)
    pieces = [(piece.first, len(piece.rows), row) for piece, row in zip(target.pieces[:each], rows, strict=False)]
    return Stack(
        torch.zeros(a, dtype=dtype, device=device),
        torch.zeros((groups, rows[-1], max_rank), dtype=dtype, device=device),
        torch.zeros((groups, each, 3), dtype=torch.int32, device=device),
        torch.zeros((groups, each), dtype=torch.float32, device=device),
        torch.tensor(pieces, dtype=torch.int32).view(each, 3).to(device),
        max((count for _, count, _ in pieces), default=0),
    )  # fmt: skip


def _rows_of_b(target: Target) -> list[int]:
    """Where the rows of each module begin in B, and where those of the last end."""
    return np.cumsum([0, *(len(piece.rows) for piece in target.pieces[: target.each])]).tolist()


def write(stack: Stack, target: Target, slot: int, pieces: tuple[Matrices | None, ...] | None) -> None:
    """What an adapter has for ``target``, into the place of ``slot``; None: nothing."""
    experts, each, starts = max(1, target.experts), target.each, _rows_of_b(target)
    place = slice(slot * experts, (slot + 1) * experts)
    ranks, scales = np.zeros((experts, each, 3), np.int32), np.zeros((experts, each), np.float32)
    if pieces is not None:
        a, b = (torch.zeros((experts, *whole.shape[1:]), dtype=whole.dtype) for whole in (stack.a, stack.b))
        for at, of in enumerate(pieces):
            if of is None:
                continue
            expert, piece = divmod(at, each)
            ranks[expert, piece], scales[expert, piece] = (of.rank, of.first, len(of.a)), of.scale
            (a[expert].t() if target.kind == "table" else a[expert, piece])[: len(of.a)] = of.a
            b[expert, starts[piece] : starts[piece + 1], : of.rank] = of.b
        stack.a[place].copy_(a)
        stack.b[place].copy_(b)
    stack.scales[place].copy_(torch.from_numpy(scales))
    stack.ranks[place].copy_(torch.from_numpy(ranks))
