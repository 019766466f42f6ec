"""Replace the processes of a running server one after the other, and lose no request: ``quire restart``.

Where two of a service can be there at once, the successor is started beside the process that it follows, and that one
is told to end once the successor serves: a successor that fails changes nothing. Elsewhere (the scheduler, whose
address has one owner; a worker that needs its GPU for itself) the old process ends first.

Nothing here touches a process or a clock: a ``Host`` does. ``control.py`` has the real one. A process that is being
replaced is apart from the places that ``watch.py`` looks after, so nothing is decided about its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from .decision import Exit
from .place import Place, Process, State
from .watch import LaunchError, Watch

ORDER = ("scheduler", "detokenizer", "gpu_worker", "frontend")
"""In which services are replaced. What is new in a frontend may count on what is new in the others."""
GONE = "those of this server have left on purpose; start workers with `quire serve --headless`, or the server anew"
READY_S = 60.0
"""How long workers that others have started may take to be found by what was replaced."""
TELL_S = 5.0
"""How often the operator is told how much an old process still has to do."""


class RollError(RuntimeError):
    """A rolling restart stops here. One line."""


class Replaceable(Process, Protocol):
    """What a rolling restart asks of a process beside what the supervisor does."""

    left: int | None
    """Requests that one which hands over still answers, where it says so."""

    def terminate(self) -> None:
        """Ask it to end."""

    def hand_over(self) -> None:
        """Ask it to leave what is new to its successor, to finish what it has begun, and to end."""


R = TypeVar("R", bound=Replaceable)


class Host(Protocol[R]):
    """The server whose processes are replaced. Times are in seconds."""

    watch: Watch[R]

    @property
    def lock(self) -> AbstractContextManager[object]:
        """To be held while the watch or a place is looked at or changed."""

    def clock(self) -> float:
        """The watch's clock."""

    def wait(self, seeing_through: bool) -> None:
        """Pass a little time. Raises RollError where the server ends, or, unless something begun must be seen
        through, where the operator has left."""

    def ready(self) -> bool:
        """Whether a request would run."""

    def successor(self, place: Place[R]) -> Place[R]:
        """A new place as this one."""

    def trial(self, place: Place[R]) -> Place[R] | None:
        """A place whose process shows that a successor would start, where it cannot be started beside the old one."""

    def beside(self, place: Place[R]) -> bool:
        """Whether a successor can run beside the process of this place."""

    def patience(self, service: str) -> tuple[float, float]:
        """How long a process may take to finish what it has, and then to end."""

    def forget(self, place: Place[R]) -> None:
        """Give up what is held for a process that has ended."""


