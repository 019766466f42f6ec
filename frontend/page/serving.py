"""``GET /`` and ``GET /page/{file}``: the files beside this one, as they are. They hold nothing secret, so they ask for
no key; what the page reads and asks for goes over the routes that programs use, with the key that its reader types.
"""

from __future__ import annotations

import hashlib
import html
from pathlib import Path

from aiohttp import web

from ..errors import ApiError

FOLDER = Path(__file__).parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""What is served, by the end of a file's name."""
POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    )
)  # fmt: skip
"""Content-Security-Policy: files of this server and nothing else, no script in the text of a page, and no text that
becomes HTML."""
HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The files, read once. ``root_path``: below which browsers find them."""

    def __init__(self, root_path: str | None = None):
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for file in sorted(FOLDER.rglob("*")):
            if (kind := TYPES.get(file.suffix)) is not None:
                self._add(file.relative_to(FOLDER).as_posix(), file.read_bytes(), kind)
        root = html.escape((root_path or "").rstrip("/"))
        body, kind, _ = self._files["index.html"]
        self._add("index.html", body.replace(b'="page/', f'="{root}/page/'.encode()), kind)

    def _add(self, name: str, body: bytes, kind: str) -> None:
        self._files[name] = body, kind, hashlib.blake2b(body, digest_size=12).hexdigest()

    def answer(self, request: web.Request, name: str) -> web.Response:
        """A file, or a 304 where the browser has it. Raises ApiError 404 for a name that is no file's."""
        if (found := self._files.get(name)) is None:
            raise ApiError(404, f"the page has no file {name!r:.100}; open / for the page.")
        body, kind, tag = found
        known = request.if_none_match or ()
        if any(each.value in (tag, "*") for each in known):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
        response.etag = tag
        return response


def routes(root_path: str | None = None) -> list[web.RouteDef]:
    """The page's two routes. ``HEAD /`` is not among them: Ollama's clients ask it whether the server is alive."""
    page = Page(root_path)

    async def index(request: web.Request) -> web.Response:
        """The page: a chat with the model, and a look inside the server."""
        return page.answer(request, "index.html")

    async def file(request: web.Request) -> web.Response:
        """A file of the page."""
        return page.answer(request, request.match_info["file"])

    return [web.get("/", index, allow_head=False), web.get("/page/{file:.+}", file)]
