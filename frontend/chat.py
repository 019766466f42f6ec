"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from aiohttp import web

from ..client.results import StreamEvent
from ..client.stream import RequestStream
from ..proto.params import SamplingParams
from .calls import Call, Choice, Ended, answer
from .extras import ChatLogprobs, Extras, prompt_logprobs
from .front import FRONT, Front, request_id
from .prompts import text_of
from .schema import ChatRequest
from .sse import ChatChunks
from .tool_choice import ChoiceReader, Reading

ROLE = "assistant"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, n times."""
    front = request.app[FRONT]
    body = await front.read(request, ChatRequest)
    model = await front.find_model(request, body.model)
    front.check_generates("Chat Completions")
    streams, params, reading = await begun(request, front, body)
    echo = _last_words(body.conversation()) if body.echo else ""
    if reading is not None and body.continue_final_message:
        reading, echo = replace(reading, said=echo), ""  # a thought or a call that it breaks off in goes on as one
    prefix = (lambda _: echo) if echo else None
    if reading is None:
        call = Call(streams, body, params, front.metrics, prefix)
    else:
        call = ReadCall(reading, streams, body, params, front.metrics, prefix)
    call.tells_cached = front.settings.usage_details
    id, created = request_id(request, body, "chatcmpl-"), int(time.time())
    role = body.conversation()[-1]["role"] if body.add_generation_prompt is False else front.settings.role
    if body.stream:
        include_usage, continuous = body.usage_options()
        chunks = ChatChunks(id, created, model, include_usage and not continuous)
        chunks.role = role
        return await call.stream(request, chunks, front.settings.stall_s)
    choices, usage = await call.complete()
    extras = body.extras() or Extras()
    return await answer(
        choices,
        lambda: {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [_choice(choice, extras, call, role) for choice in choices],
            "usage": call.with_thoughts(usage) if isinstance(call, ReadCall) else usage,
            **_of_prompt(streams[0], extras),
        },
    )


async def begun(
    request: web.Request, front: Front, body: ChatRequest
) -> tuple[list[RequestStream], SamplingParams, Reading | None]:
    """Submit a conversation: its stream, its parameters, and how its answers are read. Raises RequestError."""
    messages = body.conversation()
    params = front.params(body)
    settings = front.settings
    reading = body.reading(params, settings.tool_parser, settings.reasoning_parser, settings.chat_kwargs)
    if reading is not None:
        front.bind(reading, params)
        if body.continue_final_message:
            reading = reading.after(_last_words(messages))
    await front.wait_ready()
    streams = front.submit(request, [{"messages": messages}], params, body, template=body.template())
    return streams, params, reading


class ReadCall(Call):
    """A call whose text is read on its way: what is a thought or a call of a tool is told as such."""

    def __init__(self, reading: Reading, *args: Any):
        super().__init__(*args)
        self._reading = reading
        self._readers: dict[int, ChoiceReader] = {}
        self._render = self._read

    async def stream(self, request: web.Request, chunks: ChatChunks, stall_s: float) -> web.StreamResponse:  # type: ignore[override]
        self._deltas = chunks
        return await super().stream(request, chunks, stall_s)

    def _read(self, choice: Choice, event: StreamEvent) -> bytes:
        """The chunk of one event; empty while nothing of it is certain and nothing else is to be told."""
        data = b"" if choice.opened else self._rich_opening(choice)
        reader = self._readers.get(choice.index)
        if reader is None:
            prompt = self._streams[choice.prompt].accepted
            reader = self._readers[choice.index] = self._reading.reader(prompt.prompt if prompt else None)
        delta = reader.delta(event.text, bool(event.finish), len(event.tokens))
        reason, more, usage = self._taken(choice, event)
        if reason is not None:
            reason = reader.reason(reason)
        elif not delta and not more:
            return data
        return data + self._deltas.delta(choice.index, delta, more, reason, event.stop_reason, usage)

    def read(self, choice: Ended) -> tuple[dict[str, Any], str]:
        """The message of a whole answer, and its finish_reason."""
        accepted = choice.stream.accepted
        reader = self._readers[choice.index] = self._reading.reader(accepted.prompt if accepted else None)
        return reader.message(choice.text, len(choice.tokens)), reader.reason(choice.reason)

    def with_thoughts(self, usage: dict[str, object]) -> dict[str, object]:
        """The usage, with the tokens of thoughts in what was read so far where the server reads thoughts."""
        if self._reading.reasoning is None:
            return usage
        tokens = sum(reader.thought_tokens for reader in self._readers.values())
        return {**usage, "completion_tokens_details": {"reasoning_tokens": tokens}}

    def _usage(self) -> dict[str, object]:
        return self.with_thoughts(super()._usage())


def _choice(choice: Ended, extras: Extras, call: Call, role: str) -> dict[str, Any]:
    message, reason = {"content": choice.text}, choice.reason
    if isinstance(call, ReadCall):
        message, reason = call.read(choice)
    if choice.echo:
        message["content"] = choice.echo + (message["content"] or "")
    return {
        "index": choice.index,
        "message": {"role": role, **message, "refusal": None},
        "logprobs": ChatLogprobs(extras).of(choice.logprobs),
        "finish_reason": reason,
        "stop_reason": choice.stop,
        "token_ids": choice.tokens if extras.token_ids else None,
    }


def _of_prompt(stream: RequestStream, extras: Extras) -> dict[str, Any]:
    """What is told of the prompt, once for all choices; null where it was not asked for, as clients of vLLM expect."""
    ids = stream.accepted.prompt_ids if extras.token_ids and stream.accepted else None
    k = extras.prompt_logprobs
    return {
        "prompt_token_ids": ids,
        "prompt_logprobs": None if k is None else prompt_logprobs(stream.prompt_logprobs, k),
    }


def _last_words(messages: list[dict[str, Any]]) -> str:
    """What ``echo`` puts before the answer: the last message, where the assistant said it."""
    return text_of(messages[-1]) if messages[-1]["role"] == ROLE else ""
