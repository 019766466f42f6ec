"""What a frontend does from HAND_OVER on: new connections are its successor's, what is open here is answered."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from stack import wait_until

from quire.frontend import ending
from quire.frontend.fake import FakeServer, Say, Script
from quire.frontend.front import FRONT
from quire.proto.messages import Finish

HI = {"prompt": "hi there", "max_tokens": 3}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "ARRIVE_S", 0.05)
    monkeypatch.setattr(ending, "IDLE_S", 0.2)


def gated(gate: list[bool]) -> Script:
    """One word, then silence until the gate opens, then the end."""

    def script(request: Any) -> Any:
        yield Say(0, " one")
        while not gate:
            yield 0.01
        yield Say(0, " two", finish=Finish.STOP)

    return script


@contextlib.contextmanager
def successor(server: FakeServer) -> Iterator[socket.socket]:
    """The socket that another process has too."""
    with socket.socket(fileno=os.dup(server.site._server.sockets[0].fileno())) as kept:
        kept.settimeout(20)
        yield kept


def begin(server: FakeServer) -> tuple[Future[None], asyncio.Event]:
    hurry = asyncio.Event()
    over = ending.hand_over(server.app[FRONT], server.site, server.runner, hurry)
    return asyncio.run_coroutine_threadsafe(over, server.loop), hurry


def connect(server: FakeServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def post(connection: http.client.HTTPConnection, **fields: Any) -> tuple[int, str | None, str]:
    connection.request("POST", "/v1/completions", json.dumps(HI | fields), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.headers["Connection"], answer.read().decode()


def test_what_is_open_is_answered_and_what_is_new_is_the_successors() -> None:
    gate: list[bool] = []
    with FakeServer(gated(gate)) as server, ThreadPoolExecutor(2) as pool, successor(server) as kept:
        old, streaming, watching = connect(server), connect(server), connect(server)
        old.request("GET", "/health/live")
        assert old.getresponse().read() == b""
        watching.request("GET", "/dashboard/events")
        events = watching.getresponse()
        stream = pool.submit(post, streaming, stream=True)
        wait_until(lambda: server.engine.open_requests == 1, "the stream runs")
        over, _ = begin(server)
        wait_until(lambda: server.app[FRONT].parting and server.site not in server.runner.sites, "the port is closed")

        with socket.create_connection(kept.getsockname()) as new:  # it waits, and is not refused
            accepted, _ = kept.accept()
            new.sendall(b"for the successor")
            assert accepted.recv(100) == b"for the successor"
            accepted.close()
        late = pool.submit(post, old)  # on a connection that was idle
        wait_until(lambda: server.engine.open_requests == 2, "it runs too")
        assert not over.done()
        gate.append(True)
        status, closes, text = late.result(20)
        assert (status, closes) == (200, "close") and " one two" in text
        status, _, text = stream.result(20)
        assert status == 200 and " two" in text and text.endswith("data: [DONE]\n\n")
        assert events.read().startswith(b"data: ")  # to its end
        over.result(20)


def test_a_connection_that_stays_idle_is_waited_for_no_longer() -> None:
    with FakeServer() as server:
        idle = connect(server)
        idle.request("GET", "/health/live")
        assert idle.getresponse().read() == b""
        over, _ = begin(server)
        over.result(20)
        idle.close()


def test_what_does_not_finish_is_told_so() -> None:
    with FakeServer(gated([])) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(post, connect(server), stream=True)
        wait_until(lambda: server.engine.open_requests == 1, "the stream runs")
        over, hurry = begin(server)
        server.loop.call_soon_threadsafe(hurry.set)
        status, _, text = stream.result(20)
        assert status == 200 and "its time to finish what it had begun is over; send the request again." in text
        over.result(20)


def test_signals_that_come_late_mean_what_they_can() -> None:
    asked = ending.Ending()
    asked.act()
    asked.hand_over()
    assert asked.stop.is_set() and not asked.hands_over and not asked.hurry.is_set()
    asked = ending.Ending()
    asked.hand_over()
    asked.hand_over()
    assert asked.hands_over and not asked.hurry.is_set()
    asked.act()
    assert asked.hurry.is_set()
