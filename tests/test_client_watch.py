"""A scheduler's silence, as the launcher counts it, with a clock that the test turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from quire.client import watch as watch_module
from quire.client.watch import START_S, Watch
from quire.proto import messages as m
from quire.proto.sockets import Router, front_endpoint


class Clock:
    now = 1000.0

    def forward(self, watch: Watch, seconds: float) -> float:
        """The silence after so long, looked at each second as the launcher does."""
        found = 0.0
        for _ in range(int(seconds)):
            self.now += 1.0
            found = watch.silence()
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}"


@pytest.fixture
def watch(address: str, clock: Clock) -> Iterator[Watch]:
    made = Watch(address, None)
    yield made
    made.close()


@pytest.fixture
def scheduler(address: str) -> Iterator[Router[Any]]:
    context = zmq.Context()
    made: Router[Any] = Router(m.ToSchedulerFront, front_endpoint(address), None, context)
    yield made
    made.close()
    context.destroy(linger=0)


def hello(scheduler: Router[Any], watch: Watch) -> str:
    """Let the watch connect; who it says it is."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        watch.silence()
        if (got := scheduler.recv()) is not None:
            assert isinstance(got[1], m.Hello)
            return got[0]
        time.sleep(0.005)
    raise TimeoutError("no Hello within 60 s")


def test_a_scheduler_that_never_answers_its_socket_is_silent_from_the_end_of_its_start(
    watch: Watch, clock: Clock
) -> None:
    assert clock.forward(watch, START_S) == 0
    assert clock.forward(watch, 7) == 7
    watch.restart()
    assert clock.forward(watch, START_S) == 0


def test_a_scheduler_that_hangs_before_its_first_beat_is_silent_from_the_connection_on(
    watch: Watch, clock: Clock, scheduler: Router[Any]
) -> None:
    hello(scheduler, watch)
    assert clock.forward(watch, 5) == 5


def test_a_machine_that_stood_still_is_no_silence(watch: Watch, clock: Clock, scheduler: Router[Any]) -> None:
    hello(scheduler, watch)
    clock.now += 100
    assert watch.silence() == 0
    assert clock.forward(watch, 2) == 2
