"""Who of those who wait may go next: of one priority the API key with the fewest running, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable

from quire.proto.messages import Submit
from quire.scheduler.core import Scheduler
from quire.scheduler.placement import can_ever_hold
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence


def watch_line(core: Scheduler, fail: Callable[[str], None]) -> None:
    """Have every start of a sequence looked at. Where several workers are there, or somebody is in quarantine, others
    may be passed over for more reasons than are told here, and nothing is said."""
    note, submit = core.note_start, core.submit
    priorities: dict[int, int] = {}  # of requests, by uid

    def submitted(owner: str, message: Submit) -> None:
        priorities[message.uid] = message.priority
        submit(owner, message)

    def noted(seq: Sequence) -> None:
        if len(core.replicas) == 1 and not core.quarantine_waits and core.queue:
            _look(core, seq, priorities, fail)
        note(seq)

    core.note_start = noted  # type: ignore[method-assign]
    if core.config.scheduling_policy == "priority":
        core.submit = submitted  # type: ignore[method-assign]


def _has_adapter(replica: Replica, seq: Sequence) -> bool:
    """Its adapter is there, and its turn has come."""
    adapter, slots = seq.request.adapter, replica.adapters
    return adapter is None or (slots is not None and slots.takes(adapter) and adapter.digest in slots._granted)


def _look(core: Scheduler, started: Sequence, priorities: dict[int, int], fail: Callable[[str], None]) -> None:
    """``started`` has left the line and holds its rows: nobody may wait who should have gone before."""
    replica, own = core.replicas[started.replica], started.request.account
    priority = priorities.get(started.uid, 0)
    waiting = [
        seq for seq in core.queue
        if priorities.get(seq.uid, 0) <= priority and can_ever_hold(replica, seq)
        and not (seq.request.asks_prompt and seq.request.carried()) and _has_adapter(replica, seq)
    ]  # fmt: skip
    if not waiting:
        return
    rows = core.running_by_account()
    rows[own] -= started.width
    for seq in waiting:
        if priorities.get(seq.uid, 0) < priority:
            fail(f"priority | {started.uid} starts while {seq.uid} of a better priority waits")
        elif seq.request.account != own and rows[seq.request.account] < rows[own]:
            counts = f"{rows[own]} rows of its key run, {rows[seq.request.account]} of the other's"
            fail(f"fairness | {started.uid} starts while {seq.uid} waits: {counts}")
