"""POST /generative_scoring: how likely a generator goes on with one of a few tokens after a query and each item, as
vLLM has it. Each item is one prompt of which one token is generated, and the labels' logprobs are told beside it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from aiohttp import web

from ..client.results import TokenLogprobs
from ..client.stream import RequestStream
from ..proto.params import MAX_LOGPROB_TOKEN_IDS
from ..proto.work import Text
from .calls import Call, json_body, together
from .errors import ApiError
from .front import FRONT, Front, request_id
from .parsing import Request, kind_of
from .prompts import check_ids
from .schema import CompletionRequest


class LabelScoreRequest(Request, kw_only=True):
    """The body. ``query`` and ``items`` are texts, or lists of token ids; the score is of the first label."""

    model: str | None = None
    query: Any = None
    items: Any = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: Any = None
    user: str | None = None

    def check(self) -> None:
        _side(self.query, "query")
        if not isinstance(self.items, list) or not self.items:
            raise ApiError(400, "items must be a list of at least one text or list of token ids.", "items")
        for place, item in enumerate(self.items):
            _side(item, f"items[{place}]")
        count = len(self.label_token_ids or ())
        if not 1 <= count <= MAX_LOGPROB_TOKEN_IDS:
            raise ApiError(
                400, f"label_token_ids must hold 1 to {MAX_LOGPROB_TOKEN_IDS} token ids, got {count}.",
                "label_token_ids",
            )  # fmt: skip


class _Asked(CompletionRequest):
    """The request of each item."""

    def own_names(self) -> dict[str | None, str]:
        return {**CompletionRequest.own_names(self), "logprob_token_ids": "label_token_ids", "prompt": "items"}


def _side(given: Any, name: str) -> None:
    param = name.partition("[")[0]
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise ApiError(400, f"{name} must be a string or a list of token ids, got {kind_of(given)}.", param)
    check_ids(given, name, param)


async def generative_scoring(request: web.Request) -> web.Response:
    """The probability of the first label after each item: among the labels, or of all tokens."""
    front = request.app[FRONT]
    body = await front.read(request, LabelScoreRequest)
    model = await front.find_model(request, body.model)
    front.check_generates("Generative Scoring")
    front.check_room(len(body.items), "items")
    await front.wait_ready(sized=True)
    labels = list(dict.fromkeys(body.label_token_ids or ()))
    asked = _Asked(
        model=body.model, max_tokens=1, temperature=1.0, seed=0, logprobs=0, logprob_token_ids=labels,
        priority=body.priority, cache_salt=body.cache_salt, request_id=body.request_id, user=body.user,
        return_token_ids=True,
    )  # fmt: skip
    params = front.params(asked, len(body.items))
    params.detokenize = False
    streams = front.submit(request, await _prompts(front, body), params, asked)
    _, usage = await Call(streams, asked, params, front.metrics).complete()
    softmax = body.apply_softmax is not False
    scores = [_score(_told(stream), labels, softmax) for stream in streams]
    return json_body(
        {
            "id": request_id(request, asked, "generative-scoring-"),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)],
            "usage": usage,
        }
    )


async def _prompts(front: Front, body: LabelScoreRequest) -> list[dict[str, Any]]:
    """Query and item as ids, each item in the order that is asked for, cut to what leaves room for a token."""
    special = body.add_special_tokens is not False
    query, *items = await together(
        [_ids(front, side, special and place == 0) for place, side in enumerate([body.query, *body.items])]
    )
    most = front.engine.max_model_len - 1
    return [{"ids": (item + query if body.item_first else query + item)[:most]} for item in items]


async def _ids(front: Front, side: Any, special: bool) -> list[int]:
    if not isinstance(side, str):
        return list(side)
    return list((await front.engine.text(Text(), prompt=side, add_special_tokens=special)).ids) if side else []


def _told(stream: RequestStream) -> TokenLogprobs:
    (told,) = stream.children[0].logprobs
    return told


def _score(told: TokenLogprobs, labels: list[int], softmax: bool) -> float:
    """Of the first label, of the logprobs of one place."""
    values = dict(zip(told.ids, told.values, strict=True))
    own = values[labels[0]]
    if not softmax:
        return math.exp(own)
    best = max(values[each] for each in labels)
    if best == -math.inf:
        return 0.0
    return math.exp(own - best) / sum(math.exp(values[each] - best) for each in labels)
