"""Two frontends and two detokenizers behind one port: what ends with a connection, and what ends with a process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from stack import Server, wait_until

LONG = {"prompt": "Tell me a story.", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 1}
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(
        "--api-server-count=2", "--detokenizer-count=2", "--max-num-seqs=8", "--max-num-batched-tokens=16",
        "--shutdown-timeout=60",
    )  # fmt: skip
    yield running
    running.close()


def begin(server: Server, path: str = "/v1/completions", **fields: Any) -> http.client.HTTPConnection:
    """A request on a connection of its own, not answered yet."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    connection.request("POST", path, json.dumps({**LONG, "stream": True, **fields}), HEADERS)
    return connection


def events(answer: http.client.HTTPResponse) -> tuple[str, bool]:
    """The text of a stream, and whether it came to its end."""
    text = ""
    try:
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return text, True
            if line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
    except (ConnectionError, http.client.HTTPException):
        pass
    return text, False


def nothing_is_left(server: Server) -> bool:
    metrics = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:kv_blocks_in_use")
    return not any(server.metric(name) for name in metrics)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"n": 2, "best_of": 4, "stream": False},
        {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0.0, "stream": False},
        {"prompt": "once upon a time " * 400},
        {"stream": False},
    ],
    ids=["stream", "n", "best_of", "beams", "prefilling", "body"],
)
def test_a_client_that_leaves_frees_its_blocks(server: Server, fields: dict[str, Any]) -> None:
    assert nothing_is_left(server)
    before = server.metric("quire:generation_tokens")
    connection = begin(server, **fields)
    wait_until(lambda: server.metric("quire:kv_blocks_in_use") > 0, "it runs")
    connection.close()
    wait_until(lambda: nothing_is_left(server), "its blocks are free")
    assert server.metric("quire:generation_tokens") - before < 1500  # it did not just come to its end


def test_a_client_that_leaves_the_queue(server: Server) -> None:
    running = [begin(server) for _ in range(8)]
    wait_until(lambda: server.metric("quire:num_requests_running") == 8, "eight run")
    queued = [begin(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.metric("quire:num_requests_waiting") == 2, "two wait")
    for connection in queued:
        connection.close()
    wait_until(lambda: server.metric("quire:num_requests_waiting") == 0, "nobody waits")
    for connection in running:
        connection.close()
    wait_until(lambda: nothing_is_left(server), "all blocks are free")


def test_a_killed_frontend_takes_only_its_own_connections_along(server: Server) -> None:
    fields = {"max_tokens": 150}
    alone = events(begin(server, **fields).getresponse())
    assert alone[1]
    frontends = [p for p in server.children() if "quire.frontend" in " ".join(p.cmdline())]
    assert len(frontends) == 2
    opened = [begin(server, **fields) for _ in range(8)]  # the kernel shares connections out by their ports
    answers = [connection.getresponse() for connection in opened]
    victim, ports = frontends[0], {c.sock.getsockname()[1] for c in opened}
    lost = len({c.raddr.port for c in victim.net_connections() if c.raddr and c.raddr.port in ports})
    assert 0 < lost < 8
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(events, answer) for answer in answers]
        victim.kill()
        texts = [each.result() for each in found]
    assert sum(whole for _, whole in texts) == 8 - lost
    assert {text for text, whole in texts if whole} == {alone[0]}
    assert all(alone[0].startswith(text) for text, _ in texts)
    wait_until(lambda: nothing_is_left(server), "its requests were aborted")
    wait_until(lambda: sum("quire.frontend" in " ".join(p.cmdline()) for p in server.children()) == 2, "it is back")
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200


def test_a_hung_detokenizer_loses_nothing(server: Server) -> None:
    """Half of the streams are with the one that is stopped for good; they go on with the other."""
    fields = {"max_tokens": 60, "stop": ["never to be seen"], "logprobs": 1}
    alone = events(begin(server, **fields).getresponse())
    hung = next(p for p in server.children() if "quire.detokenizer" in " ".join(p.cmdline()))
    with ThreadPoolExecutor(4) as pool:
        answers = [begin(server, **fields).getresponse() for _ in range(4)]
        hung.suspend()
        try:
            assert [each.result() for each in [pool.submit(events, answer) for answer in answers]] == [alone] * 4
        finally:
            hung.resume()
    assert "lost detokenizer" in server.stderr()  # by its silence or by ZMTP heartbeats, whichever came first
    wait_until(lambda: nothing_is_left(server), "late aborts and attempts leave nothing")
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200


def test_sigterm_under_load_finishes_what_is_open_and_leaves_nothing(server: Server) -> None:
    """The last test of this server."""
    children, folder = server.children(), server.run_dir()
    alone = events(begin(server, max_tokens=150).getresponse())
    kept = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    kept.request("GET", "/health/live")
    kept.getresponse().read()
    with ThreadPoolExecutor(8) as pool:
        answers = [begin(server, max_tokens=150).getresponse() for _ in range(8)]
        found = [pool.submit(events, answer) for answer in answers]
        server.process.send_signal(signal.SIGTERM)
        while True:  # on a connection that is kept alive it is told when to come back
            kept.request("POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 1}), HEADERS)
            late = kept.getresponse()
            late.read()
            if late.status != 200:
                break
        assert (late.status, late.headers["Connection"]) == (503, "close") and int(late.headers["Retry-After"]) >= 1
        assert [each.result() for each in found] == [alone] * 8
    assert server.process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=5)[1] == [] and not os.path.exists(folder)
    assert not re.search("Traceback", server.stderr())
