"""Ollama's dialect over HTTP, streamed and not, over an engine of scripts; and by Ollama's own package where it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_asks import ask, ask_bytes
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.fake import FakeServer
from quire.frontend.model_card import ModelCard, read_card
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.messages import AdapterEntry, Finish
from quire.proto.work import Adapter, Infill, Text

EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
TEXT = (
    '<think>Hm.</think>Let me see.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)
HI = [{"role": "user", "content": "hi there"}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
CARD = ModelCard("safetensors", "BF16", 1_500_000, 77, 1e9, "ab" * 32, "the template", "", {"model_type": "llama"})


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    names = ["fake", "other:8b", "third:latest"]
    with FakeServer(tool_parser="hermes", reasoning_parser="qwen3", names=names, card=lambda: CARD) as running:
        yield running


@pytest.fixture(scope="module")
def embedder() -> Iterator[FakeServer]:
    with FakeServer(pooler=EMBED) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    shared.engine.script = says("Yes it is.")
    return shared


def send(server: FakeServer, path: str, **body: Any) -> tuple[int, Any]:
    return ask(server, "POST", path, {"model": "fake", "stream": False, **body})[:2]


def lines(server: FakeServer, path: str, **body: Any) -> list[dict[str, Any]]:
    status, told, headers = ask_bytes(server, "POST", path, {"model": "fake", **body})
    assert status == 200 and headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in told.splitlines()]


def asked_of(server: FakeServer) -> OpenGeneration:
    (request,) = server.engine.requests
    assert isinstance(request, OpenGeneration)
    return request


def check_end(last: dict[str, Any], reason: str, prompt: int = 2) -> None:
    assert (last["done"], last["done_reason"], last["prompt_eval_count"]) == (True, reason, prompt)
    assert last["eval_count"] >= 2 and all(isinstance(last[name], int) for name in DURATIONS)
    assert last["prompt_eval_duration"] > 0 < last["eval_duration"]
    parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert parts <= last["total_duration"] + 2 < 60 * 10**9  # 2: neither of two parts is ever 0


def test_a_thought_a_text_and_two_calls(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    status, body = send(server, "/api/chat", messages=HI, tools=TOOLS)
    assert status == 200
    message = body["message"]
    first, second = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "Let me see.", "thinking": "Hm."}
    assert first["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert second["function"] == {"index": 1, "name": "get_time", "arguments": {}} and first["id"] != second["id"]
    check_end(body, "stop")


def test_a_stream_tells_the_same_in_lines(server: FakeServer) -> None:
    server.engine.script = says(TEXT)
    *told, last = lines(server, "/api/chat", messages=HI, tools=TOOLS)
    messages = [line["message"] for line in told]
    assert {line["done"] for line in told} == {False} and {line["model"] for line in told} == {"fake"}
    assert "".join(message["content"] for message in messages) == "Let me see."
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    assert last["message"] == {"role": "assistant", "content": ""}
    check_end(last, "stop")


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a": ' * 5000, "[1]", '{"a": '])
def test_what_has_arguments_that_are_no_object_is_text(server: FakeServer, arguments: str) -> None:
    text = f"<tool_call>{json.dumps({'name': 'get_time', 'arguments': arguments})}</tool_call>"
    server.engine.script = says(text, step=900)
    status, body = send(server, "/api/chat", messages=HI, tools=TOOLS)
    told, last = lines(server, "/api/chat", messages=HI, tools=TOOLS)
    assert status == 200 and last["done"]
    assert body["message"]["content"] == told["message"]["content"] == text


def test_the_operators_interval_of_streams() -> None:
    with FakeServer(says("one two three four", step=2), stream_interval=4) as server:
        *told, _ = lines(server, "/api/generate", prompt="hi")
    assert [len(line["response"]) for line in told] == [2, 8, 8]  # the first comes at once


def test_a_prompt_is_a_turn_of_its_user(server: FakeServer) -> None:
    *told, last = lines(server, "/api/generate", prompt="hi there", system="Be brief.")
    assert len(told) > 1 and "".join(line["response"] for line in told) == "Yes it is." and last["response"] == ""
    check_end(last, "stop", prompt=4)
    assert asked_of(server).message.messages == [{"role": "system", "content": "Be brief."}, *HI]


def test_a_raw_prompt_is_read_as_it_is(server: FakeServer) -> None:
    status, body = send(server, "/api/generate", prompt="hi there", raw=True, model=None)
    assert (status, body["response"], body["model"]) == (200, "Yes it is.", "fake")
    request = asked_of(server)
    assert request.message.prompt == "hi there" and request.message.messages is None
    assert request.asked.max_tokens != 16  # which is what OpenAI's completions stop at


def test_what_stands_before_a_suffix_is_filled_in(server: FakeServer) -> None:
    assert send(server, "/api/generate", prompt="the cat", suffix="sat", options={"num_predict": 4})[0] == 200
    told = server.engine.requests[0].message
    assert isinstance(told.work, Text) and told.work.infill == Infill("the cat", "sat")


def test_what_options_become(server: FakeServer) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["x"],
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "mirostat": 0,
        "num_gpu": 1, "unheard_of": [],
    }  # fmt: skip
    assert send(server, "/api/generate", prompt="hi", options=options, keep_alive="5m", truncate=True)[0] == 200
    params = asked_of(server).asked
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 3, 0.9)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.1, 5, ["x"], 1.2)
    assert (params.presence_penalty, params.frequency_penalty, params.truncate_prompt_tokens) == (0.1, 0.2, -1)


def test_values_that_switch_options_off(server: FakeServer) -> None:
    options = {"num_predict": -1, "seed": -1, "repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}
    assert send(server, "/api/generate", prompt="hi", options=options)[0] == 200
    params = asked_of(server).asked
    assert (params.max_tokens, params.seed) == (None, None)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    server.engine.requests.clear()
    assert send(server, "/api/generate", prompt="hi", options={"num_predict": 10**6})[0] == 200
    assert asked_of(server).asked.max_tokens == 2048  # what the context holds


def test_forms(server: FakeServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, wanted in ((schema, schema), ("", None)):
        server.engine.requests.clear()
        assert send(server, "/api/chat", messages=HI, format=given, think=False)[0] == 200
        form = asked_of(server).asked.structured_outputs
        assert (form and form.json) == wanted
    server.engine.requests.clear()
    assert send(server, "/api/generate", prompt="hi", raw=True, format="json")[0] == 200
    form = asked_of(server).asked.structured_outputs
    assert form is not None and form.json_object


def test_thinking_is_the_templates_business(server: FakeServer) -> None:
    for think, wanted in (
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ):
        server.engine.requests.clear()
        assert send(server, "/api/chat", messages=HI, think=think)[0] == 200
        template = asked_of(server).message.template
        assert template is not None and template["chat_template_kwargs"] == wanted


def test_results_find_their_calls(server: FakeServer) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("get_time", "get_weather")]
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        {"role": "user", "content": "Go on."},
        {"role": "tool", "content": "noon"},
    ]
    assert send(server, "/api/chat", messages=messages, tools=TOOLS)[0] == 200
    told = asked_of(server).message.messages
    assert told is not None
    first, second = told[1]["tool_calls"]
    assert told[1]["reasoning_content"] == "Hm." and first["function"] == calls[0]["function"]
    assert [message.get("tool_call_id") for message in told[2:]] == [second["id"], None, first["id"]]


def test_an_answer_that_has_begun_is_gone_on_with(server: FakeServer) -> None:
    begun = [*HI, {"role": "assistant", "content": "Yes it"}]
    assert send(server, "/api/chat", messages=begun, tools=[])[0] == 200
    template = asked_of(server).message.template
    assert template is not None and "tools" not in template
    assert (template["continue_final_message"], template["add_generation_prompt"]) == (True, False)


def test_logprobs(server: FakeServer) -> None:
    for path, prompt in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi", "raw": True})):
        _, body = send(server, path, logprobs=True, top_logprobs=2, **prompt)
        told = [each for line in lines(server, path, logprobs=True, top_logprobs=2, **prompt)
                for each in line.get("logprobs", ())]  # fmt: skip
        assert told == body["logprobs"] and len(told) == body["eval_count"]
        assert set(told[0]) == {"token", "logprob", "bytes", "top_logprobs"} and len(told[0]["top_logprobs"]) == 2


@pytest.mark.parametrize("finish, reason", [(Finish.STOP, "stop"), (Finish.LENGTH, "length")])
def test_why_it_ended(server: FakeServer, finish: Finish, reason: str) -> None:
    server.engine.script = says("Text.", finish)
    _, body = send(server, "/api/chat", messages=HI, tools=TOOLS)
    assert body["done_reason"] == lines(server, "/api/chat", messages=HI)[-1]["done_reason"] == reason


@pytest.mark.parametrize("stop", [None, "ris"])
def test_a_call_that_is_not_whole_is_told_as_cut_off_and_may_be_sent_back(server: FakeServer, stop: str | None) -> None:
    """By its length, or by a stop string within it."""
    text = 'Text.<tool_call>{"name": "get_time", "arguments": {"a": "b'
    server.engine.script = says(text, Finish.LENGTH if stop is None else Finish.STOP, stop)
    _, body = send(server, "/api/chat", messages=HI, tools=TOOLS)
    assert body["done_reason"] == "length"
    assert lines(server, "/api/chat", messages=HI, tools=TOOLS)[-1]["done_reason"] == "length"
    function = body["message"]["tool_calls"][0]["function"]
    assert function["arguments"] == {"_raw": '{"a": "b'}
    for arguments in (function["arguments"], '{"a": "b'):
        function["arguments"] = arguments
        status, _ = send(server, "/api/chat", messages=[*HI, body["message"], {"role": "tool", "content": "no"}])
        assert status == 200
        told = server.engine.requests[-1].message.messages[1]["tool_calls"][0]  # type: ignore[index]
        assert told["function"]["arguments"] == {"_raw": '{"a": "b'}


def test_a_failure_within_a_stream_is_a_line(server: FakeServer) -> None:
    server.engine.script = says("Some text.", error=RequestError(500, "it broke."))
    assert lines(server, "/api/generate", prompt="hi")[-1] == {"error": "it broke."}


def test_an_empty_prompt_only_loads_the_model(server: FakeServer) -> None:
    told = send(server, "/api/generate", keep_alive=0)[1]
    assert (told["response"], told["done"], told["done_reason"]) == ("", True, "load")
    told = send(server, "/api/chat", messages=[], stream=True)[1]
    assert told["message"] == {"role": "assistant", "content": ""} and server.engine.requests == []


@pytest.mark.parametrize(
    "path, body, status, words",
    [
        ("generate", {"prompt": "x", "images": ["aGk="]}, 400, "images are not supported"),
        ("chat", {"messages": [{**HI[0], "images": ["aGk="]}]}, 400, "messages[0]: images are not supported"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "--chat-template"),
        ("generate", {"prompt": "x", "context": [1, 2]}, 400, "/api/chat"),
        ("generate", {"prompt": "x", "raw": True, "suffix": "y"}, 400, "raw=false"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "raw=false"),
        ("generate", {"prompt": "x", "options": {"mirostat": 2}}, 400, "options.mirostat=2"),
        ("generate", {"prompt": "x", "options": {"temperature": "hot"}}, 400, "options.temperature must be a number"),
        ("generate", {"prompt": "x", "options": {"repeat_penalty": -1}}, 400, "repeat_penalty must be"),
        ("generate", {"prompt": "x", "format": "xml"}, 400, 'format must be "json" or a JSON schema'),
        ("generate", {"prompt": "x", "think": "a lot"}, 400, "think must be"),
        ("generate", {"prompt": "x", "top_logprobs": 2}, 400, "logprobs=true"),
        ("chat", {"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content must be a string"),
        ("chat", {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [{"role": "", "content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [{"role": 5, "content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "a function that has a name"),
        ("chat", {"messages": HI, "model": "none:latest"}, 404, "`none` does not exist"),
        ("show", {"model": "none"}, 404, "`none` does not exist"),
        ("embed", {"input": "x"}, 400, "it generates"),
        ("pull", {}, 403, "quire serve MODEL"),
        ("create", {}, 403, "quire serve MODEL"),
    ],
)
def test_what_cannot_be_is_refused_in_its_shape(
    server: FakeServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    got, told = send(server, f"/api/{path}", **body)
    assert (got, list(told)) == (status, ["error"]) and words in told["error"]


def test_think_needs_a_parser_of_thoughts() -> None:
    with FakeServer() as plain:
        status, told = send(plain, "/api/chat", messages=HI, think=True)
    assert status == 400 and "does not support thinking" in told["error"]


def test_a_body_without_a_type_is_read_but_from_a_browser(server: FakeServer) -> None:
    plain = {"Content-Type": "application/x-www-form-urlencoded"}
    body = {"model": "fake:latest", "prompt": "hi", "stream": False}
    assert ask(server, "POST", "/api/generate", body, plain)[0] == 200
    status, told, _ = ask(server, "POST", "/api/generate", body, {**plain, "Origin": server.url})
    assert status == 400 and "application/json" in told["error"]


def test_what_models_there_are(server: FakeServer) -> None:
    (first, second, third) = ask(server, "GET", "/api/tags")[1]["models"]
    assert (first["name"], second["model"], first["size"]) == ("fake:latest", "other:8b", 77)
    assert first["details"]["parameter_size"] == "1.5M" and first["modified_at"] == "2001-09-09T01:46:40Z"
    running, *_ = ask(server, "GET", "/api/ps")[1]["models"]
    assert (running["name"], running["context_length"], running["size_vram"]) == ("fake:latest", 2048, 0)
    assert third["model"] == "third:latest" and send(server, "/api/chat", model="third:latest", messages=HI)[0] == 200
    for name in ("fake", "fake:latest", "other:8b"):
        status, shown, _ = ask(server, "POST", "/api/show", {"model": name})
        assert status == 200 and shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == "" and shown["model_info"]["llama.context_length"] == 2048
    assert ask(server, "HEAD", "/")[0] == 200
    assert "version" in ask(server, "GET", "/api/version")[1]


def test_adapters_are_models_too() -> None:
    entries = [
        AdapterEntry(name, 0, Adapter(name, f"/{name}", name.encode() * 4), parent)
        for name, parent in (("sql1", ""), ("sql2", "base"))
    ]
    with FakeServer(says("Yes."), modules=entries) as server:
        told = {each["name"]: each["details"]["parent_model"] for each in ask(server, "GET", "/api/tags")[1]["models"]}
        assert told == {"fake:latest": "", "sql1:latest": "fake", "sql2:latest": "base"}
        shown = [send(server, "/api/show", model=name)[1] for name in ("sql1", "sql2:latest", "fake")]
        assert [(each["details"]["parent_model"], each["modelfile"]) for each in shown] == [
            ("fake", "FROM fake\n"), ("base", "FROM base\n"), ("", "FROM fake\n"),
        ]  # fmt: skip
        assert send(server, "/api/chat", model="sql1:latest", messages=HI)[0] == 200
        (request,) = server.engine.requests
        adapter = request.work.adapter  # type: ignore[union-attr]
        assert adapter is not None and adapter.name == "sql1"


def test_a_key_sees_its_own_models(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a sha256:{hashlib.sha256(b'one').hexdigest()} models=other\n")
    keys.chmod(0o600)
    bearer = {"Authorization": "Bearer one"}
    with FakeServer(says("Yes."), names=["fake", "other"], api_key_file=str(keys)) as server:
        for path in ("/api/tags", "/api/ps"):
            (listed,) = ask(server, "GET", path, headers=bearer)[1]["models"]
            assert listed["name"] == "other:latest"
        for body in ({"prompt": "hi", "stream": False}, {}):
            answers = [
                ask(server, "POST", path, {"model": f"{name}:latest", **body}, bearer)[0]
                for path in ("/api/generate", "/api/show") for name in ("other", "fake")
            ]  # fmt: skip
            assert answers == [200, 403, 200, 403]
        assert ask(server, "GET", "/api/tags")[0] == 401


def test_nothing_runs_before_the_model_is_ready(server: FakeServer) -> None:
    server.engine.is_ready = False
    try:
        assert ask(server, "GET", "/api/ps")[1] == {"models": []}
    finally:
        server.engine.is_ready = True


def test_the_demo_models_card() -> None:
    card = read_card(load_model_config(demo_model_path()), "t")
    weights = Path(demo_model_path()) / "model.safetensors"
    assert (card.format, card.quantization, card.size) == ("safetensors", "BF16", weights.stat().st_size)
    assert 0.9 * card.size < 2 * card.parameters < card.size and card.parameter_size == "2.2M"


def test_embeddings(embedder: FakeServer) -> None:
    status, told = send(embedder, "/api/embed", input=["one two", "three"])
    assert status == 200 and len(told["embeddings"]) == 2 and told["prompt_eval_count"] == 3
    assert 0 < told["total_duration"] < 60 * 10**9 and told["load_duration"] == 0
    work = [request.work.params for request in embedder.engine.requests]
    assert [(params.normalize, params.truncate_prompt_tokens) for params in work] == [(True, -1)] * 2  # type: ignore[union-attr]
    assert send(embedder, "/api/embed", input="one two")[1]["embeddings"] == told["embeddings"][:1]
    assert send(embedder, "/api/embeddings", prompt="one two")[1] == {"embedding": told["embeddings"][0]}
    for nothing in ({"input": []}, {"input": ""}, {}):
        assert send(embedder, "/api/embed", **nothing)[1]["embeddings"] == []
    status, told = send(embedder, "/api/embed", input=[5])
    assert status == 400 and told["error"] == "input must be a string or a list of strings."
    assert send(embedder, "/api/chat", messages=HI)[0] == 400


def test_ollamas_own_package(server: FakeServer, embedder: FakeServer) -> None:
    ollama = pytest.importorskip("ollama", reason="pip install ollama")
    client = ollama.Client(server.url)
    server.engine.script = says(TEXT)
    whole = client.chat("fake", HI, tools=TOOLS)
    assert whole.message.content == "Let me see." and whole.message.thinking == "Hm." and whole.eval_count > 3
    assert [call.function.name for call in whole.message.tool_calls] == ["get_weather", "get_time"]
    pieces = list(client.chat("fake", HI, tools=TOOLS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [c for piece in pieces for c in piece.message.tool_calls or ()] == whole.message.tool_calls
    again = [*HI, whole.message, {"role": "tool", "tool_name": "get_time", "content": "noon"}]
    assert client.chat("fake", again, tools=TOOLS).done_reason == "stop"
    server.engine.script = says("Yes it is.")
    assert client.generate("fake", "hi").response == "Yes it is."
    assert "".join(piece.response for piece in client.generate("fake", "hi", stream=True)) == "Yes it is."
    assert client.list().models[0].model == client.ps().models[0].model == "fake:latest"
    assert client.show("fake").capabilities == ["completion", "tools", "thinking"]
    for refused in (lambda: client.pull("x"), lambda: client.generate("fake", "hi", images=["aGk="])):
        with pytest.raises(ollama.ResponseError):
            refused()
    assert len(ollama.Client(embedder.url).embed("fake", ["a", "b"]).embeddings) == 2


@pytest.mark.parametrize(("convert", "told"), [("embed", ["embedding"]), ("classify", [])])
def test_a_model_that_pools_is_told_to_embed_where_it_does(convert: str, told: list[str]) -> None:
    pooler = PoolerConfig("TinyModel", convert, "CLS", True, True, "softmax", 3)
    with FakeServer(pooler=pooler, card=lambda: CARD) as server:
        assert send(server, "/api/show", model="fake")[1]["capabilities"] == told
