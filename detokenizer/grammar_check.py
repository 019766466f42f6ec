"""Whether a request's grammar can be honoured, found out in processes that may be lost.

Compiling a grammar can take any time and memory, so a helper (grammar_helper.py) has a child of its own do it first:
what passes there within the limits is no danger to the process that samples. The helper starts at the first check;
starting it and building its table of tokens do not count as a grammar's time.

So that nobody waits long for others' grammars, all get a short time first, in order of arrival. Those it is too short
for are checked again with the whole time: one after the other, when nobody waits for the short time, and beside a place
that is kept for newcomers. Few may wait for that, and not long; the others are told to come back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.errors import Refused
from ..proto.grammars.grammar import GrammarError, spec_key
from ..proto.losses import Losses
from ..proto.structured import StructuredOutputsParams
from .grammar_helper import LATE, READY, STARVED, Check, Verdict, frame, wall

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""Seconds of a processor that compiling a grammar may take: so long can the worker's step wait for its first mask."""

FIRST_S = 0.04
"""Seconds of these that all get at first, half of them where many wait: 220 honest schemas over 151,936 tokens took
0.008 (median) to 0.019 (the slowest)."""

PATIENCE_S = 1.0
"""How long the slow wait for a moment in which nobody waits for the first seconds; then they are to come back."""

