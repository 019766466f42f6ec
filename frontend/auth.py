"""Who may ask: one middleware in front of every route but the health checks that cost nothing."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

from aiohttp import web

from ..proto.config import ConfigError
from .errors import ApiError, Handler

OPEN_ROUTES = frozenset(("/health", "/health/live", "/health/ready", "/ping"))
"""Routes that answer without a key. They are matched as routed, never by the text of the URL."""
OWNER: Any = web.RequestKey("owner", str) if hasattr(web, "RequestKey") else "quire.owner"
"""Where a request keeps the name of its key: what the scheduler shares and limits by."""


def keys_of(text: str | None) -> list[str]:
    """The keys of ``--api-key``: one, or several with commas or spaces between them. Raises ConfigError."""
    if not text:
        return []
    if keys := [key for key in re.split(r"[\s,]+", text) if key]:
        return keys
    raise ConfigError(f"api_key {text!r} holds no key; name one, or leave it out.")


def owner_of(key: str) -> str:
    """A key's name inside quire: a hash, so that no log and no other process ever holds the key."""
    return hashlib.sha256(b"quire api key\0" + key.encode()).hexdigest()[:16]


def auth_middleware(keys: list[str]) -> Any:
    """Demand ``Authorization: Bearer <one of keys>``, or the key as Anthropic's ``X-Api-Key``; compared in constant
    time. Unknown paths need it too."""
    owners = [(key.encode(), owner_of(key)) for key in keys]

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_ROUTES:
            scheme, _, key = _credentials(request).partition(" ")
            given = key.strip().encode("utf-8", "surrogateescape")
            found = [owner for expected, owner in owners if hmac.compare_digest(given, expected)]
            if not found or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "this server needs an API key: send the header 'Authorization: Bearer <key>'.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            request[OWNER] = found[0]
        return await handler(request)

    return authorize


def _credentials(request: web.Request) -> str:
    if (key := request.headers.get("X-Api-Key")) is not None and "Authorization" not in request.headers:
        return f"Bearer {key}"
    return request.headers.get("Authorization", "")
