"""vLLM's render routes: a completion or a chat as the token ids and parameters that would run, with nothing run.

What they answer is a body of ``POST /inference/v1/generate``, so a router may choose a server by the ids and send them
there as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from ..proto.params import SamplingParams
from ..proto.work import Text
from .calls import json_body, together
from .errors import ApiError
from .front import FRONT, Front, request_id
from .schema import ChatRequest, CompletionRequest, GenerateRequest
from .texts import rendered

_USUAL = msgspec.structs.asdict(SamplingParams())
_ITS_OWN = ("structured_outputs", "extra_args")  # fields that have another form or name over HTTP
_BESIDE = ("model", "stream", "stream_options", "cache_salt", "priority")
_MANY = 256
"""Prompts of one body at most, which are tokenized at the same time."""


async def render_completion(request: web.Request) -> web.Response:
    """One body for each prompt, in a list."""
    front = request.app[FRONT]
    body = await front.read(request, CompletionRequest)
    model = await front.find_model(request, body.model)
    front.check_generates("Render")
    if body.suffix or body.prompt_embeds is not None or body.echo:
        raise ApiError(400, "suffix, prompt_embeds and echo have no token ids to render; leave them out.", "prompt")
    params, prompts = front.params(body), body.prompts()
    if len(prompts) > _MANY:
        raise ApiError(400, f"prompt holds {len(prompts)} prompts, over the {_MANY} that are rendered at once; send "
                       "them in smaller lists.", "prompt")  # fmt: skip
    await front.wait_ready()
    special = body.add_special_tokens is not False
    found = await together([_ids(front, prompt, special) for prompt in prompts])
    id = request_id(request, body, "cmpl-")
    return json_body([_as_body(f"{id}-{n}", ids, params, body, model) for n, ids in enumerate(found)])


async def render_chat(request: web.Request) -> web.Response:
    """One body."""
    front = request.app[FRONT]
    body = await front.read(request, ChatRequest)
    model = await front.find_model(request, body.model)
    front.check_generates("Render")
    params, settings = front.params(body), front.settings
    reading = body.reading(params, settings.tool_parser, settings.reasoning_parser, settings.chat_kwargs)
    if reading is not None:
        front.bind(reading, params)
    await front.wait_ready()
    told = await rendered(front, body, Text())
    return json_body(_as_body(request_id(request, body, "chatcmpl-"), told.ids, params, body, model))


async def _ids(front: Front, prompt: str | list[int], special: bool) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return (await front.engine.text(Text(), prompt=prompt, add_special_tokens=special)).ids


def _as_body(id: str, ids: list[int], params: SamplingParams, body: GenerateRequest, model: str) -> dict[str, Any]:
    """A body of /inference/v1/generate: of the parameters those that are not as they usually are."""
    given = msgspec.structs.asdict(params)
    fields = {name: value for name, value in given.items() if value != _USUAL[name] and name not in _ITS_OWN}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = msgspec.to_builtins(params.structured_outputs)
    if params.extra_args:
        fields["vllm_xargs"] = params.extra_args
    beside = {name: value for name in _BESIDE if (value := getattr(body, name)) is not None}
    return {"request_id": id, "token_ids": ids, "sampling_params": fields, **beside, "model": model}


ROUTES = [
    web.post("/v1/completions/render", render_completion),
    web.post("/v1/chat/completions/render", render_chat),
]
