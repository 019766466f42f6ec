"""What there is to be reached: every transition of the state machines, and every fault in every phase.

A mark is (machine, state before, event, state after), or ("fault", kind, what it strikes and its phase). A mark that is
in no table is wrong where its machine has one. ``UNREACHABLE`` has what no history can reach, each with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from itertools import product

from quire.client.supervisor.place import TRANSITIONS as PLACE_TRANSITIONS
from quire.scheduler.worker_phase import TRANSITIONS as WORKER_TRANSITIONS

from .phases import PHASES
from .plan import ADMINISTRATOR, LINK, LOADS, OPERATOR, PROCESS, USERS, WORKER

Mark = tuple[str, ...]

SERVICES = ("gpu_worker", "scheduler", "detokenizer", "frontend")
MACHINES = {
    "sequence": """
        waiting | given a row | prefill
        waiting | forked | decode
        prefill | prompt scheduled | decode
        prefill / decode | preempted / lease ended / drained | waiting
        decode | moved | waiting
        decode | finished | over
        waiting / prefill / decode | stop string / aborted / not believed in / replaced / failed | over
        waiting / prefill / decode | owner forgotten / undelivered | over""",
    "beam search": """
        waiting | given a row | prefill
        prefill | prompt scheduled | decode
        prefill / decode | preempted / lease ended / drained | waiting
        decode | answered | over
        waiting / prefill / decode | answer lost | over
        waiting / prefill / decode | aborted / not believed in / replaced / owner forgotten / failed | over
        waiting / prefill / decode | undelivered | over""",
    "pooling": """
        waiting | given a row | prefill
        prefill | prompt scheduled | decode
        prefill / decode | preempted / lease ended / drained | waiting
        decode | answered | over
        waiting / prefill / decode | aborted / not believed in / replaced / owner forgotten / failed | over""",
    "request": """
        new / waits | placed | sent
        waits, in quarantine | placed | sent, in quarantine
        waits again | placed | accepted
        sent / sent, in quarantine | accepted | accepted
        accepted | accepted | accepted
        runs | accepted / started | runs
        accepted | started | runs
        sent | lost, counted | waits / waits, in quarantine
        sent | lost, not counted | waits
        sent, in quarantine | lost, not counted / lost, counted | waits, in quarantine
        accepted | lost, not counted | accepted / waits again
        accepted | lost, counted | waits again
        runs | lost, counted / lost, not counted | accepted / waits again
        accepted / runs | finished | over
        new / sent / accepted / runs / waits / waits again | aborted / failed | over
        sent, in quarantine / waits, in quarantine | aborted / failed | over
        sent / sent, in quarantine / accepted | refused | over""",
    "link": """
        none | listed | connecting
        none | after silence | waits to hear
        connecting | connected | ready
        waits to hear | heard | ready
        connecting / waits to hear | lost | over
        ready | lost / silence / it left | over""",
    "text": """
        waits / new / asks to begin | prepared | preparing
        preparing | accepted | submitted / over
        preparing | refused | over
        waits / asks to begin / preparing / submitted | aborted / not listed / its Engine is lost / replaced | over
        submitted | finished / stop string | submitted / over
        submitted | Failed / Pooled / Unknown / out of step / tokens missing | over""",
}
"""By machine, lines ``states before | events | states after``, several of a kind parted by `` / ``."""

ENDS = ("Bye", "connection broken", "breach of the protocol", "second Hello")
READY_ENDS = (*ENDS, "silence", "hung step", "StepFailed")
LOADING_ENDS = (*ENDS, "hung while it loads")
"""What ends the lease of a worker that has a replica, and of one that has none yet."""

UNREACHABLE: dict[str, str] = {
    "worker | loading | Bye | over": "a worker says Bye in answer to Drain only",
    "worker | configuring | Bye | over": "a worker says Bye in answer to Drain only",
    "worker | ready | Bye | over": "a worker says Bye in answer to Drain only",
    "worker | draining | Bye | over": "a worker says Bye in answer to Drain only",
    "worker | loading | breach of the protocol | over": "the only breach here is a result that comes twice",
    "worker | configuring | breach of the protocol | over": "the only breach here is a result that comes twice",
    "worker | recalled | breach of the protocol | over": "the only breach here is a result that comes twice",
    "worker | asleep | breach of the protocol | over": "the only breach here is a result that comes twice",
    "worker | asleep | Bye | over": "a worker says Bye in answer to Drain only",
    "process | ended | scheduler | left": "only a gpu_worker leaves",
    "process | ended | detokenizer | left": "only a gpu_worker leaves",
    "process | ended | frontend | left": "only a gpu_worker leaves",
    "process | ended | * | loading": "no place is filled by another command here, as `quire serve` does at its start",
    "process | loading | scheduler | ended": "it serves as soon as there is something to strike",
    "process | loading | detokenizer | ended": "it serves as soon as there is something to strike",
    "process | loading | frontend | ended": "it serves as soon as there is something to strike",
    "pooling | * | preempted | waiting": "only decodes need more blocks, and where prompts are pooled nothing decodes",
    "pooling | prefill | failed | over": "a prompt fails with its last chunk, which is scheduled then",
    "beam search | prefill | failed | over": "a prompt fails with its last chunk, which is scheduled then",
    "text | preparing | accepted | over": "a child's last token and its end come in one row of each message, so "
    "that of a request that is sent again some child has not ended",
    "text | submitted | out of step | over": "a beam search asks one question at a time, and ends where one is lost "
    "with the connection (Books._drop_unanswered, Membership.undelivered)",
    "text | * | not listed | over": "on one connection the Abort comes before the Reconcile that leaves it out",
}
"""What no history can reach, as patterns, and why."""


def every() -> Iterator[Mark]:
    """All marks there are."""
    for machine, lines in MACHINES.items():
        for line in lines.strip().splitlines():
            yield from product((machine,), *(column.strip().split(" / ") for column in line.split("|")))
    for phase, events in WORKER_TRANSITIONS.items():
        for event, after in events.items():
            yield "worker", phase.value, event.value, after.value
        ends = LOADING_ENDS if phase.value in ("loading", "asleep", "configuring", "recalled") else READY_ENDS
        for end in (*ends, "silence") if phase.value == "asleep" else ends:
            yield "worker", phase.value, end, "over"
    for (state, after_it), service in product(PLACE_TRANSITIONS, SERVICES):
        yield "process", state.value, service, after_it.value
    yield from faults()


def faults() -> Iterator[Mark]:
    """Every kind of fault with every phase of what it may strike."""
    of_workers = (*WORKER, *LOADS, *OPERATOR)
    for kinds, struck in ((PROCESS, PHASES), (LINK, PHASES), (of_workers, ("worker",)), (USERS, ("frontend",)),
                          (ADMINISTRATOR, ("scheduler",))):  # fmt: skip
        for kind in dict.fromkeys(kinds):
            for what in ("scheduler", "frontend") if kind == "clock" else struck:
                if kind != "join":  # it strikes nobody: somebody comes
                    yield from (("fault", kind, f"{what} {phase}") for phase in PHASES[what])


def not_reached(marks: Collection[str]) -> dict[str, str]:
    """Of ``marks`` as they are written down, those that are missing, each with the reason where it has one."""
    missing = sorted({" | ".join(mark) for mark in every()} - set(marks))
    return {mark: reason_of(mark) for mark in missing}


def unknown(marks: Collection[str]) -> list[str]:
    """Marks that no table has, or that are said to be out of reach."""
    known = {" | ".join(mark) for mark in every()}
    return sorted(mark for mark in marks if mark not in known or reason_of(mark))


def reason_of(mark: str) -> str:
    """Why it cannot be reached; empty where it can."""
    return next((reason for pattern, reason in UNREACHABLE.items() if fnmatchcase(mark, pattern)), "")
