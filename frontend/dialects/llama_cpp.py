"""llama.cpp's server: /completion, /infill, /props and /slots.

A request becomes a ``CompletionRequest`` and goes its way. What needs the tokenizer before that (prompts of texts and
ids in turn, biases of words, the marks of what is filled in) is asked of a detokenizer, and the prompt goes on as ids.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ...client.results import RequestError, StreamEvent, TokenLogprobs
from ...client.stream import RequestStream
from ...proto.params import SamplingParams
from ...proto.version import __version__
from ...proto.work import Infill, Text
from ..calls import Call, Choice, Ended, json_body, together
from ..errors import ApiError, error_response, words_of
from ..extras import floored, raw_bytes
from ..front import FRONT, Front
from ..parsing import kind_of
from ..prompts import check_count
from ..scores import rerank
from ..sse import Chunks, to_json
from ..texts import info_of, parts_of
from .llama_cpp_schema import Body, InfillRequest, LlamaRequest

_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip
_STOPS = {"length": "limit", "abort": "none"}
_ABSENT = object()
MAX_WORDS = 256
"""Words of ``logit_bias`` at most: each is looked up by itself."""


# ---------------------------------------------------------------- routes


async def completion(request: web.Request) -> web.StreamResponse:
    """Continue each prompt."""
    front = request.app[FRONT]
    asked = await front.read(request, LlamaRequest)
    await _begin(request, front, asked)
    prompts, several = _prompts(asked.prompt)
    found = await together([_prompt(front, prompt) for prompt in prompts])
    return await _answer(request, front, asked, found, several)


async def infill(request: web.Request) -> web.StreamResponse:
    """Fill in what stands between a prefix and a suffix."""
    front = request.app[FRONT]
    asked = await front.read(request, InfillRequest)
    await _begin(request, front, asked)
    work = Infill(asked.input_prefix or "", asked.input_suffix or "", asked.extra(), asked.prompt or "")
    told = await front.engine.text(Text(infill=work))
    return await _answer(request, front, asked, [{"ids": told.ids}], False, told.work.ends)


async def props(request: web.Request) -> web.Response:
    """The server's properties."""
    front = request.app[FRONT]
    front.check_ready()
    settings = front.settings
    asked = LlamaRequest(stream=True)
    params = asked.body(settings.defaults).sampling(settings.defaults, settings.ceiling)
    context = front.engine.max_model_len
    known = {} if settings.tokenizer is None else await asyncio.to_thread(info_of, *settings.tokenizer)
    special = {name: known[name] for name in ("bos_token", "eos_token") if isinstance(known.get(name), str)}
    return json_body(
        {
            "default_generation_settings": {"params": asked.settings(params, context), "n_ctx": context},
            "total_slots": settings.slots,
            "model_alias": settings.names[0],
            "model_path": settings.names[0],
            "modalities": {"vision": False, "audio": False},
            "chat_template": known.get("chat_template") or "",
            **special,
            "build_info": f"quire {__version__}",
        }
    )


async def no_props(request: web.Request) -> web.Response:
    """Properties cannot be changed."""
    raise ApiError(400, "this server's properties cannot be changed while it runs; give them as flags.")


async def slots(request: web.Request) -> web.Response:
    """As many slots as sequences may run at once, and how many of them do. With ``?fail_on_no_slot=1`` a 503 where all
    do."""
    front = request.app[FRONT]
    front.check_ready()
    try:
        stats = await front.engine.stats(front.settings.stats_s)
    except TimeoutError:
        raise ApiError(503, "the scheduler does not answer; try again in a moment.", retry_after=1.0) from None
    total = max(front.settings.slots, stats.running)
    if stats.running >= total and request.query.get("fail_on_no_slot", "0") not in ("", "0"):
        raise ApiError(503, f"all {total} slots are in use; try again in a moment.", retry_after=1.0)
    slot = {"n_ctx": front.engine.max_model_len, "speculative": False}
    return web.Response(
        body=to_json([{"id": id, "is_processing": id < stats.running, **slot} for id in range(total)]),
        content_type="application/json", charset="utf-8",
    )  # fmt: skip


async def no_slot(request: web.Request) -> web.Response:
    """Slots are not saved, restored or erased by themselves."""
    raise ApiError(
        400, "a slot cannot be saved, restored or erased: all requests share the blocks of one prefix cache."
    )


ROUTES = [
    web.post("/completion", completion),
    web.post("/completions", completion),
    web.post("/infill", infill),
    *[web.post(path, rerank) for path in ("/reranking", "/v1/reranking")],  # Jina's shape, as on /rerank
    web.get("/props", props),
    web.post("/props", no_props),
    web.get("/slots", slots),
    web.post("/slots/{id}", no_slot),
]


def refused(error: RequestError) -> web.Response:
    """An error in llama.cpp's shape."""
    answer = error_response(error)
    answer.body = to_json(_error(error))
    return answer


def _error(error: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"code": error.status, "message": words_of(error), "type": kind}}


