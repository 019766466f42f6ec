"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..client.stream import RequestStream
from .calls import Call, Ended, json_body
from .front import FRONT, request_id
from .schema import CompletionRequest
from .sse import CompletionChunks


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt, n times."""
    front = request.app[FRONT]
    body = await front.read(request, CompletionRequest)
    model = front.check_model(body.model)
    prompts = body.prompts()
    params = front.params(body, len(prompts))
    by_ids = isinstance(prompts[0], list)
    await front.wait_ready()
    streams = front.submit(
        [{"ids" if by_ids else "prompt": prompt} for prompt in prompts],
        params,
        body.priority or 0,
        add_special_tokens=True if body.add_special_tokens is None else body.add_special_tokens,
        echo=bool(body.echo),
    )
    call = Call(streams, params.n, front.metrics, _echo if body.echo else None)
    id, created = request_id(request, body, "cmpl-"), int(time.time())
    if body.stream:
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        chunks = CompletionChunks(id, created, model, include_usage and not continuous)
        return await call.stream(request, chunks, include_usage, continuous, front.settings.stall_s)
    choices, usage = await call.complete()
    return json_body(
        {
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [_choice(choice) for choice in choices],
            "usage": usage,
        }
    )


def _choice(choice: Ended) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.reason,
        "stop_reason": choice.stop,
    }


def _echo(stream: RequestStream) -> str:
    return stream.accepted.prompt or "" if stream.accepted else ""
