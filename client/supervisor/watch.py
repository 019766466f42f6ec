"""Watch over the server's processes: who is started, killed, started again or left, and when the server gives up.

Nothing here touches a process or a clock; both are given. ``launch.py`` has real ones, ``tests/simulation`` others.

What becomes of a process that ends is decided in ``decision.py``; a place's states are in ``place.py``. Of the workers
that hold one copy of the model together none can go on without the rest: they are started again together. The peers of
a process that stands still go around it; where it has served and sends no heartbeat for SILENCE_S it is killed, and so
started again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic

from ...proto.process import EXIT_CONFIG
from ...proto.standstill import Standstill
from .decision import HOPELESS_PAUSE_S, Exit, GiveUp, Leave, decide, why_hopeless
from .place import P, Place, State

log = logging.getLogger(__name__)

REPLICA_S = 3.0
"""How long the rest of a replica has to end by itself when one of its processes has died."""
SILENCE_S = 60.0
"""A serving process that sends no heartbeat for so long is killed and started again; its requests go on elsewhere."""
STOOD_STILL_S = 5.0
"""So many seconds between two looks mean that the supervisor was stopped, and perhaps the machine with it."""


class LaunchError(RuntimeError):
    """A process cannot be started or kept running. One line; ``code`` is its exit code."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


