"""One look after the other over the places of a server, with processes and a clock that are not there."""

from __future__ import annotations

import logging
import math
import signal

import pytest

from quire.client.supervisor.decision import QUICK_EXITS, Exit
from quire.client.supervisor.place import START_S, Place, State
from quire.client.supervisor.watch import REPLICA_S, SILENCE_S, STOOD_STILL_S, LaunchError, Watch
from quire.proto.process import EXIT_CONFIG

KILLED = -signal.SIGKILL
TURN_S = 1.0


class Toy:
    """A process that does as it is told, and obeys a signal or does not."""

    def __init__(self, pid: int) -> None:
        self.pid, self.code, self.beats, self.words = pid, None, False, None
        self.killed, self.obeys, self.needed = 0, True, False

    def ended(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed += 1
        if self.obeys:
            self.code = KILLED

    def heard(self) -> bool:
        beats, self.beats = self.beats, False
        return beats

    def last_words(self) -> str | None:
        return self.words


class House:
    """A watch over places: ("gpu_worker", "scheduler") or, for those of a replica, ("gpu_worker", 0)."""

    def __init__(self, *services: str | tuple[str, int], cores: int = 8) -> None:
        self.now, self.spawned, self.refuses = 100.0, 0, False
        self.watch: Watch[Toy] = Watch(self.spawn, lambda: self.now, cores)
        for each in services:
            service, replica = each if isinstance(each, tuple) else (each, None)
            self.watch.places.append(Place(service, replica=replica))

    def spawn(self, place: Place[Toy]) -> Toy:
        if self.refuses:
            raise LaunchError(f"quire.{place.service} cannot be started.")
        self.spawned += 1
        return Toy(self.spawned)

    def look(self, seconds: float = 0.0, **options: object) -> list[str]:
        """So much later: a look at each turn. Returns the states of all."""
        while seconds > 0:
            self.now += min(TURN_S, seconds)
            seconds -= TURN_S
            self.watch.look(**options)
        if seconds == 0:
            self.watch.look(**options)
        return [place.state.value for place in self.watch.places]

    def serve(self, *numbers: int) -> None:
        for number in numbers:
            self.toy(number).beats = True
        self.watch.look()

    def toy(self, number: int) -> Toy:
        return self.watch.places[number].process


def serving(*services: str | tuple[str, int]) -> House:
    """All of them serve, and have for an hour, so that a new process follows at once where it is killed."""
    house = House(*services)
    house.look()
    for _ in range(900):
        house.now += 4.0
        house.serve(*range(len(services)))
    return house


# ------------------------------------------------------------------ starts


def test_all_are_started_at_the_first_look_and_serve_when_they_say_so() -> None:
    house = House("gpu_worker", "scheduler")
    assert house.look() == ["loading", "loading"] and house.spawned == 2
    house.toy(1).beats = True
    assert house.look() == ["loading", "serving"]
    place = house.watch.places[1]
    assert (place.started, place.served, place.heard, place.running) == (100.0, True, 100.0, True)
    assert house.look(5.0) == ["loading", "serving"] and house.spawned == 2


@pytest.mark.parametrize(
    ("cores", "services", "started"),
    [
        (1, ["gpu_worker", "gpu_worker", "scheduler", "frontend"], 3),  # one beside the workers, always
        (3, ["gpu_worker", "gpu_worker", "scheduler", "frontend"], 3),
        (4, ["gpu_worker", "gpu_worker", "scheduler", "frontend"], 4),
        (1, ["scheduler", "frontend"], 1),
        (2, ["scheduler", "frontend", "detokenizer"], 2),
    ],
)
def test_no_more_load_at_once_than_there_are_cores(cores: int, services: list[str], started: int) -> None:
    house = House(*services, cores=cores)
    loading = ["loading"] * started
    assert house.look() == loading + ["new"] * (len(services) - started)
    assert house.look() == loading + ["new"] * (len(services) - started)
    house.toy(started - 1).beats = True
    assert house.look()[started:] == (["loading"] + ["new"] * 3)[: len(services) - started]


def test_a_process_that_cannot_be_started_ends_the_look_and_leaves_its_place_as_it_was() -> None:
    house = House("scheduler")
    house.refuses = True
    with pytest.raises(LaunchError, match=r"^quire\.scheduler cannot be started\.$") as caught:
        house.look()
    assert house.watch.places[0].state is State.NEW and caught.value.code == 1


def test_while_the_server_ends_what_dies_is_started_again_and_nothing_for_the_first_time() -> None:
    house = House("scheduler", "frontend", "detokenizer", cores=1)
    house.look()
    house.serve(0)
    assert [place.state for place in house.watch.places] == [State.SERVING, State.LOADING, State.NEW]
    house.serve(1)
    house = serving("scheduler", "frontend")
    house.watch.places.append(Place("detokenizer"))
    house.toy(0).code = house.toy(1).code = KILLED
    assert house.look(among=[house.watch.places[0], house.watch.places[2]]) == ["loading", "serving", "new"]
    assert house.look(among=[]) == ["loading", "serving", "new"]
    assert house.look() == ["loading", "loading", "loading"]


# ------------------------------------------------------------------ exits


def test_what_ends_after_long_is_started_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    house = serving("detokenizer", "frontend")
    old = house.toy(0)
    old.code = 3
    assert house.look() == ["loading", "serving"]
    place = house.watch.places[0]
    assert place.history == [Exit(3, 3600.0, served=True)] and place.process is not old
    assert (place.code, place.started, place.ended) == (3, 3700.0, 3700.0)
    assert (place.served, place.killed, place.error, place.alone_since) == (False, False, None, None)
    assert caplog.messages == [
        "quire.detokenizer ended with code 3; what it said is above. Starting another in 0.00 s."
    ]


def test_the_next_process_is_started_when_the_pause_is_over() -> None:
    house = House("detokenizer")
    house.look()
    house.serve(0)
    for pause in (0.25, 0.5, 1.0):
        house.toy(0).code = KILLED
        assert house.look() == ["waiting"] and house.watch.places[0].due == house.now + pause
        assert house.look(pause - 0.125) == ["waiting"]
        assert house.look(0.125) == ["loading"]
        house.serve(0)
    house.toy(0).code = KILLED
    house.look()
    assert house.watch.places[0].process.pid == 4


def test_what_it_said_before_it_ended_counts() -> None:
    house = House("frontend")
    house.look()
    house.toy(0).beats, house.toy(0).code, house.toy(0).words = True, 5, "quire.frontend: it was this."
    (place,) = house.watch.places
    assert house.watch.fallen(place) and place.served
    house.look()
    assert place.history == [Exit(5, 0.0, served=True)] and place.error == "quire.frontend: it was this."
    assert place.how_it_ended() == "quire.frontend: it was this."


@pytest.mark.parametrize(
    ("code", "killed", "line"),
    [
        (3, False, "quire.frontend ended with code 3; what it said is above."),
        (0, False, "quire.frontend ended with code 0; what it said is above."),
        (-15, False, "quire.frontend was killed by signal 15; what it said is above."),
        (-9, False, "quire.frontend was killed by signal 9, probably out of memory; what it said is above."),
        (-9, True, "quire.frontend was killed by signal 9; what it said is above."),
    ],
)
def test_how_it_ended_is_one_line(code: int, killed: bool, line: str) -> None:
    place: Place[Toy] = Place("frontend")
    place.code, place.killed = code, killed
    assert place.how_it_ended() == line


def test_a_place_keeps_the_last_exits() -> None:
    place: Place[Toy] = Place("frontend")
    exits = [Exit(0, float(number), served=True) for number in range(QUICK_EXITS + 5)]
    for each in exits:
        place.record(each)
    assert place.history == exits[-QUICK_EXITS:]


def test_a_worker_that_was_drained_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    house = serving("gpu_worker", "gpu_worker", "scheduler", "gpu_worker")
    house.toy(1).code = 0
    assert house.look() == ["serving", "left", "serving", "serving"]
    assert caplog.messages == ["a gpu_worker has left on purpose and is not started again; 2 of this server's stay."]
    house.toy(0).code = house.toy(2).code = 0
    assert house.look() == ["left", "left", "loading", "serving"] and house.watch.dead(house.watch.places[1])


def test_what_fails_while_the_server_starts_ends_it_and_what_is_killed_does_not() -> None:
    house = House("scheduler", "frontend")
    house.look(starting=True)
    house.toy(0).code = KILLED
    assert house.look(starting=True) == ["waiting", "loading"]
    assert house.watch.places[0].history == [Exit(KILLED, 0.0, served=False, starting=True)]
    house.toy(1).code = 4
    with pytest.raises(LaunchError, match=r"^quire\.frontend ended with code 4; what it said is above\.$") as caught:
        house.look(starting=True)
    assert caught.value.code == 4
    later = House("frontend")
    later.look()
    later.toy(0).code = 4
    assert later.look() == ["waiting"]


def test_of_those_for_which_the_server_is_given_up_the_one_that_says_most_is_named() -> None:
    def why(*ends: tuple[int, str | None]) -> tuple[str, int]:
        house = House(*["detokenizer"] * len(ends))
        house.look(starting=True)
        for number, (code, words) in enumerate(ends):
            house.toy(number).code, house.toy(number).words = code, words
        with pytest.raises(LaunchError) as caught:
            house.look(starting=True)
        return str(caught.value), caught.value.code

    nothing = "quire.detokenizer ended with code {}; what it said is above."
    assert why((1, None), (2, "b"), (3, "c")) == ("b", 2)
    assert why((1, "a"), (EXIT_CONFIG, None)) == (nothing.format(EXIT_CONFIG), EXIT_CONFIG)
    assert why((EXIT_CONFIG, None), (EXIT_CONFIG, "b"), (1, "c")) == ("b", EXIT_CONFIG)
    assert why((1, None), (2, None)) == (nothing.format(1), 1)


def test_the_line_says_how_often_it_was_tried() -> None:
    house = House("detokenizer")
    house.look()
    for _ in range(4):
        house.toy(0).code = 6
        house.look(40.0)
    house.toy(0).code, house.toy(0).words = 6, "It does not fit."
    message = r"^quire\.detokenizer ended 5 times before it had begun to serve: It does not fit\.$"
    with pytest.raises(LaunchError, match=message) as caught:
        house.look(1.0)
    assert caught.value.code == 6


# ------------------------------------------------------------------ replicas


def test_the_rest_of_a_replica_has_a_while_to_end_by_itself_and_all_are_started_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = serving(("gpu_worker", 0), ("gpu_worker", 0), ("gpu_worker", 1), "scheduler")
    house.toy(1).code = KILLED
    house.toy(0).obeys = False
    assert house.look() == ["serving", "ended", "serving", "serving"]
    assert house.look(REPLICA_S) == ["serving", "ended", "serving", "serving"]
    assert house.toy(0).killed == 0
    house.look(0.5)
    assert house.toy(0).killed == 1 and house.watch.places[0].killed
    house.toy(0).code = KILLED
    house.look()
    assert [place.state.value for place in house.watch.places] == ["loading", "loading", "serving", "serving"]
    assert house.watch.places[0].history == house.watch.places[1].history != []
    assert house.watch.places[2].history == [] and house.toy(2).killed == 0
    assert caplog.messages == [
        "quire.gpu_worker was killed by signal 9, probably out of memory; what it said is above. "
        "Starting another, with the 1 that work with it, in 0.00 s."
    ]
    assert [place.alone_since for place in house.watch.places] == [None] * 4


@pytest.mark.parametrize(
    ("ends", "spokesman"),
    [
        ([(EXIT_CONFIG, False, None), (0, False, None), (KILLED, False, "x")], 0),
        ([(1, False, "x"), (KILLED, False, None), (0, False, None)], 2),  # drained: the rest ended because of that
        ([(1, False, "link broke"), (KILLED, False, None)], 1),  # killed from outside: the rest lost its link
        ([(1, False, None), (KILLED, True, None)], 0),  # we killed the rest
        ([(KILLED, True, "x"), (1, False, None)], 1),
        ([(1, False, None), (2, False, "x")], 1),
        ([(1, False, "x"), (2, False, "y")], 0),
    ],
)
def test_of_those_that_ended_together_the_one_that_says_why_counts(
    ends: list[tuple[int, bool, str | None]], spokesman: int
) -> None:
    house = serving(*[("gpu_worker", 0)] * len(ends))
    for place, (code, killed, words) in zip(house.watch.places, ends, strict=True):
        place.process.code, place.process.words, place.killed = code, words, killed
    house.watch.places[0].served = False
    house.look()
    code = ends[spokesman][0]
    assert [place.history for place in house.watch.places] == [[Exit(code, 3600.0, served=True)]] * len(ends)


def test_the_life_of_the_one_that_says_why_is_the_replica_s() -> None:
    house = serving(("gpu_worker", 0), ("gpu_worker", 0))
    house.toy(0).code = KILLED
    house.look()
    house.now += 2.0
    house.toy(1).code, house.toy(1).words = 1, "The link broke."
    house.look()
    assert house.watch.places[1].history == [Exit(KILLED, 3600.0, served=True)]


# ------------------------------------------------------------------ silence


def test_what_serves_and_is_silent_for_long_is_killed_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    house = serving("detokenizer", "gpu_worker")
    house.watch.places.append(Place("gpu_worker"))
    house.look()
    old = house.toy(0)
    for _ in range(int(SILENCE_S)):
        house.toy(1).beats = True
        house.look(1.0)
    assert old.killed == 0 and house.watch.silence(house.watch.places[0]) == SILENCE_S
    old.obeys = False
    house.toy(1).beats = True
    house.look(0.5)
    assert old.killed == 1 and caplog.messages == [
        "quire.detokenizer (pid 1) has shown no sign of life for 60 s; killing it."
    ]
    house.look(1.0)
    assert old.killed == 1  # it has as long again
    old.code = KILLED
    assert house.look()[0] == "loading"
    assert "killed by signal 9; what" in caplog.messages[1]  # and not for want of memory
    assert house.look(10 * SILENCE_S)[2] == "loading" and house.toy(2).killed == 0  # what loads owes nothing


def test_of_what_ended_by_itself_after_a_long_silence_nobody_says_that_it_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = serving("frontend")
    house.look(SILENCE_S)
    house.toy(0).code = 1
    house.look(0.5)
    assert house.toy(0).killed == 0
    assert caplog.messages == ["quire.frontend ended with code 1; what it said is above. Starting another in 0.00 s."]


def test_a_heartbeat_ends_a_silence() -> None:
    house = serving("frontend")
    for _ in range(5):
        house.look(SILENCE_S - 1.0)
        house.serve(0)
    assert house.toy(0).killed == 0


def test_a_scheduler_has_a_while_to_begin_and_owes_heartbeats_from_then_on() -> None:
    house = House("scheduler", "frontend")
    house.look()
    place = house.watch.places[0]
    assert house.watch.silence(place) == -START_S
    house.look(START_S + SILENCE_S)
    assert house.toy(0).killed == 0
    old = house.toy(0)
    house.look(0.5)
    assert old.killed == 1 and place.history[-1].code == KILLED and house.toy(1).killed == 0


def test_time_in_which_the_supervisor_stood_still_is_nobodys_silence(caplog: pytest.LogCaptureFixture) -> None:
    house = serving("frontend", "detokenizer")
    house.look(SILENCE_S - STOOD_STILL_S - 1)
    house.now += 1000.0
    house.look(among=[house.watch.places[0]])
    assert house.toy(0).killed == 0
    assert [house.watch.silence(place) for place in house.watch.places] == [SILENCE_S - STOOD_STILL_S - 1] * 2
    house.look(STOOD_STILL_S + 1)
    assert house.toy(0).killed == 0
    house.look(0.5)
    assert house.watch.places[0].history and house.watch.places[1].history
    assert [record.name for record in caplog.records][:1] == ["quire.proto.standstill"]
    near = serving("frontend")
    near.now += STOOD_STILL_S
    near.look()
    assert near.watch.silence(near.watch.places[0]) == STOOD_STILL_S  # so little is none


def test_what_has_ended_is_not_killed_nor_listened_to() -> None:
    house = House("frontend")
    (place,) = house.watch.places
    house.watch.kill(place)
    assert house.watch.dead(place) and not house.watch.fallen(place) and not place.running
    assert house.watch.silence(place) == -math.inf
    house.look()
    toy = house.toy(0)
    toy.code, toy.beats = 1, False
    assert house.watch.fallen(place) and place.state is State.ENDED
    house.watch.kill(place)
    toy.beats = True
    house.watch.silence(place)
    assert toy.killed == 0 and not place.killed and not place.served


def test_a_process_is_replaced_at_once_by_one_with_another_command() -> None:
    house = serving("detokenizer")
    (place,) = house.watch.places
    house.watch.kill(place)
    assert place.killed and house.watch.dead(place)
    place.history = []
    house.watch.start(place)
    assert place.state is State.LOADING and place.process.pid == 2 and not place.killed
    assert place.heard == math.inf


def test_a_place_is_told_only_what_can_be() -> None:
    place: Place[Toy] = Place("frontend", ["command"], {"a": "b"}, 3)
    assert (place.command, place.environment, place.replica, place.due) == (["command"], {"a": "b"}, 3, math.inf)
    assert (place.state, place.process, place.code, place.heard) == (State.NEW, None, 1, math.inf)
    assert (place.started, place.ended, place.served, place.killed) == (0.0, 0.0, False, False)
    assert Place("frontend").environment == {}
    with pytest.raises(RuntimeError, match=r"^quire\.frontend is new and cannot become ended$"):
        place.end(0, 1.0)
    place.listen_anew(5.0)
    assert place.heard == math.inf
    place.heard = 3.0
    place.listen_anew(5.0)
    assert place.heard == 5.0
    place.listen_anew(4.0)
    assert place.heard == 5.0


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
