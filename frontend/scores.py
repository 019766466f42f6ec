"""POST /score and /rerank: how well texts go with each other, by a cross-encoder or by their embeddings."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..client.offline.scoring import Pairs, Scored, pooled_for_score
from ..client.results import Pooled
from .calls import json_body
from .errors import ApiError
from .front import FRONT, request_id
from .pooling import pool_all, usage_of_pooled
from .pooling_schema import RerankRequest, ScoreRequest


async def score(request: web.Request) -> web.Response:
    """A score for each pair."""
    body = await request.app[FRONT].read(request, ScoreRequest)
    model, scores, pooled = await _scores(request, body, "Score")
    return json_body(
        {
            "id": request_id(request, body, "score-"),
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": place, "object": "score", "score": each.score} for place, each in enumerate(scores)],
            "usage": usage_of_pooled(pooled),
        }
    )


async def rerank(request: web.Request) -> web.Response:
    """The documents by their score with the query, best first; equal ones in their own order."""
    body = await request.app[FRONT].read(request, RerankRequest)
    model, scores, pooled = await _scores(request, body, "Rerank (Score)")
    documents = body.sides()[1]
    order = sorted(range(len(scores)), key=lambda place: -scores[place].score)[: body.top_n or None]
    results: list[dict[str, Any]] = []
    for place in order:
        result: dict[str, Any] = {"index": place, "relevance_score": scores[place].score}
        if body.return_documents is not False:
            result["document"] = {"text": documents[place]}
        results.append(result)
    usage = usage_of_pooled(pooled)
    return json_body(
        {
            "id": request_id(request, body, "rerank-"),
            "model": model,
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]},
            "results": results,
        }
    )


async def _scores(
    request: web.Request, body: ScoreRequest | RerankRequest, api: str
) -> tuple[str, list[Scored], list[Pooled]]:
    front = request.app[FRONT]
    model = await front.find_model(request, body.model)
    pooler = front.pooler(api, "score", "embed", "token_embed")
    cross = "score" in pooler.tasks
    task = pooled_for_score(pooler)
    params = body.params(task)
    first, second = body.sides()
    template = "" if cross and front.settings.score_template else None
    if template is not None and params.max_tokens_per_doc is not None:
        text = "max_tokens_per_doc means nothing where a chat template puts texts together; shorten the documents."
        raise ApiError(400, text, "max_tokens_per_doc")
    pairs = Pairs(first, second, cross, template)
    names = [_places(name, len(texts)) for name, texts in zip(body.names(), (first, second), strict=True)]
    places = _together(names, (first, second)) if cross else names[0] + names[1]
    queries = [] if cross else [body.query_params(task)] * len(first)  # max_tokens_per_doc is no limit of these
    pooled = await pool_all(request, body, pooler, params, pairs.inputs, places, queries)
    return model, pairs.scores(pooled), pooled


def _places(name: str, count: int) -> list[str]:
    return [f"{name}[{place}]" for place in range(count)] if count > 1 else [name]


def _together(names: list[list[str]], texts: tuple[list[str], list[str]]) -> list[str]:
    """What an error calls each pair: either side may be at fault, so both are named, the longer text first."""
    lefts, rights = (list(zip(*side, strict=True)) for side in zip(names, texts, strict=True))
    lefts *= len(rights) // len(lefts)
    pairs = (sorted(pair, key=lambda side: -len(side[1])) for pair in zip(rights, lefts, strict=True))
    return [f"{longer} with {shorter}" for (longer, _), (shorter, _) in pairs]
