"""What the flags of a server say of how it is reached, what its answers hold, and what its log says."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import certificates
import pytest
from http_asks import CHAT, HI, ask, ask_bytes, error_of, post

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend import calls
from quire.frontend.fake import FakeServer, Say
from quire.frontend.log import LogSettings, Refusals
from quire.frontend.main import settings_of
from quire.frontend.plugins import load_middlewares
from quire.frontend.tls import context_of
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.listening import listen_unix
from quire.proto.messages import Finish

EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)


def events(data: bytes) -> list[Any]:
    """The JSON of a stream's events."""
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------- how it is reached


class Unix(http.client.HTTPConnection):
    def __init__(self, path: str):
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "quire.sock")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()  # what a killed server leaves
    with FakeServer(uds=path) as server:
        assert server.url == f"unix:{path}"
        connection = Unix(path)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises(ConfigError, match="somebody listens at --uds"):
            listen_unix(path)
    with pytest.raises(ConfigError, match=r"cannot listen at --uds .*: No such file"):
        listen_unix(str(tmp_path / "none" / "quire.sock"))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError):
        listen_unix(str(tmp_path / "file" / "x"))


def secure(server: FakeServer, certificate: Path | None = None) -> bytes:
    """The server's certificate, having asked it something."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate)
    connection = http.client.HTTPSConnection(server.url.removeprefix("https://"), timeout=20, context=context)
    connection.request(
        "POST", "/v1/completions", json.dumps({**HI, "stream": True}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read().endswith(b"data: [DONE]\n\n")
    found = connection.sock.getpeercert(binary_form=True)
    connection.close()
    return found


def test_https_and_a_certificate_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "own.pem"
    path.write_text(certificates.ONE)
    one, two = (ssl.PEM_cert_to_DER_cert(text.partition("-----BEGIN P")[0]) for text in
                (certificates.ONE, certificates.TWO))  # fmt: skip
    args = EngineArgs(ssl_certfile=str(path), enable_ssl_refresh=True)
    with FakeServer(tls=context_of(args)) as server:
        assert server.url.startswith("https://") and secure(server) == one
        path.write_text("nothing yet")
        assert secure(server) == one  # half written
        path.unlink()
        path.write_text(certificates.TWO)
        assert secure(server) == two == secure(server)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            http.client.HTTPConnection(server.url.removeprefix("https://"), timeout=20).request("GET", "/health")
            raise ConnectionError  # the request was written; its answer is none
    path.write_text(certificates.ONE)
    with FakeServer(tls=context_of(EngineArgs(ssl_certfile=str(path)))) as server:
        path.write_text(certificates.TWO)
        assert secure(server) == one  # nobody asked for the new one


def test_certificates_of_clients(tmp_path: Path) -> None:
    own, other = tmp_path / "own.pem", tmp_path / "other.pem"
    own.write_text(certificates.ONE)
    other.write_text(certificates.TWO)
    args = EngineArgs(ssl_certfile=str(own), ssl_ca_certs=str(other), ssl_cert_reqs=2)
    with FakeServer(tls=context_of(args)) as server:
        assert secure(server, other)
        for wrong in (None, own):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
                secure(server, wrong)
    for broken in (EngineArgs(ssl_certfile=str(tmp_path / "no")), EngineArgs(ssl_certfile=str(own), ssl_ciphers="x"),
                   EngineArgs(ssl_certfile=str(own), ssl_keyfile=str(other))):  # fmt: skip
        with pytest.raises(ConfigError, match="HTTPS cannot be set up of "):
            context_of(broken)


def test_routes_below_a_root_path() -> None:
    with FakeServer(root_path="/llm", api_key="k") as server:
        key = {"Authorization": "Bearer k"}
        for path in ("/v1/models", "/llm/v1/models"):
            assert ask(server, "GET", path, headers=key)[0] == 200
            error_of(ask(server, "GET", path), 401)
        assert ask(server, "GET", "/llm/health")[0] == ask(server, "GET", "/llm/health?x=1")[0] == 200
        assert post(server, HI, "/llm/v1/completions", **key)[0] == 200
        for path in ("/llmx/v1/models", "/llm/llm/v1/models", "/llm//v1/models"):
            assert ask(server, "GET", path, headers=key)[0] in (404, 405), path


TWICE = """
seen = []
async def first(request, handler):
    seen.append(request.path)
    answer = await handler(request)
    answer.headers["X-First"] = "1"
    return answer
class Second:
    async def __call__(self, request, handler):
        from aiohttp import web
        return web.Response(text="mine") if request.path == "/mine" else await handler(request)
