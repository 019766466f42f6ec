"""What is to be done about a process that has ended. Nothing here touches a process or a clock.

The rules, in the order in which they are looked at (``decide``):

    the server is starting, and the process failed by itself rather than being killed       give up
    a gpu_worker ended with code 0: it was drained, by a signal or an operator              leave it
    the process can never work as configured (code 78), and none has served in its place   hopeless
    UNSERVED_EXITS in a row were of no use                                                  hopeless
    QUICK_EXITS in a row came quickly or were of no use                                     hopeless
    otherwise                                                                               restart, after a pause

A process was of no use that ended before it had begun to serve, however long it loaded, or before the server was ready
for the first time. Each of the two limits has a count of its own: a worker that was killed often while it served is not
given up because its successor is killed while it loads.

A hopeless place ends the server only where the server is of use to nobody: while another place does the same work, a
request would run, or a request is open, the next process is started after longer pauses instead.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ...proto.process import EXIT_CONFIG

QUICK_S = 10.0
"""A process that lived shorter than this has ended quickly."""
UNSERVED_EXITS = 5
QUICK_EXITS = 30
"""A request that ends whatever works on it takes three processes with it, and whoever sent it may try again: the
server must outlive that."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 10.0
"""The pause after the first quick exit, and the longest; it doubles each time."""
HOPELESS_PAUSE_S = 60.0
"""The longest pause in a hopeless place of a server that is of use."""

_SOON, _UNSERVED = "within {:g} s of its start", "before it had begun to serve"


@dataclass(frozen=True)
class Exit:
    """How the processes in one place ended: one, or all those of a replica, which live and die together."""

    code: int  # of the process that says why; minus the signal's number where a signal ended it
    lived: float  # seconds
    served: bool  # it had begun to serve
    starting: bool = False  # the server had not been ready yet

    @property
    def useless(self) -> bool:
        """It had not been of use to anybody, or says at once that it cannot be."""
        return not self.served or self.starting or (self.code == EXIT_CONFIG and self.lived < QUICK_S)

    @property
    def quick(self) -> bool:
        """It counts against QUICK_EXITS."""
        return self.useless or self.lived < QUICK_S


@dataclass(frozen=True)
class Restart:
    """Start it again after ``pause`` seconds."""

    pause: float


@dataclass(frozen=True)
class Leave:
    """It has ended on purpose: do not start it again."""


@dataclass(frozen=True)
class GiveUp:
    """The server cannot go on. ``why`` is how often it was tried; "" where once is enough."""

    why: str = ""


Decision = Restart | Leave | GiveUp


def decide(service: str, history: Sequence[Exit], of_use: bool = False) -> Decision:
    """What follows the last exit of ``history``, which are those of one place under one command, oldest first.
    ``of_use``: the server is, without this place.

    The last QUICK_EXITS of them are enough.
    """
    last = history[-1]
    if last.starting and last.code != -signal.SIGKILL:
        return GiveUp()
    if last.code == 0 and service == "gpu_worker":
        return Leave()
    hopeless = why_hopeless(history)
    if hopeless is not None and not (of_use and not last.starting):
        return GiveUp(hopeless)
    quick = _streak(history, lambda each: each.quick)
    longest = MAX_PAUSE_S if hopeless is None else HOPELESS_PAUSE_S
    return Restart(min(longest, FIRST_PAUSE_S * 2 ** (quick - 1)) if quick else 0.0)


def why_hopeless(history: Sequence[Exit]) -> str | None:
    """How often a process was tried in a place where none can be kept running; "" where once is enough, None where the
    next may well serve."""
    if not history:
        return None
    if history[-1].code == EXIT_CONFIG and not any(each.served for each in history):
        return ""
    unserved = _streak(history, lambda each: each.useless)
    if unserved >= UNSERVED_EXITS:
        soon = all(each.lived < QUICK_S for each in history[-unserved:])
        return f"ended {unserved} times " + (_SOON.format(QUICK_S) if soon else _UNSERVED)
    quick = _streak(history, lambda each: each.quick)
    if quick >= QUICK_EXITS:
        return f"ended {quick} times {_SOON.format(QUICK_S)} or {_UNSERVED}"
    return None


def _streak(history: Sequence[Exit], counts: Callable[[Exit], bool]) -> int:
    """How many of the last exits count, in a row."""
    return sum(1 for _ in takewhile(counts, reversed(history)))
