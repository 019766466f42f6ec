"""Who of those who wait may go next: of one priority the API key with the fewest running, whatever comes in between;
of one key who came first, also when it had to be sent again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.scheduler.core import Scheduler
from quire.scheduler.placement import cached_prefix, can_ever_hold
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence
from quire.scheduler.tiers import MAX_LOADS

Places = Mapping[int, tuple[int, float]]
"""Of each request, by uid, its priority and arrival when its client sent it first."""


def watch_line(core: Scheduler, places: Places, fail: Callable[[str], None]) -> None:
    """Have every start of a sequence looked at. Where several workers are there, or somebody is in quarantine, others
    may be passed over for more reasons than are told here, and nothing is said."""
    note, by_priority = core.note_start, core.config.scheduling_policy == "priority"

    def noted(seq: Sequence) -> None:
        if len(core.replicas) == 1 and not core.quarantine_waits and core.queue:
            _look(core, seq, places, by_priority, fail)
        note(seq)

    core.note_start = noted  # type: ignore[method-assign]


def _has_adapter(replica: Replica, seq: Sequence) -> bool:
    """Its adapter is there, and its turn has come."""
    adapter, slots = seq.request.adapter, replica.adapters
    return adapter is None or (slots is not None and slots.takes(adapter) and adapter.digest in slots._granted)


def _loads(replica: Replica, seq: Sequence) -> bool:
    """Its blocks are on their way from a tier, or would be if fewer others' were: those behind it go first."""
    tier, size = replica.tier, replica.block_size
    if tier is None or not tier.loads:
        return False
    if tier.coming(seq) or len(tier.loads) >= MAX_LOADS:
        return True
    hashes = seq.hash_blocks(seq.reusable() // size, size)
    return any(each in tier.on_their_way for each in hashes[len(cached_prefix(replica, seq)) :][:1])


def _look(core: Scheduler, started: Sequence, places: Places, by_priority: bool, fail: Callable[[str], None]) -> None:
    """``started`` has left the line and holds its rows: nobody may wait who should have gone before."""
    replica, own = core.replicas[started.replica], started.request.account

    def priority_of(seq: Sequence) -> int:
        return places.get(seq.uid, (0, 0.0))[0] if by_priority else 0

    priority = priority_of(started)
    loading = {seq.request.account for seq in core.queue if _loads(replica, seq)}
    waiting = [
        seq for seq in core.queue
        if priority_of(seq) <= priority and can_ever_hold(replica, seq)
        and not (seq.request.asks_prompt and seq.request.carried()) and _has_adapter(replica, seq)
        and not _loads(replica, seq)
    ]  # fmt: skip
    if not waiting:
        return
    rows = core.running_by_account()
    rows[own] -= started.width
    for seq in waiting:
        if priority_of(seq) < priority:
            fail(f"priority | {started.uid} starts while {seq.uid} of a better priority waits")
        elif (
            seq.request.account != own
            and rows[seq.request.account] < rows[own]
            and not {seq.request.account, own} & loading
        ):  # a row that waits for its blocks counts for its key where others are passed over it
            counts = f"{rows[own]} rows of its key run, {rows[seq.request.account]} of the other's"
            fail(f"fairness | {started.uid} starts while {seq.uid} waits: {counts}")
        elif seq.request.account == own and _came_before(seq, started, places):
            fail(f"order | {started.uid} starts while {seq.uid} waits, which came before it")


def _came_before(seq: Sequence, started: Sequence, places: Places) -> bool:
    """``seq`` arrived before ``started``, and alone: those of one arrival take turns with the others."""
    if seq.uid not in places or started.uid not in places or seq.request.turn is not None:
        return False
    arrival = places[seq.uid][1]
    alone = sum(other == arrival for _, other in places.values()) == 1
    return alone and arrival < places[started.uid][1]
