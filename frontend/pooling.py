"""POST /v1/embeddings, /classify and /pooling: each input of a request pooled by itself.

The inputs of one request are queued together and answered together: where one fails, the others are aborted.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from ..client.offline.prompts import Input
from ..client.results import Pooled, RequestError
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.params import ParamError
from ..proto.pooling import PoolingParams
from .auth import charge, check_model, salt_of
from .calls import json_body, together
from .chunks import averaged, chunks_of, may_chunk
from .errors import ApiError
from .front import FRONT, Front, account_of, request_id
from .log import begin
from .pooling_schema import ClassifyRequest, EmbeddingRequest, EncodedRequest, InputRequest, PoolingRequest, PoolRequest
from .request_id import id_of
from .sse import usage_of
from .vectors import as_bytes, writer

if TYPE_CHECKING:
    import numpy

MAX_NUMBERS = 2**24
"""Numbers in one answer at most: 64 MiB, or some 350 MB as JSON's text."""

_AT_ONCE, _SENT_AT_ONCE = 2**16, 64
"""Numbers that are turned to text, and inputs that are sent, before other requests get their turn."""

_OF_INPUT = ("prompt", "ids", "pair", "messages", "input_tokens")
"""What an error calls what a request has as its inputs."""

In = TypeVar("In", bound=InputRequest)


async def embeddings(request: web.Request) -> web.Response:
    """A vector for each input."""
    front, body, pooled = await _each(request, EmbeddingRequest, "Embeddings", "embed")
    return await _vectors(request, front, body, "embd-", "embedding", pooled)


async def classify(request: web.Request) -> web.Response:
    """The probabilities of the classes for each input."""
    front, body, pooled = await _each(request, ClassifyRequest, "Classification", "classify")
    labels = front.pooler("Classification", "classify").labels
    data = [_classes(index, each.data, labels) for index, each in enumerate(pooled)]
    return _answer(request, front, body, "classify-", data, pooled)


async def pooling(request: web.Request) -> web.Response:
    """What the model pools of each input: a vector, or one for each token."""
    front, body, pooled = await _each(request, PoolingRequest, "Pooling", "embed", "classify", "token_embed")
    return await _vectors(request, front, body, "pool-", "pooling", pooled)


async def _each(request: web.Request, kind: type[In], api: str, *tasks: str) -> tuple[Front, In, list[Pooled]]:
    front = request.app[FRONT]
    body = await front.read(request, kind)
    await front.find_model(request, body.model)
    pooler = front.pooler(api, *tasks)
    params = body.params(next(task for task in tasks if task in pooler.tasks))
    inputs = body.inputs()
    name = "input" if body.messages is None else "messages"
    places = [f"{name}[{place}]" for place in range(len(inputs))] if len(inputs) > 1 else [name]
    if not may_chunk(pooler, params):
        return front, body, await pool_all(request, body, pooler, params, inputs, places)
    await front.wait_ready(sized=True)
    chunks = [await chunks_of(front, pooler, *each) for each in zip(inputs, places, strict=True)]
    counts = [len(each) for each in chunks]
    apart = [place for place, count in zip(places, counts, strict=True) for _ in range(count)]
    pooled = await pool_all(request, body, pooler, params, [one for each in chunks for one in each], apart)
    return front, body, averaged(pooled, counts)


