"""GET /dashboard/events: one feed for all who listen, and nothing while nobody does."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.frontend import dashboard
from quire.frontend.fake import FakeServer
from quire.frontend.front import FRONT
from quire.frontend.metrics import Metrics
from quire.frontend.shared_figures import SharedFigures

WAIT_S = 10.0


class Listener:
    """One client of the feed."""

    def __init__(self, server: Any, key: str | None = None):
        where = urllib.parse.urlsplit(server.url)
        self.connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=WAIT_S)
        self.connection.request(
            "GET", "/dashboard/events", headers={"Authorization": f"Bearer {key}"} if key is not None else {}
        )
        self.answer = self.connection.getresponse()
        self.status = self.answer.status

    def event(self) -> dict[str, Any]:
        line = self.answer.readline()
        assert line.startswith(b"data: "), line
        assert self.answer.readline() == b"\n"
        found: dict[str, Any] = json.loads(line[6:])
        return found

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def until(happens: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.02)
    with FakeServer(api_key="secret") as running:
        yield running


def test_an_event_has_the_state_and_what_is_new(server: FakeServer) -> None:
    listener = Listener(server, "secret")
    assert listener.status == 200 and listener.answer.headers["Content-Type"].startswith("text/event-stream")
    first, second = listener.event(), listener.event()
    assert (first["model"], first["scheduler"], first["counters"]["blocks_used"]) == ("fake", True, 7)
    (old,), (new,) = first["steps"], second["steps"]
    assert new["number"] > old["number"] and old["kind"] == "step" and (old["prefill"], old["decodes"]) == (3, 2)
    assert first["time"] - old["ended"] == pytest.approx(0.5, abs=0.01)
    server.engine.is_ready = False
    while (event := listener.event())["scheduler"]:
        pass
    assert "counters" not in event and "ttft" in event
    listener.close()


def test_times_are_those_of_all_frontends_on_the_port(server: FakeServer, tmp_path: Path) -> None:
    def seen(event: dict[str, Any]) -> int:
        return sum(count for _, count in event["ttft"])

    other, front = Metrics("fake"), server.app[FRONT]
    front.metrics.first_token.observe(0.5)
    other.first_token.observe(0.5)
    asyncio.run(SharedFigures(tmp_path, other).others())  # which writes what it has measured
    front.shared = SharedFigures(tmp_path, front.metrics)
    listener = Listener(server, "secret")
    assert seen(listener.event()) == 2
    front.metrics.first_token.observe(0.5)
    until(lambda: seen(listener.event()) == 3)
    listener.close()


def test_it_asks_for_a_key_and_one_question_serves_all(server: FakeServer) -> None:
    assert Listener(server).status == 401 and Listener(server, "wrong").status == 401
    assert server.engine.viewed == 0
    listeners = [Listener(server, "secret") for _ in range(5)]
    for listener in listeners:
        listener.event()
    assert server.engine.viewed <= 5  # each may have come a period later
    for listener in listeners:
        listener.close()
    until(lambda: not server.app[dashboard.HUB]._listeners)
    asked = server.engine.viewed
    Listener(server, "wrong")
    assert server.app[dashboard.HUB]._task is None and server.engine.viewed == asked


def test_too_many_are_told_so(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MOST_LISTENERS", 1)
    first = Listener(server, "secret")
    first.event()
    second = Listener(server, "secret")
    assert second.status == 429 and b"which is the limit" in second.answer.read()
    first.close()


def test_the_feed_ends_with_the_server(server: FakeServer) -> None:
    listener = Listener(server, "secret")
    listener.event()
    server.app[dashboard.HUB]._front.draining = True
    while listener.answer.readline():
        pass
    assert listener.answer.isclosed()


def test_the_deadline_of_requests_does_not_cut_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.02)
    with FakeServer(request_s=0.05) as server:
        listener = Listener(server)
        for _ in range(10):
            listener.event()
        listener.close()


def test_where_an_event_cannot_be_made_nobody_waits_and_the_next_listener_is_served(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(server, "secret")
    listener.event()
    with monkeypatch.context() as broken:
        broken.setattr(dashboard, "event_of", lambda *told: 1 / 0)
        while listener.answer.readline():
            pass
        assert listener.answer.isclosed()
    Listener(server, "secret").event()
