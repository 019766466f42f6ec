"""How a server ends: what it says first, what it finishes, what it cuts, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from stack import Server, wait_until

from quire.frontend import main as main
from quire.frontend.fake import FakeServer, Say, Script
from quire.frontend.front import FRONT
from quire.proto.messages import Finish

HI = {"prompt": "hi there", "max_tokens": 3}
HEADERS = {"Content-Type": "application/json"}


def connect(server: FakeServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
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
        over, _ = begin_end(server, 600.0)
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
            status, text = body.result(60)
            assert status == 200 and " two" in text and "error" not in text
        over.result(60)


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
        over, hurry = begin_end(server, 600.0 if second else 0.2)
        if second:
            server.loop.call_soon_threadsafe(hurry.set)
        over.result(60)
        why = "told to hurry" if second else "0.2 s of --shutdown-timeout"
        (status, body), (streamed, events) = (body.result(60) for body in bodies)
        assert (status, streamed) == (503, 200)
        assert why in json.loads(body)["error"]["message"]
        assert " one" in events and why in events and events.endswith("data: [DONE]\n\n")
        assert server.engine.open_requests == 0


# ---------------------------------------------------------------- `quire serve` itself


def child_of(server: Server, service: str) -> psutil.Process:
    return next(p for p in server.children() if f"-m quire.{service}" in " ".join(p.cmdline()))


def long_stream(server: Server, key: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 8}
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS | {"Authorization": f"Bearer {key}"})
    return connection.getresponse()


def ready(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/health/ready")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_a_drained_worker_stays_away_and_a_killed_launcher_leaves_nothing() -> None:
    server = Server()
    worker = None
    try:
        for path in ("/health", "/health/live", "/health/ready", "/health/generate"):
            assert server.get(path)[0] == 200
        old = child_of(server, "gpu_worker")
        command = old.cmdline()
        old.terminate()
        wait_until(lambda: "left on purpose" in server.stderr(), "the launcher lets it go", 120)
        wait_until(lambda: server.get("/health/ready")[0] == 503, "nobody serves", 120)
        status, answer, headers = server.post("/v1/completions", HI)
        assert status == 503 and int(headers["Retry-After"]) >= 1 and "not ready" in answer["error"]["message"]
        assert server.get("/health/live")[0] == 200
        worker = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: server.get("/health/generate")[0] == 200, "another one joins", 180)
        assert not any("gpu_worker" in " ".join(p.cmdline()) for p in server.children())

        children, folder = server.children(), server.run_dir()
        answer = long_stream(server)
        assert answer.readline()
        server.process.kill()
        server.process.wait()
        assert psutil.wait_procs(children, timeout=60)[1] == []
        until(lambda: not os.path.exists(folder))
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()
        server.close()


def test_what_dies_again_and_again_is_given_up_with_a_message_and_a_code() -> None:
    """Where no request is open: with one the server goes on for as long as the request may wait."""
    server = Server()
    try:
        children, folder = set(server.children()), server.run_dir()
        while server.process.poll() is None:  # the first may have lived long enough not to count
            with contextlib.suppress(StopIteration, psutil.Error):
                child_of(server, "detokenizer").kill()
            with contextlib.suppress(psutil.Error):
                children.update(server.children())
            time.sleep(0.02)
        assert server.process.wait() == 1
        said = re.search(r"quire\.detokenizer ended (\d+) times .*: ", server.stderr().splitlines()[-1])
        assert said is not None and int(said[1]) >= 5  # more where one had begun to serve before it was found
        assert psutil.wait_procs(children, timeout=60)[1] == [] and not os.path.exists(folder)
    finally:
        server.close()


def test_keys_have_limits_and_a_second_signal_ends_at_once_and_tells_clients() -> None:
    server = Server("--shutdown-timeout=600", "--max-requests-per-key=1", "--queue-timeout=0.5", "--max-num-seqs=1",
                    env={"QUIRE_API_KEY": "one,two"})  # fmt: skip
    try:
        children, folder = server.children(), server.run_dir()
        assert not any("one,two" in " ".join(p.cmdline()) for p in children)
        kept = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)  # it outlives the port
        assert ready(kept) == 200
        answer = long_stream(server, "one")
        assert answer.readline()
        assert server.post("/v1/completions", HI)[0] == 401
        for key, expected in (("one", 429), ("two", 503)):  # its share is used up; the only row is taken for too long
            status, told, headers = server.post("/v1/completions", HI, headers={"Authorization": f"Bearer {key}"})
            assert status == expected and int(headers["Retry-After"]) >= 1, told
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: ready(kept) == 503, "it says that it ends", 120)
        server.process.send_signal(signal.SIGINT)
        assert b"told to hurry" in answer.read()
        assert server.process.wait(120) == 0
        assert psutil.wait_procs(children, timeout=60)[1] == [] and not os.path.exists(folder)
    finally:
        server.close()
