"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..client.stream import RequestStream
from .calls import Call, Ended, answer
from .extras import ChatLogprobs, Extras, prompt_logprobs
from .front import FRONT, request_id
from .prompts import text_of
from .schema import ChatRequest
from .sse import ChatChunks

ROLE = "assistant"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, n times."""
    front = request.app[FRONT]
    body = await front.read(request, ChatRequest)
    model = await front.find_model(body.model)
    front.check_generates("Chat Completions")
    messages = body.conversation()
    params = front.params(body)
    await front.wait_ready()
    streams = front.submit(request, [{"messages": messages}], params, body, template=body.template())
    echo = _last_words(messages) if body.echo else ""
    call = Call(streams, body, params, front.metrics, (lambda _: echo) if echo else None)
    id, created = request_id(request, body, "chatcmpl-"), int(time.time())
    if body.stream:
        include_usage, continuous = body.usage_options()
        chunks = ChatChunks(id, created, model, include_usage and not continuous)
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
            "choices": [_choice(choice, extras) for choice in choices],
            "usage": usage,
            **_of_prompt(streams[0], extras),
        },
    )


def _choice(choice: Ended, extras: Extras) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": ROLE, "content": (choice.echo or "") + choice.text, "refusal": None},
        "logprobs": ChatLogprobs(extras).of(choice.logprobs),
        "finish_reason": choice.reason,
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
