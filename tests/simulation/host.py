"""A simulated process: what happens in it, happens only while it lives and runs."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from .timeline import Timeline


class Host:
    """One process from its start to its end. ``name`` is never used again; ``machine`` is where it runs, ``name`` where
    nothing is said.

    A stopped one (SIGSTOP) does nothing; what would have happened in it waits, in order, until it goes on. So does one
    that hangs, but for ZeroMQ's own thread in it. ``ended`` are told when it has been killed or has left: the network
    breaks its connections, the supervisor finds it dead. ``frozen`` and ``thawed`` are told when it is stopped with all
    its threads, and when these go on.
    """

    def __init__(self, timeline: Timeline, kind: str, name: str, machine: str | None = None):
        self.timeline, self.kind, self.name, self.machine = timeline, kind, name, machine or name
        self.alive, self.stopped, self.still = True, False, False
        self.serving = False  # it has said so to its supervisor: only what others send can end it from here on
        self.needed: Callable[[], bool] = lambda: False  # what its heartbeat to its supervisor says
        self.code = 0  # once it has ended: its exit code, or minus the signal that ended it
        self.wall_offset = 0.0  # of this machine's clock of the day, which can be set
        self.ended: list[Callable[[], None]] = []
        self.frozen: list[Callable[[], None]] = []
        self.thawed: list[Callable[[], None]] = []
        self._held: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def clock(self) -> float:
        """Seconds that only rise."""
        return self.timeline.now

    def wall_clock(self) -> float:
        """Seconds since 1970, as far as this machine knows."""
        return 1e9 + self.timeline.now + self.wall_offset

    def do(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Have this happen in the process: now, when it goes on, or never where it is dead."""
        if self.alive and not self.stopped:
            action(*arguments)
        elif self.alive:
            self._held.append((action, arguments))

    def after(self, delay: float, action: Callable[..., Any], *arguments: Any) -> None:
        """Have it happen in the process, ``delay`` seconds from now."""
        self.timeline.after(delay, self.do, action, *arguments)

    def every(self, seconds: float, action: Callable[[], Any]) -> None:
        """Have it happen now, and every so many seconds after it has happened."""
        action()
        self.after(seconds, self.every, seconds, action)

    def stop(self) -> None:
        """Stand still, with all threads."""
        self.stopped = True
        if self.alive and not self.still:
            self.still = True
            for told in self.frozen:
                told()

    def hang(self) -> None:
        """Do nothing, but for ZeroMQ's thread."""
        self.stopped = True

    def go_on(self) -> None:
        """Run again: what came meanwhile happens now, in order."""
        self.stopped = False
        while self._held and self.alive and not self.stopped:
            action, arguments = self._held.popleft()
            action(*arguments)
        if self.still and self.alive and not self.stopped:
            self.still = False
            for told in self.thawed:
                told()

    def end(self, code: int = -signal.SIGKILL) -> None:
        """It is gone, killed or of its own will."""
        if self.alive:
            self.alive, self.code = False, code
            self._held.clear()
            for told in self.ended:
                told()
