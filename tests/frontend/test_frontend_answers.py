"""Logprobs, token ids, echo, best_of and beams in answers: their form, streamed and not, over an engine of scripts."""

from __future__ import annotations

import http.client
import json
import math
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError, TokenLogprobs
from quire.frontend import calls, chat, completions
from quire.frontend.fake import FakeServer, Say, count_words, likely
from quire.proto.messages import Finish

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = {"prompt": "one two three", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.script = count_words
    shared.engine.refuse = lambda request: None
    shared.engine.requests.clear()
    return shared


def post(server: FakeServer, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ask(server: FakeServer, path: str, body: dict[str, Any]) -> Any:
    status, data = post(server, path, body)
    assert status == 200, data
    return json.loads(data)


def events_of(server: FakeServer, path: str, body: dict[str, Any]) -> list[Any]:
    status, data = post(server, path, {**body, "stream": True})
    assert status == 200, data
    *blocks, done, end = data.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def error_of(server: FakeServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, data = post(server, path, body)
    assert status == 400
    return json.loads(data)["error"]


def joined(events: list[Any], index: int) -> dict[str, Any]:
    """One choice of a stream, put together as a client does."""
    whole: dict[str, Any] = {"text": "", "logprobs": None, "token_ids": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice.get("delta", choice)
            whole["text"] += delta.get("text") or delta.get("content") or ""
            whole["token_ids"] += choice.get("token_ids") or []
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                if whole["logprobs"] is None:
                    whole["logprobs"] = {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    whole["logprobs"][name] += values
    return whole


def emoji(request: OpenGeneration) -> Iterator[Say | float]:
    """'aé😀b' in tokens of which two are parts of one character; one of them can hardly be."""
    part = TokenLogprobs([1, 1, 9], [-0.5, -0.5, -math.inf], 1, ["�", "�", "z"], {0: b"\xf0\x9f", 1: b"\xf0\x9f"})
    rest = TokenLogprobs([2, 9, 2], [-math.inf, -0.1, -math.inf], 2, ["�", "y", "�"], {0: b"\x98\x80", 2: b"\x98\x80"})
    yield Say(0, "aé", logprobs=[likely(0, "aé", 2, 0)])
    yield 0.01
    yield Say(0, "", logprobs=[part])
    yield 0.01
    yield Say(0, "😀", logprobs=[rest])
    yield 0.01
    yield Say(0, "b", finish=Finish.STOP, logprobs=[likely(3, "b", 2, 0)])


# ---------------------------------------------------------------- completions


def test_completion_logprobs(server: FakeServer) -> None:
    (choice,) = ask(server, COMPLETIONS, {**HI, "logprobs": 2})["choices"]
    assert choice["text"] == " 0.0 0.1 0.2"
    assert choice["logprobs"] == {
        "text_offset": [0, 4, 8],
        "tokens": [" 0.0", " 0.1", " 0.2"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{f" 0.{i}": -0.5, "?": -0.125} for i in range(3)],
    }
    assert choice["token_ids"] is choice["prompt_logprobs"] is None


def test_the_token_itself_is_there_however_few_are_asked_for(server: FakeServer) -> None:
    (choice,) = ask(server, COMPLETIONS, {**HI, "logprobs": 0})["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{" 0.0": -0.5}, {" 0.1": -0.5}, {" 0.2": -0.5}]
    (choice,) = ask(server, COMPLETIONS, {**HI, "logprobs": 1})["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {" 0.0": -0.5, "?": -0.125}
    (choice,) = ask(server, COMPLETIONS, {**HI, "logprobs": None})["choices"]
    assert choice["logprobs"] is None


def test_parts_of_characters_and_minus_infinity(server: FakeServer) -> None:
    server.engine.script = emoji
    found = ask(server, COMPLETIONS, {**HI, "logprobs": 2})["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 2, 2, 3]
    assert found["tokens"] == ["aé", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "b"]
    assert found["token_logprobs"] == [-0.5, -0.5, -9999.0, -0.5]
    assert found["top_logprobs"][1] == {"bytes:\\xf0\\x9f": -0.5, "z": -9999.0}


def test_echo_puts_the_prompt_first(server: FakeServer) -> None:
    (choice,) = ask(server, COMPLETIONS, {**HI, "logprobs": 1, "echo": True})["choices"]
    assert choice["text"] == "one two three 0.0 0.1 0.2"
    found = choice["logprobs"]
    assert found["tokens"] == ["one", " two", " three", " 0.0", " 0.1", " 0.2"]
    assert found["text_offset"] == [0, 3, 7, 13, 17, 21]
    assert [choice["text"][a:][: len(t)] for a, t in zip(found["text_offset"], found["tokens"], strict=True)] == (
        found["tokens"]
    )
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {" two": -0.5, "?": -0.125}
    assert choice["prompt_logprobs"] is None
    assert server.engine.requests[0].work.params.prompt_logprobs == 1


def test_the_prompt_alone(server: FakeServer) -> None:
    body = {**HI, "logprobs": 1, "echo": True, "max_tokens": 0, "n": 2, "return_token_ids": True}
    answer = ask(server, COMPLETIONS, body)
    for choice in answer["choices"]:
        assert choice["text"] == "one two three"
        assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 3)
    events = events_of(server, COMPLETIONS, body)
    for index in range(2):
        whole = joined(events, index)
        assert whole["text"] == "one two three"
        assert whole["logprobs"] == answer["choices"][index]["logprobs"]
        assert whole["finish_reason"] == "length"
    plain = {**HI, "echo": True, "max_tokens": 0}
    assert ask(server, COMPLETIONS, plain)["choices"][0]["text"] == "one two three"
    assert joined(events_of(server, COMPLETIONS, plain), 0)["text"] == "one two three"


def test_prompt_logprobs_of_completions(server: FakeServer) -> None:
    answer = ask(server, COMPLETIONS, {**HI, "prompt": ["one two", "three"], "prompt_logprobs": 1, "n": 2})
    for choice in answer["choices"][:2]:
        assert choice["prompt_logprobs"] == [
            None,
            {
                "1": {"logprob": -0.5, "rank": 2, "decoded_token": " two"},
                "1001": {"logprob": -0.125, "rank": 1, "decoded_token": "?"},
            },
        ]
        assert choice["logprobs"] is None
    assert answer["choices"][2]["prompt_logprobs"] == [None]


# ---------------------------------------------------------------- chats


def test_chat_logprobs(server: FakeServer) -> None:
    server.engine.script = emoji
    (choice,) = ask(server, CHATS, {**CHAT, "logprobs": True, "top_logprobs": 1})["choices"]
    assert choice["message"]["content"] == "aé😀b"
    assert choice["logprobs"]["content"][:3] == [
        {
            "token": "aé", "logprob": -0.5, "bytes": [97, 0xC3, 0xA9],
            "top_logprobs": [{"token": "?", "logprob": -0.125, "bytes": [63]}],
        },
        {
            "token": "�", "logprob": -0.5, "bytes": [0xF0, 0x9F],
            "top_logprobs": [{"token": "�", "logprob": -0.5, "bytes": [0xF0, 0x9F]}],
        },
        {
            "token": "�", "logprob": -9999.0, "bytes": [0x98, 0x80],
            "top_logprobs": [{"token": "y", "logprob": -0.1, "bytes": [121]}],
        },
    ]  # fmt: skip
    whole = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert whole.decode() == choice["message"]["content"]


def test_chat_logprobs_alone_and_all(server: FakeServer) -> None:
    (choice,) = ask(server, CHATS, {**CHAT, "logprobs": True})["choices"]
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[], [], []]
    (choice,) = ask(server, CHATS, {**CHAT, "logprobs": True, "top_logprobs": 4})["choices"]
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [4, 4, 4]
    assert ask(server, CHATS, {**CHAT, "logprobs": False})["choices"][0]["logprobs"] is None


def test_prompt_logprobs_and_ids_of_chats(server: FakeServer) -> None:
    answer = ask(server, CHATS, {**CHAT, "prompt_logprobs": 0, "return_token_ids": True, "n": 2})
    assert answer["prompt_logprobs"] == [None, {"1": {"logprob": -0.5, "rank": 2, "decoded_token": " two"}}]
    assert answer["prompt_token_ids"] == [0, 1]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[0, 1, 2]] * 2
    assert all("prompt_token_ids" not in choice for choice in answer["choices"])
    events = events_of(server, CHATS, {**CHAT, "return_token_ids": True, "n": 2})
    assert [event.get("prompt_token_ids") for event in events] == [[0, 1], *[None] * (len(events) - 1)]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [joined(events, index)["token_ids"] for index in range(2)] == [[0, 1, 2]] * 2


# ---------------------------------------------------------------- token ids


def test_token_ids_of_completions(server: FakeServer) -> None:
    body = {**HI, "prompt": [[5, 6], [7]], "return_token_ids": True, "n": 2}
    choices = ask(server, COMPLETIONS, body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6], [5, 6], [7], [7]]
    assert all(choice["token_ids"] == [0, 1, 2] and choice["logprobs"] is None for choice in choices)
    events = events_of(server, COMPLETIONS, body)
    for index in range(4):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [[5, 6] if index < 2 else [7]] + [None] * (
            len(own) - 1
        )
        assert joined(events, index)["token_ids"] == [0, 1, 2]


def test_ids_in_place_of_texts(server: FakeServer) -> None:
    own = {"return_tokens_as_token_ids": True}
    found = ask(server, COMPLETIONS, {**HI, "logprobs": 1, "echo": True, **own})["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:0", "token_id:1", "token_id:2", "token_id:0", "token_id:1", "token_id:2"]
    assert found["top_logprobs"][1] == {"token_id:1": -0.5, "token_id:1001": -0.125}
    assert found["text_offset"] == [0, 3, 7, 13, 17, 21]
    (choice,) = ask(server, CHATS, {**CHAT, "logprobs": True, "top_logprobs": 1, **own})["choices"]
    assert choice["logprobs"]["content"][0] == {
        "token": "token_id:0", "logprob": -0.5, "bytes": list(b" 0.0"),
        "top_logprobs": [{"token": "token_id:1000", "logprob": -0.125, "bytes": [63]}],
    }  # fmt: skip
    assert ask(server, COMPLETIONS, {**HI, **own})["choices"][0]["logprobs"] is None


def test_where_nothing_is_detokenized(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say]:
        yield Say(0, "", logprobs=[TokenLogprobs([0, 9], [-1.0, -0.5], 2, [], {})], finish=Finish.LENGTH)

    server.engine.script = script
    body = {"detokenize": False, "logprobs": 1, "prompt": "x", "max_tokens": 1}
    found = ask(server, COMPLETIONS, body)["choices"][0]["logprobs"]
    assert found == {
        "text_offset": [0], "token_logprobs": [-1.0], "tokens": ["token_id:0"],
        "top_logprobs": [{"token_id:0": -1.0, "token_id:9": -0.5}],
    }  # fmt: skip
    (choice,) = ask(server, CHATS, {**CHAT, "detokenize": False, "logprobs": True})["choices"]
    entry = {"token": "token_id:0", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    assert choice["logprobs"] == {"content": [entry]}


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_prompt_without_a_text_is_echoed_by_its_logprobs(server: FakeServer, max_tokens: int) -> None:
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "return_token_ids": True}
    (choice,) = ask(server, COMPLETIONS, body)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5", " 6", " 7", " 0.0", " 0.1"][: 3 + max_tokens]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (2 + max_tokens)]
    streamed = joined(events_of(server, COMPLETIONS, body), 0)
    assert (streamed["logprobs"], streamed["token_ids"]) == (choice["logprobs"], choice["token_ids"])
    assert streamed["text"] == choice["text"] == " 0.0 0.1"[: 4 * max_tokens]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("script", [None, emoji])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {**HI, "logprobs": 2}),
                                            (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2})])  # fmt: skip
