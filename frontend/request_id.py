"""The id by which the log, the answer and its header name a request."""

from __future__ import annotations

import re
import uuid
from typing import Any

from aiohttp import web

_ID: Any = web.RequestKey("id", str) if hasattr(web, "RequestKey") else "quire.id"
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def id_of(request: web.BaseRequest, given: str | None = None) -> str:
    """The client's own where it sent a usable one (``given``, which is the body's, or X-Request-Id), else a new one."""
    found: str | None = request.get(_ID)
    if found is None:
        usable = (each for each in (given, request.headers.get("X-Request-Id")) if each and _SAFE_ID.fullmatch(each))
        found = request[_ID] = next(usable, None) or uuid.uuid4().hex
    return found
