"""Two frontends and two detokenizers behind one port: what ends with a connection, and what ends with a process."""

from __future__ import annotations

import contextlib
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
        "--shutdown-timeout=250",
    )  # fmt: skip
    yield running
    running.close()


def connect(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)


def ask(connection: http.client.HTTPConnection, **fields: Any) -> http.client.HTTPConnection:
    """A request on it, not answered yet."""
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True, **fields}), HEADERS)
    return connection


def begin(server: Server, **fields: Any) -> http.client.HTTPConnection:
    """The same on a connection of its own."""
    return ask(connect(server), **fields)


def processes(server: Server, service: str) -> list[psutil.Process]:
    found = []
    for process in server.children():
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if f"-m quire.{service}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def spread(server: Server, each: int) -> list[tuple[psutil.Process, list[http.client.HTTPConnection]]]:
    """The frontends, and ``each`` idle connections to either: the kernel shares them out as by lot."""
    wait_until(lambda: len(processes(server, "frontend")) == 2, "both frontends are there", 120)
    shares: list[tuple[psutil.Process, list[http.client.HTTPConnection]]] = [
        (process, []) for process in processes(server, "frontend")
    ]

    def enough() -> bool:
        opened = [connect(server) for _ in range(8)]
        for connection in opened:
            connection.request("GET", "/health/live")
            connection.getresponse().read()
        by_port = {connection.sock.getsockname()[1]: connection for connection in opened}
        for process, mine in shares:
            ports = [c.raddr.port for c in process.net_connections() if c.raddr]
            mine += [by_port.pop(port) for port in ports if port in by_port and len(mine) < each]
            del mine[each:]
        return all(len(mine) == each for _, mine in shares)

    wait_until(enough, f"{each} connections to each frontend", 120)
    return shares


def metric(server: Server, name: str) -> float:
    """It, once the frontend that is asked has it: what a scheduler does not answer in time is left out."""
    wait_until(lambda: name in server.get("/metrics")[1], "the scheduler's part of /metrics", 120)
    return server.metric(name)


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
    names = ("quire:num_requests_running", "quire:num_requests_waiting", "quire:kv_blocks_in_use")
    text = server.get("/metrics")[1]
    return all(re.search(rf"^{name}{{[^}}]*}} 0\.0$", text, re.M) for name in names)


@pytest.mark.slow
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
    wait_until(lambda: nothing_is_left(server), "nothing runs", 120)
    before = metric(server, "quire:generation_tokens")
    connection = begin(server, **fields)
    wait_until(lambda: server.metric("quire:kv_blocks_in_use") > 0, "it runs", 120)
    connection.close()
    wait_until(lambda: nothing_is_left(server), "its blocks are free", 120)
    most = 1500 * fields.get("best_of", fields.get("n", 1))
    assert metric(server, "quire:generation_tokens") - before < most  # it did not just come to its end


@pytest.mark.slow
def test_a_client_that_leaves_the_queue(server: Server) -> None:
    running = [begin(server) for _ in range(8)]
    wait_until(lambda: server.metric("quire:num_requests_running") == 8, "eight run", 120)
    queued = [begin(server, stream=stream) for stream in (False, True)]
    wait_until(lambda: server.metric("quire:num_requests_waiting") == 2, "two wait", 120)
    for connection in queued:
        connection.close()
    wait_until(lambda: metric(server, "quire:num_requests_waiting") == 0, "nobody waits", 120)
    for connection in running:
        connection.close()
    wait_until(lambda: nothing_is_left(server), "all blocks are free", 120)


@pytest.mark.slow
def test_a_killed_frontend_takes_only_its_own_connections_along(server: Server) -> None:
    alone, whole = events(begin(server, max_tokens=150).getresponse())
    assert whole
    (victim, theirs), (_, others) = spread(server, 3)
    answers = [ask(connection).getresponse() for connection in theirs[:3]]  # not over before the kill
    kept = [ask(connection, max_tokens=150).getresponse() for connection in others[:3]]
    with ThreadPoolExecutor(6) as pool:
        lost, found = ([pool.submit(events, answer) for answer in each] for each in (answers, kept))
        victim.kill()
        assert [each.result() for each in found] == [(alone, True)] * 3
        for text, whole in (each.result() for each in lost):
            assert not whole and (text.startswith(alone) or alone.startswith(text))
    wait_until(lambda: nothing_is_left(server), "its requests were aborted", 120)
    wait_until(lambda: len(processes(server, "frontend")) == 2, "it is back", 120)
    wait_until(lambda: server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200, "it serves", 120)