def plain(request, handler): ...
"""


def test_middlewares_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules_of_flags.py").write_text(TWICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_middlewares(["my_rules_of_flags.first", "my_rules_of_flags:Second"])
    with FakeServer(middlewares=loaded) as server:
        answer = ask(server, "GET", "/v1/models")
        assert answer[0] == 200 and answer[2]["X-First"] == "1"
        assert ask_bytes(server, "GET", "/mine")[1] == b"mine"
    assert sys.modules["my_rules_of_flags"].seen == ["/v1/models", "/mine"]
    for name in ("my_rules_of_flags.none", "no_such_module_at_all.x", "my_rules_of_flags.plain", "x"):
        with pytest.raises(ConfigError, match=f"--middleware {name} "):
            load_middlewares([name])
    monkeypatch.delitem(sys.modules, "my_rules_of_flags")


# ---------------------------------------------------------------- what answers hold


def test_ids_in_headers() -> None:
    with FakeServer(id_headers=True) as server:
        assert ask(server, "GET", "/v1/nope", headers={"X-Request-Id": "mine-1"})[2]["X-Request-Id"] == "mine-1"
        _, body, headers = ask(server, "POST", "/v1/completions", HI)
        assert len(headers["X-Request-Id"]) == 32 and body["id"] == f"cmpl-{headers['X-Request-Id']}"
        _, data, headers = ask_bytes(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True,
                                     "request_id": "r"}, {"X-Request-Id": "a\tb"})  # fmt: skip
        assert headers["X-Request-Id"] == "r" and events(data)[0]["id"] == "chatcmpl-r"
    with FakeServer() as server:
        assert "X-Request-Id" not in ask(server, "POST", "/v1/completions", HI)[2]


def test_usage_the_role_and_names_of_tokens() -> None:
    with FakeServer(force_usage=True, usage_details=False, role="helper", names_are_ids=True) as server:
        for extra in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            told = events(ask_bytes(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True, **extra})[1])
            assert [each["usage"]["completion_tokens"] for each in told] == [0, 1, 2, 3, 3] and told[-1][
                "choices"
            ] == []
            assert told[0]["choices"][0]["delta"]["role"] == "helper"
        body = post(server, {**CHAT, "logprobs": True}, "/v1/chat/completions")[1]
        assert body["choices"][0]["message"]["role"] == "helper" and "prompt_tokens_details" not in body["usage"]
        assert body["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
        asked = {**CHAT, "logprobs": True, "return_tokens_as_token_ids": False}
        body = post(server, asked, "/v1/chat/completions")[1]
        assert not body["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
        said = {"messages": [*CHAT["messages"], {"role": "bot", "content": "I"}], "max_tokens": 3,
                "add_generation_prompt": False, "continue_final_message": True}  # fmt: skip
        assert post(server, said, "/v1/chat/completions")[1]["choices"][0]["message"]["role"] == "bot"
    with FakeServer() as server:
        body = post(server, CHAT, "/v1/chat/completions")[1]
        assert body["choices"][0]["message"]["role"] == "assistant" and "prompt_tokens_details" in body["usage"]
        told = events(ask_bytes(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True})[1])
        assert told[0]["choices"][0]["delta"]["role"] == "assistant" and told[-1]["choices"]


def test_chunks_may_be_of_several_tokens() -> None:
    with FakeServer(stream_interval=3) as server:
        for extra, chunks in (({}, 3), ({"stream_interval": 1}, 7)):
            asked = {**HI, "max_tokens": 7, "stream": True, **extra}
            assert len(events(ask_bytes(server, "POST", "/v1/completions", asked)[1])) == chunks


def test_defaults_of_templates_and_of_forms() -> None:
    with FakeServer(chat_kwargs={"a": 1, "b": 2}, structured={"disable_any_whitespace": True}) as server:
        post(server, {**CHAT, "chat_template_kwargs": {"b": 3}}, "/v1/chat/completions")
        post(server, CHAT, "/v1/chat/completions")
        templates = [request.message.template["chat_template_kwargs"] for request in server.engine.requests]
        assert templates == [{"a": 1, "b": 3}, {"a": 1, "b": 2}]
        post(server, {**HI, "guided_json": {"type": "object"}})
        post(server, {**HI, "guided_json": {"type": "object"}, "guided_whitespace_pattern": " "})
        post(server, HI)
        forms = [request.work.params.structured_outputs for request in server.engine.requests[2:]]
        assert [form and form.disable_any_whitespace for form in forms] == [True, False, None]


def test_a_silent_stream_is_kept_alive() -> None:
    def slow(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        yield Say(0, " a")
        yield 0.12
        yield Say(0, " b", finish=Finish.STOP)

    with FakeServer(script=slow, keep_alive_s=0.02) as server:
        data = ask_bytes(server, "POST", "/v1/completions", {**HI, "stream": True})[1]
        between = data.split(b'" a"')[1].split(b'" b"')[0]
        assert 1 <= between.count(b"\n\n: keep-alive\n\n") <= 15
        assert "".join(event["choices"][0]["text"] for event in events(data)) == " a b"
        assert b": keep-alive" not in data.split(b"[DONE]")[1]
        assert post(server, HI)[1]["choices"][0]["text"] == " a b"  # JSON has no comments
    with FakeServer(script=slow) as server:
        assert b"keep-alive" not in ask_bytes(server, "POST", "/v1/completions", {**HI, "stream": True})[1]


def test_a_stream_that_waits_in_line_has_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is busy for long is no reason for a proxy to give the next request up."""
    monkeypatch.setattr(calls, "WAITING_S", 0.02)
    free = threading.Event()

    def waits(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        while not free.is_set():
            yield 0.01
        yield Say(0, " a", finish=Finish.STOP)

    with FakeServer(script=waits, keep_alive_s=0.02) as server:
        for path, body in (("/v1/completions", HI), ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT)):
            free.clear()
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
            asked = json.dumps({"max_tokens": 3, **body, "stream": True})
            connection.request("POST", path, asked, {"Content-Type": "application/json"})
            answer = connection.getresponse()  # which waits for the headers
            assert answer.status == 200 and answer.readline() == b": keep-alive\n"
            free.set()
            assert b" a" in answer.read()
            connection.close()


