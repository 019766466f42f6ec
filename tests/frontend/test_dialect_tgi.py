"""The dialects of text-generation-inference and of SageMaker over HTTP, over an engine of scripts."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_asks import ask, ask_bytes
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError, TokenLogprobs
from quire.frontend.fake import FakeServer, Say
from quire.frontend.model_card import ModelCard
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.messages import Finish

CARD = ModelCard(hf={"dtype": "bfloat16"})
EURO = "€".encode()


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(card=lambda: CARD) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    shared.engine.script = says("Yes it is.")
    return shared


def send(server: FakeServer, path: str = "/generate", **parameters: Any) -> tuple[int, Any]:
    return ask(server, "POST", path, {"inputs": "hi there", "parameters": parameters})[:2]


def events(server: FakeServer, **parameters: Any) -> list[dict[str, Any]]:
    body = {"inputs": "hi there", "parameters": parameters}
    status, told, headers = ask_bytes(server, "POST", "/generate_stream", body)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    blocks = told.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data:")) for block in blocks]


def params_of(server: FakeServer) -> Any:
    (request,) = server.engine.requests
    assert isinstance(request, OpenGeneration)
    return request.asked


def test_a_text_and_its_details(server: FakeServer) -> None:
    assert send(server) == (200, {"generated_text": "Yes it is."})
    status, told = send(server, details=True, top_n_tokens=2, decoder_input_details=True, return_full_text=True)
    assert status == 200 and told["generated_text"] == "hi thereYes it is."
    details = told["details"]
    tokens, top = details["tokens"], details["top_tokens"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", len(tokens), None)
    assert "".join(token["text"] for token in tokens) == "Yes it is."
    assert [token["special"] for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert {len(each) for each in top} == {2} and set(top[0][0]) == {"id", "text", "logprob", "special"}
    first, second = details["prefill"]
    assert (first["text"] + second["text"], first["logprob"]) == ("hi there", None) and second["logprob"] < 0
    assert (first["id"], second["id"]) == (0, 1)


def test_a_stream_tells_every_token_and_the_text_at_its_end(server: FakeServer) -> None:
    *told, last = events(server, details=True, top_n_tokens=1)
    assert [event["index"] for event in (*told, last)] == list(range(1, len(told) + 2)) and len(told) >= 2
    assert "".join(event["token"]["text"] for event in (*told, last)) == last["generated_text"] == "Yes it is."
    assert {(event["generated_text"], event["details"]) for event in told} == {(None, None)}
    wanted = {"finish_reason": "eos_token", "generated_tokens": len(told) + 1, "seed": None, "input_length": 2}
    assert last["details"] == wanted and last["token"]["special"] and len(last["top_tokens"]) == 1
    assert events(server)[-1]["details"] is None
    assert events(server, details=True, do_sample=True, seed=9)[-1]["details"]["seed"] == 9


def test_several_tokens_of_one_event_and_half_a_character(server: FakeServer) -> None:
    def script(request: OpenGeneration) -> Iterator[Say]:
        raw = [TokenLogprobs([n], [-1.0], 1, ["�"], {0: part}) for n, part in enumerate((EURO[:1], EURO[1:]))]
        yield Say(0, "€", tokens=2, logprobs=raw)
        yield Say(0, "", tokens=0, finish=Finish.ABORT)

    server.engine.script = script
    told = events(server)
    assert [event["token"]["text"] for event in told] in (["", "€"], ["", "€", ""])  # as the end comes apart or not
    assert [event["generated_text"] for event in told] == [None] * (len(told) - 1) + ["€"]


@pytest.mark.parametrize(
    "finish, stop, reason",
    [(Finish.STOP, None, "eos_token"), (Finish.STOP, "x", "stop_sequence"), (Finish.LENGTH, None, "length")],
)
def test_why_it_ended(server: FakeServer, finish: Finish, stop: str | None, reason: str) -> None:
    server.engine.script = says("Text.", finish, stop)
    whole = send(server, details=True)[1]["details"]
    streamed = events(server, details=True)[-1]
    assert whole["finish_reason"] == streamed["details"]["finish_reason"] == reason
    assert whole["tokens"][-1]["special"] == streamed["token"]["special"] == (reason == "eos_token")


def test_what_parameters_become(server: FakeServer) -> None:
    send(server, max_new_tokens=7, repetition_penalty=1.2, frequency_penalty=0.5, stop=["x"], truncate=9,
         temperature=1.0, top_p=1.0, typical_p=1.0, watermark=False,
         grammar={"type": "regex", "value": "a+"})  # fmt: skip
    params = params_of(server)
    assert (params.max_tokens, params.repetition_penalty, params.frequency_penalty) == (7, 1.2, 0.5)
    assert (params.stop, params.include_stop_str_in_output, params.truncate_prompt_tokens) == (["x"], True, 9)
    assert params.temperature == 0 and params.structured_outputs.regex == "a+"
    server.engine.requests.clear()
    _, told = send(server, do_sample=True, top_k=5, top_p=0.9, details=True, grammar={"type": "json", "value": {}})
    params = params_of(server)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (1.0, 5, 0.9, 100)
    assert params.seed == told["details"]["seed"] is not None and params.structured_outputs.json == {}


@pytest.mark.parametrize(
    "grammar, wanted",
    [
        ({"type": "json", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json_schema", "value": {"name": "a", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        ({"type": "json_schema", "value": {"type": "array"}}, {"json": None}),
        ({"type": "json_object"}, {"json_object": True}),
    ],
)
def test_grammars(server: FakeServer, grammar: dict[str, Any], wanted: dict[str, Any]) -> None:
    status, told = send(server, grammar=grammar)
    if wanted == {"json": None}:
        assert status == 422 and "grammar" in told["error"]
    else:
        form = params_of(server).structured_outputs
        assert {name: getattr(form, name) for name in wanted} == wanted


def test_what_is_asked_too_much_is_called_as_it_was_asked(server: FakeServer) -> None:
    for parameters, name in (
        ({"best_of": 1000, "do_sample": True}, "best_of is 1000"), ({"truncate": -5}, "truncate"),
        ({"grammar": {"type": "regex", "value": 5}}, "grammar"),
    ):  # fmt: skip
        status, told = send(server, **parameters)
        assert status == 422 and name in told["error"] and "prompt_tokens" not in told["error"]


def test_the_least_and_the_most(server: FakeServer) -> None:
    status, told = send(server, max_new_tokens=1, top_n_tokens=20, best_of=1, temperature=0.01, details=True)
    assert status == 200 and len(told["details"]["top_tokens"][0]) == 20 and params_of(server).max_tokens == 1
    assert "best_of_sequences" not in told["details"]
    assert send(server, details=True, top_n_tokens=0)[1]["details"].get("top_tokens") is None
    assert events(server, top_n_tokens=20, best_of=1)[-1]["generated_text"] == "Yes it is."


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"do_sample": True}])
def test_what_makes_tokens_be_drawn(server: FakeServer, sampling: dict[str, Any]) -> None:
    send(server, seed=3, **sampling)
    params = params_of(server)
    assert params.temperature == sampling.get("temperature", 1.0) and params.seed == 3


def test_the_best_of_several(server: FakeServer) -> None:
    _, told = send(server, best_of=3, do_sample=True, details=True, seed=5)
    details = told["details"]
    means = [sum(token["logprob"] for token in each["tokens"]) / len(each["tokens"])
             for each in (details, *details["best_of_sequences"])]  # fmt: skip
    assert means == sorted(means, reverse=True) and len(set(means)) == 3
    assert {each["seed"] for each in (details, *details["best_of_sequences"])} == {5, 6, 7}


def test_the_root_answers_in_a_list_or_with_a_stream(server: FakeServer) -> None:
    assert ask(server, "POST", "/", {"inputs": "hi there"})[:2] == (200, [{"generated_text": "Yes it is."}])
    _, told, _ = ask_bytes(server, "POST", "/", {"inputs": "hi there", "stream": True})
    assert told.startswith(b'data:{"index":1,')


def test_a_connection_goes_on_after_a_stream(server: FakeServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    body = json.dumps({"inputs": "hi there"})
    for _ in range(2):
        connection.request("POST", "/generate_stream", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read().endswith(b"}\n\n")
    connection.close()


def test_a_failure_within_a_stream_is_an_event(server: FakeServer) -> None:
    server.engine.script = says("Some text.", error=RequestError(500, "it broke."))
    assert events(server)[-1] == {"error": "it broke.", "error_type": "generation"}


@pytest.mark.parametrize(
    "path, parameters, words",
    [
        ("/generate", {"temperature": 0}, "temperature must be above 0"),
        ("/generate", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("/generate", {"top_n_tokens": 99}, "top_n_tokens must be in [0, 20]"),
        ("/generate", {"watermark": True}, "watermark is not supported"),
        ("/generate", {"typical_p": 0.5}, "typical_p=0.5 is not supported"),
        ("/generate", {"best_of": 2}, "do_sample=true"),
        ("/generate_stream", {"best_of": 2, "do_sample": True}, "not available with a stream"),
        ("/generate_stream", {"decoder_input_details": True}, "not available with a stream"),
        ("/generate", {"grammar": {"type": "ebnf"}}, "parameters.grammar.type"),
        ("/generate", {"repetition_penalty": -1}, "repetition_penalty"),
        ("/", {"stop": "x"}, "parameters.stop must be a list"),
    ],
)
def test_what_cannot_be_is_refused_in_its_shape(
    server: FakeServer, path: str, parameters: dict[str, Any], words: str
) -> None:
    status, told = send(server, path, **parameters)
    assert (status, told["error_type"], set(told)) == (422, "validation", {"error", "error_type"})
    assert words in told["error"]


def test_inputs_must_be_there(server: FakeServer) -> None:
    assert "inputs must be" in ask(server, "POST", "/generate", {"inputs": ""})[1]["error"]
    assert send(server, adapter_id="none")[0] == 404


def test_info(server: FakeServer) -> None:
    status, told, _ = ask(server, "GET", "/info")
    assert (status, told["model_id"], told["model_dtype"], told["max_total_tokens"]) == (200, "fake", "bfloat16", 2048)


# ---------------------------------------------------------------- SageMaker


def test_a_key_that_is_for_another_model(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a sha256:{hashlib.sha256(b'one').hexdigest()} models=other\n")
    keys.chmod(0o600)
    bearer = {"Authorization": "Bearer one"}
    with FakeServer(says("Yes."), names=["fake", "other"], api_key_file=str(keys)) as server:
        for name, status in (("other", 200), ("fake", 403)):
            tgi = {"inputs": "hi", "parameters": {"adapter_id": name}}
            assert ask(server, "POST", "/generate", tgi, bearer)[0] == status
            assert ask(server, "POST", "/invocations", {"prompt": "hi", "model": name}, bearer)[0] == status


def test_invocations_are_told_apart_by_their_shape(server: FakeServer) -> None:
    for body, kind in (
        ({"prompt": "hi"}, "text_completion"), ({"messages": [{"role": "user", "content": "hi"}]}, "chat.completion"),
    ):  # fmt: skip
        status, told, _ = ask(server, "POST", "/invocations", body)
        assert (status, told["object"]) == (200, kind)
    status, told, _ = ask(server, "POST", "/invocations", {"input": "hi"})
    assert status == 400 and "give messages or prompt" in told["error"]["message"]
    assert ask(server, "POST", "/invocations", {"prompt": 5})[1]["error"]["param"] == "prompt"


def test_an_invocations_fields_are_looked_at_by_its_route() -> None:
    with FakeServer(says("Yes."), reject_unknown_fields=True) as running:
        for more, status in (({"temperature": 0.5, "max_tokens": 3}, 200), ({"max_token": 3}, 400)):
            body = {"messages": [{"role": "user", "content": "hi"}], **more}
            told = ask(running, "POST", "/invocations", body)
            assert told[0] == status
        assert "did you mean max_tokens?" in told[1]["error"]["message"]


@pytest.mark.parametrize(
    "task, body, kind",
    [
        ("embed", {"input": "a"}, "embedding"),
        ("embed", {"input": "a", "task": "embed"}, "pooling"),
        ("classify", {"input": "a"}, None),
        ("classify", {"text_1": "a", "text_2": "b"}, "score"),
        ("classify", {"query": "a", "documents": ["b"]}, None),
    ],
)
def test_invocations_of_a_model_that_pools(task: str, body: dict[str, Any], kind: str | None) -> None:
    labels = ("LABEL_0",) if len(body) > 1 else ("short", "long")
    pooler = PoolerConfig("Tiny", task, "CLS", True, True, "sigmoid" if len(body) > 1 else "softmax", 3, labels)
    with FakeServer(pooler=pooler) as running:
        status, told, _ = ask(running, "POST", "/invocations", body)
        assert status == 200, told
        if "documents" in body:
            assert told["results"][0]["document"]["text"] == "b"
        elif kind is None:
            assert told["data"][0]["label"] == "short"
        else:
            assert told["data"][0]["object"] == kind
        assert ask(running, "POST", "/invocations", {"prompt": "a"})[0] == 400