def test_streamed_logprobs_are_the_same(
    server: FakeServer, path: str, body: dict[str, Any], script: Any, echo: bool
) -> None:
    if script is not None:
        server.engine.script = script
    else:
        body = {**body, "n": 2}
    body = {**body, "return_token_ids": True, "echo": echo}
    choices = ask(server, path, body)["choices"]
    events = events_of(server, path, {**body, "stream_options": {"include_usage": True}})
    for choice in choices:
        whole = joined(events, choice["index"])
        assert whole["text"] == choice.get("text", choice.get("message", {}).get("content"))
        assert whole["logprobs"] == choice["logprobs"]
        assert whole["token_ids"] == choice["token_ids"]
        assert whole["finish_reason"] == choice["finish_reason"]
    for event in events:  # a chunk has the logprobs of exactly its tokens
        for part in event["choices"]:
            if "token_ids" in part and not (echo and "prompt_token_ids" in part):
                logprobs = part["logprobs"] or {"content": []}  # a chat's echo has none
                assert len(logprobs.get("content", logprobs.get("tokens"))) == len(part["token_ids"])
            elif path == COMPLETIONS:  # who reads these fields of every chunk finds them
                assert part["logprobs"]["tokens"] and part["token_ids"] == []
    assert events[-1]["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)


def test_what_was_not_asked_for_is_not_there(server: FakeServer) -> None:
    for path, body in ((COMPLETIONS, HI), (CHATS, CHAT)):
        for event in events_of(server, path, {**body, "logprobs": None}):
            assert "prompt_token_ids" not in event
            assert all(part["logprobs"] is None and "token_ids" not in part for part in event["choices"])
        answer = ask(server, path, body)
        own = {**answer, **answer["choices"][0]}
        assert [own[name] for name in ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 4


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {**HI, "logprobs": 1}), (CHATS, {**CHAT, "logprobs": True})])
def test_a_long_answer_keeps_nobody_waiting(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    module = completions if path == COMPLETIONS else chat
    begun, others, real = threading.Event(), threading.Event(), module._choice

    def choice(*given: Any) -> dict[str, Any]:
        begun.set()
        assert others.wait(30), "nobody else was answered"
        return real(*given)

    monkeypatch.setattr(calls, "LARGE", 1)
    monkeypatch.setattr(module, "_choice", choice)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, path, body)
        assert begun.wait(30)
        with urllib.request.urlopen(server.url + "/health/live", timeout=60):
            others.set()
        assert asked.result()["choices"][0]["logprobs"] is not None