class Roll(Generic[R]):
    """One rolling restart. ``tell`` is given which process it is about, and what has happened."""

    def __init__(self, host: Host[R], tell: Callable[[str, str], None]):
        self._host, self._watch, self._tell, self._name = host, host.watch, tell, ""

    def run(self, services: Collection[str]) -> None:
        """Replace every process of these services. Raises RollError where one cannot be; the rest stays as it is."""
        for service in ORDER:
            groups = self._groups(service) if service in services else []
            if service in services and not groups:
                if len(services) == 1:
                    raise RollError(f"there is no {service} to replace: {GONE}.")
                self._tell(service, f"there is none to replace: {GONE}")
            for number, group in enumerate(groups, 1):
                self._name = f"{service} {number} of {len(groups)}"
                self._replace(group)

    def _groups(self, service: str) -> list[list[Place[R]]]:
        """The places of a service; those of a replica live and die together."""
        groups: dict[object, list[Place[R]]] = {}
        with self._host.lock:
            for place in self._watch.places:
                if place.service == service and place.state is not State.LEFT:
                    groups.setdefault(id(place) if place.replica is None else place.replica, []).append(place)
        return list(groups.values())

    def _replace(self, group: Sequence[Place[R]]) -> None:
        began = self._host.clock()
        while any(place.state is not State.SERVING for place in group):  # it has just died, say, and is started again
            if any(place.state is State.LEFT for place in group):
                raise RollError(f"{self._name}: it has left on purpose meanwhile, and is not started again.")
            self._host.wait(False)
        if len(group) == 1 and self._host.beside(group[0]):
            self._replace_beside(group[0])
        else:
            self._replace_after(group)
        self._wait_ready()
        self._say(f"done in {self._host.clock() - began:.1f} s")

    def _wait_ready(self) -> None:
        """Wait until a request would run. Raises RollError where no worker of this server is left to run one, and none
        from elsewhere does soon."""
        began = self._host.clock()
        while not self._host.ready():
            with self._host.lock:
                workers = [place.state for place in self._watch.places if place.service == "gpu_worker"]
            if all(state is State.LEFT for state in workers) and self._host.clock() - began > READY_S:
                raise RollError(f"{self._name}: it is replaced, but no worker serves: {GONE}. The rest stays as it is.")
            self._host.wait(False)

    def _replace_beside(self, old: Place[R]) -> None:
        new = self._host.successor(old)
        self._start_apart(new, "the old one goes on")
        with self._host.lock:
            self._watch.exchange(old, new)
        self._say("successor listens" if old.service == "frontend" else "successor serves")
        self._end([old])

    def _replace_after(self, group: Sequence[Place[R]]) -> None:
        if (trial := self._host.trial(group[0])) is not None:
            self._start_apart(trial, "the old one goes on")
            self._drop(trial)
        with self._host.lock:
            for old in group:
                self._watch.set_apart(old)
        successors = [self._host.successor(old) for old in group]
        try:
            self._end(group)
        finally:  # whatever happens, somebody takes the place: the watch starts it
            with self._host.lock:
                for old, new in zip(group, successors, strict=True):
                    new.history = [Exit(0, self._host.clock() - old.started, served=True)]
                self._watch.places += successors
        self._say("the old one has ended")
        while any(new.state is not State.SERVING for new in successors):
            self._host.wait(False)
            if failed := [new for new in successors if new.history[-1].code]:
                raise self._failed(failed[0], "the server goes on trying")
        self._say("successor serves")

    def _start_apart(self, new: Place[R], otherwise: str) -> None:
        """Start a process and wait until it serves. Raises RollError, and leaves nothing of it, where it does not."""
        try:
            with self._host.lock:
                self._watch.apart.append(new)
                self._watch.start(new)
            while new.state is not State.SERVING:
                self._host.wait(False)
                if self._is_dead(new):
                    raise self._failed(new, otherwise)
        except LaunchError as error:
            self._drop(new)
            raise RollError(f"{self._name}: {error} {otherwise[:1].upper()}{otherwise[1:]}.") from error
        except RollError:
            self._drop(new)
            raise

    def _failed(self, place: Place[R], otherwise: str) -> RollError:
        if place.process is not None:
            place.error = place.process.last_words() or place.error
        return RollError(f"{self._name}: its successor failed, and {otherwise}: {place.how_it_ended()}")

    def _drop(self, place: Place[R]) -> None:
        """End a process that is apart at once, and forget it."""
        with self._host.lock:
            self._watch.kill(place)
        while not self._is_dead(place):
            self._host.wait(True)
        self._forget(place)

    def _end(self, group: Sequence[Place[R]]) -> None:
        """Have processes that are apart finish what they have, and end."""
        service = group[0].service
        finish_s, end_s = self._host.patience(service)
        hands_over = service == "frontend"
        self._ask(group, hands_over)
        began, said, asked, killed = self._host.clock(), -TELL_S, not hands_over, False
        while alive := [place for place in group if not self._is_dead(place)]:
            waited = self._host.clock() - began
            if not asked and waited > finish_s:
                self._say(f"its streams did not end within {finish_s:g} s")
                self._ask(alive, False)
                asked = True
            elif not killed and waited > finish_s + end_s:
                self._say(f"the old one did not end within {finish_s + end_s:g} s and is killed")
                with self._host.lock:
                    for place in alive:
                        self._watch.kill(place)
                killed = True
            if waited - said >= TELL_S and (left := alive[0].process.left if alive[0].process else None):
                self._say(f"{left} {'stream' if left == 1 else 'streams'} left")
                said = waited
            self._host.wait(True)
        for place in group:
            self._forget(place)

    def _ask(self, group: Sequence[Place[R]], hands_over: bool) -> None:
        with self._host.lock:
            for place in group:
                if place.process is not None and not self._watch.dead(place):
                    (place.process.hand_over if hands_over else place.process.terminate)()

    def _is_dead(self, place: Place[R]) -> bool:
        with self._host.lock:
            self._watch.silence(place)  # also hears what it says
            return self._watch.dead(place)

    def _forget(self, place: Place[R]) -> None:
        with self._host.lock:
            self._watch.apart.remove(place)
            self._host.forget(place)

    def _say(self, what: str) -> None:
        self._tell(self._name, what)
