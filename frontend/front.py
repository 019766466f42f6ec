"""What the routes share: the engine, the names it answers to, and the steps every generating request takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from ..client.adapter_folders import AdapterFolders
from ..client.engine import Engine
from ..client.results import RequestError
from ..client.stream import RequestStream
from ..client.traced import CALLER
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.messages import AdapterEntry
from ..proto.params import SamplingParams
from ..proto.restarts import read_restarts
from ..proto.structured import by_rules
from ..proto.work import BACKGROUND, Adapter
from .auth import OWNER, check_model, may_see, salt_of, watch
from .deadline import note_begun
from .errors import ApiError
from .leniency import Bodies
from .log import LogSettings, begin, end
from .metrics import Metrics
from .model_card import ModelCard
from .open_calls import OpenCall, OpenCalls
from .parsing import Request, parse
from .peers import Peers
from .pooling_schema import PoolRequest
from .request_id import id_of
from .schema import MAX_CHOICES, GenerateRequest, StreamOptions
from .shared_figures import SharedFigures
from .tool_choice import Reading

R = TypeVar("R", bound=Request)

LATEST = ":latest"
"""What clients of Ollama add to a name that has no tag of its own."""
SHOWN = 10
"""Names of models that an error tells; there may be thousands."""


@dataclass
class Settings:
    """How this frontend answers. Times are seconds, sizes bytes; ``defaults`` are the model's own sampling values, and
    ``ceiling`` is the most output tokens that any request gets, where the operator has said so."""

    names: list[str]
    root: str = ""  # what /v1/models tells as the model's origin; "": its name
    api_key: str | None = None
    api_key_file: str | None = None
    admin_api_key: str | None = None  # administrators'; None: there are no routes for them
    metrics_key: str | None = None
    open_metrics: bool = False
    metrics_prefix: str = "both"
    shared_prefix_cache: bool = False  # among all API keys
    allowed_hosts: list[str] = field(default_factory=list)
    local_only: bool = False  # this machine alone can reach the port
    allowed_origins: list[str] = field(default_factory=list)
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    max_header_bytes: int = 16 * 2**10
    max_json_depth: int = 100
    max_connections_per_address: int | None = None
    max_request_bytes: int = 8 * 2**20
    lenient_types: bool = True  # numbers and booleans may come as strings
    reject_unknown_fields: bool = False
    max_n: int = 128  # choices that may be asked for of one prompt
    max_queued: int = MAX_CHOICES  # requests that may wait in the scheduler; a longer list of prompts never fits
    defaults: dict[str, Any] = field(default_factory=dict)
    ceiling: int | None = None
    body_s: float = 60.0  # for a request's body to arrive
    request_s: float | None = None  # for a request to be answered
    stall_s: float = 30.0  # that a client may leave a full stream unread
    restart_s: float = 5.0  # that a new request waits for processes that are being restarted
    follows: bool = False  # this frontend takes the place of another: the server has taken requests before
    stats_s: float = 1.0  # for the scheduler to answer /metrics
    score_template: bool = False  # a chat template puts the texts of a score together
    pooler: PoolerConfig | None = None  # how the model pools; None where it generates
    generate_s: float = 20.0  # for the token of /health/generate
    loading_s: float = 5.0  # when to ask again where the model has not been ready yet
    again_s: float = 2.0  # when to ask again where it was
    adapters: AdapterFolders | None = None  # None: --enable-lora was not given
    modules: list[AdapterEntry] = field(default_factory=list)  # --lora-modules
    tool_parser: str | None = None  # what finds calls of tools where a model may choose to make some
    reasoning_parser: str | None = None  # what tells thoughts from answers
    tokenizer: tuple[Path, str | None] | None = None  # its folder and --chat-template, where they may be told
    embed_size: int | None = None  # numbers of a token's embedding, where prompts may be made of them
    config: dict[str, Any] = field(default_factory=dict)  # the flags, for administrators; no secrets
    slots: int = 256  # sequences that may run at once
    card: Callable[[], ModelCard] = ModelCard  # what is told of the model; may read files
    lora_root: str | None = None  # the folder below which adapters may be loaded from over HTTP
    log: LogSettings = field(default_factory=LogSettings)
    role: str = "assistant"  # of chats' answers
    names_are_ids: bool = False  # tokens of logprobs are told as token_id:N
    usage_details: bool = True  # usage says how many tokens of the prompt were cached
    force_usage: bool = False  # every stream ends with the usage
    stream_interval: int = 1  # tokens that a chunk of a stream has at least, where a request does not say
    id_headers: bool = False  # answers carry X-Request-Id
    count_load: bool = False  # GET /load counts what is open
    docs: bool = True  # there are /openapi.json and /docs
    page: bool = True  # there is a page at /
    chat_kwargs: dict[str, Any] = field(default_factory=dict)  # of chat templates, below a request's own
    structured: dict[str, bool] = field(default_factory=dict)  # of structured output, where a request says nothing
    keep_alive_s: float = 0.0  # after which a silent stream is sent a comment; 0: never
    root_path: str | None = None  # below which the routes are too
    middlewares: list[Any] = field(default_factory=list)  # the operator's own
    traced: bool = False  # there is a collector of traces
    files_path: str | None = None  # the folder of /v1/files and /v1/batches; None: there is none
    files_max_bytes: int = 2**30  # what it may hold
    batch_window: int = 128  # requests of batches that are under way at most


class Front:
    """One frontend's state. ``draining`` refuses what is new while what is open ends; ``parting`` answers it, and has
    each connection be used for nothing else: another process serves the port."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(settings.names[0], settings.metrics_prefix)
        self.shared: SharedFigures | None = None  # with those of other frontends on this port
        self.peers: Peers | None = None  # the way to other frontends on this port
        self.bodies = Bodies(
            settings.lenient_types, settings.reject_unknown_fields, settings.max_json_depth, context=self._context
        )  # fmt: skip
        self._fills = settings.names_are_ids or settings.force_usage
        self.started = int(time.time())
        self.draining = self.parting = False
        self.calls = OpenCalls()
        self.active = 0  # HTTP requests being answered
        self.open = 0  # of these, POSTs
        self._quiet = asyncio.Event()
        self._was_ready = False
        self._card: ModelCard | None = None
        self._born = time.monotonic()

    def _context(self) -> int:
        """The most tokens that a prompt may have; 0 where that is not known, or longer ones are taken in chunks."""
        pooler = self.settings.pooler
        return 0 if pooler is not None and pooler.enable_chunked_processing else self.engine.max_model_len

    async def card(self) -> ModelCard:
        """What the model's folder says; its weights may be on their way to it until the model is ready."""
        if self._card is not None:
            return self._card
        card = await asyncio.to_thread(self.settings.card)
        self._card = card if self.engine.ready else None
        return card

    def enter(self, asks: bool = False) -> None:
        """A request begins. ``asks``: for more than what is known here."""
        self.active += 1
        self.open += asks

    def leave(self, asks: bool = False, request: web.Request | None = None) -> None:
        """A request has been answered, or its client is gone."""
        if request is not None:
            self.close(request)
        self.active -= 1
        self.open -= asks
        if not self.active:
            self._quiet.set()

    def close(self, request: web.Request) -> None:
        """Nobody can end by its id what this request runs any more."""
        if self.settings.log.requests:
            end(request, self.settings.log)
        if (call := request.get(CALL)) is not None:
            self.calls.close(call)

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

    async def wait_ready(self, sized: bool = False) -> None:
        """Wait a little, for a request that was let in, while processes are being restarted. Where a server that has
        served lacks but a worker, and one is on its way, the request waits for that in line, as those do that are open:
        the queue's limits and --request-timeout bound it. ``sized``: but not before the model's length is known."""
        young = time.monotonic() - self._born < self.settings.restart_s

        def enough() -> bool:
            return self._worker_comes() and (not sized or self.engine.max_model_len > 0)

        waits = (self._served or young) and not self.engine.ready
        while waits and not enough():
            with suppress(TimeoutError):
                await self.engine.wait_ready(self.settings.restart_s, enough=enough)
            waits = not self.engine.ready and self._worker_comes()
        if not waits:
            self._check_engine()

    @property
    def _served(self) -> bool:
        """Whether the server has taken requests, as far as is known here."""
        return self._was_ready or self.settings.follows or self.engine.max_model_len > 0

    def _worker_comes(self) -> bool:
        """Whether a request can wait in line for a worker that is on its way to a server that has served."""
        told = read_restarts() if self._served else None
        return self._served and self.engine.coming(unseen=told is None or not told[2])

    def _check_engine(self) -> None:
        if not self.engine.ready:
            again = self.settings.again_s if self._was_ready else self.settings.loading_s
            raise ApiError(503, "the model is not ready; try again in a moment.", retry_after=again)
        self._was_ready = True

    def known(self, name: str | None) -> str | None:
        """The name by which a model is known here: as it is, or without Ollama's ``:latest``."""
        if name and name not in self.settings.names and self.engine.adapters.get(name) is None:
            return name.removesuffix(LATEST)
        return name

    async def find_model(self, request: web.Request, name: str | None) -> str:
        """The model's name as asked for, or an adapter's; none, or an empty one, is the first. Waits for the names of
        adapters, which a frontend that has just begun must be told.

        Raises ApiError 403 where the request's key is not good for that model, existing or not, and 404.
        """
        check_model(request, name or self.settings.names[0])
        if name and name not in self.settings.names and self.settings.adapters is not None and not self.engine.ready:
            await self.wait_ready()
        self.adapter(name, request)
        return name or self.settings.names[0]

    def adapter(self, name: str | None, request: web.Request) -> Adapter | None:
        """The adapter of this name; None for the model itself. Raises ApiError 404 where there is neither, with
        the names that the request's key is good for."""
        if not name or name in self.settings.names:
            return None
        if (found := self.engine.adapters.get(name)) is None:
            names = [*self.settings.names, *(entry.name for entry in self.engine.adapters)]
            known = [each for each in names if may_see(request, each)] or ["none"]
            told = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
            raise ApiError(404, f"The model `{name}` does not exist. Valid names: {told}.", "model")
        return found

    async def read(self, request: web.Request, kind: type[R], any_type: bool = False) -> R:
        """The request's body, checked in all that can be checked here. Raises ApiError.

        ``any_type``: the body need not be said to be JSON, but by a browser, which pages can make send anything else.
        """
        typed = not any_type or "Origin" in request.headers
        if typed and not request.content_type.endswith(("/json", "+json")):
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
        found = parse(body, kind, self.bodies)
        if self._fills and isinstance(found, GenerateRequest):
            self._fill(found)
        return found

    def _fill(self, body: GenerateRequest) -> None:
        """What the operator's flags say for requests."""
        if self.settings.names_are_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if self.settings.force_usage and body.stream:
            body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    def params(self, body: GenerateRequest, prompts: int = 1) -> SamplingParams:
        """The request's parameters; room for its choices. Raises ApiError."""
        params = body.sampling(self.settings.defaults, self.settings.ceiling)
        if body.stream_interval is None:  # here, and not in _fill: bodies of other dialects are not read as such
            body.stream_interval = self.settings.stream_interval
        most = self.settings.max_n
        for name, value in (("n", params.n), ("best_of", params.best_of or 0)):
            if value > most:
                told = f"{name} is {value}, over the limit of {most}; ask for fewer, or raise --max-n."
                raise body.own_words(ApiError(400, told, name))
        if prompts * params.width > MAX_CHOICES:
            name = "n" if params.best_of is None else "best_of"
            asked = f"{prompts} prompts with {name}={params.width}"
            raise ApiError(400, f"{asked} are over the limit of {MAX_CHOICES} choices a request.", name)
        self.check_room(prompts, "prompt")
        by_rules(params.structured_outputs, self.settings.structured)
        return params

    def bind(self, reading: Reading, params: SamplingParams) -> None:
        """Have the answer take the form that its reading needs, by the operator's rules."""
        reading.bind(params)
        by_rules(params.structured_outputs, self.settings.structured)

    def template(self, template: dict[str, Any]) -> dict[str, Any]:
        """How a chat template is rendered, with the operator's values for it below the request's own."""
        if not self.settings.chat_kwargs:
            return template
        return template | {"chat_template_kwargs": self.settings.chat_kwargs | template.get("chat_template_kwargs", {})}

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
            **account_of(request, body.priority or 0),
            "arrival": time.time(),
            "cache_salt": salt_of(request, body.cache_salt),
        }
        check_model(request, body.model or self.settings.names[0])
        if (adapter := self.adapter(body.model, request)) is not None:
            options["adapter"] = adapter
        if "template" in options:
            options["template"] = self.template(options["template"])
        streams: list[RequestStream] = []
        blank: dict[str, Any] = {"prompt": None, "ids": None, "messages": None, "embeds": None}
        try:
            for prompt in prompts:
                stream = self.engine.submit(**(blank | prompt), params=params, **options)
                streams.append(stream)
                watch(request, stream.work)
                note_begun(request, stream.uid)
            if self.settings.log.requests:
                name = id_of(request, body.request_id)
                begin(request, self.settings.log, name, prompts, streams, params, adapter.name if adapter else None)
        except BaseException as error:
            for stream in streams:
                stream.abort()
            if isinstance(error, RequestError):
                raise body.own_words(error) from error
            raise
        self._open(request, body, streams)
        return streams

    def _open(self, request: web.Request, body: GenerateRequest, streams: list[RequestStream]) -> None:
        """Have what a request runs be known by its id."""
        call = request.get(CALL)
        if call is None:
            call = request[CALL] = OpenCall(request.get(OWNER, ""))
            self.calls.name(call, id_of(request, body.request_id))
        call.streams += streams


FRONT = web.AppKey("front", Front)
BATCHED: Any = web.RequestKey("batched", bool) if hasattr(web, "RequestKey") else "quire.batched"
"""Whether a request is one of a batch, which waits for all else."""


def account_of(request: web.Request, priority: int) -> dict[str, Any]:
    """Whom the scheduler counts a request for, and its priority. The batches of a key have an account of their own, so
    that its other requests come as before."""
    owner = request.get(OWNER, "")
    if request.get(BATCHED):
        return {"api_key": f"{owner}-batch", "priority": BACKGROUND}
    return {"api_key": owner, "priority": priority}


CALL: Any = web.RequestKey("call", OpenCall) if hasattr(web, "RequestKey") else "quire.call"
"""Where a request keeps what it runs."""


def request_id(request: web.Request, body: GenerateRequest | PoolRequest, prefix: str) -> str:
    """``cmpl-...``: the client's own id where it sent a usable one (X-Request-Id, or the field), else a new one."""
    id = prefix + id_of(request, body.request_id)
    if (call := request.get(CALL)) is not None:
        request.app[FRONT].calls.name(call, id)
    if (caller := CALLER.get()) is not None:
        caller.id = id
    return id
