"""The dialect of Hugging Face's text-generation-inference: /generate, /generate_stream, / and /info.

A request becomes a ``CompletionRequest`` with logprobs, for its answers tell every token by its id.
"""

from __future__ import annotations

import codecs
import math
import secrets
from typing import Any, Literal

import msgspec
from aiohttp import web

from ...client.results import RequestError, StreamEvent, TokenLogprobs
from ...proto.messages import Finish
from ...proto.params import MAX_STOP_STRINGS
from ...proto.version import __version__
from ..calls import Call, Choice, Ended, json_body
from ..completions import begun_text
from ..errors import ApiError, error_response, words_of
from ..extras import floored, raw_bytes
from ..front import FRONT, Front
from ..parsing import Request
from ..schema import CompletionRequest
from ..sse import CompletionChunks, to_json

_KINDS = {422: "validation", 429: "overloaded", 503: "unhealthy"}
_NAMES: dict[str | None, str] = {
    "max_tokens": "max_new_tokens", "n": "best_of", "logprobs": "top_n_tokens", "prompt": "inputs",
    "truncate_prompt_tokens": "truncate", "structured_outputs": "grammar",
}  # fmt: skip
MOST_TOP_TOKENS = 20
USUAL_TOKENS = 100
"""New tokens where the request does not say."""


class TgiText(CompletionRequest):
    """A prompt that came in the words of text-generation-inference."""

    def own_names(self) -> dict[str | None, str]:
        return {**CompletionRequest.own_names(self), **_NAMES}


class Grammar(msgspec.Struct):
    """The form of an answer: a JSON schema, or a regex."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any = None

    def form(self) -> dict[str, Any]:
        """The same as ``structured_outputs``."""
        if self.type == "regex":
            return {"regex": self.value}
        if self.type == "json_object":
            return {"json_object": True}
        named = self.value.get("schema") if self.type == "json_schema" and isinstance(self.value, dict) else self.value
        return {"json": named}


class Parameters(msgspec.Struct, kw_only=True):
    """``parameters`` of a request. None means: not given."""

    adapter_id: str | None = None
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: where it is asked for, or anything is that makes no sense otherwise."""
        warm = self.temperature is not None and self.temperature != 1.0
        return bool(self.do_sample) or warm or bool(self.top_k) or (self.top_p is not None and self.top_p < 1.0)

    def check(self, stream: bool) -> None:
        """Refuse what TGI refuses, and what there is not. Raises ApiError."""
        if self.watermark:
            raise ApiError(400, "watermark is not supported; leave it out.", "watermark")
        if self.typical_p is not None and self.typical_p != 1.0:
            raise ApiError(400, f"typical_p={self.typical_p:g} is not supported; use top_p or min_p.", "typical_p")
        if self.temperature is not None and self.temperature <= 0:
            raise ApiError(400, "temperature must be above 0; leave it out for the likeliest tokens.", "temperature")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ApiError(400, f"max_new_tokens must be at least 1, got {self.max_new_tokens}.", "max_new_tokens")
        if not 0 <= (self.top_n_tokens or 0) <= MOST_TOP_TOKENS:
            raise ApiError(
                400, f"top_n_tokens must be in [0, {MOST_TOP_TOKENS}], got {self.top_n_tokens}.", "top_n_tokens"
            )
        if stream and self.decoder_input_details:
            raise ApiError(400, "decoder_input_details is not available with a stream.", "decoder_input_details")
        if (self.best_of or 1) > 1 and (stream or not self.samples):
            what = "is not available with a stream" if stream else "needs do_sample=true"
            raise ApiError(400, f"best_of={self.best_of} {what}.", "best_of")


class TgiRequest(Request, kw_only=True):
    """POST /generate and /generate_stream; ``stream`` is read on / alone."""

    inputs: str | None = None
    parameters: Parameters | None = None
    stream: bool | None = None

    @property
    def asked(self) -> Parameters:
        """The parameters, given or not."""
        return self.parameters or Parameters()

    @property
    def model(self) -> str | None:
        """The adapter that is asked for."""
        return self.asked.adapter_id

    def body(self, stream: bool) -> TgiText:
        """The same as a completion of OpenAI's. The seed is drawn here, for the answer tells it. Raises ApiError."""
        asked = self.asked
        asked.check(stream)
        if asked.samples:
            drawn = secrets.randbits(63) if asked.seed is None else asked.seed
            how: dict[str, Any] = {
                "temperature": 1.0 if asked.temperature is None else asked.temperature, "top_k": asked.top_k or 0,
                "top_p": 1.0 if asked.top_p is None else asked.top_p, "min_p": 0.0, "seed": drawn,
            }  # fmt: skip
        else:
            how = {"temperature": 0.0, "seed": None}
        text = TgiText(
            model=self.model, prompt=self.inputs, max_tokens=asked.max_new_tokens or USUAL_TOKENS, n=asked.best_of or 1,
            repetition_penalty=asked.repetition_penalty, frequency_penalty=asked.frequency_penalty, stop=asked.stop,
            include_stop_str_in_output=True, truncate_prompt_tokens=asked.truncate, logprobs=asked.top_n_tokens or 0,
            prompt_logprobs=0 if asked.decoder_input_details else None, stream=stream,
            structured_outputs=None if asked.grammar is None else asked.grammar.form(), **how,
        )  # fmt: skip
        text.check()
        return text


