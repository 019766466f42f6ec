"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..client.stream import RequestStream
from .calls import Call, Ended, answer
from .extras import CompletionLogprobs, Extras, prompt_logprobs
from .front import FRONT, request_id
from .schema import CompletionRequest
from .sse import CompletionChunks


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt, n times."""
    front = request.app[FRONT]
    body = await front.read(request, CompletionRequest)
    model = await front.find_model(body.model)
    front.check_generates("Completions")
    prompts = body.prompts()
    params = front.params(body, len(prompts))
    by_ids = isinstance(prompts[0], list)
    await front.wait_ready()
    streams = front.submit(
        request,
        [{"ids" if by_ids else "prompt": prompt} for prompt in prompts],
        params,
        body,
        add_special_tokens=True if body.add_special_tokens is None else body.add_special_tokens,
        echo=bool(body.echo),
    )
    call = Call(streams, body, params, front.metrics, _echo if body.echo else None)
    id, created = request_id(request, body, "cmpl-"), int(time.time())
    if body.stream:
        include_usage, continuous = body.usage_options()
        chunks = CompletionChunks(id, created, model, include_usage and not continuous)
        return await call.stream(request, chunks, front.settings.stall_s)
    choices, usage = await call.complete()
    extras = body.extras() or Extras()
    return await answer(
        choices,
        lambda: {
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [_choice(choice, extras) for choice in choices],
            "usage": usage,
        },
    )


def _choice(choice: Ended, extras: Extras) -> dict[str, Any]:
    """One of the choices; what was not asked for is null, as clients of vLLM expect."""
    accepted, k = choice.stream.accepted, extras.prompt_logprobs
    prompt_ids = accepted.prompt_ids if accepted else []
    return {
        "index": choice.index,
        "text": (choice.echo or "") + choice.text,
        "logprobs": None if extras.logprobs is None else _logprobs(choice, prompt_ids, extras),
        "finish_reason": choice.reason,
        "stop_reason": choice.stop,
        "token_ids": choice.tokens if extras.token_ids else None,
        "prompt_token_ids": prompt_ids if extras.token_ids else None,
        "prompt_logprobs": None if k is None else prompt_logprobs(choice.stream.prompt_logprobs, k),
    }


def _logprobs(choice: Ended, prompt_ids: list[int], extras: Extras) -> dict[str, Any]:
    """Those of the choice's tokens, after those of the prompt where it is echoed."""
    form = CompletionLogprobs(extras)
    echoed = None if choice.echo is None else form.echo(choice.echo, prompt_ids, choice.stream.prompt_logprobs)
    own = form.of(choice.logprobs) or {}
    return own if echoed is None else {name: echoed[name] + own[name] for name in own}


def _echo(stream: RequestStream) -> str:
    return stream.accepted.prompt or "" if stream.accepted else ""
