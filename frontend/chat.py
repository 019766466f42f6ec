"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from .calls import Call, Ended, json_body
from .front import FRONT, request_id
from .schema import ChatRequest
from .sse import ChatChunks

ROLE = "assistant"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, n times."""
    front = request.app[FRONT]
    body = await front.read(request, ChatRequest)
    model = front.check_model(body.model)
    messages = body.conversation()
    params = front.params(body)
    await front.wait_ready()
    streams = front.submit(
        [{"messages": messages}],
        params,
        body.priority or 0,
        template=body.template(),
        add_special_tokens=bool(body.add_special_tokens),
    )
    echo = _last_words(messages) if body.echo else ""
    call = Call(streams, params.n, front.metrics, (lambda _: echo) if echo else None)
    id, created = request_id(request, body, "chatcmpl-"), int(time.time())
    if body.stream:
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        chunks = ChatChunks(id, created, model, include_usage and not continuous)
        return await call.stream(request, chunks, include_usage, continuous, front.settings.stall_s)
    choices, usage = await call.complete()
    return json_body(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [_choice(choice) for choice in choices],
            "usage": usage,
        }
    )


def _choice(choice: Ended) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": ROLE, "content": choice.text, "refusal": None},
        "logprobs": None,
        "finish_reason": choice.reason,
        "stop_reason": choice.stop,
    }


def _last_words(messages: list[dict[str, Any]]) -> str:
    """What ``echo`` puts before the answer: the last message, where the assistant said it."""
    last = messages[-1]
    return last.get("content") or "" if last.get("role") == ROLE else ""