@pytest.mark.slow
def test_any_frontend_tells_what_all_have_measured(server: Server) -> None:
    """Also what one had measured that was killed, and the one in its place."""
    name = "quire:request_success"

    def spent() -> float:
        return server.metric(name)

    # What one has measured the other tells up to a second later: they agree once each knows all.
    wait_until(lambda: len({spent() for _ in range(20)}) == 1, "they tell the same", 60)
    before = spent()
    for one, other in zip(*(mine for _, mine in spread(server, 3)), strict=True):
        for connection in (one, other):
            body = json.dumps({"prompt": "Hi", "max_tokens": 1})
            assert said(connection, "POST", "/v1/completions", body, HEADERS).status == 200
    seen = [spent() for _ in range(20)]  # each on a connection of its own
    wait_until(lambda: spent() == before + 6, "what each has measured is told", 60)
    assert seen == sorted(seen)
    victim = processes(server, "frontend")[0]
    victim.kill()
    for _ in range(2):
        wait_until(lambda: len(processes(server, "frontend")) == 2, "there are two again", 60)
        seen = [spent() for _ in range(20)]
        assert set(seen) == {before + 6}
        spread(server, 1)  # both answer


@pytest.mark.slow
def test_a_response_is_known_to_all_frontends_until_its_own_is_killed(server: Server) -> None:
    (victim, theirs), (_, others) = spread(server, 4)

    def told(connection: http.client.HTTPConnection, method: str, path: str, **body: Any) -> tuple[int, Any]:
        connection.request(method, f"/v1/responses{path}", json.dumps(body) if body else None, HEADERS)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    _, first = told(theirs[0], "POST", "", input="Hi", max_output_tokens=4)
    assert told(others[0], "GET", f"/{first['id']}") == told(theirs[1], "GET", f"/{first['id']}") == (200, first)
    more = {"input": "On", "max_output_tokens": 4, "previous_response_id": first["id"]}
    assert told(others[0], "POST", "", **more)[0] == 200
    _, long = told(theirs[0], "POST", "", input="Hi", max_output_tokens=1500, ignore_eos=True, background=True)
    others[1].request("GET", f"/v1/responses/{long['id']}?stream=true")
    events = others[1].getresponse()
    while b"output_text.delta" not in events.readline():
        pass
    victim.kill()
    assert b"the frontend that ran this response is gone" in events.read().splitlines()[-2]
    for id in (first["id"], long["id"]):
        status, answer = told(others[0], "GET", f"/{id}")
        assert status == 404 and "a frontend process that is gone" in answer["error"]["message"]
    assert told(others[0], "POST", "", **more)[0] == 404
    wait_until(lambda: len(processes(server, "frontend")) == 2, "another has taken its place", 120)


@pytest.mark.slow
def test_a_hung_detokenizer_loses_nothing(server: Server) -> None:
    """Half of the streams are with the one that is stopped for good; they go on with the other."""
    for count in (60, 240, 960):  # more where all were over before it was stopped
        fields = {"max_tokens": count, "stop": ["never to be seen"], "logprobs": 1}
        alone = events(begin(server, **fields).getresponse())
        hung = processes(server, "detokenizer")[0]
        with ThreadPoolExecutor(4) as pool:
            answers = [begin(server, **fields).getresponse() for _ in range(4)]
            hung.suspend()
            try:
                assert [each.result() for each in [pool.submit(events, answer) for answer in answers]] == [alone] * 4
            finally:
                hung.resume()
        if "lost detokenizer" in server.stderr():
            break
    assert "lost detokenizer" in server.stderr()  # by its silence or by ZMTP heartbeats, whichever came first
    wait_until(lambda: nothing_is_left(server), "late aborts and attempts leave nothing", 120)
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200


@pytest.mark.slow
def test_sigterm_under_load_finishes_what_is_open_and_leaves_nothing(server: Server) -> None:
    """The last test of this server."""
    children, folder = server.children(), server.run_dir()
    (worker,) = processes(server, "gpu_worker")
    for count in (150, 600, 1500):  # more where some were over before the worker was stopped
        alone = events(begin(server, max_tokens=count).getresponse())
        shares = spread(server, 6)
        answers = [ask(one, max_tokens=count).getresponse() for _, mine in shares for one in mine[:4]]
        worker.suspend()  # so that nothing is over before the server has said that it ends
        if all_run := metric(server, "quire:num_requests_running") == 8:
            break
        worker.resume()
        for answer in answers:
            answer.read()
    assert all_run
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(events, answer) for answer in answers]
        try:
            server.process.send_signal(signal.SIGTERM)
            *_, look, kept = shares[0][1]
            wait_until(lambda: said(look, "GET", "/health/ready").headers["Connection"] == "close", "it ends", 120)
            late = said(kept, "POST", "/v1/completions", json.dumps({"prompt": "Hi", "max_tokens": 1}), HEADERS)
        finally:
            worker.resume()
        # on a connection that is kept alive it is told when to come back
        assert (late.status, late.headers["Connection"]) == (503, "close") and int(late.headers["Retry-After"]) >= 1
        assert [each.result() for each in found] == [alone] * 8
    assert server.process.wait(250) == 0
    assert psutil.wait_procs(children, timeout=60)[1] == [] and not os.path.exists(folder)
    assert not re.search("Traceback", server.stderr())


def said(connection: http.client.HTTPConnection, *request: Any) -> http.client.HTTPResponse:
    """An answer without its body."""
    connection.request(*request)
    answer = connection.getresponse()
    answer.read()
    return answer
