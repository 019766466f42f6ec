"""Who may run does, while a worker has nothing to do: nobody who waits for something else stands in the way."""

from __future__ import annotations

from collections.abc import Callable

from quire.proto.messages import StepPlan
from quire.scheduler.core import Scheduler
from quire.scheduler.placement import can_ever_hold
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence


def watch_idle(core: Scheduler, fail: Callable[[str], None]) -> None:
    """Have every plan that is not made looked at. Where several workers are there, or blocks are loaded from tiers, or
    somebody is in quarantine, there may be more reasons than are told here, and nothing is said."""
    plan = core.plan

    def planned(replica: Replica) -> StepPlan | None:
        made = plan(replica)
        idle = made is None and not replica.in_flight and not replica.sequences()
        if idle and core.queue and _takes_anybody(core, replica):
            for seq in core.queue:
                if _may_run(replica, seq):
                    fail(f"idle | {seq.uid} waits while the only worker has nothing to do, and could run it")
        return made

    core.plan = planned  # type: ignore[method-assign]


def _takes_anybody(core: Scheduler, replica: Replica) -> bool:
    alone = len(core.replicas) == 1 and replica.tier is None
    return alone and not (core.paused or replica.draining or core.quarantine_waits or replica.reserved)


def _may_run(replica: Replica, seq: Sequence) -> bool:
    """It fits, and needs no adapter, or one that is there and whose turn has come."""
    adapter, slots = seq.request.adapter, replica.adapters
    if not can_ever_hold(replica, seq) or (seq.request.asks_prompt and seq.request.carried()):
        return False
    return adapter is None or (slots is not None and slots.takes(adapter) and adapter.digest in slots._granted)
