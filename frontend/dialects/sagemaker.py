"""Amazon SageMaker's POST /invocations: one path, and the shape of the body says what is asked."""

from __future__ import annotations

from typing import Any, ClassVar

from aiohttp import web

from ..chat import chat_completions
from ..completions import completions
from ..errors import ApiError, Handler, error_response
from ..front import FRONT, Front
from ..parsing import Request
from ..pooling import classify, embeddings, pooling
from ..scores import rerank, score

_SCORED = ("text_1", "data_1", "queries")
_POOLED: dict[str, Handler] = {"embed": embeddings, "classify": classify}


class Invocation(Request):
    """The fields that tell requests apart, and the model's name. The route that answers reads the others."""

    names_all: ClassVar[bool] = False

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    task: Any = None
    query: Any = None
    documents: Any = None
    text_1: Any = None
    data_1: Any = None
    queries: Any = None


async def invocations(request: web.Request) -> web.StreamResponse:
    """Answer as the route does whose request this is."""
    front = request.app[FRONT]
    asked = await front.read(request, Invocation)
    return await _route(front, asked)(request)  # which reads the body again, from memory


def _route(front: Front, asked: Invocation) -> Handler:
    """The route. Raises ApiError where none takes such a body."""
    pooler = front.settings.pooler
    if pooler is None:
        if asked.messages is not None:
            return chat_completions
        if asked.prompt is not None:
            return completions
        raise ApiError(400, "the body is of no known request: give messages or prompt.")
    if asked.query is not None:
        return rerank
    if any(getattr(asked, name) is not None for name in _SCORED):
        return score
    if asked.input is None and asked.messages is None:
        told = "give input or messages, or text_1 and text_2, or query and documents"
        raise ApiError(400, f"the body is of no known request: {told}.")
    task = next((task for task in pooler.tasks if task in _POOLED), None)
    return pooling if asked.task is not None or task is None else _POOLED[task]


refused = error_response

ROUTES = [web.post("/invocations", invocations)]
