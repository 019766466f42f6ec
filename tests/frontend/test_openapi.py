"""GET /openapi.json: every route has its row, every row its route, and answers have the shapes that it tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_asks import ask_bytes

from quire.frontend.app import make_app
from quire.frontend.fake import FakeEngine, FakeServer
from quire.frontend.front import Settings
from quire.frontend.openapi import answers
from quire.frontend.openapi import dialect_answers as told
from quire.frontend.openapi.document import document
from quire.frontend.openapi.table import TABLE


def app_of(**settings: Any) -> Any:
    return make_app(FakeEngine(), Settings(names=["m"], admin_api_key="k", **settings))


def test_every_route_is_told_and_no_other() -> None:
    app = app_of()
    there = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("HEAD", "*")
    }
    assert there == set(TABLE)
    told = document(app)["paths"]
    assert {f"{method.upper()} {path}" for path, methods in told.items() for method in methods} == there


def test_references_lead_somewhere_and_every_operation_says_what_it_does() -> None:
    made = document(app_of(api_key="u"))
    text = msgspec.json.encode(made).decode()
    for part in text.split('"$ref":"#/components/schemas/')[1:]:
        assert part.split('"', 1)[0] in made["components"]["schemas"]
    names = [each["operationId"] for methods in made["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)
    assert all(each["summary"] for methods in made["paths"].values() for each in methods.values())
    chat = made["paths"]["/v1/chat/completions"]["post"]
    assert "security" not in chat and made["paths"]["/health"]["get"]["security"] == []
    assert made["paths"]["/sleep"]["post"]["security"] == [{"admin": []}]
    assert "security" not in made["paths"]["/docs"]["get"]  # which asks for the key, too
    fields = made["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "tools"} <= set(fields)


USER = [{"role": "user", "content": "the cat"}]
ASKED: dict[str, dict[str, Any] | None] = {
    "GET /v1/models": None, "GET /props": None, "GET /slots": None, "GET /info": None, "GET /version": None,
    "GET /api/tags": None, "GET /api/ps": None, "GET /api/version": None, "GET /load": None,
    "POST /v1/chat/completions": {"messages": USER, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True},
    "POST /v1/completions": {"prompt": "the cat", "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True},
    "POST /v1/responses": {"input": "the cat"},
    "POST /v1/responses/input_tokens": {"input": "the cat"},
    "POST /v1/messages": {"messages": USER, "max_tokens": 3},
    "POST /v1/messages/count_tokens": {"messages": USER},
    "POST /completion": {"prompt": "the cat"},
    "POST /api/generate": {"prompt": "the cat", "stream": False},
    "POST /api/chat": {"messages": USER, "stream": False},
    "POST /api/show": {"model": "fake"},
    "POST /generate": {"inputs": "the cat", "parameters": {"details": True}},
    "POST /": {"inputs": "the cat"},
    "POST /tokenize": {"prompt": "the cat", "return_token_strs": True},
    "POST /detokenize": {"tokens": [0, 1]},
    "POST /apply-template": {"messages": USER},
    "POST /inference/v1/generate": {"token_ids": [0, 1], "sampling_params": {"max_tokens": 2}},
    "POST /v1/requests/cancel": {"request_ids": ["a"]},
}  # fmt: skip
WRONG: dict[str, Any] = {
    "POST /v1/chat/completions": answers.Error, "POST /v1/messages": told.AnthropicError,
    "POST /completion": told.LlamaError, "POST /api/chat": told.OllamaError, "POST /generate": told.TgiError,
    "POST /invocations": answers.Error, "POST /tokenize": answers.Error,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        running.engine.words = {"the": 0, "cat": 1, "sat": 2}
        yield running


@pytest.mark.parametrize("name", ASKED)
def test_answers_have_the_shapes_that_are_told(server: FakeServer, name: str) -> None:
    method, path = name.split(" ")
    status, text, _ = ask_bytes(server, method, path, ASKED[name])
    assert status == 200, text
    msgspec.json.decode(text, type=TABLE[name].gives)


@pytest.mark.parametrize("name", WRONG)
def test_errors_have_the_shapes_that_are_told(server: FakeServer, name: str) -> None:
    method, path = name.split(" ")
    status, text, _ = ask_bytes(server, method, path, {"messages": 5, "prompt": {}, "inputs": 7})
    assert 400 <= status < 500
    msgspec.json.decode(text, type=WRONG[name])


def test_both_can_be_turned_off_and_the_page_takes_the_key_as_a_password() -> None:
    off = {route.resource.canonical for route in app_of(docs=False).router.routes() if route.resource is not None}
    assert not off & {"/docs", "/openapi.json"}
    with FakeServer(api_key="u") as server:
        assert ask_bytes(server, "GET", "/openapi.json")[0] == 401
        for given in ("", "Bearer x", "Basic dTp4", "Basic u", "Basic \u00ff", "Basic dQ=="):
            status, _, headers = ask_bytes(server, "GET", "/docs", headers={"Authorization": given})
            assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
        assert ask_bytes(server, "GET", "/v1/models", headers={"Authorization": "Basic OnU="})[0] == 401
        assert ask_bytes(server, "GET", "/docs", headers={"Authorization": "Bearer u"})[0] == 200
        status, page, _ = ask_bytes(server, "GET", "/docs", headers={"Authorization": "Basic OnU="})
        assert status == 200 and b"openapi.json" in page and b"://" not in page  # nothing from outside
