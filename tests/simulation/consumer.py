"""A client of a simulated cluster: it opens its request at an Engine's core, reads its stream, and may leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.client.core import EngineCore
from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.client.results import RequestError, StreamEvent
from quire.client.sendable import pack_ids
from quire.client.stream import RequestStream, Turn
from quire.proto import messages as m
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool, with_adapter

from .asks import Ask, adapter_named
from .checks import Rules, Seen


class Consumer:
    """What Engine's ``submit`` and ``pool`` do with a request, and a stream's reader with its events, in virtual time.

    ``start`` opens it; ``collect`` is to be called after each turn of the core. Every event goes through the rules.
    """

    def __init__(self, ask: Ask, core: EngineCore, clock: Callable[[], float], rules: Rules):
        self.ask, self.core, self.clock, self.rules = ask, core, clock, rules
        self.request: OpenGeneration | OpenPooling | None = None
        self.stream: RequestStream | None = None
        self.uid = 0
        self.error: RequestError | None = None
        self.begun = self.ended = self.progressed = clock()
        self.over = self.left = self.cut_off = False
        self.seen = Seen()
        self._news = self._turns = 0

    def start(self) -> None:
        """Open it. One that is refused at once is over."""
        self.begun = self.progressed = self.clock()
        try:
            self.request = self._open()
        except RequestError as error:
            self._end(error)
            return
        request, self.uid = self.request, self.request.uid
        if isinstance(request, OpenGeneration):
            self.stream = RequestStream(request, _nobody, self.core.abort, Turn())
            request.quiet = self.ask.quiet
        request.on_change = self._changed
        if self.ask.abort_at == 0.0:
            self.abort()

    def collect(self) -> None:
        """Look at what has come since the last look."""
        request = self.request
        if not self._news or self.over or request is None:
            return
        self._turns += 1
        if not request.done and self._turns % self.ask.reads:
            return
        self._news = 0
        self.progressed = self.clock()
        for event in self.stream.get_ready() if self.stream is not None else ():
            self._take(event)
            if 0 <= self.ask.abort_after <= self.seen.events and not request.done:
                self.abort()
                return
        if request.done:
            self._end(request.error)

    def abort(self) -> None:
        """Leave, if it is not over: what has come is looked at no more."""
        if self.request is not None and not self.over and not self.request.done:
            self.left = True
            self.core.abort(self.uid)
            self._end(None)

    def lost(self) -> None:
        """Its frontend died, and its connection with it."""
        if not self.over:
            self.cut_off = True
            self._end(None)

    @property
    def held(self) -> bool:
        """Nothing is shown before the end."""
        return isinstance(self.request, OpenGeneration) and self.request.held

    def _open(self) -> OpenGeneration | OpenPooling:
        ask, core = self.ask, self.core
        adapter = adapter_named(ask.adapter) if ask.adapter else None
        fields: dict[str, Any] = {"key": ask.key, "priority": ask.priority, "cache_salt": ask.salt}
        fields["add_special_tokens"] = ask.add_special_tokens
        if ask.chat:
            fields["messages"] = [{"role": "user", "content": ask.text}]
        elif ask.text:
            fields["prompt"] = ask.text
        else:
            fields["ids"] = pack_ids(ask.ids)
        if ask.pooling is not None:
            pool = with_adapter(Pool(_own(ask.pooling), ask.pair), adapter)
            return core.pool(m.Tokenize(0, 0, pool, ask.arrival, **fields), pool)
        params = ask.params.clone()
        seed = params.seed if params.seed is not None else ask.seed
        work = Generate(params, core.rng.getrandbits(64) if seed is None else seed % 2**64)
        work = with_adapter(work, adapter)
        return core.submit(m.Tokenize(0, 0, work, ask.arrival, echo=ask.echo, **fields), work)

    def _changed(self) -> None:
        self._news += 1

    def _take(self, event: StreamEvent) -> None:
        self.seen.events += 1
        self.rules.event(self, event)

    def _end(self, error: RequestError | None) -> None:
        self.over, self.ended, self.error = True, self.clock(), error
        self.rules.end(self)


def _own(params: PoolingParams) -> PoolingParams:
    return PoolingParams(**{name: getattr(params, name) for name in params.__struct_fields__})


def _nobody(uid: int) -> None:
    """Streams outlive their world."""
