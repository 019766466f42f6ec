"""Streams: order and shape of events, errors half-way, clients that leave or stop reading."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_asks import ask

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.fake import FakeServer, Say
from quire.frontend.metrics import Histogram
from quire.frontend.sse import ChatChunks, CompletionChunks
from quire.proto.messages import Finish

HI = {"prompt": "hi there", "max_tokens": 3, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def connect(server: FakeServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)


def events_of(server: FakeServer, body: Any, path: str = "/v1/completions") -> list[Any]:
    """The decoded events of a stream, without its [DONE], which must be there."""
    connection = connect(server)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.headers.get_content_type() == "text/event-stream"
    blocks = answer.read().decode().split("\n\n")
    connection.close()
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


def texts_of(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


@pytest.mark.parametrize("more", [{}, {"logprobs": 1, "return_token_ids": True}])
def test_an_interval_gathers_tokens(server: FakeServer, more: dict[str, Any]) -> None:
    """The first and the last come at once; nothing is lost between, of none of the choices."""
    body = {**HI, "max_tokens": 12, "n": 2, **more}
    plain, gathered = events_of(server, body), events_of(server, {**body, "stream_interval": 5})
    assert texts_of(gathered) == texts_of(plain)
    for index in range(2):
        mine = [event["choices"][0] for event in gathered if event["choices"][0]["index"] == index]
        assert [len(choice["text"].split()) for choice in mine if choice["text"]] == [1, 5, 5, 1]
        assert mine[-1]["finish_reason"] == "length"
        if more:
            assert sum(len(choice["logprobs"]["tokens"]) for choice in mine if choice["logprobs"]) == 12
            assert sum(len(choice["token_ids"]) for choice in mine if choice.get("token_ids")) == 12


def send_raw(server: FakeServer, body: Any, path: str = "/v1/completions") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


# ---------------------------------------------------------------- shape and order


def test_completion_stream(server: FakeServer) -> None:
    events = events_of(server, HI)
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and event["model"] == "fake" for event in events)
    assert all("usage" not in event for event in events)
    assert texts_of(events) == {0: " 0.0 0.1 0.2"}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]


def test_chat_stream(server: FakeServer) -> None:
    events = events_of(server, CHAT, "/v1/chat/completions")
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
    assert texts_of(events) == {0: " 0.0 0.1"}
    last = events[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({"content": " 0.1"}, "length", None)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", HI), ("/v1/chat/completions", CHAT)])
def test_usage_chunk(server: FakeServer, path: str, body: dict[str, Any]) -> None:
    *events, last = events_of(server, {**body, "stream_options": {"include_usage": True}}, path)
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == body["max_tokens"]
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + body["max_tokens"]


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"return_token_ids": True}, {"logprobs": True, "echo": True}])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", HI), ("/v1/chat/completions", CHAT)])
def test_continuous_usage(server: FakeServer, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = events_of(server, {**body, **more, "stream_options": options}, path)
    counts = [event["usage"]["completion_tokens"] for event in events]
    told = [count for count in counts if count]
    assert counts == [0] * (len(counts) - len(told)) + sorted(set(told))  # each chunk with new tokens has more
    assert counts[-1] == last["usage"]["completion_tokens"] == body["max_tokens"]
    assert last["choices"] == []
    for alone in ({"include_usage": False}, {}):
        options = {**alone, "continuous_usage_stats": True}
        events = events_of(server, {**body, **more, "stream_options": options}, path)
        assert all("usage" not in event for event in events)


def test_prompts_times_n(server: FakeServer) -> None:
    body = {**HI, "prompt": ["a", "b c", "d"], "n": 2, "stream_options": {"include_usage": True}, "echo": True}
    events = events_of(server, body)
    end = {0: " 0.0 0.1 0.2", 1: " 1.0 1.1 1.2"}
    assert texts_of(events) == {
        i: prompt + end[i % 2] for i, prompt in enumerate(["a", "a", "b c", "b c", "d", "d"])
    }  # fmt: skip
    finished = [c["index"] for event in events for c in event["choices"] if c["finish_reason"]]
    assert sorted(finished) == list(range(6))
    assert events[-1]["usage"]["completion_tokens"] == 18
    assert events[-1]["usage"]["prompt_tokens"] == 4


def test_what_is_ready_together_is_one_event(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, "a")
        yield Say(0, "b", tokens=2)
        yield Say(0, "", tokens=1)
        yield 0.01
        yield Say(0, "c", finish=Finish.STOP, stop_reason="x")

    server.engine.script = script
    events = events_of(server, {**HI, "stream_options": {"include_usage": True}})
    assert [c["text"] for event in events for c in event["choices"]] == ["ab", "c"]
    assert events[-2]["choices"][0]["stop_reason"] == "x"
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_text_held_back_makes_no_event(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        for _ in range(3):
            yield Say(0, "")
            yield 0.005
        yield Say(0, 'é\n"\u2028', finish=Finish.STOP)

    server.engine.script = script
    events = events_of(server, HI)
    assert len(events) == 1
    assert texts_of(events) == {0: 'é\n"\u2028'}


def test_http_1_0(server: FakeServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(HI).encode()
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.endswith(b"}\n\ndata: [DONE]\n\n")


def test_a_connection_is_used_again_after_a_stream(server: FakeServer) -> None:
    connection = connect(server)
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps(HI), {"Content-Type": "application/json"})
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()


@pytest.mark.parametrize("kind", [CompletionChunks, ChatChunks])
def test_templates_make_json_whatever_the_text(kind: type[Any]) -> None:
    for model in ("plain", 'qu"ote\\', "ünï%d%b"):
        chunks = kind("id-1", 1, model, True)
        for text in ("", "x", '"\\\n\t\x00', "日本\U0001f600", "%s %b {}"):
            for made in (
                chunks.text(3, text), chunks.final(3, text, "stop", text or None), chunks.opening(3),
                chunks.usage({"a": 1}), chunks.text(3, text, {"a": 1}),
            ):  # fmt: skip
                for block in made.decode().split("\n\n")[:-1]:
                    assert json.loads(block.removeprefix("data: "))["model"] == model


# ---------------------------------------------------------------- failures half-way


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_an_error_half_way_is_an_event(server: FakeServer, prompt: Any) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        yield Say(0, "some")
        yield 0.05
        yield RequestError(500, "the model failed.") if request.message.prompt == "a" else 30.0

    server.engine.script = script
    events = events_of(server, {**HI, "prompt": prompt})
    assert "some" in texts_of(events)[0]
    assert events[-1]["error"]["code"] == 500
    assert events[-1]["error"]["message"] == "the model failed."
    assert not server.engine.open_requests


def test_a_sequence_that_ends_in_error_is_an_event(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, "some")
        yield 0.01
        yield Say(0, "", finish=Finish.ERROR)

    server.engine.script = script
    assert events_of(server, HI)[-1]["error"]["code"] == 500


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_leaves_aborts_its_requests(server: FakeServer, stream: bool, prompt: Any) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, "x")
        yield 30.0

    server.engine.script = script
    count = 3 if isinstance(prompt, list) else 1
    with send_raw(server, {**HI, "prompt": prompt, "stream": stream}) as sock:
        until(lambda: len(server.engine.requests) == count and server.engine.requests[-1].accepted)
        if stream:
            assert b"200 OK" in sock.recv(65536)
    until(lambda: not server.engine.open_requests)
    assert len(server.engine.aborted) == count


def test_a_client_that_leaves_before_acceptance(server: FakeServer) -> None:
    server.engine.script = lambda request: iter([30.0])
    with send_raw(server, HI):
        until(lambda: server.engine.requests)
    until(lambda: not server.engine.open_requests)


DROPPED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "n": 2}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "stream": True}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": "hi", "stream": False}),
    ("/completion", {"prompt": "hi", "n_predict": 4, "stream": True}),
    ("/generate", {"inputs": "hi"}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}),
]


@pytest.mark.parametrize(("path", "body"), DROPPED, ids=lambda each: each if isinstance(each, str) else "")
def test_who_is_gone_is_counted(server: FakeServer, path: str, body: dict[str, Any]) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        for index in range(request.asked.n):
            yield Say(index, " word")
        yield 30.0

    server.engine.script = script
    with send_raw(server, body, path):
        requests = server.engine.requests
        until(lambda: requests and all(request.metrics.first_token_time for request in requests))
    until(lambda: not server.engine.open_requests)

    def told() -> dict[str, float]:
        text = ask(server, "GET", "/metrics")[1].decode()
        text = text.replace('{finished_reason="abort",', "_abort{")
        return {name: float(value) for name, value in re.findall(r"^quire:(\S+?)\{.*\} (\S+)$", text, re.M)}

    until(lambda: told()["request_success_total_abort"] == sum(request.asked.n for request in requests))
    figures = told()
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time", "request_decode_time"):
        assert figures[f"{name}_seconds_count"] == len(requests)
    assert figures["request_generation_tokens_sum"] >= 1 and figures["request_params_n_count"] == len(requests)


def test_a_client_that_resets(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        while True:
            yield Say(0, "x" * 1000)
            yield 0.001

    server.engine.script = script
    sock = send_raw(server, HI)
    sock.recv(100)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    until(lambda: not server.engine.open_requests)


def test_a_client_that_stops_reading_is_cut_off() -> None:
    """Its unread bytes stay bounded while it is waited for, and the others are served."""

    def script(request: OpenGeneration) -> Iterator[Say | float]:
        if request.message.prompt == "fast":
            yield Say(0, "done", finish=Finish.STOP)
            return
        while True:
            yield Say(0, "x" * 50_000)
            yield 0.001

    with FakeServer(script, stall_s=0.3) as server:
        sock = send_raw(server, HI)
        assert b"200 OK" in sock.recv(100)
        assert texts_of(events_of(server, HI | {"prompt": "fast"})) == {0: "done"}
        until(lambda: not server.engine.open_requests)
        assert server.engine.aborted == [server.engine.requests[0].uid]  # while its client was still there
        sock.close()
        assert texts_of(events_of(server, HI | {"prompt": "fast"})) == {0: "done"}


def test_a_slow_reader_gets_everything(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say | float]:
        for step in range(100):
            yield Say(0, f"{step:05d}" * 10_000, finish=Finish.LENGTH if step == 99 else Finish.NONE)
            yield 0.0

    server.engine.script = script
    sock = send_raw(server, HI)
    answer = bytearray()
    while not answer.endswith(b"0\r\n\r\n"):
        time.sleep(0.002)
        answer += sock.recv(100_000)
    sock.close()
    assert answer.count(b"00042") >= 9_990
    assert b"[DONE]" in answer


def test_histogram() -> None:
    histogram = Histogram("x", "y", [1, 2, 5])
    for value in (0.5, 1, 1.5, 7):
        histogram.observe(value)
    histogram.observe(2, times=3)
    samples = {(s.name, s.labels.get("le")): s.value for s in histogram.family("m").samples}
    assert [samples["x_bucket", le] for le in ("1.0", "2.0", "5.0", "+Inf")] == [2, 6, 6, 7]
    assert samples["x_count", None] == 7
    assert samples["x_sum", None] == 16
