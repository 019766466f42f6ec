"""`python -P -m quire.detokenizer.grammar_helper FOLDER VOCAB_SIZE EOS,... MEMORY`: compiles grammars in children.

It holds the table of tokens and forks a short-lived child for each Check, which shares the table and may die of the
grammar: the kernel ends it at its limits of processor time, memory and stack. This process has one thread, so that a
fork is whole, and waits for nothing but the next frame, the next child's end and the next child's time. Frames on
standard input and output are a length (4 bytes, little-endian) and that many bytes of msgpack. The children end with
this process, and this process with its parent.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import selectors
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.config import ConfigError
from ..proto.grammars.grammar import NO_TOKEN, GrammarError, fault, grammar_of, spelled, start_matcher, token_table
from ..proto.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_FRAME = 64 * 2**20
MAX_ANSWER = 4000
"""Bytes of a child's answer; a pipe takes as many in one piece."""

STACK_BYTES = 2**20
"""Half of what the smallest stack in the worker has: what would overflow there overflows here."""

READY = 0
LATE = -int(signal.SIGPROF)
STARVED = -int(signal.SIGALRM)
STARVED_SHARE = 0.2
"""Of its processor time: what had less when the clock ended it was kept from working, which is not its fault."""
WALKS, STEPS = 2, 8
_PR_SET_PDEATHSIG = 1


class Check(msgspec.Struct, array_like=True):
    """A grammar to check with ``seconds`` of processor time. ``spec``: StructuredOutputsParams."""

    number: int
    seconds: float
    spec: msgspec.Raw


class Verdict(msgspec.Struct, array_like=True):
    """The end of check ``number``, or READY: the table is built.

    ``error``: why the grammar cannot be honoured; "" if it can; None where its child ended with ``code`` (negative for
    a signal, LATE for too much time, STARVED where the machine had none for it) and said nothing.
    """

    number: int
    error: str | None
    code: int = 0


def frame(message: Check | Verdict) -> bytes:
    """The message as it is written to a pipe."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def wall(seconds: float) -> float:
    """Seconds by the clock after which a child is ended that may use ``seconds`` of the processor."""
    return 2 * seconds + 0.5


@dataclass
class Child:
    """A process that checks one grammar. ``answer``: the pipe it writes to. ``seconds``: of a processor that it may
    use. ``until``: when to end it."""

    number: int
    pid: int
    answer: int
    seconds: float
    until: float
    late: bool = False


class Helper:
    """The children and what they share. ``memory``: bytes that one grammar may take."""

    def __init__(self, table: LLTokenizer | None, broken: str, memory: int):
        """Without a table every check is answered with ``broken``."""
        self.table, self.broken, self.memory = table, broken, memory
        self.libc = ctypes.CDLL(None)
        self.selector = selectors.PollSelector()  # it has no descriptor that a child could inherit
        self.children: dict[int, Child] = {}

    def serve(self, source: int) -> None:
        """Until ``source`` ends. Raises ValueError for bytes that are no frames of checks."""
        frames = Frames()
        self.selector.register(source, selectors.EVENT_READ)
        while True:
            soonest = min((child.until for child in self.children.values()), default=float("inf"))
            wait = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
            for key, _ in self.selector.select(wait):
                if key.fd != source:
                    self._ended(self.children.pop(key.fd))
                    continue
                data = os.read(source, 2**18)
                if not data:
                    return
                for check in frames.feed(data):
                    self._start(check)
            self._end_late()

    def _start(self, check: Check) -> None:
        table = self.table
        if table is None:
            _send(Verdict(check.number, self.broken))
            return
        answer, end = os.pipe()
        helper, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                _hush()
                self.libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
                if os.getppid() == helper:
                    work(table, check, self.memory, end)
            except BaseException:  # noqa: BLE001 - a child must not go on as if it were the helper
                traceback.print_exc()
            os._exit(1)
        os.close(end)
        until = time.monotonic() + wall(check.seconds)
        self.children[answer] = Child(check.number, pid, answer, check.seconds, until)
        self.selector.register(answer, selectors.EVENT_READ)

    def _ended(self, child: Child) -> None:
        """It has answered, or is gone; either way it is of no more use."""
        answer = os.read(child.answer, MAX_ANSWER + 1)
        if answer:
            _send(Verdict(child.number, answer[1:].decode(errors="replace")))
        self.selector.unregister(child.answer)
        os.close(child.answer)
        os.kill(child.pid, signal.SIGKILL)
        _, status, used = os.wait4(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if child.late:
            code = STARVED if used.ru_utime + used.ru_stime < STARVED_SHARE * child.seconds else LATE
        if not answer:
            _send(Verdict(child.number, None, code))

    def _end_late(self) -> None:
        """A child's timer ends it, but only while it has the processor."""
        now = time.monotonic()
        for child in self.children.values():
            if child.until <= now:
                child.until, child.late = float("inf"), True
                os.kill(child.pid, signal.SIGKILL)