# ---------------------------------------------------------------- routes


async def generate(request: web.Request) -> web.StreamResponse:
    """Continue a text."""
    _, asked, call = await _begun(request, stream=False)
    return json_body(await call.whole(asked))


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """The same with an event for each token."""
    front, _, call = await _begun(request, stream=True)
    return await call.stream(request, CompletionChunks("", 0, "", False), front.settings.stall_s)


async def either(request: web.Request) -> web.StreamResponse:
    """The same, one or the other by ``stream``; the answer is a list."""
    front, asked, call = await _begun(request, stream=None)
    if asked.stream:
        return await call.stream(request, CompletionChunks("", 0, "", False), front.settings.stall_s)
    return web.Response(body=to_json([await call.whole(asked)]), content_type="application/json", charset="utf-8")


async def _begun(request: web.Request, stream: bool | None) -> tuple[Front, TgiRequest, TgiCall]:
    front = request.app[FRONT]
    asked = await front.read(request, TgiRequest)
    await front.find_model(request, asked.model)
    front.check_generates("Generate")
    body = asked.body(bool(asked.stream) if stream is None else stream)
    if not body.prompt:
        raise ApiError(400, "inputs must be given and must not be empty.", "inputs")
    streams, params = await begun_text(request, front, body)
    return front, asked, TgiCall(asked, streams, body, params, front.metrics)


