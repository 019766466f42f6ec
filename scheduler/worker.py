"""One worker, as the scheduler knows it under one lease."""

from __future__ import annotations

import math

from ..proto.messages import PROTOCOL, Bye, Hello, Lease, Loaded, Tiers
from ..proto.standstill import Standstill
from .replica import Replica
from .worker_phase import TRANSITIONS, Event, Phase

INT32_MAX = 2**31 - 1
MAX_DRAFTS, MAX_SLOTS = 64, 4096
"""Tokens that a worker may draft for a row in one step; its slots for adapters."""
DROPPED = 2
"""The level of a sleep from which on workers do not keep their weights."""
ROLES = ("both", "prefill", "decode")


class Worker:
    """One worker under one lease. ``since`` is when its phase began, ``leave_by`` when a drain's patience ends."""

    __slots__ = (
        "bad_frames", "dismissed", "drained", "heartbeat_at", "hello", "lease", "leave_by", "loaded", "phase", "reason",
        "replica", "resident", "rest", "rested", "since", "tiers",
    )  # fmt: skip

    def __init__(self, hello: Hello, lease: Lease, now: float, rest: int | None = None):
        """``rest``: the level of the Rest that it is sent, None for an Assign."""
        self.hello, self.lease, self.heartbeat_at, self.since = hello, lease, now, now
        self.phase = Phase.LOADING if rest is None else Phase.RESTING
        self.rest = rest
        self.rested = False  # it has given back its memory
        self.bad_frames = self.resident = 0  # counted, and bytes of its process, by its last Heartbeat
        self.loaded: Loaded | None = None
        self.tiers: Tiers | None = None  # what it keeps outside of its device's cache
        self.replica: Replica | None = None
        self.leave_by, self.reason, self.drained = math.inf, "", 0
        self.dismissed = False  # by an operator: nobody starts another in its place

    @property
    def has_weights(self) -> bool:
        """Its weights are somewhere in its memory; else it has to read them again, which may take long."""
        if self.rest is not None:
            return self.rest < DROPPED and (self.rested or self.hello.loaded)
        return self.phase is not Phase.LOADING or self.hello.loaded

    def follow(self, event: Event, now: float) -> bool:
        """Go where the table says; False, and nowhere, where it does not know the event in this phase."""
        after = TRANSITIONS[self.phase].get(event)
        if after is None:
            return False
        if after is not self.phase:
            self.phase, self.since = after, now
        return True

    def dismiss(self) -> None:
        """An operator sends it away."""
        self.dismissed = True

    def keep(self, tiers: Tiers) -> None:
        """It has these."""
        self.tiers = tiers

    def forgive(self, standstill: Standstill) -> None:
        """The scheduler stood still, and could not see what it did."""
        since = standstill.since
        self.heartbeat_at, self.since = since(self.heartbeat_at), since(self.since)
        self.leave_by = standstill.until(self.leave_by)
        if self.replica is not None:
            self.replica.forgive(standstill)

    def serve(self, replica: Replica) -> None:
        """It is ready, and this is what plans are made with."""
        self.replica = replica

    def running(self) -> int:
        """Sequences there."""
        return len(self.replica.sequences()) if self.replica is not None else 0


def count(claimed: int) -> int:
    """A peer's own count, kept where sums of it still fit a message."""
    return max(0, min(claimed, INT32_MAX))


def impossible(message: Loaded) -> str:
    """Why no worker can be as this one says that it is; "" where it can."""
    sizes = (message.num_blocks, message.max_model_len, message.vocab_size)
    if not all(1 <= size <= INT32_MAX for size in sizes) or not 0 <= message.adapter_slots <= MAX_SLOTS:
        return f"it said Loaded{sizes}, with {message.adapter_slots} slots for adapters"
    if not (0 <= message.drafts <= MAX_DRAFTS and 0 <= message.draft_rows <= INT32_MAX):
        return f"it would draft {message.drafts} tokens for each of {message.draft_rows} rows"
    return ""


def wrong_protocol(hello: Hello) -> Bye:
    """The answer to a Hello of another version."""
    return Bye(
        f"this {hello.kind} speaks protocol {hello.protocol} and the scheduler {PROTOCOL}; install the same version of "
        "quire for both."
    )