class Frames:
    """Checks out of a stream of bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Check)

    def feed(self, data: bytes) -> list[Check]:
        """The checks that ``data`` completes. Raises ValueError."""
        self._bytes += data
        checks = []
        while len(self._bytes) >= 4:
            (size,) = struct.unpack_from("<I", self._bytes)
            if not 0 < size <= MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._bytes) < 4 + size:
                break
            checks.append(self._decoder.decode(bytes(self._bytes[4 : 4 + size])))
            del self._bytes[: 4 + size]
        return checks


def _send(verdict: Verdict) -> None:
    data = frame(verdict)
    while data:
        data = data[os.write(1, data) :]


# ---------------------------------------------------------------- in a child


def work(table: LLTokenizer, check: Check, memory: int, end: int) -> NoReturn:
    """Write the verdict on ``check`` to ``end``, if the limits permit, and end this process."""

    def answer() -> None:
        limit_memory(memory)
        try:
            error = compiled(table, msgspec.msgpack.decode(check.spec, type=StructuredOutputsParams))
        except GrammarError as failed:
            error = str(failed)
        except (MemoryError, RecursionError) as failed:
            error = f"it needs too much memory ({type(failed).__name__})."
        os.write(end, b":" + error.encode(errors="replace")[:MAX_ANSWER])
        os._exit(0)

    signal.setitimer(signal.ITIMER_PROF, check.seconds)  # SIGPROF ends it
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    os._exit(1)


def compiled(table: LLTokenizer, spec: StructuredOutputsParams) -> str:
    """Compile a grammar and try a few masks; what is wrong with them. Raises GrammarError."""
    matcher = start_matcher(table, grammar_of(spec, table))
    draw = random.Random(0)
    for _ in range(WALKS):
        here = matcher.deep_copy()
        for _ in range(STEPS):
            mask = here.compute_bitmask()
            if here.is_error():
                return fault(here)
            if here.is_stopped():
                break
            token = spelled(table, here, _pick(mask, draw))
            if token is None:
                return NO_TOKEN
            here.consume_token(token)
    return ""


def _pick(mask: bytes, draw: random.Random) -> int:
    """A token of the mask: any, but not evenly drawn."""
    start = draw.randrange(len(mask))
    at = next(i % len(mask) for i in range(start, start + len(mask)) if mask[i % len(mask)])
    return at * 8 + draw.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _hush() -> None:
    """Let go of the helper's pipes: their ends must be seen when the helper is gone."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)


def limit_memory(more: int) -> None:
    """Hold the address space to ``more`` bytes beyond what it has now."""
    with open("/proc/self/statm") as statm:
        soft = int(statm.read().split()[0]) * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is its parent's, with which it ends
    folder, vocab_size, eos, memory = sys.argv[1:5]
    model = ModelConfig(folder, {}, 0, int(vocab_size), [int(i) for i in eos.split(",") if i])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    table, broken = None, ""
    try:
        table = token_table(folder, model)
    except ConfigError as error:
        broken = str(error)
    gc.collect()
    gc.freeze()  # what is here is shared with the children
    try:
        _send(Verdict(READY, ""))
        Helper(table, broken, int(memory)).serve(0)
    except (ValueError, RecursionError, BrokenPipeError):  # msgspec's errors are ValueErrors
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