class Watch(Generic[P]):
    """The places of one server. ``spawn`` starts a process for one of them, or raises LaunchError; ``clock`` is in
    seconds that only rise; ``cores`` is how many processes may load at once beside the workers."""

    def __init__(self, spawn: Callable[[Place[P]], P], clock: Callable[[], float], cores: int):
        self.places: list[Place[P]] = []
        self.apart: list[Place[P]] = []  # in a rolling restart: successors, and whom they follow (``roll.py``)
        self._spawn, self._clock, self._cores = spawn, clock, cores
        self._standstill = Standstill(STOOD_STILL_S, clock())
        self.restarts: Counter[str] = Counter()  # processes started, or about to be, in place of others, by service

    def look(self, among: Sequence[Place[P]] | None = None, starting: bool = False) -> None:
        """One look over all places, which may kill some processes and start others. Raises LaunchError to give up.

        ``among``: over these alone, and none is filled for the first time, for the server is ending. ``starting``: the
        server has not been ready yet.
        """
        if self._standstill.notice(self._clock()):
            for place in self.places:
                place.forgive(self._standstill)
        looked = self.places if among is None else among
        for place in looked:
            self._check_silence(place)
        self._handle_exits(looked, starting)
        for place in looked:
            first = place.state is State.NEW and among is None and self._has_room()
            if first or (place.state is State.WAITING and self._clock() >= place.due):
                self.start(place)

    def start(self, place: Place[P]) -> None:
        """Start a process here. Raises LaunchError."""
        now = self._clock()
        place.begin(self._spawn(place), now)

    def begun(self) -> bool:
        """Whether one of each service has begun to serve."""
        begun = {place.service for place in self.places if place.state in (State.SERVING, State.LEFT)}
        return all(place.service in begun for place in self.places)

    def no_workers(self) -> bool:
        """Whether all workers of this server have left on purpose, so that none follows."""
        states = [place.state for place in self.places if place.service == "gpu_worker"]
        return bool(states) and all(state is State.LEFT for state in states)

    def failing(self) -> Counter[str]:
        """In how many places no process can be kept running, by service."""
        return Counter(place.service for place in self.places if place.hopeless)

    def set_apart(self, place: Place[P]) -> None:
        """Look after this place no more."""
        self.places.remove(place)
        self.apart.append(place)

    def exchange(self, old: Place[P], new: Place[P]) -> None:
        """Look after ``new``, which was apart, in place of ``old``, which is apart from here on."""
        self.places[self.places.index(old)] = new
        self.apart.remove(new)
        self.apart.append(old)

    def dead(self, place: Place[P]) -> bool:
        """True when no process runs here."""
        if place.process is None or not place.running:
            return True
        code = place.process.ended()
        if code is None:
            return False
        self._listen(place)
        place.end(code, self._clock())
        return True

    def fallen(self, place: Place[P]) -> bool:
        """Whether its process has ended and nothing was decided about that yet."""
        return self.dead(place) and place.state is State.ENDED

    def kill(self, place: Place[P]) -> None:
        """End the process that runs here, without a chance to say anything."""
        if not self.dead(place) and place.process is not None:
            place.killed = True
            place.process.kill()

    def silence(self, place: Place[P]) -> float:
        """Seconds since the last heartbeat of the process here, 0 or less where none is owed."""
        self._listen(place)
        return place.silence(self._clock())

    def _listen(self, place: Place[P]) -> None:
        if place.running and place.process is not None and place.process.heard():
            place.hear(self._clock())

    def _check_silence(self, place: Place[P]) -> None:
        if self.silence(place) > SILENCE_S and not self.dead(place) and place.process is not None:
            log.error(
                "quire.%s (pid %d) has shown no sign of life for %g s; killing it.",
                place.service, place.process.pid, SILENCE_S,
            )  # fmt: skip
            self.kill(place)
            place.listen_anew(self._clock())  # so that it is said again only if the process survives that

    def _handle_exits(self, looked: Sequence[Place[P]], starting: bool) -> None:
        """Restart what has ended, leave it, or raise LaunchError with the line of the one that says most."""
        given_up: list[tuple[Place[P], GiveUp]] = []
        for fallen in looked:
            if not self.fallen(fallen) or not self._all_ended(together := self._together(fallen)):
                continue
            place = record_exit(together, starting)
            decision = decide(place.service, place.history, self._of_use(together))
            if isinstance(decision, GiveUp):
                given_up.append((place, decision))
            elif isinstance(decision, Leave):
                self._leave(together)
            else:
                self._restart(place, together, decision.pause)
        if given_up:
            place, decision = max(given_up, key=lambda one: (one[0].code == EXIT_CONFIG, one[0].error is not None))
            often = f"quire.{place.service} {decision.why}: " if decision.why else ""
            raise LaunchError(often + place.how_it_ended(), place.code)

    def _restart(self, place: Place[P], together: Sequence[Place[P]], pause: float) -> None:
        others = f", with the {len(together) - 1} that work with it," if len(together) > 1 else ""
        log.warning("%s Starting another%s in %.2f s.", place.how_it_ended(), others, pause)
        if (often := why_hopeless(place.history)) is not None:
            log.error(
                "quire.%s %s; the server goes on without it, and tries again at least every %g s.",
                place.service, often or "cannot work as configured", HOPELESS_PAUSE_S,
            )  # fmt: skip
        for each in together:
            each.restart_at(self._clock() + pause)
            self.restarts[each.service] += 1

    def _of_use(self, together: Sequence[Place[P]]) -> bool:
        """Whether the server is of use without these: another place does their work, or will soon; or, by what some
        frontend said last, a request would run or is open."""
        for each in self.places:
            if each in together or each.state is State.LEFT:
                continue
            if each.service == together[0].service and each.state is not State.NEW and not each.hopeless:
                return True
            if each.state is State.SERVING and each.process is not None and each.process.needed:
                return True
        return False

    def _leave(self, together: Sequence[Place[P]]) -> None:
        for each in together:
            each.leave()
        rest = sum(each.service == "gpu_worker" and each.state is not State.LEFT for each in self.places)
        log.warning("a gpu_worker has left on purpose and is not started again; %d of this server's stay.", rest)

    def _together(self, place: Place[P]) -> list[Place[P]]:
        """The place, or all those of its replica."""
        return [each for each in self.places if each is place or each.replica == place.replica is not None]

    def _all_ended(self, together: Sequence[Place[P]]) -> bool:
        """Whether all processes of a replica have ended after one of them did; those that take long are killed."""
        now, alive = self._clock(), [place for place in together if not self.dead(place)]
        for place in alive:
            if place.alone_since is None:
                place.alone_since = now
            elif now - place.alone_since > REPLICA_S:
                self.kill(place)
        return not alive

    def _has_room(self) -> bool:
        """Whether one more process may be started for the first time.

        No more load at once than there are cores: the rest would only hold up the workers, which take longest. One
        beside the workers may always.
        """
        loading = [place.service for place in self.places if place.state is State.LOADING]
        return len(loading) < max(self._cores, loading.count("gpu_worker") + 1)


def spokesman(places: Sequence[Place[P]]) -> Place[P]:
    """Of those whose processes ended together, the one that says why: not one that ended because another had."""
    return max(
        places,
        key=lambda place: (
            place.code == EXIT_CONFIG, place.code == 0, place.code < 0 and not place.killed, not place.killed,
            place.error is not None,
        ),
    )  # fmt: skip


def record_exit(together: Sequence[Place[P]], starting: bool) -> Place[P]:
    """Add to the history of each of these places how their processes ended. Returns the one that says why."""
    for each in together:
        each.error = each.process.last_words() if each.process is not None else None
    place = spokesman(together)
    served = any(each.served for each in together)
    last = Exit(place.code, place.ended - place.started, served, starting)
    for each in together:
        each.record(last)
    return place