def test_continuous_usage_with_logprobs(server: FakeServer) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "logprobs": 1}
    events = events_of(server, COMPLETIONS, {**HI, **options})
    assert [event["usage"]["completion_tokens"] for event in events][-2:] == [3, 3]


# ---------------------------------------------------------------- best_of, beams


def test_best_of_returns_the_likeliest(server: FakeServer) -> None:
    answer = ask(server, COMPLETIONS, {**HI, "n": 2, "best_of": 4})
    assert [choice["text"] for choice in answer["choices"]] == [" 3.0 3.1 3.2", " 2.0 2.1 2.2"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert server.engine.requests[0].work.params.n == 4
    answer = ask(server, CHATS, {**CHAT, "best_of": 3, "logprobs": True})
    assert answer["choices"][0]["message"]["content"] == " 2.0 2.1 2.2"
    assert [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]] == [-0.25] * 3
    error = error_of(server, COMPLETIONS, {**HI, "prompt": ["a"] * 2048, "best_of": 9})
    assert error["param"] == "best_of"


def test_beam_search_reaches_the_engine_whole(server: FakeServer) -> None:
    answer = ask(server, COMPLETIONS, {**HI, "use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5})
    assert len(answer["choices"]) == 2
    params = server.engine.requests[0].work.params
    assert (params.use_beam_search, params.n, params.width, params.length_penalty) == (True, 2, 4, 0.5)
    assert params.temperature == 0
    error = error_of(server, CHATS, {**CHAT, "use_beam_search": True, "n": 2, "stream": True})
    assert "Streaming is not currently supported with beam search" in error["message"]


def test_what_requests_ask_for_is_measured() -> None:
    with FakeServer() as server:
        ask(server, COMPLETIONS, {**HI, "n": 2, "best_of": 4})
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, value in (("params_n", 2), ("params_best_of", 4), ("params_max_tokens", 3),
                        ("max_num_generation_tokens", 3)):  # fmt: skip
        assert float(values[f'quire:request_{name}_sum{{model_name="fake"}}']) == value
        assert float(values[f'quire:request_{name}_count{{model_name="fake"}}']) == 1


# ---------------------------------------------------------------- errors from further in


@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_requests_own_field(server: FakeServer, stream: bool) -> None:
    said = "structured_outputs.json is no JSON schema."
    server.engine.refuse = lambda request: RequestError(400, said, "structured_outputs")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error = error_of(server, CHATS, {**CHAT, "response_format": form, "stream": stream})
    assert (error["param"], error["message"]) == ("response_format", "response_format is no JSON schema.")
    error = error_of(server, COMPLETIONS, {**HI, "guided_json": {}, "stream": stream})
    assert (error["param"], error["message"]) == ("guided_json", "guided_json is no JSON schema.")
    said = "Requested sample logprobs of 30, which is greater than max allowed: 20"
    server.engine.refuse = lambda request: RequestError(400, said, "logprobs")
    error = error_of(server, CHATS, {**CHAT, "logprobs": True, "top_logprobs": 30, "stream": stream})
    assert error["param"] == "top_logprobs"
    server.engine.refuse = lambda request: RequestError(400, "max_tokens=9999 is too much.", "max_tokens")
    error = error_of(server, CHATS, {**CHAT, "max_completion_tokens": 9999, "stream": stream})
    assert (error["param"], error["message"]) == ("max_completion_tokens", "max_completion_tokens=9999 is too much.")


def test_a_schema_that_cannot_be_sent(server: FakeServer) -> None:
    for fields in ({"guided_json": {"maximum": 10**30}}, {"structured_outputs": {"json": {"maximum": 10**30}}}):
        error = error_of(server, COMPLETIONS, {**HI, **fields})
        assert error["param"] == next(iter(fields))


# ---------------------------------------------------------------- the openai package


def test_the_openai_package_reads_it(server: FakeServer) -> None:
    server.engine.script = emoji
    client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1", max_retries=0)
    messages: Any = CHAT["messages"]
    chat = client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=2)
    found = chat.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [entry.token for entry in found.content] == ["aé", "�", "�", "b"]
    assert found.content[0].top_logprobs[0].bytes == [63]
    tokens = []
    for chunk in client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=2, stream=True
    ):
        logprobs = chunk.choices[0].logprobs
        tokens += logprobs.content or [] if logprobs is not None else []
    assert tokens == found.content
    completion = client.completions.create(model="fake", prompt="one two", logprobs=2, echo=True)
    legacy = completion.choices[0].logprobs
    assert legacy is not None
    assert legacy.text_offset == [0, 3, 7, 9, 9, 10]
    assert legacy.token_logprobs is not None
    assert legacy.token_logprobs[1] == -0.5
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model="fake", prompt="one two", logprobs=2, echo=True, stream=True)
    ]
    assert [token for part in parts if part is not None for token in part.tokens or []] == legacy.tokens
    raw: Any = {"return_token_ids": True, "prompt_logprobs": 1, "guided_regex": "a+", "repetition_penalty": 1.2}
    extra = client.completions.create(model="fake", prompt="one two", extra_body=raw).choices[0]
    assert extra.model_extra is not None
    assert extra.model_extra["token_ids"] == [0, 1, 2, 3]
    assert len(extra.model_extra["prompt_logprobs"]) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=messages, top_logprobs=2)
    assert caught.value.param == "top_logprobs"
