"""vLLM's small routes over an engine of scripts: ids in and ids out, cancelling, the server's configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_asks import ask, error_of, post

from quire import __version__
from quire.client.generation import OpenGeneration
from quire.frontend.fake import FakeServer, Say, count_words
from quire.frontend.main import settings_of
from quire.frontend.token_ids import SamplingFields
from quire.proto.codec import from_i32
from quire.proto.config import EngineArgs
from quire.proto.params import SamplingParams

GENERATE = "/inference/v1/generate"
IDS: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(admin_api_key="boss", config={"port": 8000, "model": "m"}) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    shared.engine.aborted.clear()
    shared.engine.script = count_words
    return shared


def ok(answer: tuple[Any, ...]) -> Any:
    """The body of a 200."""
    assert answer[0] == 200, answer
    return answer[1]


def generated(server: FakeServer) -> OpenGeneration:
    (request,) = server.engine.requests
    assert isinstance(request, OpenGeneration)
    return request


# ---------------------------------------------------------------- ids in, ids out


def test_ids_in_ids_out(server: FakeServer) -> None:
    status, body = post(server, {**IDS, "request_id": "mine"}, GENERATE)
    assert status == 200 and body["request_id"] == "generate-tokens-mine" and body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [0, 1, 2],
    }
    assert body["usage"]["total_tokens"] == 6 and body["prompt_logprobs"] is None
    request = generated(server)
    assert from_i32(request.message.ids or b"") == [5, 6, 7] and request.asked.detokenize is False


def test_the_context_is_the_limit_where_none_is_given(server: FakeServer) -> None:
    post(server, {"token_ids": [5], "sampling_params": {"stop": ["x"], "n": 2, "temperature": 0.5}}, GENERATE)
    asked = generated(server).asked
    assert (asked.max_tokens, asked.n, asked.temperature, asked.detokenize) == (None, 2, 0.5, True)


def test_logprobs_name_tokens_by_their_ids(server: FakeServer) -> None:
    more = {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1}
    body = post(server, {**IDS, "sampling_params": more}, GENERATE)[1]
    assert [each["token"] for each in body["choices"][0]["logprobs"]["content"]] == ["token_id:0", "token_id:1"]
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == 3


def test_no_alternatives_are_the_token_itself(server: FakeServer) -> None:
    body = post(server, {**IDS, "sampling_params": {"max_tokens": 2, "logprobs": 0}}, GENERATE)[1]
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert [each["token"] for each in entry["top_logprobs"]] == [entry["token"]]
    text = post(server, {**IDS, "sampling_params": {"logprobs": 0}, "stream": True}, GENERATE)[1]
    chunks = [json.loads(block.removeprefix("data: ")) for block in text.decode().split("\n\n")[:-2]]
    assert len(chunks) == 5
    assert all(len(e["top_logprobs"]) == 1 for c in chunks for e in c["choices"][0]["logprobs"]["content"])


def test_ids_are_streamed(server: FakeServer) -> None:
    status, body = post(server, {**IDS, "stream": True, "stream_options": {"include_usage": True}}, GENERATE)
    *chunks, usage, done = [block.removeprefix("data: ") for block in body.decode().split("\n\n")[:-1]]
    assert status == 200 and done == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == 3
    told = [json.loads(chunk) for chunk in chunks]
    assert [token for chunk in told for token in chunk["choices"][0]["token_ids"]] == [0, 1, 2]
    assert told[-1]["choices"][0]["finish_reason"] == "length" and all("text" not in c["choices"][0] for c in told)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": [5]}, "sampling_params"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": "text", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [[5], [6]], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"top_p": "x"}}, "top_p"),
        ({"token_ids": [5], "sampling_params": {"echo": True}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {}, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [5], "sampling_params": {}, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_refused(server: FakeServer, body: Any, param: str) -> None:
    assert error_of(post(server, body, GENERATE), 400)["param"] == param
    assert not server.engine.requests


# ---------------------------------------------------------------- rendering


def test_what_a_chat_renders_to_runs_as_the_chat_does(server: FakeServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = {"messages": [{"role": "user", "content": "hi there"}], "max_completion_tokens": 3, "temperature": 0.5,
            "top_logprobs": 2, "logprobs": True, "stop": "x", "seed": 7, "vllm_xargs": {"a": 1}, "priority": 2,
            "tools": tools, "tool_choice": "required"}  # fmt: skip
    body = ok(post(server, chat, "/v1/chat/completions/render"))
    assert body["token_ids"] and body["request_id"].startswith("chatcmpl-") and body["priority"] == 2
    assert set(body["sampling_params"]) == {
        "max_tokens", "temperature", "logprobs", "stop", "seed", "vllm_xargs", "structured_outputs",
        "skip_special_tokens",
    }  # fmt: skip
    assert not any(isinstance(request, OpenGeneration) for request in server.engine.requests)  # nothing ran
    ok(post(server, chat, "/v1/chat/completions"))
    ok(post(server, body, GENERATE))
    by_chat, by_ids = [each.asked for each in server.engine.requests if isinstance(each, OpenGeneration)]
    assert isinstance(by_chat, SamplingParams) and isinstance(by_ids, SamplingParams)
    assert by_ids.structured_outputs == by_chat.structured_outputs and by_ids.structured_outputs is not None
    for name in set(SamplingParams.__struct_fields__) - {"structured_outputs"}:
        assert getattr(by_ids, name) == getattr(by_chat, name), name


def test_each_prompt_renders_to_a_body_of_its_own(server: FakeServer) -> None:
    asked = {"prompt": ["a b c", "d"], "max_tokens": 2, "n": 2}
    first, second = ok(post(server, asked, "/v1/completions/render"))
    assert (len(first["token_ids"]), len(second["token_ids"])) == (3, 1)
    assert first["sampling_params"] == {"n": 2, "max_tokens": 2} and first["request_id"] != second["request_id"]
    (ids,) = ok(post(server, {"prompt": [5, 6]}, "/v1/completions/render"))
    assert ids["token_ids"] == [5, 6] and ids["sampling_params"] == {}
    for wrong in ({"prompt": "a", "echo": True}, {"prompt": ["a"] * 300}, {"prompt": "a", "temperature": -1}):
        error_of(post(server, wrong, "/v1/completions/render"), 400)


def test_every_parameter_has_a_field_to_be_rendered_to() -> None:
    not_over_http = {"guided_decoding", "flat_logprobs"}
    assert set(SamplingParams.__struct_fields__) - {"extra_args"} - not_over_http <= set(
        SamplingFields.__struct_fields__
    )


# ---------------------------------------------------------------- cancelling


def held(request: OpenGeneration) -> Iterator[Say | float]:
    """Says one word of each child, and then nothing more until it is ended."""
    for index in range(request.work.params.n):
        yield Say(index, " word")
    while not request.done:
        yield 0.002


def until_said(server: FakeServer, count: int = 1) -> None:
    """Until so many requests have said something."""
    end = time.monotonic() + 30
    while sum(bool(r.children[0].tokens) for r in server.engine.requests if isinstance(r, OpenGeneration)) < count:
        assert time.monotonic() < end, "nothing was said"
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("id", ["one", "cmpl-one"])
def test_what_is_cancelled_ends_with_what_it_has(server: FakeServer, stream: bool, id: str) -> None:
    server.engine.script = held
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, {"prompt": "a", "n": 2, "stream": stream}, **{"X-Request-Id": "one"})
        until_said(server)
        answer = ask(server, "POST", f"/v1/requests/{id}/cancel", b"")
        assert answer[:2] == (200, {"status": "cancelled", "request_id": id})
        status, body = asked.result()
    assert status == 200 and server.engine.open_requests == 0 and len(server.engine.aborted) == 1
    if not stream:
        assert [(each["text"], each["finish_reason"]) for each in body["choices"]] == [(" word", "abort")] * 2
    else:
        told = [json.loads(block.removeprefix("data: ")) for block in body.decode().split("\n\n")[:-2]]
        ends = [choice for chunk in told for choice in chunk["choices"] if choice["finish_reason"]]
        assert [choice["finish_reason"] for choice in ends] == ["abort", "abort"]
    error_of(ask(server, "POST", f"/v1/requests/{id}/cancel", b""), 404)
    error_of(ask(server, "DELETE", "/v1/requests/one"), 404)


def test_several_are_cancelled_at_once_and_others_go_on(server: FakeServer) -> None:
    server.engine.script = held
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(post, server, {"prompt": "a", "request_id": name}) for name in ("a", "b", "c")]
        until_said(server, 3)
        body = post(server, {"request_ids": ["a", "nobody", "cmpl-b"]}, "/v1/requests/cancel")[1]
        assert body == {"status": "cancelled", "cancelled_request_ids": ["a", "cmpl-b"]}
        assert [one.result()[1]["choices"][0]["finish_reason"] for one in asked[:2]] == ["abort", "abort"]
        assert not asked[2].done() and server.engine.open_requests == 1
        assert ask(server, "DELETE", "/v1/requests/c")[0] == 200
        assert asked[2].result()[0] == 200


def test_one_key_does_not_end_what_another_runs() -> None:
    with FakeServer(held, api_key="mine theirs") as server, ThreadPoolExecutor(1) as pool:
        mine, theirs = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer theirs"}
        asked = pool.submit(post, server, {"prompt": "a", "request_id": "x"}, **mine)
        until_said(server)
        error_of(ask(server, "POST", "/v1/requests/x/cancel", b"", theirs), 404)
        error_of(ask(server, "POST", "/v1/requests/x/cancel", b""), 401)
        assert ask(server, "POST", "/v1/requests/x/cancel", b"", mine)[0] == 200
        assert asked.result()[1]["choices"][0]["finish_reason"] == "abort"


def test_a_chat_that_is_cancelled_before_anything_was_said(server: FakeServer) -> None:
    server.engine.script = lambda request: iter([30.0])
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "x"}], "best_of": 2, "request_id": "y", "temperature": 1}
        asked = pool.submit(post, server, body, "/v1/chat/completions")
        while ask(server, "POST", "/v1/requests/chatcmpl-y/cancel", b"")[0] != 200:
            assert not asked.done()
        status, body = asked.result()
        assert status == 200 and body["choices"][0]["finish_reason"] == "abort"


# ---------------------------------------------------------------- the server


def test_the_configuration_is_told_to_administrators(server: FakeServer) -> None:
    boss = {"Authorization": "Bearer boss"}
    error_of(ask(server, "GET", "/server_info"), 401)
    body = ask(server, "GET", "/server_info?config_format=json", headers=boss)[1]
    assert (body["version"], body["vllm_config"]) == (__version__, {"port": 8000, "model": "m"})
    assert body["replicas"][0]["device"] == "cpu"
    assert ask(server, "GET", "/server_info", headers=boss)[1]["vllm_config"] == "port=8000, model='m'"
    error_of(ask(server, "GET", "/server_info?config_format=xml", headers=boss), 400)


def test_no_secret_is_among_the_flags_that_are_told() -> None:
    told = settings_of(EngineArgs(api_key="abc", admin_api_key="def", hf_token="ghi")).config
    assert told["max_n"] == 128 and told["max_num_seqs"] == 256
    assert not {"abc", "def", "ghi"} & set(map(str, told.values())) and "keys" not in told


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/speech"])
def test_speech_is_a_clear_404(server: FakeServer, path: str) -> None:
    assert "models of text" in error_of(post(server, {}, path), 404)["message"]
