"""A stream of every dialect, of a text or a call of a tool, while a process is killed: it says what it says alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stack import Server, thinking_demo

STORY, WEATHER = "Tell me a long story", "what is the weather in Paris?"
PROMPT = f"<|im_start|>user\n{STORY}<|im_end|>\n<|im_start|>assistant\n"
CITY = {"type": "string", "minLength": 150, "maxLength": 200}  # a call takes as long as a story
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
LONG = 200  # tokens

Found = dict[str, Any]
"""What a stream came to: ``text``, ``thought``, ``calls`` as names and arguments, and why it ``ended``."""


def said(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0}


# ---------------------------------------------------------------- how each dialect's events are read


def chat(found: Found, event: dict[str, Any]) -> None:
    (choice,) = event["choices"]
    delta = choice["delta"]
    found["text"] += delta.get("content") or ""
    found["thought"] += delta.get("reasoning") or ""
    for piece in delta.get("tool_calls") or ():
        if piece.get("id"):
            found["calls"].append([piece["function"]["name"], ""])
        found["calls"][piece["index"]][1] += piece["function"]["arguments"]
    found["ended"] += choice["finish_reason"] or ""


def completion(found: Found, event: dict[str, Any]) -> None:
    (choice,) = event["choices"]
    found["text"] += choice["text"]
    found["ended"] += choice["finish_reason"] or ""


def responses(found: Found, event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "response.output_text.delta":
        found["text"] += event["delta"]
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        found["calls"].append([event["item"]["name"], ""])
    elif kind == "response.function_call_arguments.delta":
        found["calls"][-1][1] += event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        found["ended"] += kind


def messages(found: Found, event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
        found["calls"].append([event["content_block"]["name"], ""])
    elif kind == "content_block_delta":
        delta = event["delta"]
        found["text"] += delta.get("text", "")
        found["thought"] += delta.get("thinking", "")
        if "partial_json" in delta:
            found["calls"][-1][1] += delta["partial_json"]
    elif kind == "message_delta":
        found["ended"] += event["delta"]["stop_reason"]


def ollama(found: Found, event: dict[str, Any]) -> None:
    message = event.get("message", {})
    found["text"] += event.get("response", "") + message.get("content", "")
    found["thought"] += message.get("thinking", "")
    found["calls"] += [
        [call["function"]["name"], json.dumps(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    found["ended"] += event.get("done_reason", "")


def llama_cpp(found: Found, event: dict[str, Any]) -> None:
    found["text"] += event["content"]
    found["ended"] += event["stop_type"] if event["stop"] else ""


def tgi(found: Found, event: dict[str, Any]) -> None:
    found["text"] += "" if event["token"]["special"] else event["token"]["text"]
    if event["generated_text"] is not None:
        assert event["generated_text"] == found["text"]
        found["ended"] += event["details"]["finish_reason"]


DRAWN = {"temperature": 1, "seed": 5}
REQUIRED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": LONG}
ONE = {"type": "any", "disable_parallel_tool_use": True}
ASKED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "chat": (chat, "/v1/chat/completions", said(STORY) | {"max_tokens": LONG} | DRAWN),
    "chat's call": (chat, "/v1/chat/completions", said(WEATHER) | REQUIRED),
    "chat's call after a thought": (
        chat, "/v1/chat/completions", said("hello") | REQUIRED | DRAWN
        | {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 40},
    ),
    "completion": (completion, "/v1/completions", {"prompt": PROMPT, "max_tokens": LONG} | DRAWN),
    "responses": (responses, "/v1/responses", {"input": STORY, "max_output_tokens": LONG, "temperature": 0}),
    "responses' call": (
        responses, "/v1/responses", {"input": WEATHER, "temperature": 0, "parallel_tool_calls": False,
                                         "tools": [{"type": "function", **FUNCTION}]},
    ),
    "messages": (messages, "/v1/messages", said(STORY) | {"max_tokens": LONG}),
    "messages' call": (
        messages, "/v1/messages", said(WEATHER) | {"max_tokens": LONG, "tool_choice": ONE, "tools": [
            {"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}]},
    ),
    "ollama": (ollama, "/api/chat", said(STORY) | {"options": {"num_predict": LONG} | DRAWN}),
    "ollama's call": (ollama, "/api/chat", said(WEATHER) | {"tools": TOOLS, "options": {"temperature": 0}}),
    "ollama's prompt": (ollama, "/api/generate", {"prompt": STORY, "options": {"num_predict": LONG} | DRAWN}),
    "llama.cpp": (llama_cpp, "/completion", {"prompt": PROMPT, "n_predict": LONG} | DRAWN),
    "tgi": (tgi, "/generate_stream", {"inputs": PROMPT, "parameters": {
        "max_new_tokens": LONG, "do_sample": True, "seed": 5, "details": True}}),
}  # fmt: skip
CALLS = [name for name in ASKED if "call" in name]
WHOLE = {"ollama's call"}  # which nothing is heard of before it is whole


class Kill:
    """One kill, at the moment when every stream has begun that can be seen to."""

    def __init__(self, pid: int | None):
        self._pid, self._waits = pid, set(ASKED) - WHOLE
        self._lock = threading.Lock()
        self.done = False
        self.after: set[str] = set()  # the streams to which something came after it

    def came(self, name: str) -> None:
        """Something came to a stream."""
        with self._lock:
            if self.done:
                self.after.add(name)
            self._waits.discard(name)
            if not self._waits and not self.done and self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)
                self.done = True


def lines_of(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a stream, of events or of lines."""
    data = json.dumps({"model": "quire-demo", "stream": True, **body}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            line = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"{"):
                yield json.loads(line)


def run(server: Server, kill: Kill) -> dict[str, Found]:
    """All streams at once, with one kill; what each came to."""

    def one(name: str) -> Found:
        read, path, body = ASKED[name]
        found: Found = {"text": "", "thought": "", "calls": [], "ended": ""}
        for event in lines_of(server, path, body):
            read(found, event)
            if any(found.values()):
                kill.came(name)
        return found

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return dict(zip(ASKED, pool.map(one, ASKED), strict=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(*thinking_demo(tmp_path_factory.mktemp("template")))
    yield server
    server.close()


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[str, Found]:
    """What comes when nothing is killed."""
    return run(server, Kill(None))


def test_a_dialects_story_and_its_call(alone: dict[str, Found]) -> None:
    for name, found in alone.items():
        assert found["ended"], name
        if name not in CALLS:
            assert len(found["text"]) > 300, name
        elif "thought" in name:
            assert found["thought"] and found["calls"], name
        else:
            (((called, arguments),), text) = found["calls"], found["text"]
            city = json.loads(arguments)["city"]
            assert called == "get_weather" and city.startswith("Paris") and len(city) >= 150, name
            assert text == "" or name in WHOLE, name  # there several may be called, and the last is cut


@pytest.mark.parametrize("service", ["gpu_worker", "detokenizer", "scheduler"])
def test_every_dialects_streams_survive_a_kill(server: Server, alone: dict[str, Found], service: str) -> None:
    (victim,) = [each for each in server.children() if f"quire.{service}" in each.cmdline()]
    kill = Kill(victim.pid)
    found = run(server, kill)
    assert found == alone
    calls = set(CALLS) - WHOLE
    assert kill.done and kill.after & calls and kill.after - set(CALLS)  # both kinds were being written then
