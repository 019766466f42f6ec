"""Routes, shapes and errors of the HTTP end, over an engine that plays scripts."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from http_asks import CHAT, HI, ask, error_of, post

from quire import __version__
from quire.client.generation import OpenGeneration
from quire.client.placement import Link
from quire.client.results import RequestError
from quire.frontend.auth import keys_of, owner_of
from quire.frontend.fake import MAX_MODEL_LEN, FakeServer, Say
from quire.frontend.front import FRONT
from quire.proto.config import ConfigError
from quire.proto.messages import Finish, Peer, Peers
from quire.proto.restarts import PROCESSES, TOLD, Restarts


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(names=["fake", "alias"], max_request_bytes=100_000) as running:
        yield running


def until(condition: Callable[[], Any]) -> None:
    """Wait for what the server's thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


# ---------------------------------------------------------------- small routes


def test_models(server: FakeServer) -> None:
    status, body, _ = ask(server, "GET", "/v1/models")
    assert status == 200
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["fake", "alias"]
    assert all(model["object"] == "model" and model["max_model_len"] == MAX_MODEL_LEN for model in body["data"])
    assert ask(server, "GET", "/v1/models/alias")[1]["id"] == "alias"
    assert error_of(ask(server, "GET", "/v1/models/nope"), 404)["param"] == "model"


def test_health_version_ping(server: FakeServer) -> None:
    assert ask(server, "GET", "/health")[0] == 200
    assert ask(server, "GET", "/ping")[0] == ask(server, "POST", "/ping")[0] == 200
    assert ask(server, "GET", "/version")[1] == {"version": __version__}
    server.engine.is_ready = False
    answer = ask(server, "GET", "/health")
    error_of(answer, 503)
    assert int(answer[2]["Retry-After"]) >= 1


def test_live_ready_and_a_token_really_made(server: FakeServer) -> None:
    for path in ("/health/live", "/health/ready", "/health/generate"):
        assert ask(server, "GET", path)[:2] == (200, b"")
    (probe,) = server.engine.requests
    assert (probe.message.ids, probe.work.params.max_tokens) == (b"\0" * 4, 1)
    server.engine.refuse = lambda request: RequestError(500, "the cache is on fire.")
    answer = ask(server, "GET", "/health/generate")
    assert "on fire" in error_of(answer, 503)["message"] and answer[2]["Retry-After"]
    server.engine.is_ready = False
    assert ask(server, "GET", "/health/live")[0] == 200
    for path in ("/health/ready", "/health/generate"):
        answer = ask(server, "GET", path)
        assert error_of(answer, 503)["message"].startswith("the model is not ready")
        assert answer[2]["Retry-After"] == "2"


def test_who_asks_for_a_token_meanwhile_waits_for_the_same_one(server: FakeServer) -> None:
    gate: list[bool] = []

    def script(request: OpenGeneration) -> Iterator[Say | float]:
        while not gate:
            yield 0.005
        yield Say(0, "x", finish=Finish.LENGTH)

    server.engine.script = script
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server, "GET", "/health/generate") for _ in range(4)]
        until(lambda: server.app[FRONT].active == 4)
        gate.append(True)
        assert [answer.result()[0] for answer in answers] == [200] * 4
    assert len(server.engine.requests) == 1


def test_no_token_in_time_and_a_full_queue() -> None:
    with FakeServer(generate_s=0.3) as server:
        server.engine.script = lambda request: iter([30.0])
        assert "within 0.3 s" in error_of(ask(server, "GET", "/health/generate"), 503)["message"]
        assert server.engine.open_requests == 0
        server.engine.refuse = lambda request: RequestError(429, "full.", None, 9.0)
        answer = ask(server, "GET", "/health/generate")
        assert "full" in error_of(answer, 503)["message"] and answer[2]["Retry-After"] == "9"
        server.engine.core.tokens_at = float("inf")  # others are being served
        assert ask(server, "GET", "/health/generate")[0] == 200


