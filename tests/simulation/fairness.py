"""Who of those who wait may go next: of one priority the API key with the fewest running, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable

from quire.scheduler.core import Scheduler
from quire.scheduler.placement import can_ever_hold
from quire.scheduler.request import Sequence


def watch_line(core: Scheduler, fail: Callable[[str], None]) -> None:
    """Have every start of a sequence looked at. Where several workers are there, or somebody is in quarantine, others
    may be passed over for more reasons than are told here, and nothing is said."""
    note = core.note_start

    def noted(seq: Sequence) -> None:
        if len(core.replicas) == 1 and not core.quarantine_waits and core.queue:
            _look(core, seq, fail)
        note(seq)

    core.note_start = noted  # type: ignore[method-assign]


def _look(core: Scheduler, started: Sequence, fail: Callable[[str], None]) -> None:
    """``started`` has left the line and holds its rows: nobody may wait who should have gone before."""
    replica, own = core.replicas[started.replica], started.request.account
    waiting = [
        seq for seq in core.queue
        if seq.request.account != own and seq.key[0] <= started.key[0] and can_ever_hold(replica, seq)
        and not (seq.request.asks_prompt and seq.request.carried())
    ]  # fmt: skip
    if not waiting:
        return
    rows = core.running_by_account()
    rows[own] -= started.width
    for seq in waiting:
        if seq.key[0] < started.key[0]:
            fail(f"priority | {started.uid} starts while {seq.uid} of a better priority waits")
        elif rows[seq.request.account] < rows[own]:
            counts = f"{rows[own]} rows of its key run, {rows[seq.request.account]} of the other's"
            fail(f"fairness | {started.uid} starts while {seq.uid} waits: {counts}")
