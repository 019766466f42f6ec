"""Ollama's dialect: /api/generate, /api/chat and the embeddings. A request goes the way of a chat or of a completion,
and what comes of it is told in lines of JSON, one object each, or in one object.

What it says of models is in ``ollama_models.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from ...client.results import RequestError, StreamEvent
from ...proto.call_arguments import told_object
from ..calls import Call, Choice, Ended, json_body
from ..chat import begun
from ..completions import begun_text
from ..errors import ApiError, error_response, words_of
from ..extras import ChatLogprobs
from ..front import FRONT, Front
from ..pooling import pool_all
from ..pooling_schema import EmbeddingRequest
from ..sse import HEADERS, ChatChunks, to_json
from ..tool_choice import ChoiceReader, Reading, call_id
from ..tools import Arguments, Begin, Content
from .ollama_models import MODEL_ROUTES
from .ollama_schema import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerate,
    OllamaRequest,
    OllamaText,
)  # fmt: skip

_NANO = 10**9
_NOTHING = {"content": ""}

Telling = Callable[[dict[str, Any]], dict[str, Any]]
"""What is new of an answer (content, thinking, tool_calls), as an object of a route tells it."""


# ---------------------------------------------------------------- routes


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue a prompt, by the chat template or raw."""
    return await _answer(request, OllamaGenerate, _as_response)


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await _answer(request, OllamaChatRequest, _as_message)


async def _answer(request: web.Request, kind: type[OllamaRequest], tell: Telling) -> web.StreamResponse:
    front = request.app[FRONT]
    asked = await front.read(request, kind, any_type=True)
    name, asked.model = asked.model, front.known(asked.model)
    model = await front.find_model(request, asked.model)
    front.check_generates("Ollama's")
    if asked.think and front.settings.reasoning_parser is None:
        raise ApiError(
            400, f'"{model}" does not support thinking: leave think out, or start the server with --reasoning-parser.',
            "think",
        )  # fmt: skip
    if asked.empty:
        await front.wait_ready()
        return json_body({**_head(name or model), **tell(_NOTHING), "done": True, "done_reason": "load"})
    body = asked.body()
    if body.max_tokens is not None and front.engine.max_model_len:  # more than fits asks for as much as fits
        body.max_tokens = min(body.max_tokens, front.engine.max_model_len)
    call = await _begun(request, front, body, name or model, tell)
    if asked.streams:
        return await call.stream(request, ChatChunks("", 0, "", False), front.settings.stall_s)
    (choice,), _ = await call.complete()
    return json_body(call.whole(choice))


async def _begun(
    request: web.Request, front: Front, body: OllamaChat | OllamaText, model: str, tell: Telling
) -> OllamaCall:
    if isinstance(body, OllamaChat):
        streams, params, reading = await begun(request, front, body)
        return OllamaCall(reading, model, tell, streams, body, params, front.metrics)
    streams, params = await begun_text(request, front, body)
    return OllamaCall(None, model, tell, streams, body, params, front.metrics)


async def embed(request: web.Request) -> web.Response:
    """A vector of length 1 for each text."""
    began = time.monotonic()
    asked = await request.app[FRONT].read(request, EmbedRequest, any_type=True)
    keep = None if asked.truncate is False else -1
    body = EmbeddingRequest(
        model=asked.model, input=asked.texts(), dimensions=asked.dimensions or None, truncate_prompt_tokens=keep,
        normalize=True,
    )  # fmt: skip
    model, vectors, tokens = await _embedded(request, body)
    spent = {"total_duration": _nanoseconds(time.monotonic() - began), "load_duration": 0}
    return json_body({"model": asked.model or model, "embeddings": vectors, **spent, "prompt_eval_count": tokens})


async def embeddings(request: web.Request) -> web.Response:
    """The older form: one text, and its vector as the model has it."""
    asked = await request.app[FRONT].read(request, EmbeddingsRequest, any_type=True)
    texts = [asked.prompt] if asked.prompt else []
    body = EmbeddingRequest(model=asked.model, input=texts, truncate_prompt_tokens=-1, normalize=False)
    _, vectors, _ = await _embedded(request, body)
    return json_body({"embedding": vectors[0] if vectors else []})


async def _embedded(request: web.Request, body: EmbeddingRequest) -> tuple[str, list[list[float]], int]:
    """The model's name, the vectors, and how many tokens were run."""
    front = request.app[FRONT]
    body.model = front.known(body.model)
    model = await front.find_model(request, body.model)
    pooler = front.pooler("Ollama's embeddings", "embed")
    if not body.input:
        return model, [], 0
    count = len(body.input)
    places = [f"input[{place}]" for place in range(count)] if count > 1 else ["input"]
    pooled = await pool_all(request, body, pooler, body.params("embed"), body.inputs(), places)
    return model, [each.data.tolist() for each in pooled], sum(len(each.prompt_ids) for each in pooled)


