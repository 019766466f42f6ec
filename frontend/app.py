"""The routes, and what is asked of every one of them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..client.engine import Engine
from ..client.results import RequestError
from ..proto.messages import AdapterEntry
from ..proto.version import __version__
from .admin import admin_routes
from .anthropic import count_tokens, messages, refused
from .auth import auth_middleware, keys_of
from .calls import json_body
from .chat import chat_completions
from .completions import completions
from .errors import SHAPES, ApiError, Handler, Shapes, errors_middleware
from .front import FRONT, Front, Settings
from .health import PROBE, Probe, generate, live, ready
from .metrics import CONTENT_TYPE
from .pooling import classify, embeddings, pooling
from .responses import STORE, Store, delete_response, get_response, responses
from .scores import rerank, score


def make_app(engine: Engine, settings: Settings) -> web.Application:
    """The application over an engine that somebody else starts and closes."""
    middlewares: list[Any] = [errors_middleware, _track]
    admins = keys_of(settings.admin_api_key)
    if keys := keys_of(settings.api_key):
        middlewares.append(auth_middleware([*keys, *admins]))
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_request_bytes)
    app[FRONT] = Front(engine, settings)
    app[STORE] = Store()
    shapes: Shapes = {"/v1/messages": refused, "/v1/messages/count_tokens": refused}
    app[SHAPES] = shapes
    app[PROBE] = Probe(engine, settings.generate_s, settings.pooler is not None)
    app.add_routes(
        [
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", one_model),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.get("/v1/responses/{id}", get_response),
            web.delete("/v1/responses/{id}", delete_response),
            web.post("/v1/messages", messages),
            web.post("/v1/messages/count_tokens", count_tokens),
            web.post("/v1/embeddings", embeddings),
            web.post("/classify", classify),
            web.post("/pooling", pooling),
            *[web.post(path, score) for path in ("/score", "/v1/score")],
            *[web.post(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")],
            web.get("/health", ready),
            web.get("/health/live", live),
            web.get("/health/ready", ready),
            web.get("/health/generate", generate),
            web.get("/ping", ready),
            web.post("/ping", ready),
            web.get("/version", version),
            web.get("/metrics", metrics),
            *admin_routes(admins),
        ]
    )
    return app


@web.middleware
async def _track(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count what is being answered, and what is refused. What comes while the server drains is not begun."""
    front = request.app[FRONT]
    front.enter()
    try:
        if front.draining and request.method == "POST":
            raise front.leaving()
        return await handler(request)
    except (RequestError, web.HTTPException) as error:
        if request.method == "POST":  # health checks are asked all the time
            front.metrics.failed(error.status)
        raise
    except ConnectionError:
        raise
    except Exception:
        front.metrics.failed(500)
        raise
    finally:
        front.leave()


async def models(request: web.Request) -> web.Response:
    """The names this server answers to."""
    front = request.app[FRONT]
    data = [_model(front, name) for name in front.settings.names]
    return json_body({"object": "list", "data": data + [_adapter(front, entry) for entry in front.engine.adapters]})


async def one_model(request: web.Request) -> web.Response:
    """One of them; 404 for others."""
    front = request.app[FRONT]
    name = await front.find_model(request.match_info["model"])
    entry = next((each for each in front.engine.adapters if each.name == name), None)
    return json_body(_model(front, name) if entry is None else _adapter(front, entry))


def _adapter(front: Front, entry: AdapterEntry) -> dict[str, Any]:
    path = entry.adapter.path if entry.adapter is not None else ""
    parent = entry.parent or front.settings.names[0]
    return {**_model(front, entry.name), "root": path, "parent": parent, "max_model_len": None}


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.started,
        "owned_by": "quire",
        "root": front.settings.names[0],
        "parent": None,
        "max_model_len": front.engine.max_model_len or None,
    }


async def version(request: web.Request) -> web.Response:
    """quire's version."""
    return json_body({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format. What the scheduler counts is left out while none answers."""
    front = request.app[FRONT]
    try:
        stats = await front.engine.stats(front.settings.stats_s)
    except (ApiError, RequestError, TimeoutError):
        stats = None
    return web.Response(body=front.metrics.render(stats), headers={"Content-Type": CONTENT_TYPE})
