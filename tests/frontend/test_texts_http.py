"""Text and tokens over HTTP with nothing run: vLLM's routes and llama.cpp's, over an engine of words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_asks import ask, error_of, post

from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenText
from quire.client.results import RequestError
from quire.frontend.fake import MAX_MODEL_LEN, FakeServer
from quire.frontend.front import FRONT
from quire.proto.checkpoint.model_config import demo_model_path
from quire.proto.codec import from_i32
from quire.proto.work import Text


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer(tokenizer=(Path(demo_model_path()), None)) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    shared.engine.requests.clear()
    shared.engine.words = {"the": 0, "cat": 1, "sat": 2}
    return shared


def sent(server: FakeServer) -> OpenText:
    """The one request that was made of the engine."""
    (request,) = server.engine.requests
    assert isinstance(request, OpenText) and request.done
    return request


def test_vllm_is_told_counts_ids_and_names(server: FakeServer) -> None:
    status, body = post(server, {"prompt": "the cat sat the"}, "/tokenize")
    assert (status, body) == (
        200, {"count": 4, "max_model_len": MAX_MODEL_LEN, "tokens": [0, 1, 2, 0], "token_strs": None},
    )  # fmt: skip
    assert sent(server).message.add_special_tokens is True
    body = post(server, {"prompt": "cat", "return_token_strs": True, "add_special_tokens": False}, "/tokenize")[1]
    assert (body["tokens"], body["token_strs"]) == ([1], ["cat"])
    assert server.engine.requests[1].message.add_special_tokens is False


def test_a_conversation_goes_through_the_template(server: FakeServer) -> None:
    chat = {"messages": [{"role": "user", "content": "the cat"}], "add_generation_prompt": False,
            "chat_template_kwargs": {"x": 1}, "add_special_tokens": True,
            "tools": [{"type": "function", "function": {"name": "f"}}]}  # fmt: skip
    assert post(server, chat, "/tokenize")[1]["tokens"] == [0, 1]
    message = sent(server).message
    assert message.messages == chat["messages"] and message.template == {
        "add_generation_prompt": False, "continue_final_message": False, "chat_template_kwargs": {"x": 1},
        "add_special_tokens": True, "tools": chat["tools"],
    }  # fmt: skip
    status, body = post(server, {"messages": chat["messages"], "max_tokens": 5}, "/apply-template")
    assert (status, body) == (200, {"prompt": "the cat"})


def test_llama_cpp_is_told_ids_and_pieces(server: FakeServer) -> None:
    assert post(server, {"content": "the cat"}, "/tokenize")[1] == {"tokens": [0, 1]}
    message = sent(server).message
    assert message.work == Text(["the cat"]) and message.add_special_tokens is False
    body = post(server, {"content": [7, "sat"], "with_pieces": True, "add_special": True, "parse_special": False},
                "/tokenize")[1]  # fmt: skip
    assert body == {"tokens": [{"id": 7, "piece": ""}, {"id": 2, "piece": "sat"}]}
    message = server.engine.requests[1].message
    assert message.work == Text([7, "sat"], plain=True, pieces=True) and message.add_special_tokens is True


def test_a_piece_that_is_no_text_is_told_as_bytes(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Text(names=["?"], texts=[b"\xc3"])
    monkeypatch.setattr(server.engine, "spell", lambda message: (b"\5\0\0\0", None, broken))
    body = post(server, {"content": "x", "with_pieces": True}, "/tokenize")[1]
    assert body == {"tokens": [{"id": 5, "piece": [0xC3]}]}


def test_the_text_of_ids_is_told_in_both_words(server: FakeServer) -> None:
    assert post(server, {"tokens": [2, 0, 1]}, "/detokenize") == (
        200,
        {"prompt": "sat the cat", "content": "sat the cat"},
    )
    assert post(server, {"tokens": []}, "/detokenize")[1]["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "must be given, got none"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt", "got prompt and content"),
        ("/tokenize", {"prompt": 5}, "prompt", "must be a string"),
        ("/tokenize", {"content": {"a": 1}}, "content", "must be a string or a list"),
        ("/tokenize", {"content": ["a", True]}, "content", "got a boolean"),
        ("/tokenize", {"content": [-1]}, "content", "-1, which is no token id"),
        ("/tokenize", {"messages": [{"role": 5}]}, "messages", "role must be a string"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model", "does not exist"),
        ("/detokenize", {}, "tokens", "must be given"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "got a string"),
        ("/detokenize", {"tokens": [2**31]}, "tokens", "is no token id"),
        ("/apply-template", {}, "messages", "at least one message"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "tools": ["x"]}, "tools", "tools[0]"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools", "tools[0]"),
    ],
)
def test_what_is_refused(server: FakeServer, path: str, body: Any, param: str, words: str) -> None:
    status = 404 if param == "model" else 400
    error = error_of(post(server, body, path), status)
    assert error["param"] == param and words in error["message"]
    assert not server.engine.requests


def test_what_the_detokenizer_refuses_is_told(server: FakeServer) -> None:
    server.engine.refuse = lambda request: RequestError(400, "Token id 9 is out of vocabulary.", "prompt")
    try:
        assert "out of vocabulary" in error_of(post(server, {"tokens": [9]}, "/detokenize"), 400)["message"]
    finally:
        server.engine.refuse = lambda request: None


def test_the_tokenizers_configuration_is_told_where_it_may_be(server: FakeServer) -> None:
    status, body, _ = ask(server, "GET", "/tokenizer_info")
    assert status == 200 and body["tokenizer_class"] and "{%" in body["chat_template"]
    assert body["eos_token"] == "<|im_end|>"
    settings = server.app[FRONT].settings
    kept, settings.tokenizer = settings.tokenizer, None
    try:
        told = error_of(ask(server, "GET", "/tokenizer_info"), 404)
    finally:
        settings.tokenizer = kept
    assert "--enable-tokenizer-info-endpoint" in told["message"]


# ---------------------------------------------------------------- a suffix


def test_a_completion_with_a_suffix_is_filled_in(server: FakeServer) -> None:
    body = {"prompt": ["the", "cat"], "suffix": "sat", "max_tokens": 2, "stop_token_ids": [7]}
    status, answer = post(server, body)
    assert status == 200 and [choice["text"] for choice in answer["choices"]] == [" 0.0 0.1"] * 2
    asked = [request for request in server.engine.requests if isinstance(request, OpenGeneration)]
    assert [from_i32(request.message.ids or b"") for request in asked] == [
        [9001, 0, 9002, 2, 9003],
        [9001, 1, 9002, 2, 9003],
    ]
    assert asked[0].asked.stop_token_ids == [7, 9005]
    assert post(server, {"prompt": "", "suffix": "sat", "max_tokens": 1})[0] == 200
    server.engine.requests.clear()
    assert post(server, {"prompt": "the", "suffix": "", "max_tokens": 1})[0] == 200
    assert [type(request) for request in server.engine.requests] == [OpenGeneration]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"prompt": "x", "suffix": 5}, "suffix"),
    ],
)
def test_what_means_nothing_with_a_suffix(server: FakeServer, body: Any, param: str) -> None:
    assert error_of(post(server, {"suffix": "sat", **body}), 400)["param"] == param
    assert not server.engine.requests


def test_a_model_that_cannot_fill_in_refuses_a_suffix(server: FakeServer) -> None:
    server.engine.refuse = lambda request: RequestError(400, "no tokens for filling in", "suffix")
    try:
        assert error_of(post(server, {"prompt": "x", "suffix": "y"}), 400)["param"] == "suffix"
    finally:
        server.engine.refuse = lambda request: None
