"""An Engine's core that also traces requests: each that the sampler chooses has a root span from its submission to its
end, and what is sent for it carries the trace on (``docs/tracing.md``).

It looks at what its base class does and changes none of it but the Tokenize of such a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..proto.messages import Finish, Hello, Tokenize, TracedTokenize
from ..proto.spans import Span, Spans
from ..proto.work import Adapter, Text, adapter_of
from .core import EngineCore
from .generation import OpenGeneration
from .pooled import OpenText
from .request import OpenRequest, R
from .results import RequestError

ROOT_SPAN = "llm_request"
"""vLLM's name for it."""


@dataclass
class Caller:
    """Who asks: the headers of its trace, and the id by which it knows its request."""

    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Set by who submits requests for somebody else, in the task that does."""


class Traces(NamedTuple):
    """What an Engine's requests are traced with. ``root`` begins the first span of a request, or leaves the request
    out, as ``Tracing.root`` does; ``model`` is the name of what answers."""

    spans: Spans
    root: Callable[[str, Mapping[str, str], float], Span | None]
    model: str


class TracedCore(EngineCore):
    """An EngineCore, and what its requests are traced with."""

    def __init__(
        self, hello: Hello, clock: Callable[[], float], wall_clock: Callable[[], float], rng: random.Random,
        traces: Traces,
    ):  # fmt: skip
        super().__init__(hello, clock, wall_clock, rng)
        self._spans, self._root, self._model = traces
        self._followed: dict[int, tuple[Span, Caller]] = {}

    def _enter(self, request: R) -> R:
        if not isinstance(request, OpenText):
            caller = CALLER.get() or Caller()
            span = self._root(ROOT_SPAN, caller.headers, request.metrics.arrival_time)
            if span is not None:
                self._followed[request.uid] = span, caller
                told = {name: getattr(request.message, name) for name in Tokenize.__struct_fields__}
                request.message = TracedTokenize(**told, trace=span.context)
        return super()._enter(request)

    def _resubmit(self, request: OpenRequest, counts: bool, besides: Any = None) -> None:
        if (found := self._followed.get(request.uid)) is not None:
            what = {"quire.output_tokens": request.reached, "quire.attempt": request.attempt + 1}
            found[0].event("sent_again", self.clock(), **what)
        super()._resubmit(request, counts, besides)

    def finish(self, request: OpenRequest, error: RequestError | None, tell: bool = False) -> None:
        super().finish(request, error, tell)
        if (found := self._followed.pop(request.uid, None)) is not None:
            span, caller = found
            span.attributes = attributes_of(request, caller.id or str(request.uid), self._model)
            if error is not None:
                span.error = error.message
                span.attributes["http.response.status_code"] = error.status
            self._spans.end(span, request.ended_at or self.clock())


def attributes_of(request: OpenRequest, id: str, model: str) -> dict[str, Any]:
    """What vLLM tells of a request that has ended, under its names. What is not known is left out."""
    work, metrics = request.message.work, request.metrics
    adapter: Adapter | None = None if isinstance(work, Text) else adapter_of(work)
    told: dict[str, Any] = {
        "gen_ai.request.id": id,
        "gen_ai.response.model": model if adapter is None else adapter.name,
        "gen_ai.usage.prompt_tokens": request.spent - request.reached,
        "gen_ai.usage.completion_tokens": request.reached,
        "quire.cached_tokens": request.cached_tokens,
        "quire.attempts": request.attempt + 1,
        "gen_ai.latency.e2e": request.ended_at - metrics.arrival_time,
    }
    if isinstance(request, OpenGeneration):
        params = request.params
        told |= {
            "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens, "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": len(request.children),
            "gen_ai.response.finish_reasons": [
                (child.finish if child.finish != Finish.NONE else Finish.ABORT).name.lower()
                for child in request.children
            ],
        }  # fmt: skip
    scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    told["gen_ai.latency.time_in_queue"] = metrics.time_in_queue
    if first is not None:
        told["gen_ai.latency.time_to_first_token"] = first - metrics.arrival_time
    if scheduled is not None and first is not None and last is not None:
        told["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        told["gen_ai.latency.time_in_model_decode"] = last - first
        told["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return {name: value for name, value in told.items() if value is not None}


def traces_of(endpoint: str | None, service: str, model: str) -> Traces | None:
    """How to trace to the collector at ``endpoint``, as ``service``; None without one. Raises ConfigError."""
    if endpoint is None:
        return None
    from ..proto.tracing import Tracing

    tracing = Tracing(endpoint, service)
    return Traces(tracing.spans, tracing.root, model)
