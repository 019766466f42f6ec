"""Whether a request's grammar can be honoured, found out in a process that may be lost.

Compiling a grammar can take any time and memory, so it is done in a child process (grammar_helper.py) first: what
passes there within the limits is no danger to the process that samples. The child starts at the first check; starting
it and building its table of tokens do not count as a grammar's time.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque

import msgspec

from ..proto.grammar import GrammarError, spec_key
from ..proto.model_config import ModelConfig
from ..proto.structured import StructuredOutputsParams
from .errors import Refused
from .grammar_helper import CHECKING, Check, Phase, Verdict, frame

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""Seconds that compiling a grammar may take: as long can the worker's step wait that needs its first mask."""

START_S = 60.0
MEMORY = 512 * 2**20
MAX_QUEUED = 64
MAX_KEPT = 4096
SLOW_KEPT_S = 60.0
MAX_ANSWER = 64 * 1024
PARAM = "structured_outputs"


class _Lost(Exception):
    """The child is gone or talks nonsense. ``late``: it was ended for taking too long."""

    def __init__(self, why: str, late: bool = False):
        super().__init__(why)
        self.late = late


class GrammarChecker:
    """Checks grammars, one at a time, and remembers the verdicts. Make it and use it inside one event loop."""

    def __init__(
        self, folder: str, model: ModelConfig, seconds: float = CHECK_S, memory: int = MEMORY, queued: int = MAX_QUEUED
    ):
        """``folder`` holds the tokenizer. A grammar may take ``seconds`` and ``memory`` bytes; ``queued`` may wait."""
        self.seconds, self.memory, self.queued = seconds, memory, queued
        self._argv = [folder, str(model.vocab_size), ",".join(map(str, model.eos_token_ids)), str(memory)]
        self._verdicts: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # error or "", when to forget it
        self._waiting: dict[bytes, asyncio.Future[str]] = {}
        self._queue: deque[tuple[bytes, StructuredOutputsParams]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._fresh = True  # the child has not answered yet
        self._number = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def check(self, spec: StructuredOutputsParams) -> None:
        """Return where the grammar can be honoured. Raises errors.Refused: 400; 429 when too many wait; 500."""
        key = spec_key(spec)
        error, until = self._verdicts.get(key, ("", 0.0))
        if until > time.monotonic():
            self._verdicts.move_to_end(key)
        else:
            error = await asyncio.shield(self._enqueue(key, spec))
        if error:
            raise Refused(str(GrammarError(f"structured_outputs cannot be honoured: {error}")), PARAM)

    def close(self) -> None:
        """End the child and refuse who waits."""
        if self._task is not None:
            self._task.cancel()
        self._kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Refused("the server is shutting down.", PARAM, 503))
                future.exception()  # who waited may be gone
        self._waiting.clear()
        self._queue.clear()

    # ------------------------------------------------------------ one after the other

    def _enqueue(self, key: bytes, spec: StructuredOutputsParams) -> asyncio.Future[str]:
        """The verdict to come. Equal grammars share one."""
        future = self._waiting.get(key)
        if future is None:
            if len(self._queue) >= self.queued:
                raise Refused(f"{len(self._queue)} grammars wait to be checked; try again in a moment.", PARAM, 429)
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
            self._queue.append((key, spec))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._work())
        return future

    async def _work(self) -> None:
        while self._queue:
            key, spec = self._queue.popleft()
            try:
                error, keep = await self._verdict(spec)
            except Exception as failed:  # noqa: BLE001 - whatever it is, who waits must be told
                log.error("the grammar helper does not work: %s", failed)
                future = self._waiting.pop(key)
                text = "grammars cannot be checked; the server's log says more."
                future.set_exception(Refused(text, PARAM, 500))
                future.exception()  # who waited may be gone
                continue
            self._verdicts[key] = error, time.monotonic() + keep
            while len(self._verdicts) > MAX_KEPT:
                self._verdicts.popitem(last=False)
            self._waiting.pop(key).set_result(error)

    async def _verdict(self, spec: StructuredOutputsParams) -> tuple[str, float]:
        """The error of ``spec`` ("": none), and for how many seconds it stays true."""
        limits = (
            f"it is too complex to be compiled within {self.seconds:g} s and {self.memory >> 20} MiB; make it simpler."
        )
        for again in (True, False):
            try:
                return await self._ask(spec), float("inf")
            except _Lost as lost:
                began = not self._fresh
                code = await self._end(0.0 if lost.late else 0.2)
                if lost.late or code in (-6, -11, -24):  # SIGABRT: no memory; SIGSEGV: no stack; SIGXCPU: no time
                    log.warning("a grammar was refused and its helper ended: %s (code %s)", lost, code)
                    return limits, SLOW_KEPT_S
                if not again:
                    if began:  # two children were lost over it
                        return limits, SLOW_KEPT_S
                    raise
                log.warning("the grammar helper was lost (%s, code %s); starting another", lost, code)
        raise AssertionError("unreachable")

    # ------------------------------------------------------------ the child

    async def _ask(self, spec: StructuredOutputsParams) -> str:
        """One check. Raises _Lost."""
        process = await self._start()
        assert process.stdin is not None  # PIPE
        self._number += 1
        allowed, phase = START_S if self._fresh else self.seconds, CHECKING
        try:
            process.stdin.write(frame(Check(self._number, spec)))
            while True:
                async with asyncio.timeout(allowed):
                    answer = await self._read(process)
                if answer.number != self._number:
                    raise _Lost(f"it answered check {answer.number} instead of {self._number}")
                if isinstance(answer, Verdict):
                    return answer.error
                self._fresh, phase = False, answer.name
                allowed = self.seconds if phase == CHECKING else START_S
        except TimeoutError:
            raise _Lost(f"no answer within {allowed:g} s", late=phase == CHECKING and not self._fresh) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _Lost(str(error)) from None

    async def _start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            argv = [sys.executable, "-P", "-m", "quire.detokenizer.grammar_helper", *self._argv]
            self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
            self._fresh = True
        return self._process

    async def _read(self, process: Process) -> Phase | Verdict:
        assert process.stdout is not None  # PIPE
        (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
        if size > MAX_ANSWER:
            raise _Lost(f"it sent a frame of {size} bytes")
        try:
            return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Phase | Verdict)
        except msgspec.MsgspecError as error:
            raise _Lost(str(error)) from None

    def _kill(self) -> None:
        if self.pid is not None and self._process is not None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass  # it ended by itself

    async def _end(self, patience: float) -> int | None:
        """Make sure that the child is gone; its exit code, negative for a signal.

        One that may be about to end by itself is given ``patience`` seconds, for its own code says why.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            async with asyncio.timeout(patience):
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()
