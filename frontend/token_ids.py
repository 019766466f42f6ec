"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's engines are asked by those that have a tokenizer
of their own."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from aiohttp import web

from ..client.results import TokenLogprobs
from .calls import Call, Ended, answer
from .errors import ApiError
from .extras import ChatLogprobs, Extras, prompt_logprobs
from .front import FRONT, request_id
from .leniency import Bodies
from .parsing import Request, converted
from .prompts import prompts_of
from .schema import CompletionRequest, StreamOptions
from .sse import Chunks, to_json


class SamplingFields(CompletionRequest):
    """``sampling_params``: the fields of vLLM's SamplingParams. Without ``max_tokens`` the context is the limit."""

    output_kind: int | None = None  # what is answered is said by ``stream``
    extra_args: dict[str, Any] | None = None

    def usual_limit(self) -> int | None:
        return None

    def extras(self) -> Extras:
        logprobs, of_prompt = self.likeliest(), self.likeliest_of_prompt()
        return Extras(logprobs, of_prompt, token_ids=True, names_are_ids=True)


class GenerateRequest(Request, kw_only=True):
    """The body."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {"features": (), "kv_transfer_params": ()}

    request_id: str | None = None
    token_ids: Any = None
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Any = None
    priority: int | None = None

    def body(self, rules: Bodies) -> SamplingFields:
        """The same as a completion. Raises ApiError."""
        if self.sampling_params is None:
            raise ApiError(400, "sampling_params must be given: an object, which may be empty.", "sampling_params")
        fields = converted(self.sampling_params, SamplingFields, rules)
        for name in ("model", "stream", "stream_options", "cache_salt", "priority", "request_id"):
            setattr(fields, name, getattr(self, name))
        if fields.extra_args or fields.suffix or fields.echo:
            raise ApiError(400, "extra_args, suffix and echo mean nothing here; leave them out.", "sampling_params")
        fields.check()
        return fields


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue the ids, n times."""
    front = request.app[FRONT]
    asked = await front.read(request, GenerateRequest)
    model = await front.find_model(request, asked.model)
    front.check_generates("Generate")
    body = asked.body(front.bodies)
    prompts = prompts_of(asked.token_ids, "token_ids")
    if len(prompts) > 1 or not isinstance(prompts[0], list):
        raise ApiError(400, "token_ids must be one list of token ids.", "token_ids")
    params = front.params(body)
    params.detokenize = bool(params.stop)  # nobody reads the text
    await front.wait_ready()
    streams = front.submit(request, [{"ids": prompts[0]}], params, body)
    call = Call(streams, body, params, front.metrics)
    id, created = request_id(request, body, "generate-tokens-"), int(time.time())
    if body.stream:
        include_usage, _ = body.usage_options()
        return await call.stream(request, IdChunks(id, created, model, include_usage), front.settings.stall_s)
    choices, usage = await call.complete()
    extras = body.extras()
    k = extras.prompt_logprobs
    return await answer(
        choices,
        lambda: {
            "request_id": id,
            "id": id,
            "created": created,
            "model": model,
            "choices": [_choice(choice, extras) for choice in choices],
            "usage": usage,
            "prompt_logprobs": None if k is None else prompt_logprobs(streams[0].prompt_logprobs, k),
            "kv_transfer_params": None,
        },
    )


class _Logprobs(ChatLogprobs):
    """As a chat's, but that ``logprobs: 0`` puts the drawn token itself into ``top_logprobs``, as vLLM does here."""

    def _token(self, token: TokenLogprobs) -> dict[str, Any]:
        entry = super()._token(token)
        return entry if self._extras.logprobs else {**entry, "top_logprobs": [self._entry(token, 0)]}


def _choice(choice: Ended, extras: Extras) -> dict[str, Any]:
    return {
        "index": choice.index,
        "logprobs": _Logprobs(extras).of(choice.logprobs),
        "finish_reason": choice.reason,
        "stop_reason": choice.stop,
        "token_ids": choice.tokens,
    }


class IdChunks(Chunks):
    """Chunks that tell ids and no text."""

    logprobs = _Logprobs

    def __init__(self, id: str, created: int, model: str, usage_null: bool):
        super().__init__(id, created, model, usage_null)
        self._start = b'data: {"request_id":%b,"created":%d,"model":%b,"choices":[' % (
            to_json(id), created, to_json(model),
        )  # fmt: skip

    def rich(
        self, index: int, text: str, more: dict[str, Any], reason: str | None = None, stop: int | str | None = None,
        usage: dict[str, object] | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": index, "logprobs": None, "finish_reason": reason, **more}
        return self._choice(choice if reason is None else {**choice, "stop_reason": stop}, usage)
