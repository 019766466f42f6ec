"""`python -P -m quire.detokenizer.grammar_helper FOLDER VOCAB_SIZE EOS,...`: compiles grammars, and may die of it.

Frames on standard input and output are a length (4 bytes, little-endian) and that many bytes of msgpack. Each Check
is answered with Phases, which tell what the time is spent on, and a Verdict. The process ends with its parent.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import struct
import sys
import threading
import traceback
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from ..proto.config import ConfigError
from ..proto.grammar import GrammarError, fault, grammar_of, start_matcher, token_table, validate
from ..proto.model_config import ModelConfig
from ..proto.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_FRAME = 64 * 2**20
CPU_S = 4
"""Seconds of processor time that one check may take, should nobody stop it before."""

TABLE_BYTES = 2**30
STACK_BYTES = 2**20
"""Half of what the smallest stack in the worker has: what would overflow there overflows here."""

WALKS, STEPS = 2, 8
CHECKING, TABLE = "checking", "table"


class Check(msgspec.Struct, array_like=True):
    """A grammar to check."""

    number: int
    spec: StructuredOutputsParams


class Phase(msgspec.Struct, array_like=True, tag=True):
    """What check ``number`` is at: ``checking`` the grammar, or building the token ``table`` once."""

    number: int
    name: str


class Verdict(msgspec.Struct, array_like=True, tag=True):
    """The end of check ``number``: why the grammar cannot be honoured, or nothing."""

    number: int
    error: str


def frame(message: Check | Phase | Verdict) -> bytes:
    """The message as it is written to a pipe."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


class Helper:
    """One process's checks. ``memory``: bytes that a grammar may take."""

    def __init__(self, folder: str, model: ModelConfig, memory: int, out: BinaryIO):
        self.folder, self.model, self.memory, self.out = folder, model, memory, out
        self.table: LLTokenizer | None = None

    def check(self, check: Check) -> None:
        """Answer one check."""
        limit_processor(CPU_S)
        self._send(Phase(check.number, CHECKING))
        try:
            error = self._try(check)
        except (GrammarError, ConfigError) as failed:
            error = str(failed)
        except (MemoryError, RecursionError) as failed:
            error = f"it needs too much memory ({type(failed).__name__})."
        self._send(Verdict(check.number, error))

    def _try(self, check: Check) -> str:
        grammar = grammar_of(check.spec)
        if self.table is None:
            validate(grammar)  # at once, so that a bad one need not wait for the table
            self._send(Phase(check.number, TABLE))
            limit_processor(30)
            self.table = token_table(self.folder, self.model)
            limit_processor(CPU_S)
            limit_memory(self.memory)
            self._send(Phase(check.number, CHECKING))
        matcher = start_matcher(self.table, grammar)
        draw = random.Random(0)
        for _ in range(WALKS):
            here = matcher.deep_copy()
            for _ in range(STEPS):
                mask = here.compute_bitmask()
                if here.is_error():
                    return fault(here)
                if here.is_stopped():
                    break
                here.consume_token(_pick(mask, draw))
        return ""

    def _send(self, message: Phase | Verdict) -> None:
        self.out.write(frame(message))
        self.out.flush()


def _pick(mask: bytes, draw: random.Random) -> int:
    """A token of the mask: any, but not evenly drawn."""
    start = draw.randrange(len(mask))
    at = next(i % len(mask) for i in range(start, start + len(mask)) if mask[i % len(mask)])
    return at * 8 + draw.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def limit_memory(more: int) -> None:
    """Hold the address space to ``more`` bytes beyond what it has now."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, now + more)


def limit_processor(more: int) -> None:
    """Have the kernel end this process after ``more`` further seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + more)


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def serve(helper: Helper, checks: queue.Queue[Check]) -> None:
    """Answer checks. An error that nothing foresaw ends the process, which its parent takes for a refusal."""
    import llguidance  # noqa: F401 - now, while no request's clock runs

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(TABLE_BYTES + helper.memory)
    try:
        while True:
            helper.check(checks.get())
    finally:
        traceback.print_exc()
        os._exit(1)


def read_frames(source: BinaryIO, checks: queue.Queue[Check]) -> None:
    """Put what comes on ``source`` into ``checks``. Its end is this process's, and so are bytes that are no frames."""
    decoder = msgspec.msgpack.Decoder(Check)
    while True:
        head = source.read(4)
        size = struct.unpack("<I", head)[0] if len(head) == 4 else 0
        if not 0 < size <= MAX_FRAME:
            break
        try:
            checks.put(decoder.decode(source.read(size)))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    os._exit(0 if not head else 1)


def main() -> None:
    folder, vocab_size, eos, memory = sys.argv[1:5]
    model = ModelConfig(folder, {}, 0, int(vocab_size), [int(i) for i in eos.split(",") if i])
    checks: queue.Queue[Check] = queue.Queue(4)
    helper = Helper(folder, model, int(memory), sys.stdout.buffer)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=serve, args=(helper, checks), daemon=True).start()
    read_frames(sys.stdin.buffer, checks)


if __name__ == "__main__":
    main()
