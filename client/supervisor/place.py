"""One place among the server's processes: its states, and what is known of the process that fills it.

Nothing here touches a process or a clock: ``watch.py`` says what happened and when, in seconds that only rise.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Generic, Protocol, TypeVar

from ...proto.standstill import Standstill
from .decision import QUICK_EXITS, Exit, why_hopeless

START_S = 60.0
"""A scheduler that does not serve after so long counts as silent from then on; what others load may take hours."""


class State(Enum):
    """What the process in a place is doing."""

    NEW = "new"
    LOADING = "loading"
    SERVING = "serving"
    ENDED = "ended"
    WAITING = "waiting"
    LEFT = "left"


TRANSITIONS = {
    (State.NEW, State.LOADING): "its first process is started",
    (State.LOADING, State.SERVING): "the process says that it serves",
    (State.LOADING, State.ENDED): "the process has ended, whatever ended it",
    (State.SERVING, State.ENDED): "the process has ended, whatever ended it",
    (State.ENDED, State.WAITING): "it was decided to start another, after a pause",
    (State.ENDED, State.LEFT): "it was decided to start no other: the process has left on purpose",
    (State.ENDED, State.LOADING): "another is started at once, by another command",
    (State.WAITING, State.LOADING): "the pause is over, or another is started at once, by another command",
}
"""All changes of a place's state, and what causes them."""


class Process(Protocol):
    """What the supervisor asks of a process."""

    needed: bool
    """Of a frontend: by its last heartbeat a request would run, or one is open."""

    @property
    def pid(self) -> int:
        """Its number."""

    def ended(self) -> int | None:
        """None while it runs; else its exit code, or minus the signal that ended it. All it had started is gone too."""

    def kill(self) -> None:
        """End it and all that it has started, without a chance to say anything."""

    def heard(self) -> bool:
        """Whether a sign of life has come since this was last asked. The first says that it serves."""

    def last_words(self) -> str | None:
        """Of one that has ended: the line in which it says why, if it does."""


P = TypeVar("P", bound=Process)


class Place(Generic[P]):
    """A place, what its processes are started with, and the process that fills it now."""

    def __init__(
        self,
        service: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        replica: int | None = None,
    ):
        self.service, self.command, self.environment = service, command, environment or {}
        self.replica = replica  # of several processes, which live and die together
        self.process: P | None = None
        self.state = State.NEW
        self.history: list[Exit] = []  # of the processes with this very command, the last of them
        self.started = self.ended = 0.0
        self.due = math.inf  # when to start the next process, in WAITING
        self.alone_since: float | None = None  # when another process of its replica was first found dead
        self.served = False  # the process has said that it serves
        self.killed = False  # the supervisor ended the process
        self.heard = math.inf  # when its last heartbeat came; inf: it owes none yet
        self.code = 1  # of the process that has ended
        self.error: str | None = None  # its last words

    def become(self, state: State) -> None:
        """Change the state. Raises RuntimeError where TRANSITIONS does not have that."""
        if (self.state, state) not in TRANSITIONS:
            raise RuntimeError(f"quire.{self.service} is {self.state.value} and cannot become {state.value}")
        self.state = state

    @property
    def running(self) -> bool:
        """A process runs here, as far as is known."""
        return self.state in (State.LOADING, State.SERVING)

    @property
    def hopeless(self) -> bool:
        """No process could be kept running here, and none serves now."""
        return self.state is not State.SERVING and why_hopeless(self.history) is not None

    def begin(self, process: P, now: float) -> None:
        """A process has been started here."""
        self.become(State.LOADING)
        self.process, self.started = process, now
        self.heard = now + START_S if self.service == "scheduler" else math.inf
        self.alone_since, self.served, self.killed, self.error = None, False, False, None

    def hear(self, now: float) -> None:
        """The process has given a sign of life."""
        self.served, self.heard = True, now
        if self.state is State.LOADING:
            self.become(State.SERVING)

    def end(self, code: int, now: float) -> None:
        """The process has ended."""
        self.become(State.ENDED)
        self.code, self.ended = code, now

    def restart_at(self, due: float) -> None:
        """Another process is to be started here at that time."""
        self.become(State.WAITING)
        self.due = due

    def leave(self) -> None:
        """No other process is to be started here."""
        self.become(State.LEFT)

    def silence(self, now: float) -> float:
        """Seconds since its last heartbeat (``proto.process.heartbeat``), 0 or less where none is owed."""
        return now - self.heard

    def forgive(self, standstill: Standstill) -> None:
        """Leave the time that the supervisor stood still out of the silence."""
        self.heard = standstill.since(self.heard)

    def listen_anew(self, now: float) -> None:
        """Begin to count its silence again, where it is counted."""
        self.heard = max(self.heard, now)

    def record(self, last: Exit) -> None:
        """Add to the history how its process ended, or the processes of its replica."""
        self.history = [*self.history[1 - QUICK_EXITS :], last]

    def how_it_ended(self) -> str:
        """One line: what the process said itself, or what is known of its end."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"
        if self.code == -signal.SIGKILL and not self.killed:
            how += ", probably out of memory"
        return self.error or f"quire.{self.service} {how}; what it said is above."
