"""From where a request may come: the names a server answers to (Host), and the pages that may ask it (Origin, CORS).

A browser lets any page send requests to any address that its user can reach, a server on the user's own machine as
well. Two rules keep such pages out. A server that listens on this machine alone answers to this machine's names only,
so a page whose name was made to point here (DNS rebinding) is refused. And a request that a page of another origin
sends is refused unless ``--allowed-origins`` names that origin; what is no browser sends no Origin.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from .errors import ApiError

PREFLIGHT_S = 600
"""How long a browser may keep the answer to a preflight."""
SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
"""Headers that need no leave."""
SHOWN_HEADERS = ", ".join(
    ["X-Request-Id", "Retry-After"]
    + [f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
)
"""Headers of answers that a page may read beside the usual."""


def host_of(header: str) -> str:
    """The name in a Host header, in lower case and without port; "" where it is none."""
    try:
        parts = urlsplit("//" + header)
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError:
        return ""
    plain = parts.username is None and not parts.path and not parts.query and not parts.fragment
    return (parts.hostname or "").removesuffix(".") if plain else ""


@functools.lru_cache(maxsize=256)
def is_local(host: str) -> bool:
    """Whether a name is always this machine's."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Hosts:
    """Names that a server answers to: ``allowed``, with ``*.NAME`` for all below a name and ``*`` for any, and always
    this machine's own. Without any name, ``local_only`` says whether there are others."""

    def __init__(self, allowed: Sequence[str] = (), local_only: bool = False):
        self._names = {host_of(name) or name.lower() for name in allowed}
        self._below = tuple(name[1:] for name in self._names if name.startswith("*."))
        self.open = "*" in self._names or not (self._names or local_only)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError 403 where a request is for another name (the URL's, where that has one)."""
        if self.open:
            return
        host = host_of(request.host)
        if host and (is_local(host) or host in self._names or host.endswith(self._below or ("/",))):
            return
        raise ApiError(
            403, f"this server does not answer to the Host {request.host!r:.100}; name it in --allowed-hosts, or ask "
            "for localhost.",
        )  # fmt: skip


class Origins:
    """Pages that may ask: those of this server, and of the origins ``allowed`` (``*``: of any). Without ``allowed``
    there is no CORS: no answer carries a header of it."""

    def __init__(
        self, allowed: Sequence[str] = (), methods: Sequence[str] = ("*",), headers: Sequence[str] = ("*",),
        credentials: bool = False,
    ):  # fmt: skip
        self._allowed = {origin.lower().removesuffix("/") for origin in allowed}
        self._any = "*" in self._allowed
        self._methods = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT" if "*" in methods else ", ".join(methods)
        self._headers = None if "*" in headers else sorted({*SAFE_HEADERS, *headers}, key=str.lower)
        self._credentials = credentials

    def __bool__(self) -> bool:
        """Whether answers carry headers of CORS."""
        return bool(self._allowed)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError 403 where a page of an origin that is not allowed asks."""
        origin = request.headers.get("Origin")
        if origin is None or self._allows(origin) or _is_own(request, origin):
            return
        raise ApiError(
            403, f"pages of {origin!r:.100} may not ask this server; name that origin in --allowed-origins.",
        )  # fmt: skip

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser that asks whether it may ask; None where this is no such question."""
        wanted = request.headers.get("Access-Control-Request-Method")
        if not self or request.method != "OPTIONS" or wanted is None or "Origin" not in request.headers:
            return None
        self.check(request)
        asked = request.headers.get("Access-Control-Request-Headers", "")
        refused = None
        if wanted.upper() not in self._methods.split(", "):
            refused = f"the method {wanted!r:.40}; --allowed-methods has {self._methods}"
        elif self._headers is not None:
            known = {name.lower() for name in self._headers}
            if strange := [name for name in asked.lower().replace(" ", "").split(",") if name and name not in known]:
                refused = f"the header {strange[0]!r:.40}; --allowed-headers has {', '.join(self._headers)}"
        if refused is not None:
            raise ApiError(400, f"pages of other origins may not send {refused}.")
        headers = {
            "Access-Control-Allow-Methods": self._methods, "Access-Control-Max-Age": str(PREFLIGHT_S),
            "Access-Control-Allow-Headers": asked if self._headers is None else ", ".join(self._headers),
        }  # fmt: skip
        return web.Response(headers={name: value for name, value in headers.items() if value})

    def tell(self, request: web.BaseRequest, headers: dict[str, str]) -> None:
        """Add to ``headers`` what lets a browser show an answer to the page that asked."""
        origin = request.headers.get("Origin")
        if origin is None or not self._allows(origin):
            return
        headers["Access-Control-Allow-Origin"] = "*" if self._any else origin
        headers["Access-Control-Expose-Headers"] = SHOWN_HEADERS
        if self._credentials:
            headers["Access-Control-Allow-Credentials"] = "true"

    @property
    def varies(self) -> bool:
        """Whether answers differ by who asks, which caches must know."""
        return bool(self._allowed) and not self._any

    def _allows(self, origin: str) -> bool:
        return self._any or origin.lower() in self._allowed


def _is_own(request: web.BaseRequest, origin: str) -> bool:
    """Whether a page of this server asks. Sec-Fetch-Site is the browser's word, which no page can change: it holds
    behind a proxy too, where Host is another name. Whether Host is one of ours is ``Hosts``' question."""
    if request.headers.get("Sec-Fetch-Site") == "same-origin":
        return True
    scheme, found, host = origin.partition("://")
    ports = {"http": ":80", "https": ":443"}
    short = ports.get(scheme.lower(), ":")
    return bool(found) and host.lower().removesuffix(short) == request.host.lower().removesuffix(short)
