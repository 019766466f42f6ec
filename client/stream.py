"""What the consumer of a request holds, in its event loop: a stream of events, or what an answer is awaited on.

The core (``core.py``) keeps the request itself and knows nothing of event loops. It holds no reference to a stream,
only to its event (or, while ``forward`` is awaited, to what that gives to), so a stream that is dropped aborts its
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from ..proto.params import SamplingParams
from .generation import OpenGeneration
from .request import OpenRequest
from .results import ChildOutput, Prompt, RequestError, RequestMetrics, StreamEvent, TokenLogprobs

T = TypeVar("T")


class Turn:
    """What is to be done in the event loop's next turn: one call by the loop for all of it, however much that is."""

    def __init__(self) -> None:
        self._acts: dict[Callable[[], None], None] = {}  # in the order in which they were added

    def add(self, act: Callable[[], None]) -> None:
        """Have ``act``, which never raises, called once in the next turn of the loop, however often it is added."""
        if not self._acts:
            asyncio.get_running_loop().call_soon(self._run)
        self._acts[act] = None

    def _run(self) -> None:
        acts, self._acts = self._acts, {}
        for act in acts:
            act()


class RequestStream(AsyncIterator[StreamEvent]):
    """The consumer's side of a request: ``async for event in stream``, or ``forward`` where every microsecond counts.

    Each event holds everything of one child that came since the last look, so a slow consumer gets fewer, larger
    events. Iteration raises RequestError where the request failed. Dropping the stream aborts the request.
    """

    def __init__(
        self, request: OpenGeneration, abandon: Callable[[int], None], abort: Callable[[int], None], turn: Turn
    ):  # fmt: skip
        self._request, self._abandon, self._abort, self._turn = request, abandon, abort, turn
        self._changed = asyncio.Event()
        request.on_change = self._changed.set

    @property
    def uid(self) -> int:
        """The request's number, unlike any other's."""
        return self._request.uid

    @property
    def work(self) -> OpenRequest:
        """The request itself, which outlives this stream while somebody counts what it takes."""
        return self._request

    @property
    def accepted(self) -> Prompt | None:
        """The prompt as run; set before the first event."""
        return self._request.accepted

    @property
    def params(self) -> SamplingParams:
        """The parameters in the user's terms; with ``max_tokens`` resolved once it is accepted."""
        return self._request.params

    @property
    def metrics(self) -> RequestMetrics:
        """Times so far, all on ``time.monotonic``."""
        return self._request.metrics

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        return self._request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry a prompt token, the first None; None where not asked for. Complete before the first event."""
        return self._request.prompt_logprobs

    @property
    def children(self) -> list[ChildOutput]:
        """All that has come so far, by child. With best_of and beam search nothing has before the end."""
        request = self._request
        return request.children if request.done or not request.held else [ChildOutput() for _ in range(request.asked.n)]

    @property
    def done(self) -> bool:
        """True once nothing more will come."""
        return self._request.done

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        request = self._request
        while not request.pending:
            if request.error is not None:
                raise request.error
            if request.done:
                raise StopAsyncIteration
            await self._change()
        return request.pending.pop(next(iter(request.pending)))

    def get_ready(self) -> list[StreamEvent]:
        """Every event that waits now, without waiting."""
        ready = list(self._request.pending.values())
        self._request.pending.clear()
        return ready

    async def forward(self, give: Callable[[list[StreamEvent]], bool]) -> bool:
        """Call ``give`` with the events that have come, in each turn of the loop that brings some, until it returns
        False; what comes then waits. True once nothing more will come.

        ``give`` is called by the loop itself: to wake a task for each event costs more than all that is done with it.
        Raises RequestError where the request failed, and what ``give`` raises.
        """
        request, ended = self._request, asyncio.get_running_loop().create_future()

        def deliver() -> None:
            if ended.done():
                return
            try:
                if request.pending and not give(self.get_ready()):
                    ended.set_result(False)
                elif request.error is not None:
                    ended.set_exception(request.error)
                elif request.done:
                    ended.set_result(True)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                ended.set_exception(error)

        request.on_change = partial(self._turn.add, deliver)
        try:
            deliver()
            return await ended
        finally:
            request.on_change = self._changed.set

    async def wait_accepted(self) -> Prompt:
        """The prompt as run, as soon as it is known. Raises RequestError where the request is refused."""
        request = self._request
        while request.accepted is None:
            if request.done:
                raise request.error or RequestError(499, "the request was aborted.")
            await self._change()
        return request.accepted

    async def collect(self) -> list[ChildOutput]:
        """Wait for the end with no events on the way; the children as they ended. Raises RequestError."""
        request = self._request
        request.quiet = True
        request.pending.clear()
        while not request.done:
            await self._change()
        if request.error is not None:
            raise request.error
        return request.children

    def abort(self) -> None:
        """End the request now (from the engine's own thread); iteration then stops. Does nothing once it is done."""
        self._abort(self._request.uid)

    def cancel(self) -> None:
        """End the request now, with what there is as its answer: children that go on end with Finish.ABORT."""
        if not self._request.done:
            self._request.cut()
            self.abort()

    async def aclose(self) -> None:
        """Abort, for ``contextlib.aclosing``."""
        self.abort()

    def __del__(self) -> None:
        if not self._request.done:
            self._abandon(self._request.uid)

    async def _change(self) -> None:
        """Wait until something has happened since the last look."""
        self._changed.clear()
        await self._changed.wait()


def answer_of(request: OpenRequest, take: Callable[[], T | None], abort: Callable[[int], None]) -> asyncio.Future[T]:
    """What the answer of a request without tokens is awaited on, which ``take`` gives at its end; ``abort`` is called
    with the uid where it is cancelled."""
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def changed() -> None:
        if not request.done or answer.done():
            return
        if (found := take()) is not None:
            answer.set_result(found)
        elif request.error is not None:
            answer.set_exception(request.error)
        else:
            answer.cancel()

    def given_up(_: object) -> None:
        if answer.cancelled() and not request.done:
            abort(request.uid)

    request.on_change = changed
    answer.add_done_callback(given_up)
    return answer
