"""What the routes share: the engine, the names it answers to, and the steps every generating request takes."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from ..client.adapter_folders import AdapterFolders
from ..client.engine import Engine
from ..client.results import RequestError
from ..client.stream import RequestStream
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.messages import AdapterEntry
from ..proto.params import SamplingParams
from ..proto.work import Adapter
from .auth import OWNER
from .errors import ApiError
from .metrics import Metrics
from .parsing import Request, parse
from .pooling_schema import PoolRequest
from .schema import MAX_CHOICES, GenerateRequest

R = TypeVar("R", bound=Request)

SHOWN = 10
"""Names of models that an error tells; there may be thousands."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass
class Settings:
    """How this frontend answers. Times are seconds, sizes bytes; ``defaults`` are the model's own sampling values, and
    ``ceiling`` is the most output tokens that any request gets, where the operator has said so."""

    names: list[str]
    api_key: str | None = None
    admin_api_key: str | None = None  # administrators'; None: there are no routes for them
    max_request_bytes: int = 8 * 2**20
    max_n: int = 128  # choices that may be asked for of one prompt
    max_queued: int = MAX_CHOICES  # requests that may wait in the scheduler; a longer list of prompts never fits
    defaults: dict[str, Any] = field(default_factory=dict)
    ceiling: int | None = None
    body_s: float = 60.0  # for a request's body to arrive
    stall_s: float = 30.0  # that a client may leave a full stream unread
    restart_s: float = 5.0  # that a new request waits for processes that are being restarted
    stats_s: float = 1.0  # for the scheduler to answer /metrics
    pooler: PoolerConfig | None = None  # how the model pools; None where it generates
    generate_s: float = 20.0  # for the token of /health/generate
    loading_s: float = 5.0  # when to ask again where the model has not been ready yet
    again_s: float = 2.0  # when to ask again where it was
    adapters: AdapterFolders | None = None  # None: --enable-lora was not given
    modules: list[AdapterEntry] = field(default_factory=list)  # --lora-modules
    tool_parser: str | None = None  # what finds calls of tools where a model may choose to make some
    reasoning_parser: str | None = None  # what tells thoughts from answers
    lora_root: str | None = None  # the folder below which adapters may be loaded from over HTTP


