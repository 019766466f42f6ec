"""``/openapi.json`` (OpenAPI 3.1) and ``/docs``, made of the router's routes and of ``table.py`` when asked for."""

from __future__ import annotations

import inspect
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ...proto.version import __version__
from ..calls import json_body
from ..errors import SHAPES
from ..gate import ADMIN_ROUTES, GATE, OPEN_ROUTES, is_file
from . import answers
from .table import ERRORS, EVENTS, FORM, TABLE, Told

_MADE: web.AppKey[list[dict[str, Any]]] = web.AppKey("openapi", list)
_REF = "#/components/schemas/{name}"
_PAGE = Path(__file__).with_name("page.html")
_HIDDEN = ("/v1/audio/{what}",)
"""What is no route but a place where there is none."""
_UPLOAD = {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
}  # fmt: skip


def routes(app: web.Application) -> list[web.RouteDef]:
    """The two routes, of this application."""
    app[_MADE] = []
    return [web.get("/openapi.json", openapi), web.get("/docs", docs)]


async def openapi(request: web.Request) -> web.Response:
    """This server's routes, for programs."""
    made = request.app[_MADE]
    if not made:
        made.append(document(request.app))
    return json_body(made[0])


async def docs(request: web.Request) -> web.Response:
    """This server's routes, for people: a page that reads /openapi.json."""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=_PAGE.read_text("utf-8"), content_type="text/html", headers=headers)


def document(app: web.Application) -> dict[str, Any]:
    """OpenAPI's object for the routes that this application has."""
    found = {
        f"{route.method} {route.resource.canonical}": route
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("HEAD", "*")
    }
    told = {name: TABLE[name] for name in found if name.split(" ", 1)[1] not in _HIDDEN}
    types = [kind for each in told.values() for kind in (each.takes, each.gives) if not isinstance(kind, str | None)]
    errors = sorted({answers.Error, *ERRORS.values()}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components([*types, *errors], ref_template=_REF)
    schema_of = {id(kind): schema for kind, schema in zip([*types, *errors], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for name, each in told.items():
        method, path = name.split(" ", 1)
        error = schema_of[id(ERRORS.get(app[SHAPES].get((method, path)), answers.Error))]
        operation = _operation(found[name], each, schema_of, error)
        if path in OPEN_ROUTES or is_file(method, path) or not app[GATE].users:
            operation["security"] = []
        if path in ADMIN_ROUTES:
            operation["security"] = [{"admin": []}]
        paths.setdefault(path, {})[method.lower()] = operation
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {"schemas": components, "securitySchemes": {"key": bearer, "admin": bearer}},
    }


def _operation(route: web.AbstractRoute, told: Told, schema_of: dict[int, Any], error: Any) -> dict[str, Any]:
    """What one route does, takes and gives."""
    path = route.resource.canonical if route.resource is not None else ""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in (part[1:-1] for part in path.split("/") if part.startswith("{"))
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in told.queries.items()]
    summary = " ".join((inspect.getdoc(route.handler) or "").split("\n\n")[0].split())
    made: dict[str, Any] = {"summary": summary, "operationId": f"{route.method.lower()} {path}", "responses": {}}
    if parameters:
        made["parameters"] = parameters
    if told.takes == FORM:
        made["requestBody"] = {"required": True, "content": {FORM: {"schema": _UPLOAD}}}
    elif told.takes is not None:
        body = {"application/json": {"schema": schema_of[id(told.takes)]}}
        made["requestBody"] = {"required": True, "content": body}
    refused = {"description": "why not", "content": {"application/json": {"schema": error}}}
    made["responses"] = {"4XX": refused, "5XX": refused}
    for status, kind in told.more.items():
        made["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            **({"content": {kind: {}}} if kind else {}),
        }
    if told.status is not None:
        made["responses"][str(told.status)] = {"description": "all is well", **_content(told, schema_of)}
    return made


def _content(told: Told, schema_of: dict[int, Any]) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    content: dict[str, Any] = {}
    if isinstance(told.gives, str):
        content[told.gives] = {} if told.gives == EVENTS else text
    elif told.gives is not None:
        content["application/json"] = {"schema": schema_of[id(told.gives)]}
    for other in told.others:
        content[other] = {}  # one schema for a whole stream says nothing of its events
    return {"content": content} if content else {}
