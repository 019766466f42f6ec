"""The routes that pool, over an engine that answers from a script: shapes, fields, errors, aborts, keys."""

from __future__ import annotations

import base64
import http.client
import json
import re
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy
import openai
import pytest
import torch

from quire.client.pooled import OpenPooling
from quire.client.results import RequestError
from quire.frontend import pooling
from quire.frontend.fake import FakeServer
from quire.frontend.vectors import TYPES, packed
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.codec import from_i32
from quire.proto.params import ParamError
from quire.proto.pooling import PoolingParams

EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)
CLASSES = PoolerConfig("TinyForSequenceClassification", "classify", "CLS", True, True, "softmax", 3, ("short", "long"))
CROSS = replace(CLASSES, labels=("LABEL_0",), activation="sigmoid")
MODELS = {"embed": EMBED, "classes": CLASSES, "cross": CROSS}

WIDE = 2**31
STRICT: dict[str, Any] = {"max_request_bytes": 50_000, "lenient_types": False}
PATHS = {
    "/v1/embeddings": "embed", "/pooling": "embed", "/classify": "classes",
    "/score": "cross", "/v1/score": "cross", "/rerank": "cross", "/v1/rerank": "cross", "/v2/rerank": "cross",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a b"}, "/pooling": {"input": "a b"}, "/classify": {"input": "a b"},
    **{path: {"text_1": "a b", "text_2": "b"} for path in ("/score", "/v1/score")},
    **{path: {"query": "a b", "documents": ["b"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, FakeServer]]:
    with (
        FakeServer(names=["fake", "alias"], pooler=EMBED, max_queued=64, **STRICT) as embed,
        FakeServer(names=["fake"], pooler=CLASSES, **STRICT) as classes,
        FakeServer(names=["fake"], pooler=CROSS, **STRICT) as cross,
    ):
        yield {"embed": embed, "classes": classes, "cross": cross}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(names=["fake"], pooler=EMBED) as running:
        yield running


def post(server: FakeServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def raw_of(server: FakeServer, path: str, body: Any) -> tuple[str | None, bytes]:
    """The header with what is told beside the bytes, and the bytes."""
    asked = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/octet-stream"
        return answer.headers["metadata"], answer.read()


def error_of(answer: tuple[int, Any], status: int = 400) -> dict[str, Any]:
    assert answer[0] == status, answer
    (error,) = answer[1].values()
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error


def vector(text: str) -> list[float]:
    """What the script's model makes of a text."""
    rows = numpy.array([[len(word), ord(word[0]) / 100, 1] for word in text.split()], numpy.float32)
    return rows.sum(0).tolist()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------- shapes


def test_embeddings(servers: dict[str, FakeServer]) -> None:
    status, body = post(servers["embed"], "/v1/embeddings", {"model": "alias", "input": ["a bc", "d"], "user": "me"})
    assert status == 200
    assert body["id"].startswith("embd-") and body["object"] == "list" and body["model"] == "alias"
    assert isinstance(body["created"], int)
    assert body["data"] == [
        {"index": 0, "object": "embedding", "embedding": vector("a bc")},
        {"index": 1, "object": "embedding", "embedding": vector("d")},
    ]
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    assert body["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}


def test_base64_is_the_same_numbers_as_little_endian_float32(servers: dict[str, FakeServer]) -> None:
    _, body = post(servers["embed"], "/v1/embeddings", {"input": "a bc", "encoding_format": "base64"})
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert list(struct.unpack("<3f", raw)) == vector("a bc")
    _, body = post(servers["embed"], "/pooling", {"input": "a bc", "task": "token_embed", "encoding_format": "base64"})
    raw = base64.b64decode(body["data"][0]["data"])
    assert list(struct.unpack("<6f", raw)) == vector("a") + vector("bc")


def test_a_template_puts_the_texts_of_a_score_together() -> None:
    with FakeServer(names=["fake"], pooler=CROSS, score_template=True) as server:
        post(server, "/rerank", {"query": "q", "documents": ["a b", "c"]})
        told = [each.message for each in server.engine.requests]
        assert [each.messages for each in told] == [
            [{"role": "query", "content": "q"}, {"role": "document", "content": text}] for text in ("a b", "c")
        ]
        assert told[0].template == {"add_generation_prompt": False, "continue_final_message": False}
        error = error_of(post(server, "/score", {"text_1": "q", "text_2": "a", "max_tokens_per_doc": 3}))
        assert error["param"] == "max_tokens_per_doc"


def test_a_text_that_is_too_long_is_embedded_in_chunks() -> None:
    def by_ids(request: OpenPooling) -> Iterator[Any]:
        ids = from_i32(request.message.ids) if request.message.ids is not None else [7, 7]
        yield numpy.array([ids[0], len(ids), 1], numpy.float32)

    chunked = replace(EMBED, enable_chunked_processing=True, max_embed_len=5000)
    with FakeServer(names=["fake"], pooler=chunked) as server:
        server.engine.pooling = by_ids
        words = " ".join(f"w{n}" for n in range(4500))
        status, body = post(server, "/v1/embeddings", {"input": [words, "a b"]})
        weights = [2048, 2048, 404]  # the context of the model holds 2048
        means = [numpy.average(values, weights=weights) for values in ([0, 2048, 4096], weights, [1, 1, 1])]
        assert status == 200 and body["data"][0]["embedding"] == pytest.approx(means)
        assert body["data"][1]["embedding"] == [7, 2, 1] and len(body["data"]) == 2
        assert body["usage"]["prompt_tokens"] == 4502
        _, body = post(server, "/v1/embeddings", {"input": list(range(3000))})
        assert body["data"][0]["embedding"] == pytest.approx([952 * 2048 / 3000, (2048**2 + 952**2) / 3000, 1])
        error = error_of(post(server, "/v1/embeddings", {"input": ["a", list(range(5001))][1]}))
        assert "input has 5001 tokens, over the limit of 5000 (max_embed_len)" in error["message"]
        seen = len(server.engine.requests)
        post(server, "/v1/embeddings", {"input": words, "truncate_prompt_tokens": -1})
        assert len(server.engine.requests) == seen + 1


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_numbers_are_torchs(kind: str) -> None:
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(kind, kind))
    draw = numpy.random.default_rng(1)
    given = numpy.concatenate(
        [draw.normal(size=4096).astype("f4") * scale for scale in (1.0, 1e-2, 1e-3, 30.0)]
        + [numpy.array([0.0, -0.0, 448.0, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10, 57344.0, 1.125, 1.375], "f4")]
    )
    given = numpy.clip(given, -400, 400) if kind == "fp8_e4m3" else given
    want = torch.from_numpy(given).to(dtype).view(torch.uint8).numpy().tobytes()
    assert packed(given, kind, "native") == packed(given, kind, "little") == want
    width = len(want) // len(given)
    swapped = numpy.frombuffer(want, "u1").reshape(-1, width)[:, ::-1].tobytes()
    assert packed(given, kind, "big") == swapped


def test_vectors_as_bytes(servers: dict[str, FakeServer]) -> None:
    server, body = servers["embed"], {"input": ["a bc", "d"], "encoding_format": "bytes", "embed_dtype": "float16"}
    want = [numpy.array(vector(text), "<f2").tobytes() for text in body["input"]]
    told, raw = raw_of(server, "/v1/embeddings", body)
    assert raw == b"".join(want) and told is not None
    said = json.loads(told)
    place = {"embed_dtype": "float16", "endianness": "native", "shape": [3]}
    assert said["data"] == [{"index": 0, "start": 0, "end": 6, **place}, {"index": 1, "start": 6, "end": 12, **place}]
    assert said["usage"]["prompt_tokens"] == 3 and said["model"] == "fake" and said["id"].startswith("embd-")
    assert raw_of(server, "/pooling", {**body, "encoding_format": "bytes_only"}) == (None, b"".join(want))
    _, answer = post(server, "/v1/embeddings", {**body, "encoding_format": "base64", "endianness": "big"})
    assert base64.b64decode(answer["data"][1]["embedding"]) == numpy.array(vector("d"), ">f2").tobytes()


def test_the_limit_of_documents_is_none_of_queries(servers: dict[str, FakeServer]) -> None:
    server = servers["embed"]
    seen = len(server.engine.requests)
    body = {"query": "a b c", "documents": ["d e", "f"], "max_tokens_per_doc": 2}
    assert post(server, "/rerank", body)[0] == 200
    asked = [each.work.params.max_tokens_per_doc for each in server.engine.requests[seen:]]
    assert asked == [None, 2, 2]


def test_every_form_of_input(servers: dict[str, FakeServer]) -> None:
    server = servers["embed"]
    for given, count, tokens in (
        ("a b", 1, 2), (["a", "b c"], 2, 3), ([5, 6, 7], 1, 3), ([[5], [6, 7]], 2, 3), ("", 1, 0), (["", "a"], 2, 1),
    ):  # fmt: skip
        status, body = post(server, "/v1/embeddings", {"input": given})
        assert (status, len(body["data"]), body["usage"]["prompt_tokens"]) == (200, count, tokens)
    seen = len(server.engine.requests)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi there"}]}]
    assert post(server, "/v1/embeddings", {"messages": messages, "chat_template_kwargs": {"a": 1}})[0] == 200
    message = server.engine.requests[seen].message
    assert message.messages == messages
    template = {"add_generation_prompt": False, "continue_final_message": False, "chat_template_kwargs": {"a": 1}}
    assert message.template == template
    assert post(server, "/v1/embeddings", {"messages": messages, "add_special_tokens": True})[0] == 200
    assert server.engine.requests[seen + 1].message.template["add_special_tokens"] is True
    body = {"input": "x", "add_special_tokens": False, "priority": -5}
    assert post(server, "/v1/embeddings", body)[0] == 200
    message = server.engine.requests[seen + 2].message
    assert (message.prompt, message.add_special_tokens, message.priority) == ("x", False, -5)


def test_parameters_reach_the_engine(servers: dict[str, FakeServer]) -> None:
    for path, body, expected in (
        ("/v1/embeddings", {"dimensions": 2, "normalize": False}, {"dimensions": 2, "normalize": False}),
        ("/v1/embeddings", {"use_activation": False}, {"normalize": False}),
        ("/v1/embeddings", {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ("/pooling", {}, {}),
        ("/pooling", {"task": "token_embed", "dimensions": 1}, {"task": "token_embed", "dimensions": 1}),
        ("/classify", {"use_activation": False}, {"task": "classify", "use_activation": False}),
        ("/score", {"max_tokens_per_doc": 4}, {"task": "score", "max_tokens_per_doc": 4}),
        ("/rerank", {"max_tokens_per_doc": 0}, {"task": "score"}),
        ("/classify", {"truncation_side": "left"}, {"task": "classify", "truncation_side": "left"}),
        ("/score", {"truncate_prompt_tokens": 9}, {"task": "score", "truncate_prompt_tokens": 9}),
        ("/rerank", {"use_activation": True}, {"task": "score", "use_activation": True}),
    ):
        server = servers[PATHS[path]]
        assert post(server, path, {**BODIES[path], **body})[0] == 200
        assert server.engine.requests[-1].work.params == PoolingParams(**{"task": "embed", **expected})


def test_classify(servers: dict[str, FakeServer]) -> None:
    status, body = post(servers["classes"], "/classify", {"input": ["one", "four words are here"]})
    assert status == 200 and body["id"].startswith("classify-") and body["object"] == "list"
    first, second = body["data"]
    assert first == {"index": 0, "label": "short", "probs": [0.5, 0.5], "num_classes": 2}
    assert second["label"] == "long" and second["probs"] == pytest.approx([0.2, 0.8])
    assert body["usage"]["prompt_tokens"] == 5


def test_pooling_by_task(servers: dict[str, FakeServer]) -> None:
    _, body = post(servers["embed"], "/pooling", {"input": "a bc"})
    assert body["id"].startswith("pool-")
    assert body["data"] == [{"index": 0, "object": "pooling", "data": vector("a bc")}]
    _, body = post(servers["embed"], "/pooling", {"input": "a bc", "task": "token_embed"})
    assert body["data"][0]["data"] == [vector("a"), vector("bc")]
    _, body = post(servers["classes"], "/pooling", {"input": "one"})
    assert body["data"][0]["data"] == [0.5, 0.5]


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_scores_of_a_cross_encoder(servers: dict[str, FakeServer], names: tuple[str, str]) -> None:
    server = servers["cross"]
    for first, second, scores, tokens in (
        ("a b", "b c", [0.5], 4),
        ("a b", ["b", "c", "a b"], [0.5, 0.0, 1.0], 10),
        (["a b"], [{"text": "b"}], [0.5], 3),
        (["a", "b"], ["a", "x"], [1.0, 0.0], 4),
    ):
        status, body = post(server, "/score", dict(zip(names, (first, second), strict=True)))
        assert status == 200 and body["id"].startswith("score-")
        assert body["data"] == [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)]
        assert body["usage"]["prompt_tokens"] == tokens


def test_scores_of_embeddings_are_cosines_and_a_text_is_run_once(servers: dict[str, FakeServer]) -> None:
    server = servers["embed"]
    seen = len(server.engine.requests)
    status, body = post(server, "/score", {"text_1": "a b", "text_2": ["a b", "ccc d", "e"]})
    assert status == 200
    a, others = numpy.array(vector("a b")), [numpy.array(vector(text)) for text in ("a b", "ccc d", "e")]
    expected = [a @ b / numpy.sqrt((a @ a) * (b @ b)) for b in others]
    assert [each["score"] for each in body["data"]] == pytest.approx(expected, abs=1e-12)
    assert len(server.engine.requests) == seen + 4 and body["usage"]["prompt_tokens"] == 7


def test_scores_of_late_interaction_are_sums_of_the_best() -> None:
    """Each token of the query with the document's token that is most like it; a text is run once."""

    def rows(text: str) -> numpy.ndarray:
        return numpy.array([[len(word), ord(word[0]) / 100, 1] for word in text.split()], numpy.float32)

    texts = ["b", "a bb ccc", "dddd d"]
    expected = [sum(max(float(a @ b) for b in rows(text)) for a in rows("a bbb")) for text in texts]
    with FakeServer(names=["fake"], pooler=replace(EMBED, late_interaction=True)) as server:
        body = post(server, "/score", {"text_1": "a bbb", "text_2": texts})[1]
        assert [each["score"] for each in body["data"]] == pytest.approx(expected, rel=1e-6)
        assert [request.work.params.task for request in server.engine.requests] == ["token_embed"] * 4
        best = post(server, "/rerank", {"query": "a bbb", "documents": texts, "top_n": 1})[1]["results"]
        assert [each["index"] for each in best] == [expected.index(max(expected))]
        data = post(server, "/pooling", {"input": "a bbb"})[1]["data"][0]["data"]
        assert numpy.array(data) == pytest.approx(rows("a bbb"))
        assert "it can do token_embed" in error_of(post(server, "/v1/embeddings", {"input": "a"}))["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(servers: dict[str, FakeServer], path: str) -> None:
    documents = ["b", "x", {"text": "a b"}, "a"]
    body = post(servers["cross"], path, {"query": "a b", "documents": documents})[1]
    assert set(body) == {"id", "model", "usage", "results"} and body["id"].startswith("rerank-")
    assert body["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    assert body["results"] == [
        {"index": 2, "relevance_score": 1.0, "document": {"text": "a b"}},
        {"index": 0, "relevance_score": 0.5, "document": {"text": "b"}},  # equal ones in their own order
        {"index": 3, "relevance_score": 0.5, "document": {"text": "a"}},
        {"index": 1, "relevance_score": 0.0, "document": {"text": "x"}},
    ]
    asked = {"query": "a b", "documents": documents, "top_n": 2, "return_documents": False}
    assert post(servers["cross"], path, asked)[1]["results"] == [
        {"index": 2, "relevance_score": 1.0}, {"index": 0, "relevance_score": 0.5},
    ]  # fmt: skip
    for top_n, count in ((0, 4), (1, 1), (4, 4), (99, 4)):
        assert len(post(servers["cross"], path, {**asked, "top_n": top_n})[1]["results"]) == count
    best = post(servers["embed"], path, {"query": "a b", "documents": ["zzzz", "a b"]})[1]["results"][0]
    assert best["index"] == 1 and best["relevance_score"] == pytest.approx(1)


def test_ids_are_the_clients_own(servers: dict[str, FakeServer]) -> None:
    for path, kind in PATHS.items():
        body = post(servers[kind], path, {**BODIES[path], "request_id": "mine-1"})[1]
        assert body["id"].endswith("-mine-1")


# ---------------------------------------------------------------- fields

TEXTS = ("text_1", "text_2")
ANY: list[tuple[str, Any, str]] = [
    ("cache_salt", "", "Parameter 'cache_salt' must be a non-empty string if provided."),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be at least 1, got 0"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens must be at least 1, got -2"),
    ("truncate_prompt_tokens", WIDE, f"truncate_prompt_tokens must be at most {WIDE - 1}, got {WIDE}"),
    ("truncate_prompt_tokens", 1.5, "truncate_prompt_tokens must be an integer, got a number"),
    ("truncate_prompt_tokens", "3", "truncate_prompt_tokens must be an integer, got a string"),
    ("truncate_prompt_tokens", True, "truncate_prompt_tokens must be an integer, got true or false"),
    ("priority", WIDE, "priority must be a 32-bit integer"),
    ("priority", "high", "priority must be an integer, got a string"),
    ("use_activation", 1, "use_activation must be true or false, got an integer"),
    ("model", 5, "model must be a string, got an integer"),
    ("user", [], "user must be a string, got a list"),
]
INPUTS: list[tuple[str, Any, str]] = [
    ("input", None, "input must be given and must not be empty"),
    ("input", [], "input must be given and must not be empty"),
    ("input", 5, "input must be a string or a list, got an integer"),
    ("input", {"a": 1}, "input must be a string or a list, got an object"),
    ("input", ["a", 5], "input[1] must be a string or a list of token ids, all alike; got an integer"),
    ("input", ["a", [5]], "input[1] must be a string or a list of token ids"),
    ("input", [None], "input must be a string or a list of token ids, all alike; got null"),
    ("input", [1.5], "input must be a string or a list of token ids"),
    ("input", [1, "a"], "input must hold integers (token ids), got a string"),
    ("input", [[1], []], "input[1] must not be empty"),
    ("input", [-1], "input holds -1, which is no token id"),
    ("input", [[3, WIDE]], f"input holds {WIDE}, which is no token id"),
    ("input", ["x"] * 2049, "input holds 2049 prompts, over the limit of 2048"),
    ("messages", [], "messages"),
    ("messages", [{"content": "x"}], "messages"),
    ("messages", "hi", "messages must be a list, got a string"),
    ("add_special_tokens", "yes", "add_special_tokens must be true or false, got a string"),
]
VECTORS: list[tuple[str, Any, str]] = [
    ("dimensions", 0, "dimensions must be at least 1, got 0"),
    ("dimensions", -1, "dimensions must be at least 1, got -1"),
    ("dimensions", 4, "dimensions must be at most 3, the model's own, got 4"),
    ("dimensions", 2.5, "dimensions must be an integer, got a number"),
    ("dimensions", "2", "dimensions must be an integer, got a string"),
    ("encoding_format", "hex", "encoding_format must be one of float, base64, bytes, bytes_only, got 'hex'"),
    ("encoding_format", 1, "encoding_format must be a string, got an integer"),
    ("normalize", "no", "normalize must be true or false, got a string"),
    ("embed_dtype", "int8", "embed_dtype must be one of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, got 'int8'"),
    ("endianness", "middle", "endianness must be one of native, little, big, got 'middle'"),
    ("truncation_side", "both", "truncation_side must be one of ['left', 'right'], got 'both'"),
]
BAD: dict[str, list[tuple[str, Any, str]]] = {
    "/v1/embeddings": ANY + INPUTS + VECTORS,
    "/pooling": [
        *ANY[:2], *INPUTS[:2], *VECTORS,
        ("task", "generate", "task must be one of"),
        ("task", 5, "task must be a string, got an integer"),
        ("task", "classify", "task 'classify' is not what TinyModel can do here"),
        ("use_activation", False, "use_activation means nothing for task 'embed'"),
    ],
    "/classify": [*ANY, *INPUTS[:4]],
    "/score": [
        *ANY,
        ("text_1", None, "the two sides of a score are text_1 and text_2, or queries and documents; given: text_2"),
        ("queries", "x", "the two sides of a score are"),
        ("text_1", [], "text_1 must be given and must not be empty"),
        ("text_2", 5, "text_2 must be a string, or an object such as"),
        ("text_2", ["a", None], "text_2[1] must be a string"),
        ("text_2", [{"txt": "a"}], "text_2[0] must be a string"),
        ("text_1", ["a", "b"], "Input lengths must be either 1:1, 1:N or N:N (2 and 1 given)"),
        ("text_2", ["x"] * 2049, "text_2 holds 2049 texts, over the limit of 2048"),
    ],
    "/v2/rerank": [
        *ANY,
        ("query", None, "query must be given"),
        ("query", ["a"], "query must be a string, got a list"),
        ("query", 5, "query must be a string"),
        ("documents", None, "documents must be given"),
        ("documents", [], "documents must be given and must not be empty"),
        ("documents", [{"text": 5}], "documents[0] must be a string"),
        ("top_n", -1, "top_n must be at least 0 (0: all documents), got -1"),
        ("top_n", 1.5, "top_n must be an integer, got a number"),
        ("return_documents", "yes", "return_documents must be true or false"),
        ("max_tokens_per_doc", -1, "max_tokens_per_doc must be at least 1, got -1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", BAD)
def test_what_is_refused_and_nothing_is_queued(servers: dict[str, FakeServer], path: str) -> None:
    server = servers[PATHS[path]]
    seen = len(server.engine.requests)
    for name, value, message in BAD[path]:
        body = {} if name == "messages" else BODIES[path]
        error = error_of(post(server, path, {**body, name: value}))
        assert message in error["message"], (name, value)
        if name != "queries" and (name, value) != ("text_1", None):
            assert error["param"] == name, (name, value)
    for raw in (b'{"input": NaN}', b'{"input": "a", "dimensions": NaN}', b"[]", b"", b"\xff"):
        error_of(post(server, path, raw))
    assert error_of(post(server, path, b'{"user": "a", "dimensions": 1e400, "top_n": 1e400}'))["param"] in (
        "dimensions", "top_n",
    )  # fmt: skip
    assert len(server.engine.requests) == seen


def test_two_inputs_and_both_ends_of_a_conversation(servers: dict[str, FakeServer]) -> None:
    messages = [{"role": "user", "content": "x"}]
    error = error_of(post(servers["embed"], "/v1/embeddings", {"input": "a", "messages": messages}))
    assert error["param"] == "messages" and "both given" in error["message"]
    body = {"messages": messages, "add_generation_prompt": True, "continue_final_message": True}
    assert "Cannot set both" in error_of(post(servers["embed"], "/v1/embeddings", body))["message"]


def test_models_methods_and_sizes(servers: dict[str, FakeServer]) -> None:
    for path, kind in PATHS.items():
        assert error_of(post(servers[kind], path, {**BODIES[path], "model": "nope"}), 404)["param"] == "model"
        big = {**BODIES[path], "user": "x" * 50_000}
        assert "over the limit" in error_of(post(servers[kind], path, big), 413)["message"]
    connection = http.client.HTTPConnection(servers["embed"].url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/embeddings")
    assert connection.getresponse().status == 405
    connection.close()


def test_a_route_that_the_model_cannot_do(servers: dict[str, FakeServer]) -> None:
    for kind, path, words in (
        ("classes", "/v1/embeddings", "The model does not support Embeddings API: it can do classify, token_classify."),
        ("embed", "/classify", "The model does not support Classification API: it can do embed, token_embed."),
        ("classes", "/score", "The model does not support Score API: it can do classify"),
        ("classes", "/rerank", "The model does not support Rerank (Score) API: it can do classify"),
        ("embed", "/v1/completions", "The model does not support Completions API: this server pools"),
    ):
        assert words in error_of(post(servers[kind], path, {**BODIES.get(path, {}), "prompt": "a"}))["message"]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    words = "The model does not support Chat Completions API"
    assert words in error_of(post(servers["embed"], "/v1/chat/completions", chat))["message"]
    with FakeServer() as server:
        for path, body in BODIES.items():
            error = error_of(post(server, path, body))
            assert "it generates; start a server with --runner pooling" in error["message"]
        assert not server.engine.requests


# ---------------------------------------------------------------- failures


def test_a_list_that_could_never_wait(servers: dict[str, FakeServer]) -> None:
    error = error_of(post(servers["embed"], "/v1/embeddings", {"input": ["x"] * 65}))
    assert error["param"] == "input" and "--max-num-queued-reqs" in error["message"]
    assert post(servers["embed"], "/v1/embeddings", {"input": ["x"] * 64})[0] == 200
    error = error_of(post(servers["embed"], "/score", {"text_1": ["x"] * 40, "text_2": ["x"] * 40}))
    assert error["param"] == "text_1" and "80 prompts" in error["message"]


def test_one_failing_input_fails_the_request_and_aborts_the_others(server: FakeServer) -> None:
    server.engine.pooling = lambda request: iter([600.0])
    said = RequestError(400, "prompt must not be empty: it has no tokens.", "prompt")
    server.engine.refuse = lambda request: said if request.message.prompt == "bad" else None
    error = error_of(post(server, "/v1/embeddings", {"input": ["a", "b", "bad", "c"]}))
    assert error == {"message": "input[2] must not be empty: it has no tokens.", "type": "BadRequestError",
                     "param": "input", "code": 400}  # fmt: skip
    wait_until(lambda: server.engine.open_requests == 0 and len(server.engine.aborted) == 3)
    said = RequestError(400, "This is too long.", "input_tokens")
    error = error_of(post(server, "/rerank", {"query": "a", "documents": ["b", "bad"]}))
    assert error["message"] == "documents[1]: This is too long." and error["param"] == "documents"
    wait_until(lambda: server.engine.open_requests == 0)


@pytest.mark.parametrize(
    ("path", "sides", "place"),
    [
        ("/rerank", {"query": "a", "documents": ["b", "bad"]}, "documents[1] with query"),
        ("/rerank", {"query": "bad", "documents": ["b", "c"]}, "query with documents[0]"),
        ("/score", {"text_1": "a", "text_2": "bad"}, "text_2 with text_1"),
        ("/score", {"text_1": ["a", "bad"], "text_2": ["b", "c"]}, "text_1[1] with text_2[1]"),
    ],
)
def test_a_pair_that_fails_is_named_by_both_its_texts_the_longer_first(
    servers: dict[str, FakeServer], monkeypatch: pytest.MonkeyPatch, path: str, sides: dict[str, Any], place: str
) -> None:
    said = RequestError(400, "This is too long.", "input_tokens")
    refuse = lambda request: said if "bad" in (request.message.prompt, request.work.pair) else None  # noqa: E731
    monkeypatch.setattr(servers["cross"].engine, "refuse", refuse)
    error = error_of(post(servers["cross"], path, sides))
    assert error["message"] == f"{place}: This is too long." and error["param"] == re.split(r"\W", place)[0]


def test_an_input_that_cannot_be_sent_takes_back_those_before_it(server: FakeServer) -> None:
    server.engine.pooling = lambda request: iter([600.0])
    error = error_of(post(server, "/v1/embeddings", b'{"input": ["a", "b", "\\ud800"]}'))
    assert error["param"] in ("input", None)
    wait_until(lambda: server.engine.open_requests == 0)


@pytest.mark.parametrize("status", [429, 503, 500])
def test_refusals_of_the_engine_keep_their_status(server: FakeServer, status: int) -> None:
    server.engine.refuse = lambda request: RequestError(status, "no.", None, 2.4)
    for body in ({"input": "a"}, {"input": ["a", "b"]}):
        assert error_of(post(server, "/v1/embeddings", body), status)["message"] == "no."
    wait_until(lambda: server.engine.open_requests == 0)


def test_numbers_that_are_none_are_an_error_and_not_null(server: FakeServer) -> None:
    for value in (numpy.nan, numpy.inf, -numpy.inf):
        server.engine.pooling = lambda request, value=value: iter([numpy.array([1, value], numpy.float32)])
        for encoding in ("float", "base64"):
            body = {"input": ["a", "b"], "encoding_format": encoding}
            assert "not finite" in error_of(post(server, "/v1/embeddings", body), 500)["message"]


def test_an_answer_that_would_be_too_large(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_NUMBERS", 6)
    assert post(server, "/v1/embeddings", {"input": ["a", "b"]})[0] == 200
    assert "over 6 numbers" in error_of(post(server, "/v1/embeddings", {"input": ["a", "b", "c"]}))["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank"])
def test_a_client_that_leaves_ends_its_requests(server: FakeServer, path: str) -> None:
    server.engine.pooling = lambda request: iter([600.0])
    texts = {"query": "a", "documents": ["b", "c"]} if path == "/rerank" else {"input": ["a", "b", "c"]}
    body = json.dumps(texts).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        wait_until(lambda: len(server.engine.requests) == 3 and server.engine.open_requests == 3)
    wait_until(lambda: server.engine.open_requests == 0)
    assert len(server.engine.aborted) == 3


def test_nothing_is_ready_and_draining() -> None:
    with FakeServer(pooler=EMBED, restart_s=0.05) as server:
        server.engine.is_ready = False
        assert error_of(post(server, "/v1/embeddings", {"input": "a"}), 503)["type"] == "ServiceUnavailableError"
        error_of(post(server, "/v1/embeddings", {"input": []}), 400)  # what is wrong with it is told all the same
        assert not server.engine.requests


def test_keys_and_whose_a_request_is() -> None:
    with FakeServer(pooler=EMBED, api_key="one,two") as server:
        for path in PATHS:
            assert error_of(post(server, path, BODIES[path]), 401)["type"] == "AuthenticationError"
        for key in ("one", "two"):
            assert post(server, "/v1/embeddings", {"input": ["a", "b"]}, Authorization=f"Bearer {key}")[0] == 200
        owners = [request.message.key for request in server.engine.requests]
        assert owners[0] == owners[1] != owners[2] == owners[3] and "" not in owners


def test_health_and_metrics_of_a_server_that_pools(server: FakeServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)

    def get(path: str) -> tuple[int, str]:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    assert get("/health/generate")[0] == 200
    (probe,) = server.engine.requests
    assert isinstance(probe, OpenPooling) and probe.message.ids == b"\0" * 4
    server.engine.refuse = lambda request: RequestError(500, "the cache is on fire.")
    assert "on fire" in get("/health/generate")[1]
    server.engine.refuse = lambda request: None
    post(server, "/v1/embeddings", {"input": ["a b", "c"]})
    text = get("/metrics")[1]
    assert 'quire:request_success_total{finished_reason="stop",model_name="fake"} 2.0' in text
    assert 'quire:request_prompt_tokens_sum{model_name="fake"} 3.0' in text
    assert json.loads(get("/v1/models")[1])["data"][0]["id"] == "fake"
    connection.close()


def test_the_openai_client_reads_both_encodings(servers: dict[str, FakeServer]) -> None:
    client = openai.OpenAI(api_key="EMPTY", base_url=servers["embed"].url + "/v1", max_retries=0)
    plain = client.embeddings.create(model="fake", input=["a bc", "d"], encoding_format="float")
    packed = client.embeddings.create(model="fake", input=["a bc", "d"])  # it asks for base64 by itself
    assert [each.embedding for each in plain.data] == [each.embedding for each in packed.data]
    assert plain.data[0].embedding == vector("a bc") and plain.usage.total_tokens == 3
    assert len(client.embeddings.create(model="fake", input="a", dimensions=2).data[0].embedding) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="fake", input="a", dimensions=7)
    assert caught.value.param == "dimensions"


def test_a_long_answer_lets_others_through(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_AT_ONCE", 1)
    turns = []
    gate = threading.Event()
    before = pooling.writer("float", "float32", "native")

    def slow(data: numpy.ndarray) -> Any:
        turns.append(len(data))
        if len(turns) == 1:
            server.loop.call_soon(gate.set)
        elif len(turns) == 2:
            assert gate.is_set()  # the loop has turned since
        return before(data)

    monkeypatch.setattr(pooling, "writer", lambda *form: slow)
    assert post(server, "/v1/embeddings", {"input": ["a", "b", "c"]})[0] == 200 and turns == [3, 3, 3]


def test_many_at_once_are_not_mixed_up(servers: dict[str, FakeServer]) -> None:
    def one(number: int) -> None:
        texts = [f"{'w' * (1 + (number + i) % 9)} x{'y' * i}" for i in range(1 + number % 5)]
        body = post(servers["embed"], "/v1/embeddings", {"input": texts})[1]
        assert [each["embedding"] for each in body["data"]] == [vector(text) for text in texts]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(48)))


def test_a_task_is_the_models_own_where_none_is_named() -> None:
    assert EMBED.resolve(PoolingParams()).task == "embed"
    resolved = CLASSES.resolve(PoolingParams(use_activation=False))
    assert (resolved.task, resolved.use_activation, resolved.pooling) == ("classify", False, "CLS")
    with pytest.raises(ParamError, match="use_activation means nothing for task 'embed'"):
        EMBED.resolve(PoolingParams(use_activation=False))
    with pytest.raises(ParamError, match="does not go with task 'embed'"):
        EMBED.resolve(PoolingParams(pooling="ALL"))
