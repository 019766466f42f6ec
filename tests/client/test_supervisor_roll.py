"""A rolling restart over places, with processes and a clock that are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.client.supervisor.place import Place, State
from quire.client.supervisor.roll import Roll, RollError
from quire.client.supervisor.watch import LaunchError, Watch


class Toy:
    """A process that serves at once and ends when it is told to, unless it was told otherwise."""

    def __init__(self, service: str, log: list[str], name: str) -> None:
        self.needed = False
        self.code: int | None = None
        self.pid, self.beats, self.left, self.words = 1, True, None, None
        self.obeys, self.hands_over = True, True
        self._log, self.name = log, name

    def ended(self) -> int | None:
        return self.code

    def heard(self) -> bool:
        beats, self.beats = self.beats, False
        return beats

    def last_words(self) -> str | None:
        return self.words

    def _do(self, what: str, code: int, obeys: bool) -> None:
        self._log.append(f"{what} {self.name}")
        if obeys:
            self.code = code

    def kill(self) -> None:
        self._do("kill", -9, True)

    def terminate(self) -> None:
        self._do("end", 0, self.obeys)

    def hand_over(self) -> None:
        self._do("hand over", 0, self.hands_over)


class House:
    """A host. ``made`` is given every process that is started, ``together`` says of which services two can run."""

    def __init__(self, *services: str, together: tuple[str, ...] = ("detokenizer", "gpu_worker", "frontend")) -> None:
        self.now, self.log, self.told, self.together = 100.0, [], [], together
        self.made: Callable[[Toy], None] = lambda toy: None
        self.each: Callable[[], None] = lambda: None
        self.tries, self.serves = False, True
        self.lock = threading.RLock()
        self.watch: Watch[Toy] = Watch(self.spawn, self.clock, 8)
        for service in services:
            replica = int(service[-1]) if service[-1].isdigit() else None
            self.watch.places.append(Place(service.rstrip("0123456789"), replica=replica))
        self.watch.look()
        self.watch.look()
        self.log.clear()

    def spawn(self, place: Place[Toy]) -> Toy:
        toy = Toy(place.service, self.log, f"{place.service}-{len(self.log)}")
        self.log.append(f"start {toy.name}")
        self.made(toy)
        return toy

    def clock(self) -> float:
        return self.now

    def wait(self, seeing_through: bool) -> None:
        self.now += 1.0
        assert self.now < 10_000
        self.each()
        self.watch.look()

    def ready(self) -> bool:
        return self.serves

    def successor(self, place: Place[Toy]) -> Place[Toy]:
        return Place(place.service, replica=place.replica)

    def trial(self, place: Place[Toy]) -> Place[Toy] | None:
        return Place(place.service) if self.tries else None

    def beside(self, place: Place[Toy]) -> bool:
        return place.service in self.together

    def patience(self, service: str) -> tuple[float, float]:
        return 30.0, 5.0

    def forget(self, place: Place[Toy]) -> None:
        assert place.process is None or place.process.code is not None

    def roll(self, *services: str) -> None:
        Roll[Toy](self, lambda name, said: self.told.append(f"{name}: {said}")).run(services)

    def toys(self) -> list[Any]:
        return [place.process for place in self.watch.places]

    def did(self) -> list[str]:
        """What was done to which service."""
        return [line.rpartition("-")[0] for line in self.log]


def states(house: House) -> list[str]:
    return [place.state.value for place in house.watch.places]


def test_a_successor_serves_before_the_old_one_is_told_to_end() -> None:
    house = House("frontend", "detokenizer")
    before = house.toys()
    house.roll("frontend", "detokenizer")
    assert house.did() == ["start detokenizer", "end detokenizer", "start frontend", "hand over frontend"]
    assert not set(map(id, before)) & set(map(id, house.toys())) and states(house) == ["serving"] * 2
    assert house.watch.apart == [] and all(toy.code == 0 for toy in before)
    assert house.told == [
        "detokenizer 1 of 1: successor serves", "detokenizer 1 of 1: done in 1.0 s",
        "frontend 1 of 1: successor listens", "frontend 1 of 1: done in 1.0 s",
    ]  # fmt: skip


def test_an_end_on_purpose_is_not_decided_about() -> None:
    house = House("gpu_worker", "gpu_worker")  # whose exit 0 would have the watch leave the place
    house.roll("gpu_worker")
    house.wait(True)
    assert states(house) == ["serving"] * 2 and [line.split(":")[0] for line in house.told] == [
        "gpu_worker 1 of 2", "gpu_worker 1 of 2", "gpu_worker 2 of 2", "gpu_worker 2 of 2",
    ]  # fmt: skip


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_where_a_successor_fails_the_old_one_goes_on(service: str) -> None:
    house = House(service, "detokenizer")
    house.tries = True
    before = house.toys()

    def fails(toy: Toy) -> None:
        toy.beats, toy.code, toy.words = False, 78, "no such flag."

    house.made = fails
    with pytest.raises(RollError, match=f"{service} 1 of 1: its successor failed, and the old one goes on: no such fl"):
        house.roll(service)
    assert house.toys() == before and house.watch.apart == [] and before[0].code is None
    house.wait(True)  # and the watch, which gives up where a process cannot work, knows nothing of it
    assert states(house) == ["serving"] * 2


def test_one_that_cannot_be_started_changes_nothing() -> None:
    house = House("frontend")

    def refuses(toy: Toy) -> None:
        raise LaunchError("quire.frontend cannot be started: too many processes.")

    house.made = refuses
    with pytest.raises(RollError, match=r"too many processes\. The old one goes on"):
        house.roll("frontend")
    assert states(house) == ["serving"] and house.watch.apart == []


def drained(house: House) -> House:
    """All its workers have left on purpose, as where an operator has drained them."""
    for place in house.watch.places:
        if place.service == "gpu_worker":
            place.process.code = 0
    house.watch.look()
    house.log.clear()
    return house


def test_where_all_workers_were_drained_there_is_nothing_to_replace_and_that_is_said() -> None:
    house = drained(House("frontend", "gpu_worker", "gpu_worker"))
    with pytest.raises(RollError, match=r"there is no gpu_worker to replace: those of this server have left on purpos"):
        house.roll("gpu_worker")
    assert house.log == [] and house.told == []
    house.roll("gpu_worker", "frontend")  # workers that others have started serve
    assert house.told[0].startswith("gpu_worker: there is none to replace: those of this server have left on purpose")
    assert house.did() == ["start frontend", "hand over frontend"]


def test_a_restart_does_not_wait_for_ever_where_no_worker_is_left() -> None:
    house = drained(House("frontend", "detokenizer", "gpu_worker"))
    house.serves = False
    with pytest.raises(
        RollError, match=r"detokenizer 1 of 1: it is replaced, but no worker serves: those of this serv"
    ):
        house.roll("frontend", "detokenizer")
    assert house.did()[:2] == ["start detokenizer", "end detokenizer"]


def test_a_worker_that_is_drained_while_a_restart_comes_to_it_is_not_waited_for() -> None:
    house = House("gpu_worker", "gpu_worker")
    house.each = lambda: setattr(house.toys()[1], "code", 0)
    with pytest.raises(RollError, match=r"gpu_worker 2 of 2: it has left on purpose meanwhile, and is not started aga"):
        house.roll("gpu_worker")


def test_a_replica_ends_whole_before_it_is_started_again() -> None:
    house = House("gpu_worker0", "gpu_worker0", "gpu_worker1", "gpu_worker1", "scheduler", together=("gpu_worker",))
    house.roll("gpu_worker", "scheduler")
    worker = ["end gpu_worker"] * 2 + ["start gpu_worker"] * 2
    assert house.did() == ["end scheduler", "start scheduler", *worker, *worker]
    assert states(house) == ["serving"] * 5 and house.told[-1].startswith("gpu_worker 2 of 2: done in")


def test_a_successor_that_fails_when_the_old_one_has_ended_is_the_watchs_to_start_again() -> None:
    house = House("gpu_worker", together=())

    def fails(toy: Toy) -> None:
        toy.beats, toy.code, toy.words = False, 78, "no memory."

    house.made = fails
    with pytest.raises(RollError, match="1 of 1: its successor failed, and the server goes on trying: no memory"):
        house.roll("gpu_worker")
    assert house.watch.places[0].state is State.WAITING
    assert [each.served for each in house.watch.places[0].history] == [True, False]
    house.made = lambda toy: None
    house.now += 60.0
    house.wait(True)
    house.wait(True)
    assert states(house) == ["serving"]


def test_what_does_not_finish_is_told_to_end_and_then_killed() -> None:
    house = House("frontend")
    old = house.toys()[0]
    old.hands_over = old.obeys = False
    old.left = 12
    house.roll("frontend")
    assert house.did() == ["start frontend", "hand over frontend", "end frontend", "kill frontend"]
    assert house.told.count("frontend 1 of 1: 12 streams left") > 2
    assert "frontend 1 of 1: its streams did not end within 30 s" in house.told
    assert "frontend 1 of 1: the old one did not end within 35 s and is killed" in house.told


def test_one_that_left_is_left_and_one_that_died_is_waited_for() -> None:
    house = House("gpu_worker", "gpu_worker", "detokenizer")
    house.toys()[0].code = 0
    house.watch.look()
    house.toys()[2].code = -9
    house.now += 100.0
    house.roll("gpu_worker", "detokenizer")
    assert states(house) == ["left", "serving", "serving"] and house.told[-1].startswith("gpu_worker 1 of 1: done")


def test_who_is_told_to_stop_leaves_no_successor_behind() -> None:
    house = House("frontend")

    def loads_for_ever(toy: Toy) -> None:
        toy.beats = False

    def stops() -> None:
        house.each = lambda: None
        raise RollError("whoever asked for it has left.")

    house.made, house.each = loads_for_ever, stops
    with pytest.raises(RollError, match="has left"):
        house.roll("frontend")
    assert house.did() == ["start frontend", "kill frontend"] and house.watch.apart == []