async def pool_all(
    request: web.Request, body: PoolRequest, pooler: PoolerConfig, params: PoolingParams, inputs: list[Input],
    places: list[str], apart: Sequence[PoolingParams] = (),
) -> list[Pooled]:  # fmt: skip
    """Pool all inputs, or none; ``places`` are what the request calls them. The first are pooled by ``apart`` where it
    is given, the others by ``params``. Raises RequestError."""
    front = request.app[FRONT]
    try:
        pooler.resolve(params)
    except ParamError as error:
        raise ApiError(400, str(error), error.param) from error
    front.check_room(len(inputs), _param(places[0]))
    await front.wait_ready()
    options = {
        **account_of(request, body.priority or 0), "arrival": time.time(),
        "cache_salt": salt_of(request, body.cache_salt),
    }  # fmt: skip
    check_model(request, body.model or front.settings.names[0])
    if (adapter := front.adapter(body.model, request)) is not None:
        options["adapter"] = adapter
    if front.settings.log.requests:
        name = id_of(request, body.request_id)
        begin(request, front.settings.log, name, [], [], params, adapter.name if adapter else None)
    began, numbers = time.monotonic(), 0
    answers: list[asyncio.Future[Pooled]] = []

    async def one(answer: asyncio.Future[Pooled], place: str) -> Pooled:
        nonlocal numbers
        try:
            pooled = await answer
        except RequestError as error:
            raise _in_words(error, place) from error
        except asyncio.CancelledError:
            front.metrics.withdrawn(time.monotonic() - began)
            raise
        numbers += pooled.data.size
        if numbers > MAX_NUMBERS:
            raise ApiError(400, f"the answer would hold over {MAX_NUMBERS} numbers; send fewer inputs at a time.")
        if not (abs(pooled.data) < math.inf).all():
            raise ApiError(500, f"{place}: the model's numbers are not finite; another --dtype may help.")
        charge(request, len(pooled.prompt_ids))
        front.metrics.pooled(len(pooled.prompt_ids), time.monotonic() - began, pooled.num_cached_tokens)
        return pooled

    try:
        for given, place, each in zip(inputs, places, [*apart, *repeat(params, len(inputs) - len(apart))], strict=True):
            try:
                answers.append(asyncio.ensure_future(front.engine.pool(**given.asked(), params=each, **options)))
            except RequestError as error:
                raise _in_words(error, place) from error
            if len(answers) % _SENT_AT_ONCE == 0:
                await asyncio.sleep(0)
        return await together([one(answer, place) for answer, place in zip(answers, places, strict=True)])
    finally:
        for answer in answers:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # this failure has been told, or that of another input


def _in_words(error: RequestError, place: str) -> RequestError:
    """The error in the request's own words: which of its inputs it is about."""
    if error.param not in _OF_INPUT:
        return error
    words = re.sub(r"^prompt\b", place, error.message)
    words = words if words != error.message else f"{place}: {words}"
    return ApiError(error.status, words, _param(place), error.retry_after)


def _param(place: str) -> str:
    """The field of the request that ``place`` is in: "documents" of "documents[1] with query"."""
    return re.split(r"\W", place)[0]


async def _vectors(
    request: web.Request, front: Front, body: EncodedRequest, prefix: str, kind: str, pooled: list[Pooled]
) -> web.Response:
    """The answer with the vectors in the form asked for."""
    form, type, order = body.form
    if form.startswith("bytes"):
        told = _told(request, front, body, prefix, pooled) if form == "bytes" else None
        return as_bytes(pooled, type, order, told)
    data = await _encoded(pooled, writer(form, type, order), kind)
    return _answer(request, front, body, prefix, data, pooled)


async def _encoded(pooled: list[Pooled], encode: Callable[[numpy.ndarray], Any], kind: str) -> list[dict[str, Any]]:
    """The data of an answer; long ones are made piece by piece, so that nobody waits for them."""
    name = "embedding" if kind == "embedding" else "data"
    data: list[dict[str, Any]] = []
    since = 0
    for index, each in enumerate(pooled):
        data.append({"index": index, "object": kind, name: encode(each.data)})
        since += each.data.size
        if since > _AT_ONCE:
            since = 0
            await asyncio.sleep(0)
    return data


def _classes(index: int, data: numpy.ndarray, labels: tuple[str, ...]) -> dict[str, Any]:
    best = int(data.argmax())
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": data.tolist(), "num_classes": len(data)}


def _answer(
    request: web.Request, front: Front, body: PoolRequest, prefix: str, data: list[dict[str, Any]], pooled: list[Pooled]
) -> web.Response:
    return json_body({"object": "list", "data": data, **_told(request, front, body, prefix, pooled)})


def _told(request: web.Request, front: Front, body: PoolRequest, prefix: str, pooled: list[Pooled]) -> dict[str, Any]:
    """What an answer says beside its data."""
    return {
        "id": request_id(request, body, prefix),
        "created": int(time.time()),
        "model": body.model or front.settings.names[0],
        "usage": usage_of_pooled(pooled),
    }


def usage_of_pooled(pooled: list[Pooled]) -> dict[str, object]:
    """The tokens that were run, and how many of them were found in the prefix cache."""
    return usage_of(sum(len(each.prompt_ids) for each in pooled), 0, sum(each.num_cached_tokens for each in pooled))
