"""Who may ask: one middleware in front of every route but the health checks."""

from __future__ import annotations

import hmac
from typing import Any

from aiohttp import web

from .errors import ApiError, Handler

OPEN_ROUTES = frozenset(("/health", "/ping"))
"""Routes that answer without a key. They are matched as routed, never by the text of the URL."""


def auth_middleware(api_key: str) -> Any:
    """Demand ``Authorization: Bearer <api_key>``; compared in constant time. Unknown paths need it too."""
    expected = api_key.encode()

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_ROUTES:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected) or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "this server needs an API key: send the header 'Authorization: Bearer <key>'.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return authorize