def test_metrics(server: FakeServer) -> None:
    post(server, HI)
    post(server, {**HI, "stream": True})
    post(server, {**HI, "n": 0})
    text = ask(server, "GET", "/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['quire:num_requests_running{model_name="fake"}'] == "0.0"
    assert values['quire:kv_cache_usage_perc{model_name="fake"}'] == "0.07"
    assert values['quire:kv_blocks_in_use{model_name="fake"}'] == "7.0"
    assert values['quire:kernel_compilations_total{model_name="fake"}'] == "0.0"
    assert values['quire:bad_frames_total{model_name="fake"}'] == "2.0"
    assert values['quire:generation_tokens_total{model_name="fake"}'] == "13.0"
    assert values['quire:request_success_total{finished_reason="length",model_name="fake"}'] == "2.0"
    assert values['quire:time_to_first_token_seconds_count{model_name="fake"}'] == "2.0"
    assert values['quire:inter_token_latency_seconds_count{model_name="fake"}'] == "4.0"
    assert values['quire:e2e_request_latency_seconds_count{model_name="fake"}'] == "2.0"
    assert values['quire:request_generation_tokens_sum{model_name="fake"}'] == "6.0"
    assert values['quire:http_errors_total{model_name="fake",status="400"}'] == "1.0"
    server.engine.is_ready = False  # no scheduler answers
    text = ask(server, "GET", "/metrics")[1].decode()
    assert "kv_blocks_in_use" not in text
    assert "request_success" in text


# ---------------------------------------------------------------- shapes


def test_completion(server: FakeServer) -> None:
    status, body = post(server, HI)
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert isinstance(body["created"], int)
    nothing = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"))
    assert body["choices"] == [{"index": 0, "text": " 0.0 0.1 0.2", "finish_reason": "length", **nothing}]
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_chat(server: FakeServer) -> None:
    status, body = post(server, {**CHAT, "model": "alias"}, "/v1/chat/completions")
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "alias"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == " 0.0 0.1 0.2"
    assert choice["finish_reason"] == "length"
    message = server.engine.requests[0].message
    assert message.messages == CHAT["messages"]
    assert message.template == {"add_generation_prompt": True, "continue_final_message": False}


def test_prompts_times_n_are_numbered_as_openai_does(server: FakeServer) -> None:
    _, body = post(server, {"prompt": ["a", "b c", "d"], "n": 2, "max_tokens": 1, "echo": True})
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a 0.0"), (1, "a 1.0"), (2, "b c 0.0"), (3, "b c 1.0"), (4, "d 0.0"), (5, "d 1.0"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 6


def test_prompts_as_ids(server: FakeServer) -> None:
    assert post(server, {**HI, "prompt": [5, 6, 7]})[1]["usage"]["prompt_tokens"] == 3
    _, body = post(server, {**HI, "prompt": [[5, 6, 7], [8]]})
    assert len(body["choices"]) == 2
    assert body["usage"]["prompt_tokens"] == 4


def test_options_reach_the_engine(server: FakeServer) -> None:
    post(server, {**HI, "seed": 7, "stop": "x", "priority": -3, "add_special_tokens": False, "top_k": 4,
                  "cache_salt": "s"})  # fmt: skip
    message = server.engine.requests[0].message
    assert (message.work.seed, message.priority, message.add_special_tokens) == (7, -3, False)
    assert (message.work.params.stop, message.work.params.top_k, message.work.params.max_tokens) == (["x"], 4, 3)
    post(server, {"messages": CHAT["messages"], "add_special_tokens": True}, "/v1/chat/completions")
    assert message.cache_salt == "s"
    message = server.engine.requests[1].message
    assert message.template["add_special_tokens"] is True and message.cache_salt == ""
    assert message.work.params.max_tokens is None


def test_finish_reasons(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say]:
        yield Say(0, "é", finish=Finish.STOP)
        yield Say(1, '"\n', tokens=2, finish=Finish.STOP, stop_reason="END")
        yield Say(2, "", tokens=0, finish=Finish.STOP, stop_reason=42)
        yield Say(3, "cut", finish=Finish.ABORT)

    server.engine.script = script
    _, body = post(server, {**HI, "n": 4})
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
        ("é", "stop", None), ('"\n', "stop", "END"), ("", "stop", 42), ("cut", "abort", None),
    ]  # fmt: skip