class Front:
    """One frontend's state. ``draining`` refuses what is new while what is open ends."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(settings.names[0])
        self.started = int(time.time())
        self.draining = False
        self.active = 0  # HTTP requests being answered
        self._quiet = asyncio.Event()
        self._was_ready = False
        self._born = time.monotonic()

    def enter(self) -> None:
        """A request begins."""
        self.active += 1

    def leave(self) -> None:
        """A request has been answered, or its client is gone."""
        self.active -= 1
        if not self.active:
            self._quiet.set()

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        while self.active:
            self._quiet.clear()
            await self._quiet.wait()

    def leaving(self) -> ApiError:
        """What a new request hears while the server drains: the next one is answered by another."""
        return ApiError(503, "the server is shutting down.", retry_after=5, headers={"Connection": "close"})

    def check_ready(self) -> None:
        """Raises ApiError 503 where no new request would be run now."""
        if self.draining:
            raise self.leaving()
        self._check_engine()

    async def wait_ready(self) -> None:
        """Wait a little, for a request that was let in, while processes are being restarted."""
        young = time.monotonic() - self._born < self.settings.restart_s
        if (self._was_ready or young) and not self.engine.ready:
            with suppress(TimeoutError):
                await self.engine.wait_ready(self.settings.restart_s)
        self._check_engine()

    def _check_engine(self) -> None:
        if not self.engine.ready:
            again = self.settings.again_s if self._was_ready else self.settings.loading_s
            raise ApiError(503, "the model is not ready; try again in a moment.", retry_after=again)
        self._was_ready = True

    def check_model(self, name: str | None) -> str:
        """The model's name as asked for, or an adapter's; none, or an empty one, is the first. Raises ApiError 404."""
        self.adapter(name)
        return name or self.settings.names[0]

    async def find_model(self, name: str | None) -> str:
        """The same once the names of adapters are known here, which a frontend that has just begun must be told."""
        if name and name not in self.settings.names and self.settings.adapters is not None and not self.engine.ready:
            await self.wait_ready()
        return self.check_model(name)

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name; None for the model itself. Raises ApiError 404 where there is neither."""
        if not name or name in self.settings.names:
            return None
        if (found := self.engine.adapters.get(name)) is None:
            known = [*self.settings.names, *(entry.name for entry in self.engine.adapters)]
            told = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
            raise ApiError(404, f"The model `{name}` does not exist. Valid names: {told}.", "model")
        return found

    async def read(self, request: web.Request, kind: type[R]) -> R:
        """The request's body, checked in all that can be checked here. Raises ApiError."""
        if not request.content_type.endswith(("/json", "+json")):
            raise ApiError(
                400, f"Content-Type must be application/json, got {request.headers.get('Content-Type', 'none')}."
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(400, "a compressed body is not supported; send it without Content-Encoding.")
        limit = self.settings.max_request_bytes
        too_large = f"the body is over the limit of {limit} bytes; send less, or raise --max-request-bytes."
        if (request.content_length or 0) > limit:
            raise ApiError(413, too_large)
        try:
            async with asyncio.timeout(self.settings.body_s):
                body = await request.read()
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self.settings.body_s:g} s.", headers={"Connection": "close"}
            ) from None
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(413, too_large) from None
        return parse(body, kind)

    def params(self, body: GenerateRequest, prompts: int = 1) -> SamplingParams:
        """The request's parameters; room for its choices. Raises ApiError."""
        params = body.sampling(self.settings.defaults, self.settings.ceiling)
        most = self.settings.max_n
        for name, value in (("n", params.n), ("best_of", params.best_of or 0)):
            if value > most:
                raise ApiError(
                    400, f"{name} is {value}, over the limit of {most}; ask for fewer, or raise --max-n.", name
                )
        if prompts * params.width > MAX_CHOICES:
            name = "n" if params.best_of is None else "best_of"
            asked = f"{prompts} prompts with {name}={params.width}"
            raise ApiError(400, f"{asked} are over the limit of {MAX_CHOICES} choices a request.", name)
        self.check_room(prompts, "prompt")
        return params

    def check_room(self, prompts: int, name: str) -> None:
        """Raises ApiError 400 where so many prompts of field ``name`` could never wait at once."""
        if prompts > self.settings.max_queued:
            raise ApiError(
                400,
                f"{name} holds {prompts} prompts, over the {self.settings.max_queued} requests that may wait at once; "
                "send them in smaller lists, or raise --max-num-queued-reqs.",
                name,
            )

    def check_generates(self, api: str) -> None:
        """Raises ApiError 400 where the model pools."""
        if self.settings.pooler is not None:
            raise ApiError(
                400, f"The model does not support {api} API: this server pools "
                f"({', '.join(self.settings.pooler.tasks)}).", "model",
            )  # fmt: skip

    def pooler(self, api: str, *tasks: str) -> PoolerConfig:
        """How the model pools, where it can do one of ``tasks``. Raises ApiError 400."""
        pooler = self.settings.pooler
        why = None
        if pooler is None:
            why = "it generates; start a server with --runner pooling"
        elif not set(tasks) & set(pooler.tasks):
            why = f"it can do {', '.join(pooler.tasks)}"
        if pooler is None or why is not None:
            raise ApiError(400, f"The model does not support {api} API: {why}.", "model")
        return pooler

    def submit(
        self, request: web.Request, prompts: list[dict[str, Any]], params: SamplingParams, body: GenerateRequest,
        **options: Any,
    ) -> list[RequestStream]:  # fmt: skip
        """Submit all prompts, or none: a refusal of one aborts those before it. Raises RequestError."""
        options |= {
            "api_key": request.get(OWNER, ""),
            "priority": body.priority or 0,
            "arrival": time.time(),
            "cache_salt": body.cache_salt or "",
        }
        if (adapter := self.adapter(body.model)) is not None:
            options["adapter"] = adapter
        streams: list[RequestStream] = []
        blank: dict[str, Any] = {"prompt": None, "ids": None, "messages": None}
        try:
            for prompt in prompts:
                stream = self.engine.submit(**(blank | prompt), params=params, **options)
                streams.append(stream)
        except BaseException as error:
            for stream in streams:
                stream.abort()
            if isinstance(error, RequestError):
                raise body.own_words(error) from error
            raise
        return streams


FRONT = web.AppKey("front", Front)


def request_id(request: web.Request, body: GenerateRequest | PoolRequest, prefix: str) -> str:
    """``cmpl-...``: the client's own id where it sent a usable one (X-Request-Id, or the field), else a new one."""
    for given in (body.request_id, request.headers.get("X-Request-Id")):
        if given is not None and _SAFE_ID.fullmatch(given):
            return prefix + given
    return prefix + uuid.uuid4().hex