# ---------------------------------------------------------------- from llama.cpp's words to OpenAI's


async def _begin(request: web.Request, front: Front, asked: LlamaRequest) -> None:
    await front.find_model(request, asked.model)
    front.check_generates("Completion")
    await front.wait_ready()


def _prompts(given: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether the answer is a list. A list of strings, or one that holds lists, is of several."""
    if given is None or given == []:
        raise ApiError(400, "prompt must be given and must not be empty.", "prompt")
    if not isinstance(given, list):
        return [given], False
    kinds = set(map(type, given))
    if int in kinds and kinds <= {int, str}:
        return [given], False
    check_count(given, "prompt", "prompts")
    return given, len(given) > 1


async def _prompt(front: Front, given: Any) -> dict[str, Any]:
    """One prompt as the engine takes it: a text, or the ids of texts and ids in turn. Raises RequestError."""
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ApiError(400, "multimodal_data is not supported: this server takes text.", "prompt")
        given = given.get("prompt_string")
    if isinstance(given, str):
        return {"prompt": given}
    if not isinstance(given, list):
        raise ApiError(
            400, f"prompt must be a string or a list of strings and token ids, got {kind_of(given)}.", "prompt"
        )
    parts = parts_of(given, "prompt")
    if all(isinstance(part, int) for part in parts):
        return {"ids": parts}
    return {"ids": (await front.engine.text(Text(parts))).ids}


async def _biases(front: Front, given: Any) -> dict[int, float] | None:
    """``logit_bias`` in its three shapes: [[id, bias]], [["word", bias]], {"id or word": bias}; a bias of false is the
    lowest there is. A word is that of all its tokens. Raises RequestError."""
    if not given:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ApiError(400, "logit_bias must be a list of pairs [token, bias], or an object.", "logit_bias")
    words = [key for key, _ in pairs if isinstance(key, str) and not (isinstance(given, dict) and _is_id(key))]
    if len(words) > MAX_WORDS:
        raise ApiError(
            400, f"logit_bias holds {len(words)} words, over the limit of {MAX_WORDS}; give ids.", "logit_bias"
        )
    told = (
        await together([front.engine.text(Text([word]), add_special_tokens=False) for word in words]) if words else []
    )
    ids = {word: answer.ids for word, answer in zip(words, told, strict=True)}
    biases: dict[int, float] = {}
    for key, bias in pairs:
        if bias is False:
            bias = -100.0
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ApiError(
                400, f"logit_bias of {key!r:.80} must be a number or false, got {kind_of(bias)}.", "logit_bias"
            )
        if not isinstance(key, str | int):
            raise ApiError(
                400, f"logit_bias has the key {key!r:.80}, which is neither a token id nor a word.", "logit_bias"
            )
        tokens = [key] if isinstance(key, int) else ids[key] if key in ids else [int(key)]
        biases |= dict.fromkeys(tokens, bias)
    return biases


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10


async def _answer(
    request: web.Request, front: Front, asked: LlamaRequest, prompts: list[dict[str, Any]], several: bool,
    ends: list[int] | None = None,
) -> web.StreamResponse:  # fmt: skip
    body = asked.body(front.settings.defaults)
    body.logit_bias = await _biases(front, asked.logit_bias)
    body.stop_token_ids = ends or None
    params = front.params(body, len(prompts))
    streams = front.submit(request, prompts, params, body, add_special_tokens=True, echo=True)
    call = LlamaCall(asked, front, streams, body, params, front.metrics)
    if asked.stream:
        return await call.stream(request, Chunks("", 0, "", False), front.settings.stall_s)
    choices, _ = await call.complete()
    told = [call.final(choice.index, choice.text, choice) for choice in choices]
    if several or len(told) > 1:
        return web.Response(body=to_json(told), content_type="application/json", charset="utf-8")
    return json_body(told[0])


# ---------------------------------------------------------------- answers


class LlamaCall(Call):
    """A call that is told in llama.cpp's objects."""

    def __init__(
        self, asked: LlamaRequest, front: Front, streams: list[RequestStream], body: Body, params: SamplingParams,
        metrics: Any,
    ):  # fmt: skip
        super().__init__(streams, body, params, metrics)
        self._asked, self._front = asked, front
        self._render = self._events
        self._none = asked.limit() == 0  # the prompt is read, and nothing is to be told of what follows
        self._lines: set[int] = set()  # choices in whose text a line has ended

    def final(self, index: int, text: str, choice: Ended) -> dict[str, Any]:
        """The whole answer of one choice."""
        content, tokens = ("", []) if self._none else (text, choice.tokens)
        more: dict[str, Any] = {"content": content, "tokens": tokens if self._asked.return_tokens else []}
        told = self._final(index, choice.reason, choice.stop, len(tokens), "\n" in content) | more
        if self._asked.probs() and not self._none:
            told["completion_probabilities"] = [_probability(each) for each in choice.logprobs]
        return self._shown(told)

    def _final(
        self, index: int, reason: str, stop: int | str | None, predicted: int, has_new_line: bool
    ) -> dict[str, Any]:
        stream = self._streams[index // self._n]
        prompt, context = stream.accepted, self._front.engine.max_model_len
        evaluated = len(prompt.prompt_ids) if prompt is not None else 0
        kind = _STOPS.get(reason) or ("word" if isinstance(stop, str) else "eos")
        kind = "limit" if self._none else kind
        return {
            "index": index, "content": "", "tokens": [], "id_slot": self._slot(), "stop": True,
            "model": self._asked.model or self._front.settings.names[0], "tokens_predicted": predicted,
            "tokens_evaluated": evaluated,
            "generation_settings": self._asked.settings(self._params, context),
            "prompt": (prompt.prompt or "") if prompt is not None else "", "has_new_line": has_new_line,
            "truncated": kind == "limit" and 0 < context <= evaluated + predicted, "stop_type": kind,
            "stopping_word": stop if kind == "word" else "", "tokens_cached": stream.cached_tokens,
            "timings": _timings(stream, predicted),
        }  # fmt: skip

    def _slot(self) -> int:
        return -1 if self._asked.id_slot is None else self._asked.id_slot

    def _shown(self, told: dict[str, Any]) -> dict[str, Any]:
        """What of it was asked for by ``response_fields``: ``a/b`` is b of a, and is told under that name."""
        if not self._asked.response_fields:
            return told
        found: dict[str, Any] = {}
        for path in self._asked.response_fields:
            value: Any = told
            for name in path.split("/"):
                value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is not _ABSENT:
                found[path] = value
        return found

    # -- a stream of events

    def _events(self, choice: Choice, event: StreamEvent) -> bytes:
        """What is new, and at the end all that is known of the whole."""
        first, choice.opened = not choice.opened, True
        reason, _, _ = self._taken(choice, event)
        out = []
        if "\n" in event.text:
            self._lines.add(choice.index)
        if (event.text or event.tokens) and not self._none:
            out.append(_data(self._partial(choice, event, first)))
        if reason is not None:
            predicted = 0 if self._none else choice.tokens
            told = self._final(choice.index, reason, event.stop_reason, predicted, choice.index in self._lines)
            out.append(_data(self._shown(told)))
        return b"".join(out)

    def _partial(self, choice: Choice, event: StreamEvent, first: bool) -> dict[str, Any]:
        stream = self._streams[choice.prompt]
        evaluated = len(stream.accepted.prompt_ids) if stream.accepted else 0
        told: dict[str, Any] = {
            "index": choice.index, "content": event.text, "tokens": event.tokens, "stop": False,
            "id_slot": self._slot(), "tokens_predicted": choice.tokens, "tokens_evaluated": evaluated,
        }  # fmt: skip
        if self._asked.timings_per_token:
            told["timings"] = _timings(stream, choice.tokens)
        if self._asked.return_progress and first:
            ms = _timings(stream, 0)["prompt_ms"]
            told["prompt_progress"] = {
                "total": evaluated, "cache": stream.cached_tokens, "processed": evaluated, "time_ms": ms,
            }  # fmt: skip
        if self._asked.probs():
            told["completion_probabilities"] = [_probability(each) for each in event.logprobs]
        return told

    def _ending(self, include_usage: bool) -> bytes:
        return b""

    def _failure(self, error: RequestError) -> bytes:
        return _data(_error(error))


def _data(told: dict[str, Any]) -> bytes:
    return b"data: " + to_json(told) + b"\n\n"


def _timings(stream: RequestStream, predicted: int) -> dict[str, float]:
    """Milliseconds of the prompt and of what was generated since; 0 where nothing has been measured yet."""
    metrics = stream.metrics
    began, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    prompt_ms = 0.0 if began is None or first is None else (first - began) * 1e3
    predicted_ms = 0.0 if first is None or last is None else (last - first) * 1e3
    cached = stream.cached_tokens
    evaluated = len(stream.accepted.prompt_ids) - cached if stream.accepted else 0
    return {
        "cache_n": cached, "prompt_n": evaluated, "prompt_ms": prompt_ms, **_rate("prompt", evaluated, prompt_ms),
        "predicted_n": predicted, "predicted_ms": predicted_ms, **_rate("predicted", predicted, predicted_ms),
    }  # fmt: skip


def _rate(name: str, count: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_per_token_ms": ms / count if count else 0.0,
        f"{name}_per_second": count / ms * 1e3 if ms else 0.0,
    }


def _probability(token: TokenLogprobs) -> dict[str, Any]:
    """One token, and those that were likeliest in its place."""
    entries = [
        {
            "id": token.ids[place],
            "token": token.texts[place] if token.texts else "",
            "bytes": list(raw_bytes(token, place) or b""),
            "logprob": floored(token.values[place]),
        }
        for place in range(len(token.ids))
    ]
    return {**entries[0], "top_logprobs": entries[1:]}
