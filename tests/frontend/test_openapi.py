"""GET /openapi.json: every route has its row, every row its route, and answers have the shapes that it tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
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
from quire.proto.checkpoint.pooler_config import PoolerConfig


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
    "POST /completion": {"prompt": "the cat", "n_probs": 1},
    "POST /api/generate": {"prompt": "the cat", "stream": False, "logprobs": True},
    "POST /api/chat": {"messages": USER, "stream": False, "logprobs": True},
    "POST /api/show": {"model": "fake"},
    "POST /generate": {"inputs": "the cat", "parameters": {"details": True}},
    "POST /": {"inputs": "the cat"},
    "POST /tokenize": {"prompt": "the cat", "return_token_strs": True},
    "POST /detokenize": {"tokens": [0, 1]},
    "POST /apply-template": {"messages": USER},
    "POST /v1/completions/render": {"prompt": ["the cat", "sat"]},
    "POST /v1/chat/completions/render": {"messages": USER},
    "POST /inference/v1/generate": {"token_ids": [0, 1], "sampling_params": {"max_tokens": 2}},
    "POST /generative_scoring": {"query": "the", "items": ["cat"], "label_token_ids": [0]},
    "POST /v1/requests/cancel": {"request_ids": ["a"]},
}  # fmt: skip
WRONG: dict[str, Any] = {
    "POST /v1/chat/completions": answers.Error, "POST /v1/messages": told.AnthropicError,
    "POST /completion": told.LlamaError, "POST /api/chat": told.OllamaError, "POST /generate": told.TgiError,
    "POST /invocations": answers.Error, "POST /tokenize": answers.Error,
}  # fmt: skip


def wrong_in(name: str, text: bytes) -> list[str]:
    """The fields of an answer that its shape does not tell. Raises ValidationError where it is not of that shape."""
    msgspec.json.decode(text, type=TABLE[name].gives)
    (schema,), components = msgspec.json.schema_components([TABLE[name].gives])
    return untold(json.loads(text), schema, components)


def untold(value: Any, schema: dict[str, Any], components: dict[str, Any], where: str = "") -> list[str]:
    """The paths of a value's fields that a schema does not name."""
    if "anyOf" in schema:
        return min((untold(value, each, components, where) for each in schema["anyOf"]), key=len)
    if "$ref" in schema:
        return untold(value, components[schema["$ref"].rpartition("/")[2]], components, where)
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    if kind is None or schema.get("type", kind) != kind:
        return [] if kind is None else [where]
    if isinstance(value, list):
        return [found for each in value for found in untold(each, schema.get("items", {}), components, f"{where}[]")]
    if "properties" not in schema:
        return []
    found = [f"{where}.{name}" for name in value.keys() - schema["properties"].keys()]
    for name in value.keys() & schema["properties"].keys():
        found += untold(value[name], schema["properties"][name], components, f"{where}.{name}")
    return found


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
    assert not wrong_in(name, text)