def refused(error: RequestError) -> web.Response:
    """An error in Ollama's shape."""
    answer = error_response(error)
    answer.body = to_json({"error": words_of(error)})
    return answer


ROUTES = [
    web.post("/api/generate", generate), web.post("/api/chat", chat), web.post("/api/embed", embed),
    web.post("/api/embeddings", embeddings), *MODEL_ROUTES,
]  # fmt: skip


# ---------------------------------------------------------------- answers


def _as_response(said: dict[str, Any]) -> dict[str, Any]:
    thought = {"thinking": said["thinking"]} if said.get("thinking") else {}
    return {"response": said["content"], **thought}


def _as_message(said: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", **said}}


def _head(model: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": model, "created_at": now.replace("+00:00", "Z")}


class OllamaCall(Call):
    """A call that is told in lines of JSON. A call of a tool is told when it is whole."""

    headers = HEADERS | {"Content-Type": "application/x-ndjson"}

    def __init__(self, reading: Reading | None, model: str, tell: Telling, *args: Any):
        super().__init__(*args)
        self._reading, self._model, self._tell = reading or Reading(None, None), model, tell
        self._reader: ChoiceReader | None = None
        self._open: list[str] | None = None  # the name and the arguments of the call that is being read
        self._calls = 0
        self._why = ""
        self._render = self._line

    def whole(self, choice: Ended) -> dict[str, Any]:
        """The whole answer."""
        self._why = choice.reason
        told = {**_head(self._model), **self._tell(self._said(choice.text, last=True) or _NOTHING)}
        if self._extras is not None and (found := ChatLogprobs(self._extras).of(choice.logprobs)) is not None:
            told["logprobs"] = found["content"]
        return {**told, **self._end()}

    def _said(self, text: str, last: bool) -> dict[str, Any]:
        """What is new: empty, or ``content`` and perhaps ``thinking`` and ``tool_calls``."""
        if self._reader is None:
            accepted = self._streams[0].accepted
            self._reader = self._reading.reader(accepted.prompt if accepted else None)
        said: dict[str, Any] = {}
        for delta in self._reader.deltas(text, last):
            if isinstance(delta, Arguments) and self._open is not None:
                self._open[1] += delta.text
                continue
            self._close(said)
            if isinstance(delta, Begin):
                self._open = [delta.name, ""]
            else:
                name = "content" if isinstance(delta, Content) else "thinking"
                said[name] = said.get(name, "") + delta.text
        if last:
            self._close(said)
        return {**_NOTHING, **said} if said else said

    def _close(self, said: dict[str, Any]) -> None:
        """The call that was open is whole, or cut off."""
        if self._open is None:
            return
        (name, arguments), self._open = self._open, None
        function = {"index": self._calls, "name": name, "arguments": told_object(arguments)}
        said.setdefault("tool_calls", []).append({"id": call_id(), "function": function})
        self._calls += 1

    def _end(self) -> dict[str, Any]:
        """What the last object tells. Durations are nanoseconds: of all, of waiting to be let in, of the prompt (up to
        the first token), and of the other tokens; no rate is divided by 0. An answer with a call that is not whole was
        cut off, for which Ollama has one word."""
        stream = self._streams[0]
        times, count = stream.metrics, len(stream.children[0].tokens)
        began, now = times.arrival_time, time.monotonic()
        let_in = times.first_scheduled_time or began
        first = times.first_token_time or now
        last = times.last_token_time or now
        cut = self._why == "length" or (self._reader is not None and self._reader.broken)
        return {
            "done": True,
            "done_reason": "length" if cut else "stop",
            "total_duration": _nanoseconds(now - began),
            "load_duration": _nanoseconds(let_in - began),
            "prompt_eval_count": len(stream.accepted.prompt_ids) if stream.accepted else 0,
            "prompt_eval_duration": max(1, _nanoseconds(first - let_in)),
            "eval_count": count,
            "eval_duration": max(1, _nanoseconds(last - first)),
        }

    # -- a stream of lines

    def _line(self, choice: Choice, event: StreamEvent) -> bytes:
        if not choice.opened:
            choice.opened = True
            choice.logprobs = None if self._extras is None else ChatLogprobs(self._extras)
        reason, more, _ = self._taken(choice, event)
        said = self._said(event.text, last=reason is not None)
        self._why = reason or ""
        logprobs = {"logprobs": more["logprobs"]["content"]} if more.get("logprobs") and event.logprobs else {}
        if not said and not logprobs:
            return b""
        return _json_line({**_head(self._model), **self._tell(said or _NOTHING), **logprobs, "done": False})

    def _ending(self, include_usage: bool) -> bytes:
        return _json_line({**_head(self._model), **self._tell(_NOTHING), **self._end()})

    def _failure(self, error: RequestError) -> bytes:
        return _json_line({"error": words_of(error)})


def _json_line(fields: dict[str, Any]) -> bytes:
    return to_json(fields) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * _NANO))