PLACES = max(2, min(4, (os.cpu_count() or 1) // 4))
"""Checks at once. The slow get one of them at most."""

START_S = 60.0
SILENCE_S = 5.0
MEMORY = 512 * 2**20
MAX_QUEUED, MAX_SLOW = 64, 2
MAX_HELPER_LOSSES = 2
"""A grammar is given up once so many processes were lost over it."""
MAX_KEPT = 4096
SLOW_KEPT_S = 60.0
MAX_ANSWER = 64 * 1024
PARAM = "structured_outputs"
_FATAL = tuple(-int(kind) for kind in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))
"""What a child ends by that has no memory or no stack left."""


class _Lost(Exception):
    """The helper is gone or talks nonsense."""


@dataclass(eq=False)
class _Pending:
    """A grammar without a verdict. ``losses``: of processes that compiled it. ``since``: in its queue (seconds)."""

    key: bytes
    spec: msgspec.Raw
    future: asyncio.Future[str]
    since: float
    slow: bool = False
    losses: Losses = field(default_factory=lambda: Losses(limit=MAX_HELPER_LOSSES))


class GrammarChecker:
    """Checks grammars and remembers the verdicts. Make it and use it inside one event loop."""

    def __init__(
        self, folder: str, model: ModelConfig, seconds: float = CHECK_S, memory: int = MEMORY, queued: int = MAX_QUEUED
    ):
        """``folder`` holds the tokenizer. A grammar may take ``seconds`` and ``memory`` bytes; ``queued`` may wait."""
        self.seconds, self.memory, self.queued = seconds, memory, queued
        self._argv = [folder, str(model.vocab_size), ",".join(map(str, model.eos_token_ids)), str(memory)]
        self._verdicts: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()
        """By grammar: its error, "" if it has none, None if all that is known is that it is slow; when to forget it."""
        self._pending: dict[bytes, _Pending] = {}
        self._queue: deque[_Pending] = deque()
        self._slow: deque[_Pending] = deque()
        self._running: dict[int, _Pending] = {}  # by number of the check
        self._number = READY
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._ready = False  # the helper has built its table

    @property
    def pid(self) -> int | None:
        """The helper's process id, while there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def check(self, spec: StructuredOutputsParams) -> None:
        """Return where the grammar can be honoured. Raises errors.Refused: 400; 429 when too many wait; 500."""
        key = spec_key(spec)
        error, until = self._verdicts.get(key, (None, 0.0))
        known = until > time.monotonic()
        if known:
            self._verdicts.move_to_end(key)
        if not known or error is None:
            pending = self._pending.get(key) or self._enqueue(key, spec, slow=known)
            error = await asyncio.shield(pending.future)
        if error:
            raise Refused(str(GrammarError(f"structured_outputs cannot be honoured: {error}")), PARAM)

    def close(self) -> None:
        """End the helper and refuse who waits."""
        if self._task is not None:
            self._task.cancel()
        if self.pid is not None and self._process is not None:
            self._process.kill()
        self._refuse_all(Refused("the server is shutting down.", PARAM, 503))

    # ------------------------------------------------------------ whose turn it is

    def _enqueue(self, key: bytes, spec: StructuredOutputsParams, slow: bool) -> _Pending:
        """The verdict to come, which equal grammars share. Raises Refused."""
        if slow and len(self._slow) >= MAX_SLOW:
            raise _full()
        if not slow and len(self._queue) >= self.queued:
            raise Refused(f"{len(self._queue)} grammars wait to be checked; try again in a moment.", PARAM, 429)
        raw = msgspec.Raw(msgspec.msgpack.encode(spec))
        pending = _Pending(key, raw, asyncio.get_running_loop().create_future(), time.monotonic(), slow)
        self._pending[key] = pending
        (self._slow if slow else self._queue).append(pending)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        elif self._running:  # the helper is there, and its verdicts are awaited
            self._dispatch()
        return pending

    def _next(self) -> _Pending | None:
        """Who may run now."""
        if len(self._running) >= PLACES:
            return None
        if self._queue:
            while self._slow and time.monotonic() > self._slow[0].since + PATIENCE_S:
                self._refuse(self._slow.popleft(), _full())
            return self._queue.popleft()
        if self._slow and not any(pending.slow for pending in self._running.values()):
            return self._slow.popleft()
        return None

    def _dispatch(self) -> None:
        """Send the helper what it has places for. A helper that is gone is noticed by who reads from it."""
        assert self._process is not None and self._process.stdin is not None  # PIPE
        while (pending := self._next()) is not None:
            self._number += 1
            self._running[self._number] = pending
            first = FIRST_S if len(self._queue) < 2 * PLACES else FIRST_S / 2
            seconds = self.seconds if pending.slow else min(first, self.seconds)
            self._process.stdin.write(frame(Check(self._number, seconds, pending.spec)))

    def _again(self, pending: _Pending) -> bool:
        """Put what was lost in the middle back in front; False if that has happened before."""
        pending.losses.lost()
        if not pending.losses.exhausted:
            (self._slow if pending.slow else self._queue).appendleft(pending)
        return not pending.losses.exhausted

    def _settle(self, verdict: Verdict) -> None:
        """What ``verdict`` means for who waits for it. Raises _Lost."""
        pending = self._running.pop(verdict.number, None)
        if pending is None:
            raise _Lost(f"it answered check {verdict.number}, which does not run")
        if verdict.error is not None:
            self._finish(pending, verdict.error)
        elif verdict.code in (LATE, STARVED) and not pending.slow:
            if verdict.code == LATE:
                self._remember(pending.key, None, SLOW_KEPT_S)
            pending.slow, pending.since = True, time.monotonic()
            if len(self._slow) < MAX_SLOW:
                self._slow.append(pending)
            else:
                self._refuse(pending, _full())
        elif verdict.code == STARVED:
            log.warning("a grammar could not be checked: the process that compiles it hardly ran")
            self._refuse(pending, Refused("the server is too busy to check the grammar; try again.", PARAM, 429))
        elif verdict.code in (LATE, *_FATAL) or not self._again(pending):
            log.info("a grammar is refused: the process that compiled it ended with code %d", verdict.code)
            what = f"compiled within {self.seconds:g} s and {self.memory >> 20} MiB"
            self._finish(pending, f"it is too complex to be {what}; make it simpler.", SLOW_KEPT_S)

    def _finish(self, pending: _Pending, error: str, keep: float = float("inf")) -> None:
        self._remember(pending.key, error, keep)
        del self._pending[pending.key]
        pending.future.set_result(error)

    def _remember(self, key: bytes, error: str | None, keep: float) -> None:
        self._verdicts[key] = error, time.monotonic() + keep
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > MAX_KEPT:
            self._verdicts.popitem(last=False)

    def _refuse(self, pending: _Pending, refused: Refused) -> None:
        del self._pending[pending.key]
        pending.future.set_exception(refused)
        pending.future.exception()  # who waited may be gone

    def _refuse_all(self, refused: Refused) -> None:
        self._queue.clear()
        self._slow.clear()
        self._running.clear()
        for pending in list(self._pending.values()):
            self._refuse(pending, refused)

    # ------------------------------------------------------------ the helper

    async def _work(self) -> None:
        """Until nobody waits."""
        unborn = 0
        while self._pending:
            try:
                process = await self._start()
                unborn = 0
                while self._pending:
                    self._dispatch()
                    self._settle(await self._read(process))
            except _Lost as lost:
                unborn += not self._ready
                code = await self._end()
                log.warning("the grammar helper was lost (%s, code %s)", lost, code)
                running = list(self._running.values())
                self._running.clear()
                for pending in reversed(running):
                    if not self._again(pending):
                        self._refuse(pending, _broken())
                if unborn > 1:
                    self._refuse_all(_broken())
            except Exception:  # whatever it is, who waits must be told
                log.exception("the grammar helper does not work")
                await self._end()
                self._refuse_all(_broken())

    async def _start(self) -> Process:
        """The helper, ready for checks. Raises _Lost."""
        if self.pid is None or self._process is None:
            argv = [sys.executable, "-P", "-m", "quire.detokenizer.grammar_helper", *self._argv]
            self._process, self._ready = None, False
            self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        process = self._process
        if not self._ready:
            if (await self._read(process)).number != READY:
                raise _Lost("it answered before it was asked")
            self._ready = True
        return process

    async def _read(self, process: Process) -> Verdict:
        """What the helper says next. Raises _Lost."""
        assert process.stdout is not None  # PIPE
        seconds = wall(self.seconds) + SILENCE_S if self._ready else START_S
        try:
            async with asyncio.timeout(seconds):
                (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
                if size > MAX_ANSWER:
                    raise _Lost(f"it sent a frame of {size} bytes")
                return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Verdict)
        except TimeoutError:
            raise _Lost(f"it said nothing for {seconds:g} s") from None
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise _Lost(str(error)) from None

    async def _end(self) -> int | None:
        """Make sure that the helper is gone; its exit code, negative for a signal."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        if process.returncode is None:
            try:
                process.kill()
            except ProcessLookupError:
                pass  # it ended by itself
        return await process.wait()


def _full() -> Refused:
    text = "the grammar takes long to compile, and others wait; try again in a moment, or make it simpler."
    return Refused(text, PARAM, 429)


def _broken() -> Refused:
    return Refused("grammars cannot be checked; the server's log says more.", PARAM, 500)
