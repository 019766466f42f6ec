"""What is to be done about a process that has ended. Nothing here touches a process or a clock.

The rules, in the order in which they are looked at (``decide``):

    the process can never work as configured (code 78), and none has served in its place   give up
    the server is starting, and the process failed by itself rather than being killed       give up
    a gpu_worker ended with code 0: it was drained, by a signal or an operator              leave it
    UNSERVED_EXITS in a row were of no use                                                  give up
    QUICK_EXITS in a row came quickly or were of no use                                     give up
    otherwise                                                                               restart, after a pause

A process was of no use that ended before it had begun to serve, however long it loaded, or before the server was ready
for the first time. Each of the two limits has a count of its own: a worker that was killed often while it served is not
given up because its successor is killed while it loads.
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


def decide(service: str, history: Sequence[Exit]) -> Decision:
    """What follows the last exit of ``history``, which are those of one place under one command, oldest first.

    The last QUICK_EXITS of them are enough.
    """
    last = history[-1]
    if last.code == EXIT_CONFIG and not any(each.served for each in history):
        return GiveUp()
    if last.starting and last.code != -signal.SIGKILL:
        return GiveUp()
    if last.code == 0 and service == "gpu_worker":
        return Leave()
    unserved = _streak(history, lambda each: each.useless)
    if unserved >= UNSERVED_EXITS:
        soon = all(each.lived < QUICK_S for each in history[-unserved:])
        return GiveUp(f"ended {unserved} times " + (_SOON.format(QUICK_S) if soon else _UNSERVED))
    quick = _streak(history, lambda each: each.quick)
    if quick >= QUICK_EXITS:
        return GiveUp(f"ended {quick} times {_SOON.format(QUICK_S)} or {_UNSERVED}")
    return Restart(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (quick - 1)) if quick else 0.0)


def _streak(history: Sequence[Exit], counts: Callable[[Exit], bool]) -> int:
    """How many of the last exits count, in a row."""
    return sum(1 for _ in takewhile(counts, reversed(history)))