async def info(request: web.Request) -> web.Response:
    """What is served, and its limits."""
    front = request.app[FRONT]
    card, settings, longest = await front.card(), front.settings, front.engine.max_model_len or None
    return json_body(
        {
            "model_id": settings.names[0],
            "model_sha": None,
            "model_dtype": str(card.hf.get("dtype") or card.hf.get("torch_dtype") or "") or None,
            "model_pipeline_tag": "text-generation" if settings.pooler is None else "feature-extraction",
            "max_concurrent_requests": settings.slots,
            "max_best_of": settings.max_n,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": None if longest is None else longest - 1,
            "max_total_tokens": longest,
            "max_client_batch_size": 1,
            "router": "quire",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def refused(error: RequestError) -> web.Response:
    """An error in TGI's shape; what it calls a validation error is a 422."""
    answer = error_response(error)
    if error.status == 400:
        answer.set_status(422)
    answer.body = _error(error)
    return answer


def _error(error: RequestError) -> bytes:
    status = 422 if error.status == 400 else error.status
    kind = _KINDS.get(status, "validation" if status < 500 else "generation")
    return to_json({"error": words_of(error), "error_type": kind})


ROUTES = [
    web.post("/generate", generate), web.post("/generate_stream", generate_stream), web.post("/", either),
    web.get("/info", info),
]  # fmt: skip


# ---------------------------------------------------------------- answers


class TgiCall(Call):
    """A call whose tokens are told one by one."""

    def __init__(self, asked: TgiRequest, *args: Any):
        super().__init__(*args)
        self._asked, self._wanted = asked, asked.asked
        self._render = self._events
        self._tokens = _Tokens(self._wanted.top_n_tokens or 0)
        self._text = ""  # of the stream so far

    async def whole(self, asked: TgiRequest) -> dict[str, Any]:
        """The answer: the likeliest, by its tokens' mean, of those that were drawn."""
        choices, _ = await self.complete()
        best, *others = sorted(choices, key=_mean, reverse=True)
        told: dict[str, Any] = {"generated_text": self._full(best.text)}
        if self._wanted.details or self._wanted.decoder_input_details:
            told["details"] = self._details(best)
            if others:
                told["details"]["best_of_sequences"] = [
                    {"generated_text": self._full(other.text), **self._details(other)} for other in others
                ]
        return told

    def _full(self, text: str) -> str:
        return (self._asked.inputs or "") + text if self._wanted.return_full_text else text

    def _details(self, choice: Ended) -> dict[str, Any]:
        tokens = _Tokens(self._wanted.top_n_tokens or 0)
        ended = choice.reason == "stop" and not isinstance(choice.stop, str)
        told = [tokens.of(token, ended and n == len(choice.logprobs)) for n, token in enumerate(choice.logprobs, 1)]
        details = {**self._end(choice.reason, choice.stop, len(choice.tokens), choice.index), "prefill": []}
        if self._wanted.decoder_input_details:
            details["prefill"] = self._prefill(choice)
        details["tokens"] = [each["token"] for each in told]
        if self._wanted.top_n_tokens:
            details["top_tokens"] = [each["top_tokens"] for each in told]
        return details

    def _prefill(self, choice: Ended) -> list[dict[str, Any]]:
        """The prompt's tokens. The first has no logprob, and what the others leave of the text."""
        accepted, found = choice.stream.accepted, choice.stream.prompt_logprobs or []
        prompt = (accepted.prompt or "") if accepted else ""
        tokens = _Tokens(0)
        told = [_prefilled(tokens.of(token, False)["token"]) for token in found if token is not None]
        head = len(prompt) - sum(len(each["text"]) for each in told)
        first = {"id": accepted.prompt_ids[0] if accepted else 0, "text": prompt[: max(0, head)], "logprob": None}
        return [first, *told]

    def _end(self, reason: str, stop: int | str | None, count: int, child: int = 0) -> dict[str, Any]:
        kind = "length" if reason == "length" else "stop_sequence" if isinstance(stop, str) else "eos_token"
        seed = self._body.seed
        return {"finish_reason": kind, "generated_tokens": count, "seed": None if seed is None else seed + child}

    # -- a stream of events

    def _events(self, choice: Choice, event: StreamEvent) -> bytes:
        """An event for each token. An end that comes without one is told with a token of no text."""
        reason, _, _ = self._taken(choice, event)
        out = list[dict[str, Any]]()
        self._text += event.text
        ended = event.finish == Finish.STOP and not isinstance(event.stop_reason, str)
        for n, token in enumerate(event.logprobs, 1):
            last = reason is not None and n == len(event.logprobs)
            told = {"index": self._tokens.count + 1, **self._tokens.of(token, ended and last)}
            told |= {"generated_text": None, "details": None}
            if last and reason is not None:
                told |= self._last(reason, event.stop_reason, choice)
            out.append(told)
        if reason is not None and not event.logprobs:
            nothing = {"id": 0, "text": "", "logprob": 0.0, "special": True}
            out.append({"index": self._tokens.count, "token": nothing, **self._last(reason, event.stop_reason, choice)})
        return b"".join(b"data:%b\n\n" % to_json(each) for each in out)

    def _last(self, reason: str, stop: int | str | None, choice: Choice) -> dict[str, Any]:
        accepted = self._streams[0].accepted
        end = {**self._end(reason, stop, choice.tokens), "input_length": len(accepted.prompt_ids) if accepted else 0}
        return {"generated_text": self._full(self._text), "details": end if self._wanted.details else None}

    def _ending(self, include_usage: bool) -> bytes:
        return b""

    def _failure(self, error: RequestError) -> bytes:
        return b"data:%b\n\n" % _error(error)


class _Tokens:
    """Tokens of one answer in their order, as objects. The bytes of a character that is not whole yet are told with the
    token that ends it."""

    def __init__(self, likeliest: int):
        self._likeliest = likeliest
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.count = 0

    def of(self, token: TokenLogprobs, special: bool) -> dict[str, Any]:
        """``token``, and ``top_tokens`` where wanted. ``special``: it ends the answer, and is no text of it."""
        self.count += 1
        text = self._decode(raw_bytes(token, 0) or b"")
        told: dict[str, Any] = {"token": _token(token, 0, text, special)}
        if self._likeliest:
            places = range(1, min(len(token.ids), self._likeliest + 1))
            told["top_tokens"] = [
                _token(token, n, token.texts[n] if token.texts else "", special and token.ids[n] == token.ids[0])
                for n in places
            ]
        return told


def _token(token: TokenLogprobs, place: int, text: str, special: bool) -> dict[str, Any]:
    return {"id": token.ids[place], "text": text, "logprob": floored(token.values[place]), "special": special}


def _prefilled(token: dict[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("id", "text", "logprob")}


def _mean(choice: Ended) -> float:
    values = [token.values[0] for token in choice.logprobs]
    return sum(values) / len(values) if values else -math.inf
