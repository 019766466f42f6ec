"""What the page's "Look inside" shows: the scheduler's state at one moment, asked for a few times a second by frontends
with somebody watching."""

from __future__ import annotations

import msgspec

from .base import Message
from .operators import AdapterStats, Stats, WorkerInfo

CELLS = 4096
"""Cells of one map of blocks at most: of a larger pool several neighbours share one."""
FREE, CACHED, USED, SHARED = range(4)
"""States of a cell: nobody wants it; nobody holds it and its content can be found again; one sequence holds it; several
do. Of several blocks in one cell the highest counts."""


class GetView(Message):
    """frontend -> scheduler, while somebody watches it. The first one opens the ring of steps, which closes a few
    seconds after the last. ``since``: the number of the last step that is known already."""

    token: int = 0
    since: int = 0


class Waiting(msgspec.Struct, array_like=True, gc=False):
    """One sequence in line, the next first."""

    uid: int
    index: int  # among the children of its request
    prompt: int  # tokens
    outputs: int  # tokens that it had before it was put back
    arrival: float  # seconds since the epoch; 0 where nobody said


class Running(msgspec.Struct, array_like=True, gc=False):
    """One sequence that runs. ``cells``: where it holds blocks on its replica's map, i32 pairs of a first cell and a
    number of cells; empty where the answer has no room for them."""

    uid: int
    index: int
    replica: int
    row: int
    phase: str  # "prefill", "decode", "beam" or "move" (held: on its way to another replica)
    prompt: int
    computed: int
    total: int
    limit: int
    arrival: float
    cells: bytes = b""


class BlockMap(msgspec.Struct, array_like=True, gc=False):
    """The KV blocks of one replica: ``cells`` has one byte for each ``fold`` neighbours, the highest of their states.

    The counts are of blocks, and exact.
    """

    replica: int
    blocks: int
    fold: int
    cells: bytes  # u8
    cached: int  # not held, and can be found again
    used: int  # held by one or several
    shared: int  # of these, by several


class WorkerView(msgspec.Struct, array_like=True, gc=False):
    """One worker: what operators are told, its phase, and its memory in bytes (0: it has not said)."""

    info: WorkerInfo
    phase: str
    resident: int  # of its process
    block_bytes: int  # of one KV block


class StepView(msgspec.Struct, array_like=True, gc=False):
    """One entry of the ring of steps. ``kind`` is "step", "loss" (a worker was lost, and ``requeued`` sequences went
    back in line), "leave" (it left as it was asked to) or "join" (a worker is ready)."""

    number: int  # rises by one with each entry
    kind: str
    replica: int
    ended: float  # seconds on the scheduler's clock
    seconds: float  # from its plan, or the result before it, to its result
    prefill: int  # prompt tokens computed
    decodes: int  # rows that draw the next of their tokens
    preempted: int = 0  # sequences put back for want of blocks since the entry before
    recomputed: int = 0  # tokens of sequences that had run before, to be computed again, since the entry before
    requeued: int = 0


class View(Message):
    """scheduler -> frontend, answering GetView. All but ``token`` and ``steps`` may be a fraction of a second old."""

    token: int
    now: float  # the scheduler's clock
    stats: Stats | AdapterStats
    workers: list[WorkerView]
    waiting: list[Waiting]  # the first of them
    running: list[Running]  # the first of them
    maps: list[BlockMap]
    steps: list[StepView]  # the newest after ``since``, the oldest first
