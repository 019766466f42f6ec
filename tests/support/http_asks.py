"""Requests of a fake server over HTTP, as the tests of routes make them."""

from __future__ import annotations

import http.client
import json
from typing import Any

from quire.frontend.fake import FakeServer

HI = {"prompt": "hi there", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def ask(
    server: FakeServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, decoded body, headers. ``body`` is JSON, or bytes as they are."""
    status, text, answered = ask_bytes(server, method, path, body, headers)
    return status, json.loads(text) if text[:1] in b"{[" and text else text, answered


def ask_bytes(
    server: FakeServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """The same with the body as it came."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return answer.status, text, answer.headers


def post(server: FakeServer, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    return ask(server, "POST", path, body, headers)[:2]


def error_of(answer: tuple[Any, ...], status: int) -> dict[str, Any]:
    """The error, having checked its shape."""
    assert answer[0] == status
    assert set(answer[1]) == {"error"}
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"] and isinstance(error["type"], str)
    return error
