"""In which phase a process is at the moment when a fault strikes it."""

from __future__ import annotations

from typing import Any

from .plan import Fault
from .processes import Detokenizer, Frontend, Process, Scheduler
from .workers import Worker
from .world import World

PHASES = {
    "worker": (
        "starting", "loading", "configuring", "idle", "in a step", "draining", "leaving", "recalled", "no lease",
        "asleep",
    ),
    "scheduler": ("idle", "holding", "running"),
    "detokenizer": ("idle", "preparing", "submitted"),
    "frontend": ("idle", "waiting", "accepted", "streaming"),
}  # fmt: skip
"""By kind of process. ``no lease``: the scheduler that it serves does not know it, or there is none. ``holding``: the
scheduler has requests, and none of them runs. A detokenizer's or frontend's phase is that of its request that has
got furthest."""


def phases_of(world: World, fault: Fault) -> list[str]:
    """What the fault strikes, and in which phase, of each end of a link; nothing where nobody is there."""
    ends = dict.fromkeys(place for place in (fault.target, fault.other) if place)
    found = [world.processes.get(place) for place in ends]
    return [phase for process in found if process is not None and (phase := phase_of(world, process))]


def phase_of(world: World, process: Process) -> str:
    """``kind phase`` of one process; empty where it has ended."""
    if not process.host.alive:
        return ""
    if isinstance(process, Worker):
        return f"worker {_worker(world, process)}"
    if isinstance(process, Scheduler):
        return f"scheduler {_scheduler(process)}"
    if isinstance(process, Detokenizer):
        requests = process.core.requests.values()
        return "detokenizer " + (
            "submitted" if any(r.submitted for r in requests) else "preparing" if requests else "idle"
        )
    if isinstance(process, Frontend):
        return f"frontend {_frontend(process.core)}"
    return ""


def _worker(world: World, process: Worker) -> str:
    scheduler = world.scheduler
    if not process.identity:
        return "starting"
    if scheduler is None or not scheduler.host.alive:
        return "no lease"
    known = scheduler.membership.registry.workers.get(process.identity)
    if known is None:
        return "no lease"
    if known.phase.value == "ready":
        return "in a step" if known.replica.in_flight else "idle"
    return str(known.phase.value)


def _scheduler(process: Scheduler) -> str:
    core = process.core
    if not core.requests:
        return "idle"
    return "running" if any(replica.running for replica in core.replicas.values()) else "holding"


def _frontend(core: Any) -> str:
    requests = core.open.values()
    if not requests:
        return "idle"
    if any(request.started for request in requests):
        return "streaming"
    return "accepted" if any(request.accepted for request in requests) else "waiting"
