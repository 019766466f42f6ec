"""The routes, and what is asked of every one of them."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ..client.engine import Engine
from ..client.results import RequestError
from ..client.traced import CALLER, Caller
from ..proto.messages import AdapterEntry
from ..proto.version import __version__
from .admin import admin_routes
from .auth import OWNER, may_see
from .batches import routes as batches
from .calls import json_body
from .cancel import INNER as CANCEL_INNER
from .cancel import ROUTES as CANCEL
from .chat import chat_completions
from .completions import completions
from .dashboard import HUB, Hub
from .dashboard import ROUTES as DASHBOARD
from .deadline import deadline_middleware
from .dialects import ROUTES, SHAPES_OF
from .dialects.anthropic import refused as anthropic_refused
from .dialects.anthropic_models import ANTHROPIC, anthropic_model, anthropic_models
from .errors import NOTE, SHAPES, ApiError, Handler, errors_middleware
from .front import FRONT, Front, Settings
from .gate import GATE, Gate
from .health import PROBE, Probe, generate, live, ready
from .label_scores import generative_scoring
from .log import Refusals, access_middleware, id_header
from .metrics import CONTENT_TYPE
from .openapi import routes as openapi
from .page import routes as page
from .peers import OWNER_HEADER
from .pooling import classify, embeddings, pooling
from .protocol import close_after
from .render import ROUTES as RENDER
from .responses import INNER as RESPONSES_INNER
from .responses import ROUTES as RESPONSES
from .responses import STORE, Store
from .router import Router
from .scores import rerank, score
from .sse import KEEP_ALIVE
from .texts import apply_template, detokenize, tokenize, tokenizer_info
from .token_ids import generate as inference


def make_app(engine: Engine, settings: Settings) -> web.Application:
    """The application over an engine that somebody else starts and closes."""
    gate = Gate(settings)
    before = [access_middleware(settings.log.silent)] if settings.log.access else []
    app = web.Application(
        middlewares=[*before, _measure, errors_middleware, _track],
        client_max_size=settings.max_request_bytes,
        router=Router(),
    )
    gate.attach(app)
    if settings.request_s is not None:
        app.middlewares.append(deadline_middleware(settings.request_s, engine.fail))
    app.middlewares.extend([*([_note_caller] if settings.traced else ()), *settings.middlewares])
    app[NOTE] = Refusals().note
    if settings.keep_alive_s:
        app[KEEP_ALIVE] = settings.keep_alive_s
    if settings.id_headers:
        id_header(app)
    app[GATE], app[FRONT] = gate, Front(engine, settings)
    app[STORE] = Store()
    app[HUB] = Hub(app[FRONT])
    app[SHAPES] = SHAPES_OF
    app[PROBE] = Probe(engine, settings.generate_s, settings.pooler is not None)
    app.add_routes(
        [
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", one_model),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            *RESPONSES,
            *ROUTES,
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.post("/apply-template", apply_template),
            web.get("/tokenizer_info", tokenizer_info),
            web.post("/inference/v1/generate", inference),
            *RENDER,
            *CANCEL,
            web.route("*", "/v1/audio/{what:.*}", no_audio),
            web.post("/v1/embeddings", embeddings),
            web.post("/classify", classify),
            web.post("/pooling", pooling),
            web.post("/generative_scoring", generative_scoring),
            *[web.post(path, score) for path in ("/score", "/v1/score")],
            *[web.post(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")],
            *[web.get(path, ready) for path in ("/health", "/health/ready", "/ping")],
            web.post("/ping", ready),
            web.get("/health/live", live),
            web.get("/health/generate", generate),
            web.get("/version", version),
            web.get("/load", load),
            web.get("/metrics", metrics),
            *DASHBOARD,
            *(admin_routes() if gate.admins else ()),
            *_for_readers(app, settings),
        ]
    )
    batches.setup(app)
    return app


def make_inner(app: web.Application) -> web.Application:
    """What other frontends may ask of this one, where nobody else reaches it (``peers.py``)."""
    inner = web.Application(middlewares=[errors_middleware, _for_owner], client_max_size=app._client_max_size)
    inner[FRONT], inner[STORE], inner[NOTE], inner[SHAPES] = app[FRONT], app[STORE], app[NOTE], {}
    inner.add_routes([*RESPONSES_INNER, *CANCEL_INNER])
    return inner


@web.middleware
async def _for_owner(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer for the owner whom the frontend that asks has authenticated; a process that ends waits for it."""
    request[OWNER] = request.headers.get(OWNER_HEADER, "")
    front = request.app[FRONT]
    front.enter()
    try:
        return await handler(request)
    finally:
        front.leave()


def _for_readers(app: web.Application, settings: Settings) -> list[web.RouteDef]:
    """What tells this server's routes, and the page for people, as far as the operator wants them."""
    return (openapi(app) if settings.docs else []) + (page(settings.root_path) if settings.page else [])


@web.middleware
async def _measure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count answers and their times. A client that left before its answer counts as 499, as nginx has it."""
    began, status = time.monotonic(), 499
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        path = None if resource is None else resource.canonical
        request.app[FRONT].metrics.http.answered(path, request.method, status, time.monotonic() - began)


@web.middleware
async def _note_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What is submitted from here on belongs to the caller's trace, if it has one."""
    given = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    CALLER.set(Caller(given))
    return await handler(request)


@web.middleware
async def _track(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count what is being answered, and what is refused. What comes while the server drains is not begun."""
    front = request.app[FRONT]
    asks = request.method == "POST"
    front.enter(asks)
    try:
        if front.parting:
            close_after(request)
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
        front.leave(asks, request)


async def models(request: web.Request) -> web.Response:
    """The names this server answers to; Anthropic's clients are told in their own form."""
    front = request.app[FRONT]
    if ANTHROPIC in request.headers:
        names = [*front.settings.names, *(entry.name for entry in front.engine.adapters)]
        return anthropic_models([name for name in names if may_see(request, name)], front.started)
    data = [_model(front, name) for name in front.settings.names]
    data += [_adapter(front, entry) for entry in front.engine.adapters]
    return json_body({"object": "list", "data": [each for each in data if may_see(request, each["id"])]})


async def one_model(request: web.Request) -> web.Response:
    """One of them; 404 for others."""
    front = request.app[FRONT]
    wanted = request.match_info["model"].rstrip("/")
    if ANTHROPIC in request.headers:
        try:
            return anthropic_model(await front.find_model(request, wanted), front.started)
        except RequestError as error:
            return anthropic_refused(error)
    name = await front.find_model(request, wanted)
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
        "root": front.settings.root or front.settings.names[0],
        "parent": None,
        "max_model_len": front.engine.max_model_len or None,
    }


async def no_audio(request: web.Request) -> web.Response:
    """404: there is no model of speech."""
    raise ApiError(
        404, f"there is no {request.path} here: this server runs models of text, and hears and says nothing."
    )


async def version(request: web.Request) -> web.Response:
    """quire's version."""
    return json_body({"version": __version__})


async def load(request: web.Request) -> web.Response:
    """How many requests are being answered; 0 where nobody counts them, as in vLLM."""
    front = request.app[FRONT]
    return json_body({"server_load": front.open if front.settings.count_load else 0})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format. What the scheduler counts is left out while none answers."""
    front = request.app[FRONT]
    try:
        stats = await front.engine.stats(front.settings.stats_s)
    except (ApiError, RequestError, TimeoutError):
        stats = None
    figures = front.metrics
    if front.shared is not None:
        figures = figures.with_others(await front.shared.others())
    return web.Response(body=figures.render(stats), headers={"Content-Type": CONTENT_TYPE})
