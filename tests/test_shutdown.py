"""How a server ends: what it says first, what it finishes, what it cuts, and what it leaves behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from quire.frontend import __main__ as main
from quire.frontend.fake import FakeServer, Say, Script
from quire.frontend.front import FRONT
from quire.proto.messages import Finish

HI = {"prompt": "hi there", "max_tokens": 3}
HEADERS = {"Content-Type": "application/json"}


def connect(server: FakeServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begin_end(server: FakeServer, limit: float) -> tuple[Future[None], asyncio.Event]:
    """What SIGTERM starts, and what the second one sets."""
    hurry = asyncio.Event()
    drain = main.drain(server.app[FRONT], server.site, limit, hurry)
    return asyncio.run_coroutine_threadsafe(drain, server.loop), hurry


def gated(gate: list[bool]) -> Script:
    """One word, then silence until the gate opens, then the end."""

    def script(request: Any) -> Any:
        yield Say(0, " one")
        while not gate:
            yield 0.01
        yield Say(0, " two", finish=Finish.STOP)

    return script


def test_open_requests_end_while_new_ones_are_sent_away() -> None:
    gate: list[bool] = []
    with FakeServer(gated(gate)) as server, ThreadPoolExecutor(2) as pool:
        kept, fresh = connect(server), connect(server)
        for connection in (kept, fresh):
            connection.request("GET", "/health/ready")
            assert connection.getresponse().read() == b""
        bodies = [pool.submit(whole, server, stream) for stream in (False, True)]
        until(lambda: server.engine.open_requests == 2)
        over, _ = begin_end(server, 20.0)
        until(lambda: server.app[FRONT].draining)
        fresh.request("GET", "/health/live")
        assert fresh.getresponse().read() == b""
        while True:  # the port closes after readiness has turned
            try:
                late = connect(server)
                late.request("GET", "/health/ready")
                answer = late.getresponse()
                assert (answer.status, answer.headers["Connection"]) == (503, "close")
            except ConnectionError:
                break
            time.sleep(0.02)
        kept.request("POST", "/v1/completions", json.dumps(HI), HEADERS)
        answer = kept.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (503, "close") and int(answer.headers["Retry-After"])
        assert json.loads(answer.read())["error"]["message"] == "the server is shutting down."
        assert not over.done() and not bodies[0].done()
        gate.append(True)
        for body in bodies:
            status, text = body.result(20)
            assert status == 200 and " two" in text and "error" not in text
        over.result(20)


def whole(server: FakeServer, stream: bool) -> tuple[int, str]:
    connection = connect(server)
    connection.request("POST", "/v1/completions", json.dumps({**HI, "stream": stream}), HEADERS)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize("second", [False, True])
def test_what_does_not_end_in_time_is_told_so(second: bool) -> None:
    with FakeServer(gated([])) as server, ThreadPoolExecutor(2) as pool:
        bodies = [pool.submit(whole, server, stream) for stream in (False, True)]
        until(lambda: len(server.engine.requests) == 2 and all(r.children[0].tokens for r in server.engine.requests))
        over, hurry = begin_end(server, 60.0 if second else 0.2)
        if second:
            server.loop.call_soon_threadsafe(hurry.set)
        over.result(20)
        why = "told to hurry" if second else "0.2 s of --shutdown-timeout"
        (status, body), (streamed, events) = (body.result(20) for body in bodies)
        assert (status, streamed) == (503, 200)
        assert why in json.loads(body)["error"]["message"]
        assert " one" in events and why in events and events.endswith("data: [DONE]\n\n")
        assert server.engine.open_requests == 0
