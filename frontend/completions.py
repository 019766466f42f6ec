"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from ..client.stream import RequestStream
from ..proto.params import SamplingParams
from ..proto.work import Infill, Text
from .calls import Call, Ended, answer, together
from .embeds import embeds_of_body
from .errors import ApiError
from .extras import CompletionLogprobs, Extras, prompt_logprobs
from .front import FRONT, Front, request_id
from .schema import CompletionRequest
from .sse import CompletionChunks


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue each prompt, n times."""
    front = request.app[FRONT]
    body = await front.read(request, CompletionRequest)
    model = await front.find_model(request, body.model)
    front.check_generates("Completions")
    streams, params = await begun_text(request, front, body)
    call = Call(streams, body, params, front.metrics, _echo if body.echo else None)
    call.tells_cached = front.settings.usage_details
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


async def begun_text(
    request: web.Request, front: Front, body: CompletionRequest
) -> tuple[list[RequestStream], SamplingParams]:
    """Submit the prompts: a stream for each, and the parameters. Raises RequestError."""
    prompts = body.prompts()
    embedded = [] if body.prompt_embeds is None else await _embedded(front, body.prompt_embeds)
    params = front.params(body, len(prompts) + len(embedded))
    by_ids = bool(prompts) and isinstance(prompts[0], list)
    await front.wait_ready()
    given = [*embedded, *({"ids" if by_ids else "prompt": prompt} for prompt in prompts)]
    streams = front.submit(
        request,
        await _filled(front, given, body.suffix, params) if body.suffix else given,
        params,
        body,
        add_special_tokens=True if body.add_special_tokens is None else body.add_special_tokens,
        echo=bool(body.echo),
    )
    return streams, params


async def _embedded(front: Front, given: Any) -> list[dict[str, Any]]:
    """Prompts of embeddings, which stand before those of text. Raises ApiError."""
    if (size := front.settings.embed_size) is None:
        raise ApiError(400, "prompt_embeds is off: start the server with --enable-prompt-embeds.", "prompt_embeds")
    found = await asyncio.to_thread(embeds_of_body, given, size)
    return [{"ids": [0] * each.count, "embeds": each} for each in found]


async def _filled(
    front: Front, prompts: list[dict[str, Any]], suffix: str, params: SamplingParams
) -> list[dict[str, Any]]:
    """The prompts as ids, in the marks by which the model is told to fill in; the marks that end it end the answer.
    Raises RequestError where the model has none."""
    told = await together([front.engine.text(Text(infill=Infill(each["prompt"], suffix))) for each in prompts])
    params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *told[0].work.ends]))
    return [{"ids": each.ids} for each in told]


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
