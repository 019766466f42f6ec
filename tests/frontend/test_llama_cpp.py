"""llama.cpp's dialect over HTTP, streamed and not, over an engine of scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_asks import ask, post
from spoken import says

from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenText
from quire.client.results import RequestError
from quire.frontend.fake import MAX_MODEL_LEN, FakeServer, Say, count_words
from quire.frontend.front import FRONT
from quire.proto.checkpoint.model_config import demo_model_path
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.codec import from_i32
from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.proto.work import Infill

CROSS = PoolerConfig("TinyForSequenceClassification", "classify", "CLS", True, True, "sigmoid", 3, ("LABEL_0",))
HI: dict[str, Any] = {"prompt": "hi there", "n_predict": 3}


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(defaults={"top_k": 7}, slots=4) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    shared.engine.script = count_words
    shared.engine.words = {"the": 0, "cat": 1, "sat": 2}
    return shared


def told(server: FakeServer, path: str = "/completion", **body: Any) -> Any:
    status, answer = post(server, {**HI, **body}, path)
    assert status == 200, answer
    return answer


def events(server: FakeServer, **body: Any) -> list[Any]:
    status, answer = post(server, {**HI, "stream": True, **body}, "/completion")
    assert status == 200
    blocks = answer.decode().split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: {") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def generated(server: FakeServer) -> OpenGeneration:
    found = [request for request in server.engine.requests if isinstance(request, OpenGeneration)]
    return found[-1]


def params(server: FakeServer, **body: Any) -> SamplingParams:
    told(server, **body)
    return generated(server).asked


def error(server: FakeServer, status: int = 400, path: str = "/completion", **body: Any) -> str:
    answer = post(server, {**HI, **body}, path)
    assert answer[0] == status and set(answer[1]) == {"error"}
    assert set(answer[1]["error"]) == {"code", "message", "type"} and answer[1]["error"]["code"] == status
    return answer[1]["error"]["message"]


# ---------------------------------------------------------------- the answer


def test_the_whole_answer(server: FakeServer) -> None:
    body = told(server)
    assert body["content"] == " 0.0 0.1 0.2" and body["tokens"] == []
    assert (body["stop"], body["stop_type"], body["stopping_word"], body["truncated"]) == (True, "limit", "", False)
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens_cached"]) == (3, 2, 0)
    assert (body["prompt"], body["model"], body["index"], body["id_slot"]) == ("hi there", "fake", 0, -1)
    timings = body["timings"]
    assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == (2, 3, 0)
    assert all(timings[name] >= 0 for name in ("prompt_ms", "predicted_ms", "predicted_per_second"))
    settings = body["generation_settings"]
    assert (settings["n_predict"], settings["n_ctx"], settings["stream"]) == (3, MAX_MODEL_LEN, False)
    assert told(server, path="/completions", id_slot=2, return_tokens=True)["tokens"] == [0, 1, 2]


def test_why_it_stopped(server: FakeServer) -> None:
    server.engine.script = says("a\nb", stop="b")
    body = told(server, stop=["b", ""])
    assert (body["stop_type"], body["stopping_word"], body["has_new_line"]) == ("word", "b", True)
    assert generated(server).asked.stop == ["b"]
    server.engine.script = says("ab")
    assert told(server)["stop_type"] == "eos"
    server.engine.script = lambda request: iter([Say(0, "x", MAX_MODEL_LEN - 2, Finish.LENGTH)])
    body = told(server, n_predict=-1)
    assert (body["stop_type"], body["truncated"]) == ("limit", True)


def test_a_stream_tells_pieces_and_then_the_whole(server: FakeServer) -> None:
    *parts, last = events(server)
    assert "".join(part["content"] for part in parts) == " 0.0 0.1 0.2"
    assert [token for part in parts for token in part["tokens"]] == [0, 1, 2]
    assert all(part["stop"] is False and "timings" not in part and part["tokens_evaluated"] == 2 for part in parts)
    assert (last["stop"], last["content"], last["tokens"], last["stop_type"]) == (True, "", [], "limit")
    assert last["tokens_predicted"] == parts[-1]["tokens_predicted"] == 3 and last["generation_settings"]["stream"]
    first, *_ = events(server, timings_per_token=True, return_progress=True)
    assert first["timings"]["prompt_n"] == 2
    assert first["prompt_progress"]["total"] == first["prompt_progress"]["processed"] == 2


def test_a_stream_that_fails_says_so_in_its_own_shape(server: FakeServer) -> None:
    server.engine.script = says("abc", error=RequestError(500, "lost"))
    *_, last = events(server)
    assert last == {"error": {"code": 500, "message": "lost", "type": "server_error"}}


def test_several_prompts_and_several_answers(server: FakeServer) -> None:
    answers = told(server, prompt=["one", "two words"], n_cmpl=2, temperature=1.0)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == ["one", "one", "two words", "two words"]
    assert [answer["content"][:2] for answer in answers] == [" 0", " 1", " 0", " 1"]
    ends = [event for event in events(server, prompt=["one", "two"]) if event["stop"]]
    assert sorted(event["index"] for event in ends) == [0, 1]
    assert isinstance(told(server, prompt=["one"]), dict)


def test_no_token_is_told_where_none_is_wanted(server: FakeServer) -> None:
    body = told(server, n_predict=0)
    assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
    assert generated(server).asked.max_tokens == 1 and body["generation_settings"]["n_predict"] == 0
    (last,) = events(server, n_predict=0)
    assert last["stop"] and last["tokens_predicted"] == 0


def test_likely_tokens(server: FakeServer) -> None:
    body = told(server, n_probs=2)
    assert len(body["completion_probabilities"]) == 3 and generated(server).asked.logprobs == 2
    first = body["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"]) == (0, " 0.0", list(b" 0.0")) and first["logprob"] < 0
    assert [set(each) for each in first["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 2
    *parts, last = events(server, n_probs=1)
    assert sum(len(part["completion_probabilities"]) for part in parts) == 3 and "completion_probabilities" not in last
    assert "post_sampling_probs" in error(server, n_probs=1, post_sampling_probs=True)
    assert told(server, post_sampling_probs=True)["content"]


def test_fields_of_the_answer_may_be_chosen(server: FakeServer) -> None:
    body = told(
        server, response_fields=["content", "generation_settings/n_predict", "nothing/there", "nothing/content"]
    )
    assert body == {"content": " 0.0 0.1 0.2", "generation_settings/n_predict": 3}


# ---------------------------------------------------------------- what is asked


def test_prompts_in_every_form(server: FakeServer) -> None:
    assert from_i32(generated_of(server, prompt=[5, 6]).message.ids or b"") == [5, 6]
    mixed = generated_of(server, prompt=[7, "the cat", 8])
    assert from_i32(mixed.message.ids or b"") == [7, 0, 1, 8]
    assert generated_of(server, prompt={"prompt_string": "x y"}).message.prompt == "x y"
    told(server, prompt=["x", [5], ["sat", 9]])
    sent = [r for r in server.engine.requests if isinstance(r, OpenGeneration)][-3:]
    assert sent[0].message.prompt == "x"
    assert [from_i32(request.message.ids or b"") for request in sent[1:]] == [[5], [2, 9]]


def generated_of(server: FakeServer, **body: Any) -> OpenGeneration:
    told(server, **body)
    return generated(server)


def test_what_is_said_is_honoured_and_the_rest_is_llama_cpps(server: FakeServer) -> None:
    plain = params(server)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (0.8, 7, 0.95, 0.05)  # 7: the model's own
    assert (plain.repetition_penalty, plain.seed, plain.skip_reading_prefix_cache) == (1.0, None, None)
    given = params(
        server, temperature=0.5, top_k=-1, top_p=0.9, min_p=0, repeat_penalty=1.2, presence_penalty=0.1,
        frequency_penalty=0.2, seed=9, ignore_eos=True, stop="x", cache_prompt=False, repeat_last_n=-1,
    )  # fmt: skip
    assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.5, 0, 0.9, 0.0)
    assert (given.repetition_penalty, given.presence_penalty, given.frequency_penalty) == (1.2, 0.1, 0.2)
    assert (given.seed, given.ignore_eos, given.stop, given.skip_reading_prefix_cache) == (9, True, ["x"], True)
    assert params(server, temperature=-1).greedy and params(server, seed=4294967295).seed is None
    assert params(server, n_predict=None, max_tokens=5).max_tokens == 5
    assert params(server, n_predict=-2, max_tokens=5).max_tokens is None
    off = params(server, repeat_penalty=1.5, presence_penalty=1, repeat_last_n=0)
    assert (off.repetition_penalty, off.presence_penalty) == (1.0, 0.0)


def test_samplers_that_are_not_named_are_not_run(server: FakeServer) -> None:
    asked = params(server, samplers=["dry", "top_k", "typ_p", "temperature"], repeat_penalty=2)
    assert (asked.top_k, asked.top_p, asked.min_p, asked.temperature, asked.repetition_penalty) == (7, 1, 0, 0.8, 1)
    whole = params(server, samplers=["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
                                     "temperature"], repeat_penalty=2)  # fmt: skip
    assert (whole.top_p, whole.min_p, whole.repetition_penalty) == (0.95, 0.05, 2)
    assert "must come in the order" in error(server, samplers=["temperature", "top_k"])
    assert "each once" in error(server, samplers=["top_k", "top_k"])
    assert "'mirostat'" in error(server, samplers=["mirostat"])


def test_grammars_and_schemas(server: FakeServer) -> None:
    gbnf = 'root ::= "yes" | "no"'
    spec = params(server, grammar=gbnf, json_schema={"type": "string"}).structured_outputs
    assert spec is not None and (spec.grammar, spec.json) == (gbnf, None)
    spec = params(server, grammar="", json_schema={"type": "string"}).structured_outputs
    assert spec is not None and spec.json == {"type": "string"}
    assert told(server, grammar=gbnf)["generation_settings"]["grammar"] == gbnf
    assert error(server, json_schema=5).startswith("json_schema")


def test_biases_of_ids_and_words(server: FakeServer) -> None:
    assert params(server, logit_bias=[[5, 1.5], [6, False]]).logit_bias == {5: 1.5, 6: -100.0}
    assert params(server, logit_bias=[["the cat", -2]]).logit_bias == {0: -2.0, 1: -2.0}
    assert params(server, logit_bias={"9": 1, "sat": 2}).logit_bias == {9: 1.0, 2: 2.0}
    assert params(server, logit_bias=[]).logit_bias is None
    for odd in ([5], 5, [[5, True]], [[None, 1]], {"5": "x"}):
        assert "logit_bias" in error(server, logit_bias=odd)
    assert "over the limit of 256" in error(server, logit_bias=[["x", 1]] * 257)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": None}, "prompt must be given"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"prompt": [5, None]}, "must be a string or a list"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aa"]}}, "takes text"),
        ({"dynatemp_range": 0.5}, "dynatemp_range=0.5 is not supported"),
        ({"mirostat": 2}, "mirostat=2 is not supported"),
        ({"typical_p": 0.5}, "typical_p=0.5 is not supported"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora="),
        ({"repeat_last_n": -2}, "repeat_last_n must be at least -1"),
        ({"repeat_penalty": 0}, "repeat_penalty must be in"),
        ({"n_probs": -5}, "n_probs must be at least"),
        ({"logit_bias": [[[1], 5]]}, "logit_bias has the key [1], which is neither"),
        ({"logit_bias": [[{}, 5]]}, "logit_bias has the key {}, which is neither"),
        ({"n_cmpl": 0}, "n_cmpl must be at least 1"),
        ({"top_p": 0}, "top_p must be in"),
        ({"temperature": "hot"}, "temperature must be a number"),
    ],
)
def test_what_cannot_be_done_is_refused_in_its_names(server: FakeServer, body: Any, words: str) -> None:
    assert words in error(server, **body)
    assert not [request for request in server.engine.requests if isinstance(request, OpenGeneration)]


def test_what_asks_for_nothing_is_let_pass(server: FakeServer) -> None:
    neutral = {"dynatemp_range": 0.0, "typical_p": 1.0, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0,
               "min_keep": 0, "lora": [], "n_keep": 4, "t_max_predict_ms": 0, "n_indent": 0, "mirostat_tau": 3,
               "grammar_lazy": False, "grammar_triggers": [], "unheard_of": 1}  # fmt: skip
    assert told(server, **neutral)["content"]
    assert error(server, 404, model="nope") and told(server, model="fake")["model"] == "fake"


# ---------------------------------------------------------------- filling in


def test_what_is_filled_in_goes_as_ids(server: FakeServer) -> None:
    body = {"input_prefix": "the cat", "input_suffix": "sat", "input_extra": [{"filename": "a", "text": "the"}],
            "prompt": "cat", "n_predict": 2}  # fmt: skip
    answer = told(server, "/infill", **body)
    assert answer["content"] == " 0.0 0.1"
    text, request = server.engine.requests
    assert isinstance(text, OpenText) and isinstance(request, OpenGeneration)
    assert text.message.work.infill == Infill("the cat", "sat", [("a", "the")], "cat")
    assert from_i32(request.message.ids or b"") == [9004, 0, 9001, 0, 1, 9002, 2, 9003, 1]
    assert request.asked.stop_token_ids == [9005]
    server.engine.script = lambda request: iter([Say(0, "x", 1, Finish.STOP, 9005)])
    assert told(server, "/infill", **body)["stop_type"] == "eos"
    assert "input_suffix must be given" in error(server, 400, "/infill", input_prefix="x")
    assert "input_extra[0]" in error(server, 400, "/infill", **{**body, "input_extra": ["x"]})


def test_a_model_that_cannot_fill_in_is_a_400(server: FakeServer) -> None:
    server.engine.refuse = lambda request: RequestError(400, "no tokens for filling in", "suffix")
    try:
        assert "filling in" in error(server, 400, "/infill", input_prefix="a", input_suffix="b", prompt="")
    finally:
        server.engine.refuse = lambda request: None


# ---------------------------------------------------------------- the server


def test_properties_and_slots(server: FakeServer) -> None:
    body = ask(server, "GET", "/props")[1]
    settings = body["default_generation_settings"]
    assert (settings["n_ctx"], body["total_slots"], body["chat_template"]) == (MAX_MODEL_LEN, 4, "")
    assert (settings["params"]["temperature"], settings["params"]["top_k"]) == (0.8, 7)
    for path in ("/props", "/slots/0?action=erase"):
        status, told, _ = ask(server, "POST", path, {})
        assert status == 400 and set(told["error"]) == {"code", "message", "type"}
    slots = ask(server, "GET", "/slots")[1]
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not any(slot["is_processing"] for slot in slots)
    held = server.app[FRONT].settings
    held.tokenizer = (Path(demo_model_path()), None)
    try:
        assert "{%" in ask(server, "GET", "/props")[1]["chat_template"]
    finally:
        held.tokenizer = None


@pytest.mark.parametrize("path", ["/reranking", "/v1/reranking"])
def test_documents_are_ranked_by_its_names_too(server: FakeServer, path: str) -> None:
    body = {"query": "the cat", "documents": ["the dog sat", "the cat sat"]}
    assert "does not support" in error(server, 400, path, **body)  # this model generates
    with FakeServer(pooler=CROSS) as ranking:
        found = post(ranking, body, path)[1]["results"]
    assert [each["index"] for each in found] == [1, 0]


def test_a_server_with_no_slot_left(server: FakeServer) -> None:
    async def stats(timeout: float) -> Any:
        return type("Full", (), {"running": 4})

    kept, server.engine.stats = server.engine.stats, stats  # type: ignore[method-assign, assignment]
    try:
        assert all(slot["is_processing"] for slot in ask(server, "GET", "/slots")[1])
        status, body, _ = ask(server, "GET", "/slots?fail_on_no_slot=1")
        assert status == 503 and body["error"]["type"] == "unavailable_error"
    finally:
        server.engine.stats = kept  # type: ignore[method-assign]