def test_what_is_kept_has_the_shapes_that_are_told(tmp_path: Path) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=XX"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    parts = {'name="purpose"': "batch", 'name="file"; filename="in.jsonl"': line}
    body = "".join(f"--XX\r\nContent-Disposition: form-data; {what}\r\n\r\n{text}\r\n" for what, text in parts.items())
    with FakeServer(files_path=str(tmp_path)) as server:

        def asked(name: str, path: str = "", given: Any = None, **headers: Any) -> dict[str, Any]:
            method, usual = name.split(" ")
            status, text, _ = ask_bytes(server, method, path or usual, given, **headers)
            assert status == 200, text
            assert not wrong_in(name, text)
            return json.loads(text)

        file = asked("POST /v1/files", given=f"{body}--XX--\r\n".encode(), headers=form)["id"]
        asked("GET /v1/files/{id}", f"/v1/files/{file}")
        asked("GET /v1/files")
        made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = asked("POST /v1/batches", given=made)["id"]
        asked("GET /v1/batches/{id}", f"/v1/batches/{batch}")
        asked("GET /v1/batches")
        kept = asked("POST /v1/responses", given={"input": "the cat", "background": True, "metadata": {"a": "b"}})["id"]
        asked("GET /v1/responses/{id}", f"/v1/responses/{kept}")
        asked("GET /v1/responses/{id}/input_items", f"/v1/responses/{kept}/input_items?order=asc")
        asked("POST /v1/responses/{id}/cancel", f"/v1/responses/{kept}/cancel")
        asked("DELETE /v1/responses/{id}", f"/v1/responses/{kept}")

        # what a file may be answered with beside 200
        content, told = f"/v1/files/{file}/content", responses_of(server, "GET /v1/files/{id}/content")
        tag = ask_bytes(server, "GET", content)[2]["ETag"]
        for headers, status in (
            ({"Range": "bytes=0-3"}, 206), ({"If-None-Match": tag}, 304), ({"If-Match": '"x"'}, 412),
            ({"Range": "bytes=9999-"}, 416),
        ):  # fmt: skip
            answer = ask_bytes(server, "GET", content, headers=headers)
            assert (answer[0], answer[1]) == (status, line[:4].encode() if status == 206 else b"")
            assert set(told[str(status)].get("content", {})) == ({"application/octet-stream"} if answer[1] else set())
        (tmp_path / "files" / file).unlink()  # by somebody else than its server
        status, text, _ = ask_bytes(server, "GET", content)
        assert status == 404 and msgspec.json.decode(text, type=answers.Error).error.param == "id"


def responses_of(server: FakeServer, name: str) -> dict[str, Any]:
    method, path = name.split(" ")
    return document(server.app)["paths"][path][method.lower()]["responses"]


def test_files_of_the_page_are_told_by_what_they_are(server: FakeServer) -> None:
    told = responses_of(server, "GET /page/{file}")
    for file in ("style.css", "app.js", "icon.svg", "index.html"):
        status, _, headers = ask_bytes(server, "GET", f"/page/{file}")
        assert status == 200 and headers.get_content_type() in told["200"]["content"]
        status, text, _ = ask_bytes(server, "GET", f"/page/{file}", headers={"If-None-Match": headers["ETag"]})
        assert (status, text) == (304, b"") and told["304"] == {"description": "Not Modified"}
    assert "application/octet-stream" not in told["200"]["content"]
    assert responses_of(server, "GET /")["304"] == told["304"]


EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)


@pytest.mark.parametrize("form", ["float", "bytes", "bytes_only"])
def test_vectors_are_told_as_they_may_come(form: str) -> None:
    with FakeServer(pooler=EMBED) as server:
        for path in ("/v1/embeddings", "/pooling", "/invocations"):
            given = {"input": "the cat", "encoding_format": form}
            status, text, headers = ask_bytes(server, "POST", path, given)
            told = responses_of(server, f"POST {path}")["200"]["content"]
            assert status == 200 and headers.get_content_type() in told
            if form == "float":
                assert not wrong_in(f"POST {path}", text)
        for path, asked in (("/api/embed", {"input": "the cat"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            for named in ({}, {"model": "fake"}):
                text = ask_bytes(server, "POST", path, {**named, **asked})[1]
                assert not wrong_in(f"POST {path}", text) and json.loads(text)["model"] == "fake"


def test_a_part_of_an_answer_has_the_shape_that_is_told(server: FakeServer) -> None:
    asked = {"prompt": "the cat", "response_fields": ["content", "tokens_cached"]}
    status, text, _ = ask_bytes(server, "POST", "/completion", asked)
    assert status == 200 and set(json.loads(text)) == {"content", "tokens_cached"}
    assert not wrong_in("POST /completion", text)


@pytest.mark.parametrize(
    ("path", "query", "limit"), [("/v1/files", "order=asc", 10000), ("/slots", "fail_on_no_slot=1", None)]
)
def test_queries_are_told(server: FakeServer, path: str, query: str, limit: int | None) -> None:
    told = document(server.app)["paths"][path]["get"]["parameters"]
    schemas = {each["name"]: each["schema"] for each in told}
    assert query.partition("=")[0] in schemas and (limit is None or schemas["limit"]["maximum"] == limit)


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
