"""Paths to routes; a slash at the end of a path makes no other path of it."""

from __future__ import annotations

from aiohttp import web


class Router(web.UrlDispatcher):
    """aiohttp's, for which ``/v1/models/`` is ``/v1/models``. It is the route that decides who may ask, so another
    spelling of a path leads past no check."""

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        """The route of a request, or the error of there being none."""
        found = await super().resolve(request)
        path = request.rel_url.raw_path
        if found.http_exception is None or found.http_exception.status != 404 or not path.endswith("/"):
            return found
        bare = request.rel_url.with_path(path.rstrip("/") or "/", encoded=True)
        return await super().resolve(request.clone(rel_url=bare))