def test_the_clients_own_id(server: FakeServer) -> None:
    assert post(server, HI, **{"X-Request-Id": "abc-1"})[1]["id"] == "cmpl-abc-1"
    assert post(server, {**HI, "request_id": "mine"})[1]["id"] == "cmpl-mine"
    assert "<" not in post(server, HI, **{"X-Request-Id": "<script>"})[1]["id"]


def test_chat_echo(server: FakeServer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I"}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 1}
    assert post(server, body, "/v1/chat/completions")[1]["choices"][0]["message"]["content"] == "I 0.0"
    messages[1] = {"role": "assistant", "content": [{"type": "text", "text": "I"}, "am"]}
    assert post(server, body, "/v1/chat/completions")[1]["choices"][0]["message"]["content"] == "I\nam 0.0"


# ---------------------------------------------------------------- refusals


def test_unknown_and_missing_model(server: FakeServer) -> None:
    error = error_of(post(server, {**HI, "model": "nope"}), 404)
    assert error["type"] == "NotFoundError"
    assert error["param"] == "model"
    assert "`nope` does not exist" in error["message"]
    assert "fake" in error["message"]
    assert post(server, HI)[0] == 200
    assert post(server, {**HI, "model": ""})[1]["model"] == "fake"


@pytest.mark.parametrize(("field", "value"), [("max_tokens", -1), ("temperature", "a"), ("n", 0), ("prompt", "")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_400_and_nothing_is_queued(server: FakeServer, field: str, value: Any, stream: bool) -> None:
    error = error_of(post(server, {**HI, "stream": stream, field: value}), 400)
    assert error["param"] == field
    assert error["type"] == "BadRequestError"
    assert not server.engine.requests


def test_one_bad_prompt_among_many_queues_none(server: FakeServer) -> None:
    assert error_of(post(server, {**HI, "prompt": ["a", ""]}), 400)["param"] == "prompt"
    assert not server.engine.requests
    assert error_of(post(server, {**HI, "prompt": ["a"] * 2048, "n": 16}), 400)["param"] == "n"
    assert not server.engine.requests


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("field", ["n", "best_of"])
def test_max_n_bounds_the_choices_of_a_prompt(field: str, chat: bool) -> None:
    body, path = (CHAT, "/v1/chat/completions") if chat else (HI, "/v1/completions")
    with FakeServer(names=["fake"], max_n=3) as server:
        error = error_of(post(server, {**body, field: 4}, path), 400)
        assert (error["param"], server.engine.requests) == (field, [])
        assert f"{field} is 4, over the limit of 3" in error["message"] and "--max-n" in error["message"]
        assert post(server, {**body, field: 3}, path)[0] == 200


def test_the_prompts_of_one_call_have_one_arrival(server: FakeServer) -> None:
    for _ in range(2):
        assert post(server, {**HI, "prompt": ["a", "b", "c"]})[0] == 200
    arrivals = [request.message.arrival for request in server.engine.requests]
    assert arrivals[0] > 1e9 and len(set(arrivals)) == 2
    assert len(set(arrivals[:3])) == len(set(arrivals[3:])) == 1


def test_greedy_with_n(server: FakeServer) -> None:
    assert error_of(post(server, {**HI, "temperature": 0, "n": 2}), 400)["param"] == "n"


def test_empty_messages(server: FakeServer) -> None:
    for messages in ([], None):
        error = error_of(post(server, {"messages": messages}, "/v1/chat/completions"), 400)
        assert error["param"] == "messages"


def test_bodies_that_are_no_json(server: FakeServer) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe", b"\x80\x04\x95"):
        error_of(post(server, body), 400)
    error_of(post(server, HI, **{"Content-Type": "text/plain"}), 400)
    error_of(post(server, HI, **{"Content-Type": "application/x-www-form-urlencoded"}), 400)
    error_of(post(server, HI, **{"Content-Encoding": "gzip"}), 400)
    assert post(server, HI, **{"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_too_large(server: FakeServer) -> None:
    error = error_of(post(server, {"prompt": "x" * 200_000}), 413)
    assert "100000" in error["message"]
    # the same with no length announced
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    pieces = iter([b'{"prompt": "'] + [b"x" * 10_000] * 20 + [b'"}'])
    connection.request("POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert post(server, HI)[0] == 200


def test_a_body_that_does_not_come() -> None:
    with FakeServer(body_s=0.1) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "50")
        connection.endheaders(b'{"prompt"')
        answer = connection.getresponse()
        error_of((answer.status, json.loads(answer.read())), 408)
        connection.close()


def test_unknown_path_and_method(server: FakeServer) -> None:
    error_of(ask(server, "GET", "/v1/nope"), 404)
    error_of(ask(server, "GET", "/nothing"), 404)
    answer = ask(server, "GET", "/v1/completions")
    error_of(answer, 405)
    assert answer[2]["Allow"] == "POST"
    error_of(ask(server, "DELETE", "/v1/models"), 405)


def test_garbage_instead_of_http(server: FakeServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for bytes_sent in (b"\x00\xff" * 50 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"):
        answer = b""
        with socket.create_connection((host, int(port)), timeout=20) as sock, suppress(ConnectionError):
            sock.sendall(bytes_sent)  # it may be cut off before it has sent all
            answer = sock.recv(65536)
        assert not answer or answer.split(b" ")[1] in (b"400", b"431")
    assert post(server, HI)[0] == 200


MUCH = b"Host: x\r\nX: " + b"y" * 20_000
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (POST + b"Content-Length: abc\r\n\r\n", 400, "not valid HTTP"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nx\r\n", 400, "not valid HTTP"),
        (b"GET /version HTTP/1.1\r\n" + MUCH + b"\r\n\r\n", 431, "header"),
        (b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "URL"),
        (b"F(O /version HTTP/1.1\r\nHost: x\r\n\r\n", 400, "method"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "HTTP"),
        (POST + b"Content-Length: 2\r\nExpect: banana\r\n\r\n{}", 417, "banana"),
        (POST + b"Content-Length: 2\r\nExpect: 100-contin\xc0\xd4P\r\n\r\n{}", 417, "100-contin"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: \xc0\xd4\r\n\r\n{}", 417, "Expect"),
        (b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n", 404, "there is no CONNECT"),
    ],
    ids=["length", "chunk", "header", "line", "method", "tls", "expect", "expect-bytes", "expect-nowhere", "connect"],
)
def test_what_is_no_http_is_refused_in_json_and_one_line(
    server: FakeServer, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, words: str
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with caplog.at_level("INFO"), socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(sent)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        error = error_of((answer.status, json.loads(answer.read())), status)
    assert words in error["message"]
    assert "yyy" not in error["message"]
    assert "b'" not in error["message"]
    assert len(caplog.records) <= 1
    assert not any(record.exc_info for record in caplog.records)


def test_a_bad_chunk_in_a_later_packet_does_not_wait(server: FakeServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:  # the body's own limit is 60 s
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        until(lambda: server.app[FRONT].active == 1)  # the headers have been read
        sock.sendall(b'5\r\n{"pro\r\n')
        ask(server, "GET", "/version")
        sock.sendall(b"ZZ\r\nx\r\n")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert "a chunk is wrong" in error_of((answer.status, json.loads(answer.read())), 400)["message"]
        assert sock.recv(100) == b""


def test_numbers_that_cannot_be_sent(server: FakeServer) -> None:
    big = 123456789012345678901234567890
    for body, param in [
        ({"messages": [{"role": "user", "content": "x", "a": big}]}, "messages"),
        ({**CHAT, "chat_template_kwargs": {"a": big}}, "chat_template_kwargs"),
    ]:
        assert error_of(post(server, body, "/v1/chat/completions"), 400)["param"] == param
    for name in (b"logprobs", b"suffix", b"presence_penalty", b"logit_bias", b"temperature"):
        answer = post(server, b'{"prompt": "a", "%s": 1e400}' % name)
        assert error_of(answer, 400)["param"] == name.decode()
    assert not server.engine.requests


def test_a_list_of_prompts_that_could_never_wait() -> None:
    with FakeServer(max_queued=2) as server:
        error = error_of(post(server, {**HI, "prompt": ["a", "b", "c"]}), 400)
        assert error["param"] == "prompt"
        assert "3 prompts" in error["message"]
        assert "over the 2" in error["message"]
        assert "--max-num-queued-reqs" in error["message"]
        assert post(server, {**HI, "prompt": ["a", "b"], "n": 3})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_refusals_of_the_engine_keep_their_status(server: FakeServer, stream: bool, prompt: Any) -> None:
    server.engine.refuse = lambda request: RequestError(429, "too many wait.", None, 2.4)
    body = {**HI, "prompt": prompt, "stream": stream}
    answer = ask(server, "POST", "/v1/completions", body)
    assert error_of(answer, 429)["type"] == "RateLimitError"
    assert answer[2]["Retry-After"] == "3"
    server.engine.refuse = lambda request: RequestError(400, "prompt too long.", "prompt")
    assert error_of(post(server, body), 400)["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_after_acceptance_is_still_a_status(server: FakeServer, stream: bool) -> None:
    def script(request: OpenGeneration) -> Iterator[RequestError]:
        yield RequestError(429, "full.", None, 1)

    server.engine.script = script
    error_of(post(server, {**HI, "stream": stream}), 429)


def test_one_refused_prompt_ends_the_others(server: FakeServer) -> None:
    server.engine.script = lambda request: iter([30.0])
    server.engine.refuse = lambda request: RequestError(400, "no.") if request.message.prompt == "bad" else None
    error_of(post(server, {**HI, "prompt": ["a", "bad", "c"]}), 400)
    error_of(post(server, {**HI, "prompt": ["a", "bad", "c"], "stream": True}), 400)
    assert server.engine.open_requests == 0
    assert len(server.engine.aborted) == 4


def test_nothing_is_ready() -> None:
    with FakeServer(restart_s=0.1) as server:
        server.engine.is_ready = False
        answer = ask(server, "POST", "/v1/completions", HI)
        assert error_of(answer, 503)["type"] == "ServiceUnavailableError"
        assert answer[2]["Retry-After"] == "5"  # it has never been
        assert not server.engine.requests
        error_of(post(server, {**HI, "n": 0}), 400)  # what is wrong with it is told all the same


def without_workers(server: FakeServer, *coming: str, size: int = 128) -> None:
    """No worker is ready; those of these incarnations are on their way, "" is one that was not seen yet."""
    peers = [Peer("detokenizer", "d", "d"), *(Peer("gpu_worker", each, "") for each in coming)]
    core = server.engine.core
    core.peers, core._heard = Peers(1, peers, 16, False, size), core.clock() + 1e6
    core.links["d"] = link = Link("d", "d", "d", 1, False)
    link.ready = True
    server.engine.is_ready = False


@pytest.mark.parametrize("incarnation", ["gpu_worker-1", ""])
def test_a_new_request_waits_in_line_for_a_worker_that_is_on_its_way(incarnation: str) -> None:
    with FakeServer(restart_s=0.1) as server:
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200
        without_workers(server, incarnation)
        error_of(ask(server, "GET", "/health/ready"), 503)  # which goes by what serves
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200  # the fake runs what is in line
        without_workers(server, incarnation, size=0)  # also for a scheduler that has just begun
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200
        without_workers(server)
        assert error_of(ask(server, "POST", "/v1/completions", HI), 503)["message"].startswith("the model is not ready")


def test_a_request_waits_for_no_worker_where_the_launcher_knows_that_none_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROCESSES, str(tmp_path / TOLD))
    with FakeServer(restart_s=0.1) as server:
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200
        without_workers(server, "")
        for left, status in ((False, 200), (True, 503)):
            Restarts().tell(str(tmp_path), {}, {}, left)
            assert ask(server, "POST", "/v1/completions", HI)[0] == status
        without_workers(server, "gpu_worker-of-others")
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200


def test_a_frontend_waits_for_workers_only_where_the_server_has_served() -> None:
    for follows, status in ((False, 503), (True, 200)):
        with FakeServer(restart_s=0.1, follows=follows) as server:
            without_workers(server, "gpu_worker-1", size=0)
            assert ask(server, "POST", "/v1/completions", HI)[0] == status


def test_a_frontend_that_has_just_started_waits_a_little() -> None:
    with FakeServer(restart_s=20.0) as server, ThreadPoolExecutor(1) as pool:
        server.engine.is_ready = False
        answer = pool.submit(ask, server, "POST", "/v1/completions", HI)
        error_of(ask(server, "GET", "/health"), 503)  # health does not wait
        assert not answer.done()
        server.engine.is_ready = True
        server.loop.call_soon_threadsafe(server.engine._changed.set)
        assert answer.result()[0] == 200


def test_a_fault_of_ours_is_a_500_that_tells_nothing(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say]:
        raise ValueError("secret")
        yield

    def refuse(request: OpenGeneration) -> RequestError:
        return RequestError(500, "the model failed.")

    server.engine.refuse = refuse
    assert error_of(post(server, HI), 500)["type"] == "InternalServerError"
    server.engine.refuse = lambda request: None
    server.engine.submit = script  # type: ignore[assignment, method-assign] - anything that raises
    assert "secret" not in error_of(post(server, HI), 500)["message"]
    assert b'http_errors_total{model_name="fake",status="500"} 2.0' in ask(server, "GET", "/metrics")[1]


# ---------------------------------------------------------------- keys


def test_api_key() -> None:
    with FakeServer(api_key="s3cret") as server:
        for path in ("/health", "/ping"):
            assert ask(server, "GET", path)[0] == 200
        for path in ("/v1/models", "/metrics", "/version", "/nope", "/Health", "//health", "/v1/../health"):
            answer = ask(server, "GET", path)
            assert error_of(answer, 401)["type"] == "AuthenticationError"
            assert answer[2]["WWW-Authenticate"] == "Bearer"
        for value in ("Bearer wrong", "Bearer ", "s3cret", "Basic s3cret", "Bearer s3cretx", "Bearer \xff"):
            error_of(ask(server, "GET", "/v1/models", headers={"Authorization": value}), 401)
        right = {"Authorization": "Bearer s3cret"}
        assert ask(server, "GET", "/v1/models", headers=right)[0] == 200
        assert ask(server, "POST", "/v1/completions", HI, right)[0] == 200
        error_of(ask(server, "POST", "/v1/completions", HI), 401)


def test_several_keys_and_whose_a_request_is() -> None:
    with FakeServer(api_key="one, two\nthree") as server:
        for path in ("/health", "/health/live", "/health/ready"):
            assert ask(server, "GET", path)[0] == 200
        for path in ("/health/generate", "/health/nope"):
            error_of(ask(server, "GET", path), 401)
        for key in ("one", "two", "two", "three"):
            assert ask(server, "POST", "/v1/completions", HI, {"Authorization": f"Bearer {key}"})[0] == 200
        for key in ("one, two", "one,", "four"):
            error_of(ask(server, "POST", "/v1/completions", HI, {"Authorization": f"Bearer {key}"}), 401)
        owners = [request.message.key for request in server.engine.requests]
        assert owners[1] == owners[2] and len(set(owners)) == 3 and owners[0] == owner_of("one")
        assert not {"one", "two", "three", ""} & set(owners)
    with FakeServer() as server:
        post(server, {**HI, "user": "me"})
        assert server.engine.requests[0].message.key == ""
    with pytest.raises(ConfigError, match="holds no key"):
        keys_of(" , ")


# ---------------------------------------------------------------- the openai package


def test_openai_client(server: FakeServer) -> None:
    client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1", max_retries=0)
    assert client.models.list().data[0].id == "fake"
    assert client.models.retrieve("alias").id == "alias"
    completion = client.completions.create(model="fake", prompt="a b", max_tokens=2, n=2)
    assert [choice.text for choice in completion.choices] == [" 0.0 0.1", " 1.0 1.1"]
    messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    chat = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=2)
    assert chat.choices[0].message.content == " 0.0 0.1"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 2
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="fake", messages=messages, max_tokens=3, stream=True, stream_options=options
    ):
        usage = chunk.usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == " 0.0 0.1 0.2"
    assert usage is not None
    assert usage.total_tokens == 5
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    server.engine.refuse = lambda request: RequestError(429, "full.", None, 1)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="fake", prompt="a")
