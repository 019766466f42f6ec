"""The supervisor of a simulated server: the product's policy, over hosts in place of processes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence

from quire.client.supervisor.launch import GRACE_S, WATCH_S
from quire.client.supervisor.place import Place, State
from quire.client.supervisor.watch import LaunchError, Watch
from quire.proto.process import PARENT_GRACE_S

from .host import Host
from .timeline import Timeline, Timer

IDLE_S = 2.0
"""Looks that could find nothing are left out, but for one in so long: less than what counts as a standstill."""


class Child:
    """A host, as the policy asks about it."""

    def __init__(self, host: Host, pid: int):
        self.host, self.pid = host, pid
        self._said = False

    def ended(self) -> int | None:
        return None if self.host.alive else self.host.code

    @property
    def needed(self) -> bool:
        return self.host.needed()

    def kill(self) -> None:
        self.host.end(-signal.SIGKILL)

    def heard(self) -> bool:
        """One that serves and runs sends a heartbeat each second, so it has sent some since the look before."""
        if not self.host.serving:
            return False
        said, self._said = self._said, True
        return not said or (self.host.alive and not self.host.stopped)

    def last_words(self) -> str | None:
        return None


class Supervisor:
    """``places`` are (name, service, replica or None), workers first; ``spawn(name)`` makes a process and returns its
    host, which says that it serves by ``host.serving``. A process that ends says by ``host.code`` how.

    ``is_ready`` is asked once one of each service serves; before it is true, what ends by itself ends the start.
    ``gave_up(message, code)`` is told when the policy gives the server up; ``terminate(host)`` is a SIGTERM. ``host``
    is the supervisor's own: its children end with it, and nobody watches them while it stands still.
    """

    def __init__(
        self,
        timeline: Timeline,
        places: Sequence[tuple[str, str, int | None]],
        spawn: Callable[[str], Host],
        cores: int = 8,
        is_ready: Callable[[], bool] = lambda: True,
        gave_up: Callable[[str, int], object] = lambda message, code: None,
        terminate: Callable[[Host], object] = lambda host: host.end(0),
        name: str = "supervisor",
    ):
        self.timeline, self.host = timeline, Host(timeline, "supervisor", name)
        self.host.ended.append(self._orphan)
        self.places: dict[str, Place[Child]] = {name: Place(service, [name], None, r) for name, service, r in places}
        self._watch: Watch[Child] = Watch(self._spawn, timeline.clock, cores)
        self._watch.places.extend(self.places.values())
        self._make, self._is_ready, self._gave_up, self._terminate = spawn, is_ready, gave_up, terminate
        self.ready = self.over = False
        self.started = 0
        self._tick, self._due, self._next = 0, math.inf, Timer(0.0, self._look, ())

    def start(self) -> None:
        """Start what may start at once; the rest follows."""
        self.host.do(self._look, 0)

    def _spawn(self, place: Place[Child]) -> Child:
        self.started += 1
        host = self._make(place.command[0])
        host.ended.append(self._wake)
        if not host.alive:
            self._wake()
        return Child(host, self.started)

    # ------------------------------------------------------------ looks, at whole multiples of WATCH_S

    def _look(self, tick: int) -> None:
        """The look at ``tick``, or later where this process stood still then. The next is at another tick: a multiple
        of WATCH_S, divided by it, may be a little less than it was."""
        self._tick, self._due = tick, math.inf
        if self.over:
            return
        self.ready = self.ready or (self._begun() and self._is_ready())
        try:
            self._watch.look(starting=not self.ready)
        except LaunchError as error:
            self._give_up(error)
        else:
            self._look_at(self._until())

    def _begun(self) -> bool:
        """One of each service serves, or has left."""
        places = self.places.values()
        begun = {place.service for place in places if place.state in (State.SERVING, State.LEFT)}
        return all(place.service in begun for place in places)

    def _until(self) -> float:
        """When the next look may find something, where no process ends before."""
        now, until = self.timeline.now, self.timeline.now + IDLE_S
        for place in self.places.values():
            if place.state is State.NEW or (place.running and place.alone_since is not None):
                return now
            if place.state is State.WAITING:
                until = min(until, place.due)
        return until if self.ready else now

    def _look_at(self, when: float) -> None:
        """Look at the first multiple of WATCH_S after ``when``, or sooner where that is planned already."""
        if when < self._due and self.host.alive and not self.over:
            self._next.cancel()
            self._due = when
            tick = max(self._tick, math.floor(when / WATCH_S)) + 1
            self._next = self.timeline.at(tick * WATCH_S, self.host.do, self._look, tick)

    def _wake(self) -> None:
        """A process has ended."""
        self._look_at(self.timeline.now)

    # ------------------------------------------------------------ ends

    def _orphan(self) -> None:
        """This process has ended, and with it the pipe that its children watch."""
        self.over = True
        for host in self._hosts():
            host.do(self._terminate, host)
            host.after(PARENT_GRACE_S, host.end, 1)

    def _give_up(self, error: LaunchError) -> None:
        self.over = True
        self._gave_up(str(error), error.code)
        for host in self._hosts():
            host.do(self._terminate, host)
            self.timeline.after(GRACE_S["gpu_worker"], host.end)

    def _hosts(self) -> list[Host]:
        return [place.process.host for place in self.places.values() if place.process and place.process.host.alive]
