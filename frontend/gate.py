"""The one middleware in front of every route: from where a request comes, whose it is, and what that key may do.

What a route asks for is told by the route that was found, never by the text of the URL, and what is in no list asks for
a key: an unknown path too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .admin import admin_routes
from .auth import CALLER, OWNER, Caller, KeyRing, authenticate, keys_of
from .errors import ApiError, Handler
from .key_file import is_expired
from .origins import Hosts, Origins

if TYPE_CHECKING:
    from .front import Settings

OPEN_ROUTES = frozenset(("/health", "/health/live", "/health/ready", "/ping"))
"""Routes that answer without a key, and to any Host: whoever watches a server knows it by its address."""
METRICS_ROUTES = frozenset(("/metrics", "/version", "/load"))
"""Routes that ``--metrics-key`` and ``--open-metrics`` are about."""
PUBLIC_FILES = frozenset(("/", "/page/{file}"))
"""Routes whose GET is a file of the page at /, the same for everybody: what it shows it asks for with a key."""
PAGES = frozenset(("/docs",))
"""Routes that a person opens in a browser, which asks for the key as a password (HTTP's Basic)."""
ADMIN_ROUTES = frozenset(route.path for route in admin_routes())
"""Routes that ask for ``--admin-api-key``, and are there only with one."""


def is_file(method: str, path: str | None) -> bool:
    """Whether a route is a file of the page. ``POST /`` is none."""
    return path in PUBLIC_FILES and method in ("GET", "HEAD") and (method, path) != ("HEAD", "/")


class Gate:
    """What is asked of every request. Raises ConfigError where the file of keys cannot be used."""

    def __init__(self, settings: Settings):
        admins, salted = keys_of(settings.admin_api_key), not settings.shared_prefix_cache
        self.users = KeyRing(keys_of(settings.api_key), settings.api_key_file, len(admins), salted)
        self.admins = KeyRing(admins, besides=1, salted=salted and bool(self.users))
        self.metrics = KeyRing(keys_of(settings.metrics_key))
        self._open_metrics = settings.open_metrics
        self._hosts = Hosts(settings.allowed_hosts, settings.local_only)
        self._origins = Origins(
            settings.allowed_origins, settings.allowed_methods, settings.allowed_headers, settings.allow_credentials
        )
        self._max_header_bytes = settings.max_header_bytes

    def attach(self, app: web.Application) -> None:
        """Put this in front of an application's routes, behind those middlewares that are there."""
        app.middlewares.append(self._pass)
        if self._origins or self.users.limits:
            app.on_response_prepare.append(self._tell)

    @web.middleware
    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = None if resource is None else resource.canonical
        self._check_headers(request)
        if path not in OPEN_ROUTES:
            self._hosts.check(request)
            if (answer := self._origins.preflight(request)) is not None:
                return answer
            self._origins.check(request)
            meter = caller.meter if (caller := self._caller(request, path)) is not None else None
            if meter is not None and request.method == "POST":
                meter.enter(time.monotonic())
                try:
                    return await handler(request)
                finally:
                    meter.leave(time.monotonic())
        return await handler(request)

    def _caller(self, request: web.Request, path: str | None) -> Caller | None:
        """Whose the request is; None where nobody need say. Raises ApiError 401, 403."""
        if is_file(request.method, path):
            return None
        if path in ADMIN_ROUTES:
            if self.users.find_in(request) is not None and self.admins.find_in(request) is None:
                raise ApiError(403, f"{path} asks for a key of --admin-api-key, and this API key is none.")
            return authenticate(request, self.admins)
        if path in METRICS_ROUTES:
            if self._open_metrics:
                return None
            if self.metrics:
                return authenticate(request, self.metrics, self.admins)
        if not self.users:
            return None
        return authenticate(request, self.users, self.admins, password=path in PAGES)

    def _check_headers(self, request: web.Request) -> None:
        limit = self._max_header_bytes
        if (size := sum([len(name) + len(value) for name, value in request.raw_headers])) > limit:
            raise ApiError(
                431, f"the headers are {size} bytes, over the limit of {limit}; send less in them, or raise "
                "--max-header-bytes.", headers={"Connection": "close"},
            )  # fmt: skip

    def adopt(self, request: web.Request, owner: str) -> None:
        """Take a request that comes from inside this process, of a batch, for one of the key that asked for it.

        Raises ApiError 401 where that is no key any more, 429 where it has used up its tokens.
        """
        request[OWNER] = owner
        if not owner or not (self.users or self.admins):
            return
        caller = self.users.by_owner(owner) or self.admins.by_owner(owner)
        if caller is None or is_expired(caller.key):
            raise ApiError(401, "the API key that asked for this is not valid any more; ask again with another.")
        request[CALLER] = caller
        if caller.meter is not None:
            caller.meter.check_tokens(time.monotonic())

    async def _tell(self, request: web.Request, response: web.StreamResponse) -> None:
        """What every answer carries, errors and streams as well: CORS, and what is left of a key's limits."""
        headers: dict[str, str] = {}
        if self._origins:
            self._origins.tell(request, headers)
            if self._origins.varies:
                response.headers.add("Vary", "Origin")
        caller: Any = request.get(CALLER)
        if caller is not None and caller.meter is not None:
            headers |= caller.meter.headers(time.monotonic())
        response.headers.update(headers)


GATE = web.AppKey("gate", Gate)
