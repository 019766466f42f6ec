"""Engine: submit, stream, abort. The event loop around the core: sockets, the machine's clocks, and who waits.

One Engine lives in one event loop; nothing here is thread-safe but the dropping of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import zmq

from ..proto import messages as m
from ..proto.config import ConfigError
from ..proto.params import SamplingParams
from ..proto.pooling import PoolingParams
from ..proto.process import heartbeat, new_incarnation, resident_bytes
from ..proto.wire.sockets import CONNECTED, Dealer, Keys, front_endpoint
from ..proto.work import Adapter, Embeds, Generate, Pool, Text, Work, with_adapter, with_embeds
from .adapters import AdapterBook
from .core import HEARTBEAT_S, SCHEDULER, Connect, Disconnect, EngineCore
from .results import Pooled, Prompt, RequestError, StreamEvent, Told
from .sendable import pack_ids, priority_of
from .stream import RequestStream, Turn, answer_of
from .traced import TracedCore, Traces

__all__ = ["Engine", "Pooled", "Prompt", "RequestError", "RequestStream", "StreamEvent"]


class Engine:
    """The way into a running quire at ``scheduler_address`` (``ipc://FOLDER`` or ``tcp://HOST:PORT``)."""

    def __init__(self, scheduler_address: str, keys: Keys | None = None, traces: Traces | None = None):
        self.address, self._keys = scheduler_address, keys
        self.incarnation = new_incarnation("frontend")
        hello = m.Hello(kind="frontend", incarnation=self.incarnation, protocol=m.PROTOCOL, pid=os.getpid())
        given = hello, time.monotonic, time.time, random.Random()
        self.core = EngineCore(*given) if traces is None else TracedCore(*given, traces)
        self._context: zmq.Context | None = None
        self._wires: dict[str, Dealer[Any]] = {}  # by peer
        self._dropped = 0  # bad frames of connections that are gone
        self._changed = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Any]] = {}  # what the scheduler is to answer, by token
        self._registering: dict[int, asyncio.Future[m.Registered]] = {}
        self._told: dict[int, tuple[m.Sleep, asyncio.Future[m.Sleeping]]] = {}  # what administrators wait for
        self._asked_count = 0
        self._ticker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = Turn()  # shared by all streams

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Say Hello; returns at once, the peers may come later (``wait_ready``). Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._open(SCHEDULER, m.FromSchedulerFront, front_endpoint(self.address), self.incarnation)
        self._ticker = self._loop.create_task(self._tick())

    async def close(self) -> None:
        """Abort what is open and leave. Idempotent."""
        if self._context is None:
            return
        if self._ticker is not None:
            self._ticker.cancel()
        self.core.close(RequestError(503, "the engine has been closed."))
        self._flush()
        await asyncio.sleep(0.01)  # closing gives up what has not left yet
        for peer in list(self._wires):
            self._close(peer)
        context, self._context = self._context, None
        context.destroy(linger=0)

    @property
    def ready(self) -> bool:
        """True while a request would run: scheduler heard, a replica ready, a detokenizer connected."""
        return self.core.ready

    def coming(self, unseen: bool = True) -> bool:
        """True while a request would wait in line for a worker that is on its way: it loads, or, where ``unseen``, the
        scheduler believes that one follows which was lost."""
        peers = self.core.peers if self.core.reaches else None
        listed = [] if peers is None or peers.ready else peers.peers
        return any(peer.kind == "gpu_worker" and (unseen or peer.incarnation) for peer in listed)

    @property
    def max_model_len(self) -> int:
        """The longest prompt + output in tokens; 0 until a replica is ready."""
        return self.core.peers.max_model_len if self.core.peers is not None else 0

    @property
    def open_requests(self) -> int:
        """Requests not finished."""
        return len(self.core.open)

    @property
    def tokens_at(self) -> float:
        """When tokens, or what was pooled, last came, of any request (``time.monotonic``)."""
        return self.core.tokens_at

    @property
    def bad_frames(self) -> int:
        """Frames dropped so far because they made no sense."""
        return self.core.bad_frames + self._bad_frames_of_wires()

    @property
    def detokenizers(self) -> set[str]:
        """The incarnations of those it is connected to, or tries to be."""
        return {link.incarnation for link in self.core.links.values()}

    async def wait_ready(
        self, timeout: float | None = None, without: Collection[str] = (), enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once a request would run, with none of the detokenizers ``without``, or as soon as something comes
        after which there is ``enough``.

        Raises TimeoutError, or RuntimeError where the scheduler refuses this version.
        """

        async def wait() -> None:
            while not (self.ready and self.detokenizers.isdisjoint(without)) and not enough():
                if self.core.refused is not None:
                    raise RuntimeError(self.core.refused)
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), timeout)

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: str | None = None,
        ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        params: SamplingParams | None = None,
        *,
        template: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        api_key: str = "",
        priority: int = 0,
        arrival: float = 0.0,
        cache_salt: str = "",
        seed: int | None = None,
        echo: bool = False,
        adapter: Adapter | None = None,
        embeds: Embeds | None = None,
    ) -> RequestStream:
        """Queue one request and return its stream at once; exactly one of prompt, ids and messages is given.

        Requests share cached blocks only with those of the same ``cache_salt`` and ``adapter``.
        ``seed`` is used where params has none; left out, it is random. ``echo`` has ``accepted.prompt`` set where ids
        are given, too. With ``embeds`` ids are given as well, one for each, which say nothing. Requests of one
        ``arrival`` (seconds since the epoch; 0: now) take turns with others as if they were one, as the prompts of one
        call should. With best_of and beam search every event comes at the end. What is
        wrong with the request is raised by the stream as RequestError; only what could not be sent at all (ids that are
        no int32, messages that are not JSON) is raised here, as RequestError 400.
        """
        params = params if params is not None else SamplingParams()
        seed = params.seed if params.seed is not None else seed
        work = Generate(params, self.core.rng.getrandbits(64) if seed is None else seed % 2**64)
        work = with_embeds(with_adapter(work, adapter), embeds)
        message = _tokenize(
            work, prompt, ids, messages, template, add_special_tokens, api_key, priority, arrival, cache_salt, echo
        )
        request = self.core.submit(message, work)
        self._flush()
        return RequestStream(request, self._abandon, self._abort, self._turn)

    def pool(
        self,
        *,
        prompt: str | None = None,
        ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        pair: str | None = None,
        params: PoolingParams | None = None,
        template: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
        api_key: str = "",
        priority: int = 0,
        arrival: float = 0.0,
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Awaitable[Pooled]:
        """Queue one prompt to be pooled and return at once what its answer will be awaited on; cancelling that aborts
        the request. Exactly one of prompt, ids and messages is given; ``pair`` is the second text of a pair whose
        first is ``prompt``.

        What is wrong with the request is raised by the awaitable as RequestError; only what could not be sent at all
        is raised here, as by ``submit``.
        """
        if pair is not None and prompt is None:
            raise ValueError("the first text of a pair must be given as prompt.")
        work = with_adapter(Pool(params if params is not None else PoolingParams(), pair), adapter)
        message = _tokenize(
            work, prompt, ids, messages, template, add_special_tokens, api_key, priority, arrival, cache_salt
        )
        request = self.core.pool(message, work)
        self._flush()
        return answer_of(request, lambda: request.pooled, self._abort)

    def text(
        self,
        work: Text,
        *,
        prompt: str | None = None,
        ids: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> Awaitable[Told]:
        """Have a detokenizer turn text into tokens or back, and return at once what its answer will be awaited on.

        One of prompt, ids and messages is given, or ``work`` says it in parts. What is wrong with it is raised by the
        awaitable as RequestError; only what could not be sent at all is raised here.
        """
        prompt = "" if work.parts is not None or work.infill is not None else prompt
        message = _tokenize(
            work, prompt, ids, messages, template, add_special_tokens, "", 0, 0.0, "", echo=ids is not None
        )
        request = self.core.text(message)
        self._flush()
        return answer_of(request, lambda: request.told, self._abort)

    @property
    def adapters(self) -> AdapterBook:
        """The names of adapters that are known to all frontends."""
        return self.core.adapters

    async def register(self, adapter: Adapter, parent: str = "", replace: bool = False, timeout: float = 300.0) -> None:
        """Load an adapter on a worker and have all frontends know its name; with ``replace`` another may have it.

        Raises RequestError: 400 where it cannot be loaded, or the name is taken; 503 after ``timeout`` seconds.
        """
        await self._ask_adapter(m.Register(0, adapter, parent, replace), timeout)

    async def unregister(self, name: str, timeout: float = 10.0) -> None:
        """Have all frontends forget a name; what runs with the adapter goes on. RequestError 404, 503."""
        await self._ask_adapter(m.Unregister(0, name), timeout)

    async def _ask_adapter(self, asked: m.Register | m.Unregister, timeout: float) -> None:
        token = self.core.ask_adapter(asked)
        answer = self._registering[token] = asyncio.get_running_loop().create_future()
        self._flush()
        try:
            told = await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise RequestError(503, f"the scheduler did not answer within {timeout:g} s.", retry_after=5) from None
        finally:
            self.core.adapters.answered(token)
            del self._registering[token]
        if told.status != 200:
            raise RequestError(told.status, told.error)

    def fail(self, uid: int, error: RequestError) -> bool:
        """End one request with ``error``; False where it is not open."""
        if (request := self.core.open.get(uid)) is None:
            return False
        self.core.finish(request, error, tell=True)
        self._flush()
        return True

    def fail_all(self, error: RequestError) -> None:
        """End every open request with ``error``."""
        self.core.fail_all(error)
        self._flush()

    async def stats(self, timeout: float = 2.0) -> m.Stats:
        """The scheduler's counters. Raises TimeoutError."""
        stats: m.Stats = await self._ask(m.GetStats(), timeout)
        return stats

    async def view(self, since: int = 0, timeout: float = 2.0) -> m.View:
        """The scheduler's state, with the steps after number ``since``. Raises TimeoutError."""
        view: m.View = await self._ask(m.GetView(since=since), timeout)
        return view

    async def _ask(self, message: m.GetStats | m.GetView, timeout: float) -> Any:
        self._asked_count += 1
        token = message.token = self._asked_count
        answer = self._asked[token] = asyncio.get_running_loop().create_future()
        try:
            if (wire := self._wires.get(SCHEDULER)) is not None:
                wire.send(message)
            return await asyncio.wait_for(answer, timeout)
        finally:
            del self._asked[token]

    async def sleep(self, level: int = 1, mode: str = "keep") -> list[str]:
        """Have all workers give back the memory of their KV cache and (level 2) drop their weights, or (level 1) keep
        them in the host's memory. Returns what is away when they have done it.

        ``mode`` is what becomes of open requests: "keep": they go on when the workers wake, "wait": they end first,
        "abort": they fail with 503. New ones wait in line. Raises RequestError 400 where a value is wrong.
        """
        return await self._tell(m.Sleep(0, "sleep", level, mode))

    async def wake_up(self, tags: Collection[str] = ()) -> list[str]:
        """Have the workers take back ``tags`` ("weights", "kv_cache"; none: both). Returns what is away still, when
        they have done it: nothing, where they serve again. Raises RequestError 400 where a value is wrong."""
        return await self._tell(m.Sleep(0, "wake_up", tags=list(tags)))

    async def asleep(self) -> list[str]:
        """What the workers have put away by order of an administrator: nothing where they are awake."""
        return await self._tell(m.Sleep(0, "ask"))

    async def reset_prefix_cache(self) -> None:
        """Have the scheduler forget all cached blocks. Raises RequestError 400 while blocks are in use."""
        await self._tell(m.Sleep(0, "reset_prefix_cache"))

    async def profile(self, on: bool) -> None:
        """Have torch's profiler record the workers' steps, or end that and have the traces written. Returns when it is
        done. Raises RequestError 400 where the workers were started without --profiler-config."""
        await self._tell(m.Sleep(0, "start_profile" if on else "stop_profile"))

    async def _tell(self, message: m.Sleep) -> list[str]:
        """Wait for the answer, also of another scheduler than was told first."""
        self._asked_count += 1
        message.token = self._asked_count
        answer: asyncio.Future[m.Sleeping] = asyncio.get_running_loop().create_future()
        self._told[message.token] = message, answer
        try:
            self._send_told()
            sleeping = await answer
        finally:
            del self._told[message.token]
        if sleeping.error:
            raise RequestError(400, sleeping.error)
        return sleeping.tags

    def _send_told(self) -> None:
        """Tell the scheduler, or tell it again where it was connected anew or is another one: it may not have heard it.

        Not at other times: each change of the workers, of which this process is told, may come of what it told.
        """
        wire = self._wires.get(SCHEDULER)
        if wire is not None and self.core.peers is not None:
            for message, _ in self._told.values():
                wire.send(message)

    def _abandon(self, uid: int) -> None:
        """A stream was dropped, perhaps by the garbage collector in another thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the request with it
                self._loop.call_soon_threadsafe(self._abort, uid)

    def _abort(self, uid: int) -> None:
        self.core.abort(uid)
        self._flush()

    # ------------------------------------------------------------ between the core and the sockets

    def _flush(self) -> None:
        """Do what the core wants done, and let who waits for a change look."""
        for peer, what in self.core.take():
            if isinstance(what, Connect):
                try:
                    self._open(peer, m.FromDetokenizer, what.endpoint, peer)
                except (zmq.ZMQError, ConfigError) as error:
                    self.core.unreachable(peer, error)
            elif isinstance(what, Disconnect):
                self._close(peer)
            elif (wire := self._wires.get(peer)) is not None:
                wire.send(what)
        self._changed.set()

    def _open(self, peer: str, union: Any, endpoint: str, identity: str) -> None:
        wire: Dealer[Any] = Dealer(union, endpoint, identity, self._keys, self._context)
        self._wires[peer] = wire
        wire.attach(lambda message: self._on_message(peer, message), lambda event: self._on_event(peer, event))

    def _close(self, peer: str) -> None:
        if (wire := self._wires.pop(peer, None)) is not None:
            wire.close()
            self._dropped += wire.bad_frames

    def _on_message(self, peer: str, message: Any) -> None:
        before = self.core.peers
        self.core.received(peer, message)
        if isinstance(message, m.Stats | m.View):
            answer = self._asked.get(message.token)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, m.Registered):
            waiting = self._registering.get(message.token)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, m.Sleeping):
            if message.token in self._told and not (told := self._told[message.token][1]).done():
                told.set_result(message)
        elif isinstance(message, m.Peers) and (before is None or before.epoch < message.epoch):
            self._send_told()
        self._flush()

    def _on_event(self, peer: str, event: str) -> None:
        if event == CONNECTED:
            self.core.connected(peer)
        else:
            self.core.disconnected(peer)
        self._flush()

    def _bad_frames_of_wires(self) -> int:
        return self._dropped + sum(wire.bad_frames for wire in self._wires.values())

    async def _tick(self) -> None:
        while True:
            heartbeat(needed=self.ready or self.open_requests > 0)
            self.core.heartbeat(resident_bytes(), self._bad_frames_of_wires())
            self._flush()
            await asyncio.sleep(HEARTBEAT_S)


def _tokenize(
    work: Work | Text, prompt: str | None, ids: list[int] | None, messages: list[dict[str, Any]] | None,
    template: dict[str, Any] | None, add_special_tokens: bool, api_key: str, priority: int, arrival: float,
    cache_salt: str, echo: bool = False,
) -> m.Tokenize:  # fmt: skip
    """The message of a request that has no uid yet. Raises ValueError, and RequestError 400."""
    if sum(x is not None for x in (prompt, ids, messages)) != 1:
        raise ValueError("exactly one of prompt, ids and messages must be given.")
    try:
        priority = priority_of(priority)
    except (TypeError, ValueError) as error:
        raise RequestError(400, str(error), "priority") from None
    return m.Tokenize(
        uid=0, attempt=0, work=work, arrival=arrival, prompt=prompt, ids=None if ids is None else pack_ids(ids),
        messages=messages, template=template, add_special_tokens=add_special_tokens, key=api_key, priority=priority,
        echo=echo, cache_salt=cache_salt,
    )  # fmt: skip
