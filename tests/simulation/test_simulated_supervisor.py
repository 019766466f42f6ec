"""The simulated supervisor, with processes that only load and serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from quire.client.supervisor.place import State
from quire.proto.process import EXIT_CONFIG
from simulation.host import Host
from simulation.supervisor import Supervisor
from simulation.timeline import Timeline

LOADS_S = 0.5
PLACES = [("w0", "gpu_worker", None), ("w1", "gpu_worker", None), ("s", "scheduler", None), ("d0", "detokenizer", None)]


class Server:
    """A supervisor, and when which process was started."""

    def __init__(self, places: list[tuple[str, str, int | None]] = PLACES, **options: object) -> None:
        self.timeline = Timeline()
        self.hosts: dict[str, Host] = {}
        self.starts: list[tuple[str, float]] = []
        self.gave_up: list[tuple[str, int]] = []
        self.after_load: dict[str, Callable[[Host], object]] = {}
        self.supervisor = Supervisor(
            self.timeline, places, self.spawn, gave_up=lambda *why: self.gave_up.append(why), **options
        )
        self.supervisor.start()

    def spawn(self, name: str) -> Host:
        self.starts.append((name, self.timeline.now))
        host = self.hosts[name] = Host(self.timeline, name, f"{name}.{len(self.starts)}")
        host.after(LOADS_S, self.loaded, name, host)
        return host

    def loaded(self, name: str, host: Host) -> None:
        host.serving = True
        self.after_load.get(name, lambda host: None)(host)

    def until(self, when: float) -> None:
        while self.timeline.step(when):
            pass

    def times(self, name: str) -> list[float]:
        """Seconds from one start of a place to the next."""
        starts = [when for each, when in self.starts if each == name]
        return [round(later - sooner, 6) for sooner, later in pairwise(starts)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_all_are_started_and_the_server_is_ready_when_all_serve() -> None:
    server = Server()
    assert [name for name, _ in server.starts] == ["w0", "w1", "s", "d0"] and not server.supervisor.ready
    server.until(1.0)
    assert server.supervisor.ready and all(place.served for place in server.supervisor.places.values())


def test_no_more_load_at_once_than_there_are_cores() -> None:
    server = Server(cores=1)
    assert [name for name, _ in server.starts] == ["w0", "w1", "s"]
    server.until(1.0)
    assert len(server.starts) == 4 and 0.5 < server.starts[3][1] <= 0.7 + 1e-9


def test_what_is_killed_is_started_again_with_growing_pauses() -> None:
    server = Server()
    server.after_load["d0"] = lambda host: host.end() if server.supervisor.ready else None
    server.until(5.0)
    server.hosts["d0"].end()
    server.until(40.0)
    assert server.times("d0")[0] == 5.6  # it had lived shortly, too: 0.25 s after the next look
    assert server.times("d0")[1:6] == [1.2, 1.8, 2.8, 4.8, 8.8]  # 0.5 s and a look each, and 0.5, 1, 2, 4, 8 s
    assert len(server.times("w0")) == 0 and not server.gave_up


def test_a_request_that_ends_workers_as_they_serve_ends_the_server_after_many() -> None:
    server = Server([PLACES[0], *PLACES[2:]])
    server.until(1.0)
    server.after_load["w0"] = lambda host: host.end(70)
    server.hosts["w0"].end(70)
    server.until(1000.0)
    assert server.gave_up == [
        ("quire.gpu_worker ended 30 times within 10 s of its start or before it had begun to serve: "
         "quire.gpu_worker ended with code 70; what it said is above.", 70)
    ]  # fmt: skip
    assert server.supervisor.over and not any(host.alive for host in server.hosts.values())


def test_a_replica_that_dies_while_it_loads_ends_no_server_that_another_serves() -> None:
    """Whatever it dies of. Its tries become fewer, and where it works again it serves again."""
    for code in (-9, 3, EXIT_CONFIG):
        server = Server()
        server.until(20.0)
        server.hosts["w1"].end()
        server.supervisor.places["w1"].history.clear()
        spawn, dies = server.spawn, [True]
        server.supervisor._make = lambda name, spawn=spawn, dies=dies, code=code: (
            stillborn(spawn(name), code) if name == "w1" and dies[0] else spawn(name)
        )
        server.until(600.0)
        assert not server.gave_up and server.hosts["w0"].alive and not server.times("w0")
        assert 60.0 < server.times("w1")[-1] < 61.0 and len(server.times("w1")) < 20
        dies[0] = False
        server.until(700.0)
        assert server.supervisor.places["w1"].state is State.SERVING and not server.supervisor.places["w1"].hopeless


def stillborn(host: Host, code: int) -> Host:
    host.end(code)
    return host


@pytest.mark.parametrize("name", ["w0", "s", "d0"])
def test_the_only_process_of_its_kind_is_tried_for_as_long_as_a_request_is_open(name: str) -> None:
    server = Server([PLACES[0], *PLACES[2:], ("f0", "frontend", None)])
    server.until(20.0)
    server.hosts["f0"].needed = lambda: server.timeline.now < 300.0
    spawn = server.spawn
    server.supervisor._make = lambda place: stillborn(spawn(place), -9) if place == name else spawn(place)
    server.hosts[name].end()
    server.until(290.0)
    assert not server.gave_up and len(server.times(name)) > 8
    server.until(400.0)
    ((line, code),) = server.gave_up
    assert line.startswith("quire.") and "times within 10 s of its start: " in line and code == -9


def test_kills_of_everything_but_the_frontend_end_no_server_with_open_requests() -> None:
    """Several times within seconds, before anything has begun to serve."""
    server = Server([*PLACES, ("f0", "frontend", None)])
    server.until(20.0)
    server.hosts["f0"].needed = lambda: True
    for tenth in range(200, 400):
        server.until(tenth / 10)
        for name in ("w0", "w1", "s", "d0"):
            server.hosts[name].end()
    server.until(120.0)
    assert not server.gave_up and all(host.alive and host.serving for host in server.hosts.values())


def test_what_fails_while_the_server_starts_ends_it() -> None:
    server = Server()
    server.hosts["d0"].end(1)
    server.hosts["w1"].end(EXIT_CONFIG)
    server.until(100.0)
    assert server.gave_up == [("quire.gpu_worker ended with code 78; what it said is above.", EXIT_CONFIG)]
    killed = Server(is_ready=lambda: False)
    killed.until(2.0)
    killed.hosts["d0"].end()
    killed.until(4.0)
    assert not killed.gave_up and len(killed.times("d0")) == 1 and not killed.supervisor.ready


def test_a_drained_worker_stays_away() -> None:
    server = Server()
    server.until(20.0)
    server.hosts["w1"].end(0)
    server.hosts["d0"].end(0)
    server.until(200.0)
    assert server.supervisor.places["w1"].state is State.LEFT and not server.times("w1")
    assert len(server.times("d0")) == 1


def test_what_stands_still_is_killed_after_a_minute_of_silence() -> None:
    server = Server()
    server.until(20.0)
    stopped = server.hosts["w0"]
    stopped.stop()
    server.until(75.0)
    assert stopped.alive
    server.until(85.0)
    assert not stopped.alive and server.hosts["w0"].alive and server.hosts["w0"] is not stopped
    short = server.hosts["d0"]
    short.stop()
    server.until(130.0)
    short.go_on()
    server.until(300.0)
    assert short.alive and not server.gave_up


def test_a_supervisor_that_stands_still_sees_what_ended_when_it_goes_on_and_forgives_the_rest() -> None:
    server = Server()
    server.until(20.0)
    server.supervisor.host.stop()
    server.hosts["w0"].end()
    server.hosts["d0"].stop()
    server.until(200.0)
    assert not server.hosts["w0"].alive
    server.supervisor.host.go_on()
    server.until(202.0)
    assert server.hosts["w0"].alive and server.hosts["d0"].alive
    server.until(265.0)
    assert server.hosts["d0"] is not None and len(server.times("d0")) == 1


def test_children_end_with_their_supervisor_and_a_stopped_one_when_it_goes_on() -> None:
    asked: list[Host] = []
    server = Server(terminate=asked.append)
    server.until(20.0)
    stopped = server.hosts["w0"]
    stopped.stop()
    server.supervisor.host.end()
    assert len(asked) == 3
    server.until(100.0)
    assert [name for name, host in server.hosts.items() if host.alive] == ["w0"] and len(server.starts) == 4
    stopped.go_on()
    assert len(asked) == 4 and not stopped.alive


def test_processes_of_a_replica_live_and_die_together() -> None:
    server = Server([("w0", "gpu_worker", 0), ("w1", "gpu_worker", 0), *PLACES[2:]])
    server.until(20.0)
    other = server.hosts["w1"]
    server.hosts["w0"].end()
    server.until(22.9)
    assert other.alive and not server.times("w0")
    server.until(24.0)
    assert not other.alive and server.times("w0") == server.times("w1") and len(server.times("w0")) == 1
    assert server.supervisor.places["w0"].history == server.supervisor.places["w1"].history


def test_few_looks_where_nothing_happens() -> None:
    server = Server()
    server.until(2.0)
    before = server.timeline.happened
    server.until(102.0)
    assert server.timeline.happened - before <= 50


def test_each_look_comes_later_than_the_one_before():
    """Whatever a multiple of the time between two looks is as a float."""
    server = Server(is_ready=lambda: False)
    server.until(300.0)
    assert server.timeline.happened < 2 * 300 / 0.2
