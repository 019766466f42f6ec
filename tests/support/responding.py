"""Asking for responses by OpenAI's client, and scripts that wait in the middle of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
from spoken import says

from quire.client.generation import OpenGeneration
from quire.frontend.fake import FakeServer


def client(server: FakeServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def ask(server: FakeServer, **more: Any) -> Any:
    return client(server).responses.create(**{"model": "fake", "input": "hi there", **more})


def until(server: FakeServer, id: str, status: str) -> Any:
    """The response, once it is so."""
    for _ in range(500):
        found = client(server).responses.retrieve(id)
        if found.status == status:
            return found
        assert found.status in ("queued", "in_progress"), found
        time.sleep(0.01)
    raise AssertionError(f"{id} is {found.status}, not {status}")


def held(text: str, go_on: threading.Event) -> Any:
    """A script that stops in the middle of ``text`` until it may go on."""

    def script(request: OpenGeneration) -> Iterator[Any]:
        parts = list(says(text)(request))
        yield from parts[: len(parts) // 2]
        while not go_on.is_set():
            yield 0.005
        yield from parts[len(parts) // 2 :]

    return script
