"""POST /v1/embeddings, /classify and /pooling: each input of a request pooled by itself.

The inputs of one request are queued together and answered together: where one fails, the others are aborted.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from ..client.offline.prompts import Input
from ..client.results import Pooled, RequestError
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.params import ParamError
from ..proto.pooling import PoolingParams
from .auth import OWNER
from .calls import json_body, together
from .errors import ApiError
from .front import FRONT, Front, request_id
from .pooling_schema import ClassifyRequest, EmbeddingRequest, EncodedRequest, InputRequest, PoolingRequest, PoolRequest
from .sse import to_json, usage_of

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
    data = await _encoded(pooled, body, "embedding")
    return _answer(request, front, body, "embd-", data, pooled)


async def classify(request: web.Request) -> web.Response:
    """The probabilities of the classes for each input."""
    front, body, pooled = await _each(request, ClassifyRequest, "Classification", "classify")
    labels = front.pooler("Classification", "classify").labels
    data = [_classes(index, each.data, labels) for index, each in enumerate(pooled)]
    return _answer(request, front, body, "classify-", data, pooled)


async def pooling(request: web.Request) -> web.Response:
    """What the model pools of each input: a vector, or one for each token."""
    front, body, pooled = await _each(request, PoolingRequest, "Pooling", "embed", "classify")
    data = await _encoded(pooled, body, "pooling")
    return _answer(request, front, body, "pool-", data, pooled)


async def _each(request: web.Request, kind: type[In], api: str, *tasks: str) -> tuple[Front, In, list[Pooled]]:
    front = request.app[FRONT]
    body = await front.read(request, kind)
    await front.find_model(body.model)
    pooler = front.pooler(api, *tasks)
    params = body.params(next(task for task in tasks if task in pooler.tasks))
    inputs = body.inputs()
    name = "input" if body.messages is None else "messages"
    places = [f"{name}[{place}]" for place in range(len(inputs))] if len(inputs) > 1 else [name]
    return front, body, await pool_all(request, body, pooler, params, inputs, places)


async def pool_all(
    request: web.Request, body: PoolRequest, pooler: PoolerConfig, params: PoolingParams, inputs: list[Input],
    places: list[str],
) -> list[Pooled]:  # fmt: skip
    """Pool all inputs, or none; ``places`` are what the request calls them. Raises RequestError."""
    front = request.app[FRONT]
    try:
        pooler.resolve(params)
    except ParamError as error:
        raise ApiError(400, str(error), error.param) from error
    front.check_room(len(inputs), _param(places[0]))
    await front.wait_ready()
    options = {
        "params": params, "api_key": request.get(OWNER, ""), "priority": body.priority or 0, "arrival": time.time(),
        "cache_salt": body.cache_salt or "",
    }  # fmt: skip
    if (adapter := front.adapter(body.model)) is not None:
        options["adapter"] = adapter
    began, numbers = time.monotonic(), 0
    answers: list[asyncio.Future[Pooled]] = []

    async def one(answer: asyncio.Future[Pooled], place: str) -> Pooled:
        nonlocal numbers
        try:
            pooled = await answer
        except RequestError as error:
            raise _in_words(error, place) from error
        numbers += pooled.data.size
        if numbers > MAX_NUMBERS:
            raise ApiError(400, f"the answer would hold over {MAX_NUMBERS} numbers; send fewer inputs at a time.")
        if not (abs(pooled.data) < math.inf).all():
            raise ApiError(500, f"{place}: the model's numbers are not finite; another --dtype may help.")
        front.metrics.pooled(len(pooled.prompt_ids), time.monotonic() - began)
        return pooled

    try:
        for given, place in zip(inputs, places, strict=True):
            try:
                answers.append(asyncio.ensure_future(front.engine.pool(**given.asked(), **options)))
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


async def _encoded(pooled: list[Pooled], body: EncodedRequest, kind: str) -> list[dict[str, Any]]:
    """The data of an answer; long ones are made piece by piece, so that nobody waits for them."""
    encode: Callable[[numpy.ndarray], Any] = _base64 if body.base64 else _numbers
    name = "embedding" if kind == "embedding" else "data"
    data, since = [], 0
    for index, each in enumerate(pooled):
        data.append({"index": index, "object": kind, name: encode(each.data)})
        since += each.data.size
        if since > _AT_ONCE:
            since = 0
            await asyncio.sleep(0)
    return data


def _numbers(data: numpy.ndarray) -> msgspec.Raw:
    return msgspec.Raw(to_json(data.tolist()))


def _base64(data: numpy.ndarray) -> str:
    return base64.b64encode(data.astype("<f4").tobytes()).decode()


def _classes(index: int, data: numpy.ndarray, labels: tuple[str, ...]) -> dict[str, Any]:
    best = int(data.argmax())
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": data.tolist(), "num_classes": len(data)}


def _answer(
    request: web.Request, front: Front, body: PoolRequest, prefix: str, data: list[dict[str, Any]], pooled: list[Pooled]
) -> web.Response:
    return json_body(
        {
            "id": request_id(request, body, prefix),
            "object": "list",
            "created": int(time.time()),
            "model": body.model or front.settings.names[0],
            "data": data,
            "usage": usage_of_pooled(pooled),
        }
    )


def usage_of_pooled(pooled: list[Pooled]) -> dict[str, object]:
    """The tokens that were run, and how many of them were found in the prefix cache."""
    return usage_of(sum(len(each.prompt_ids) for each in pooled), 0, sum(each.num_cached_tokens for each in pooled))
