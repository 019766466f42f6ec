"""Blocks of a KV cache that go from one worker to another, as the scheduler decides.

``move`` numbers a sequence's way from one replica to another; slots are places in its block table. The scheduler tells
the taker which blocks of its are meant (Take), and once it has heard so, tells the giver which to send (Give). Pages go
from worker to worker. Whatever fails, the scheduler has the taker forget the move, and the sequence goes on or is
computed again.
"""

from __future__ import annotations

import msgspec

from .base import Message
from .plans import Lease


class Take(Message):
    """scheduler -> the worker that is to have blocks: pages of ``move`` for slots from ``first`` on go into these."""

    lease: Lease
    move: int
    first: int
    blocks: bytes  # i32
    pages: int = 0  # of the first Take: so many leading slots have theirs already


class Give(Message):
    """scheduler -> the worker that has them: send the pages of these blocks, a sequence's slots from ``first`` on, to
    the worker at ``endpoint``, whose lease is ``to``. What the plans before it write is in them."""

    lease: Lease
    move: int
    first: int
    blocks: bytes  # i32
    endpoint: str
    to: Lease


class Forget(Message):
    """scheduler -> the worker that was to have blocks: pages of ``move`` that have not come are dropped."""

    lease: Lease
    move: int


class Taken(Message):
    """worker -> scheduler: it knows the blocks of so many slots of ``move``, and the pages of so many are there."""

    lease: Lease
    move: int
    slots: int
    pages: int


class NotMoved(Message):
    """worker -> scheduler, the giver or the taker: it cannot be done."""

    lease: Lease
    move: int
    error: str


class SharedMemory(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Memory of the process ``pid`` that others of its user find by the number of a file there. ``token`` is in it."""

    pid: int
    fd: int
    token: bytes


class Pages(Message):
    """worker -> worker: the pages of ``count`` slots from ``first`` on, one block's after the other's, in ``data`` or,
    with ``slot`` >= 0, in that slot of ``shared``."""

    to: Lease
    move: int
    first: int
    count: int
    data: bytes
    shared: SharedMemory | None = None
    slot: int = -1