def test_what_is_refused_late_is_told_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WAITING_S", 0.01)

    def fails(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        yield 0.2
        yield RequestError(503, "nobody can run it.")

    with FakeServer(script=fails) as server:
        status, data, _ = ask_bytes(server, "POST", "/v1/completions", {**HI, "stream": True})
        assert status == 200 and events(data)[0]["error"]["code"] == 503
        assert post(server, HI)[0] == 503  # one body has its status to the end


def test_a_stream_that_ends_as_it_is_opened_has_one_status() -> None:
    """What failed in the turn in which its stream was to be opened was answered with a 200 and its own status."""
    opened: list[str] = []

    class Held:
        opened = False

        async def open(self) -> None:
            opened.append("yes")

    async def turn() -> None:
        early = calls._EarlyOpening(Held(), [])  # type: ignore[arg-type]
        early._look()
        await early.close()

    asyncio.run(turn())
    assert not opened


def test_load_counts_what_is_open() -> None:
    begun: list[OpenGeneration] = []

    def silent(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        begun.append(request)
        yield Say(0, " a")
        yield 60.0

    for counts in (True, False):
        with FakeServer(script=silent, count_load=counts) as server:
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
            body = json.dumps({**HI, "stream": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert ask(server, "GET", "/load")[1] == {"server_load": int(counts)}
            answer.close()
            connection.close()
            until(lambda server=server: ask(server, "GET", "/load")[1] == {"server_load": 0})


def until(condition: Callable[[], Any]) -> None:
    """Wait for what the server's thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


# ---------------------------------------------------------------- the log


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("frontend.log")
            and record.levelno == level]  # fmt: skip


def test_requests_are_logged_from_start_to_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeServer(log=LogSettings(requests=True, outputs=True, most=8)) as server:
        post(server, {**HI, "request_id": "r1", "prompt": "a\x1bb and much more"})
        ask_bytes(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True}, {"X-Request-Id": "r2"})
    one = [line for line in lines(caplog) if "r1" in line]
    assert one[0].startswith("Received request r1: params: SamplingParams(")
    assert re.search(r"lora_request: None, runs as: [0-9a-f]+-1$", one[0])
    assert one[1].startswith(
        "Finished request r1: /v1/completions, reason: length, prompt tokens: 4, output tokens: 3,"
    )
    assert one[2] == "Request r1: output:  0.0 0.1"
    two = [line for line in lines(caplog) if "r2" in line]
    assert len(two) == 3 and "Finished request r2: /v1/chat/completions, reason: length" in two[1]
    told = lines(caplog, logging.DEBUG)
    assert "Request r1: prompt: a\\x1bb and " in told
    assert any(line.startswith("Request r1: output token ids: [") for line in told)


def test_prompts_stay_out_of_the_log_unless_it_is_debugged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with FakeServer(log=LogSettings(requests=True)) as server:
        post(server, {**HI, "prompt": "a secret"})
        error_of((*post(server, {**HI, "n": 0}), None), 400)
        assert post(server, {**HI, "stop": ["x" * 90] * 60})[0] == 200
        post(server, {"input": "a"}, "/v1/embeddings")
    with FakeServer(log=LogSettings(requests=True), pooler=EMBED) as server:
        assert post(server, {"input": "a secret", "request_id": "p"}, "/v1/embeddings")[0] == 200
    assert not any("secret" in line or "output: " in line for line in lines(caplog))
    assert max(map(len, lines(caplog))) < 4200
    told = [" ".join(line.split(" ")[:3]) for line in lines(caplog) if "refused" not in line]
    assert [word.partition(" request")[0] for word in told] == ["Received", "Finished"] * 3
    assert told[4:] == ["Received request p:", "Finished request p:"]


def test_nothing_is_logged_of_requests_unasked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeServer() as server:
        post(server, HI)
        ask(server, "GET", "/health")
    assert lines(caplog) == lines(caplog, logging.DEBUG) == []


def test_each_answer_may_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with FakeServer(log=LogSettings(access=True, silent=frozenset(["/health"]))) as server:
        ask(server, "GET", "/health")
        ask(server, "GET", "/v1/models?a=%0Ab")
        post(server, HI)
    assert [line.partition(" - ")[2] for line in lines(caplog)] == [
        '"GET /v1/models?a=%0Ab HTTP/1.1" 200', '"POST /v1/completions HTTP/1.1" 200',
    ]  # fmt: skip


def test_refusals_have_a_line_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with FakeServer(api_key="the-key") as server:
        ask(server, "GET", "/v1/models", headers={"Authorization": "Bearer a-wrong-key"})
        key = {"Authorization": "Bearer the-key"}
        post(server, {**HI, "temperature": "hot\x1b[2J"}, **key)
        server.engine.refuse = lambda request: RequestError(429, "the queue is full.", retry_after=1)
        post(server, HI, **key)
        server.engine.is_ready = False
        ask(server, "GET", "/health")  # asked all the time
    found = lines(caplog)
    assert [line.partition(":")[0] for line in found] == [
        "refused GET /v1/models of 127.0.0.1 with 401", "refused POST /v1/completions of 127.0.0.1 with 400",
        "refused POST /v1/completions of 127.0.0.1 with 429",
    ]  # fmt: skip
    assert "the queue is full." in found[2] and "temperature" in found[1]
    assert all(line.isprintable() and "a-wrong-key" not in line for line in found)


def test_a_failure_within_a_stream_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: OpenGeneration) -> Iterator[Say | RequestError | float]:
        yield Say(0, " a")
        yield 0.01
        yield RequestError(503, "the worker is gone.")

    caplog.set_level(logging.INFO)
    with FakeServer(script=broken) as server:
        assert b"the worker is gone" in ask_bytes(server, "POST", "/v1/completions", {**HI, "stream": True})[1]
    assert lines(caplog) == [
        "refused POST /v1/completions of 127.0.0.1 with 503: the worker is gone. (told in its stream)"
    ]


def test_many_refusals_have_one_line_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = [100.0]
    monkeypatch.setattr("quire.frontend.log.time.monotonic", lambda: now[0])
    refusals, request = Refusals(), Asked()
    for status in (400, 400, 401, 400):
        refusals.note(request, status, "why")
    now[0] += 1.0
    refusals.note(request, 400, "again")
    assert [line.rpartition(" with ")[2] for line in lines(caplog)] == [
        "400: why", "401: why", "400: again (2 more since the last such line)",
    ]  # fmt: skip


class Asked(dict[Any, Any]):
    """As much of a request as a line of a refusal needs."""

    method, path, remote = "POST", "/v1/x", None
    headers: ClassVar[dict[str, str]] = {}


def test_flags_become_settings() -> None:
    args = EngineArgs(
        enable_log_requests=True, max_log_len=5, response_role="r", return_tokens_as_token_ids=True, root_path="/x",
        enable_prompt_tokens_details=False, enable_force_include_usage=True, enable_request_id_headers=True,
        enable_server_load_tracking=True, default_chat_template_kwargs={"a": 1}, sse_keep_alive_interval=3,
        structured_outputs_config={"disable_any_whitespace": True}, disable_uvicorn_access_log=False,
        disable_access_log_for_endpoints="/health, /metrics", enable_log_outputs=True,
    ).check()  # fmt: skip
    settings = settings_of(args)
    assert settings.log == LogSettings(True, True, 5, True, frozenset(["/health", "/metrics"]))
    assert (settings.role, settings.names_are_ids, settings.usage_details, settings.force_usage) == (
        "r",
        True,
        False,
        True,
    )
    assert (settings.id_headers, settings.count_load, settings.chat_kwargs) == (True, True, {"a": 1})
    assert (settings.structured, settings.keep_alive_s, settings.root_path) == (
        {"disable_any_whitespace": True},
        3,
        "/x",
    )
