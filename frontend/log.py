"""What the log says of requests: a line for each refusal, and on demand one for each start, end and HTTP answer.

A client's words stand in some of these lines, so control characters are escaped and lengths are bounded.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ..proto.log_lines import printable
from ..proto.request_name import short
from .errors import Handler
from .request_id import id_of

if TYPE_CHECKING:
    from ..client.stream import RequestStream
    from ..proto.params import SamplingParams
    from ..proto.pooling import PoolingParams

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""One line in so long for refusals of one status."""
_MOST, _MOST_PARAMS = 600, 4000
"""Characters of a reason and of a request's parameters in a line."""
_HEALTH = ("/health", "/ping")
_OPEN: Any = web.RequestKey("open", tuple) if hasattr(web, "RequestKey") else "quire.open"


@dataclass(frozen=True)
class LogSettings:
    """What is logged beside refusals. ``most`` is the most characters, or token ids, of a prompt or an output."""

    requests: bool = False
    outputs: bool = False
    most: int | None = None
    access: bool = False
    silent: frozenset[str] = frozenset()  # paths without a line of access

    def cut(self, what: str | list[int]) -> str:
        """A prompt or an output as a line has it."""
        return printable(str(what if self.most is None else what[: self.most]))


class Refusals:
    """A line for each refusal with its reason: one a second for each status, which says how many it stands for."""

    def __init__(self) -> None:
        self._told: dict[int, float] = {}
        self._left_out: dict[int, int] = {}

    def note(self, request: web.BaseRequest, status: int, message: str) -> None:
        """A request was answered with ``status``. Health checks are asked all the time, and get no line."""
        if request.path.startswith(_HEALTH):
            return
        now = time.monotonic()
        if now - self._told.get(status, -QUIET_S) < QUIET_S:
            self._left_out[status] = self._left_out.get(status, 0) + 1
            return
        self._told[status] = now
        more = self._left_out.pop(status, 0)
        others = f" ({more} more since the last such line)" if more else ""
        log.info(
            "refused %s %s of %s with %d: %s%s", printable(request.method[:20]), printable(request.path[:200]),
            request.remote or "a socket", status, printable(message[:_MOST]), others,
            extra={"request_id": id_of(request)},
        )  # fmt: skip


def begin(
    request: web.Request, settings: LogSettings, name: str, prompts: list[dict[str, Any]],
    streams: list[RequestStream], params: SamplingParams | PoolingParams, adapter: str | None,
) -> None:  # fmt: skip
    """Log that a request has been submitted; ``end`` logs its end."""
    told = str(params)  # a schema or a list of biases can be long
    told = told if len(told) <= _MOST_PARAMS else told[:_MOST_PARAMS] + "..."
    uids, about = ", ".join(short(stream.uid) for stream in streams), {"request_id": name}
    log.info("Received request %s: params: %s, lora_request: %s, runs as: %s", name, printable(told), adapter, uids,
             extra=about)  # fmt: skip
    if log.isEnabledFor(logging.DEBUG):
        for prompt in prompts:
            kind, what = next(iter(prompt.items()))
            log.debug(
                "Request %s: %s: %s", name, kind, settings.cut(what if kind != "messages" else str(what)), extra=about
            )
    began, before = request.get(_OPEN, (time.monotonic(), []))
    request[_OPEN] = (began, [*before, *streams])


def end(request: web.Request, settings: LogSettings) -> None:
    """Log that a request has been answered, or its client has left. Nothing where it had not begun."""
    if (found := request.get(_OPEN)) is None:
        return
    began, streams = found
    name, counts = id_of(request), ""
    about = {"request_id": name}
    children = [child for stream in streams for child in stream.children]
    if children:
        prompt = sum(len(stream.accepted.prompt_ids) for stream in streams if stream.accepted)
        reasons = {child.finish.name.lower() if child.finish else "unfinished" for child in children}
        output = sum(len(child.tokens) for child in children)
        counts = f"reason: {','.join(sorted(reasons))}, prompt tokens: {prompt}, output tokens: {output}, "
    seconds = time.monotonic() - began
    log.info("Finished request %s: %s, %s%.3f s", name, printable(request.path[:200]), counts, seconds, extra=about)
    for child in children if settings.outputs else ():
        log.info("Request %s: output: %s", name, settings.cut("".join(child.parts)), extra=about)
        log.debug("Request %s: output token ids: %s", name, settings.cut(child.tokens), extra=about)


def access_middleware(silent: frozenset[str]) -> Any:
    """Around all others: a line for each HTTP answer, but for the paths of ``silent``."""

    @web.middleware
    async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 499  # the client has left
        try:
            answer = await handler(request)
            status = answer.status
            return answer
        finally:
            if request.path not in silent:
                log.info(
                    '%s - "%s %s HTTP/%d.%d" %d', request.remote or "a socket", printable(request.method[:20]),
                    printable(request.raw_path[:500]), *request.version, status, extra={"request_id": id_of(request)},
                )  # fmt: skip

    return logged


def id_header(app: web.Application) -> None:
    """Have every answer carry its request's id as X-Request-Id."""

    async def add(request: web.Request, answer: web.StreamResponse) -> None:
        answer.headers["X-Request-Id"] = id_of(request)

    app.on_response_prepare.append(add)
