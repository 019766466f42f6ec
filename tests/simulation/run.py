"""Histories by their seeds: one here, or many in several processes.

``run_seed`` never raises: what breaks is a failure of that history. ``python -m simulation.run`` (with ``tests`` on the
path) is what each of the processes of ``run_many`` does: it reads lines ``FIRST STOP`` and answers each seed with a
``Record``, a line of JSON.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from .broken import BROKEN
from .coverage import watched
from .draw import draw
from .plan import Plan
from .world import World

LIMIT_S = 60.0
"""Seconds of processor time for one history, which takes some 0.03: one that takes more goes round in circles."""
PIECE = 25
"""Seeds that a process is given at once."""
TESTS = Path(__file__).resolve().parent.parent


class Record(msgspec.Struct, omit_defaults=True):
    """What became of one history. ``failures`` are lines ``rule | what``, ``marks`` what it reached, and how often;
    ``seconds`` are of processor time."""

    seed: int
    failures: list[str] = []
    seconds: float = 0.0
    virtual_s: float = 0.0
    events: int = 0
    requests: int = 0
    faults: int = 0
    digest: int = 0
    marks: dict[str, int] = {}

    @property
    def rule(self) -> str:
        """The rule that failed first; empty where none did."""
        return self.failures[0].partition(" | ")[0] if self.failures else ""


class TooLong(BaseException):
    """A history has used up its processor time. Nothing that is told of errors may catch it."""


class Logged(logging.Handler):
    """What the product logs with a traceback: something was raised that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.failures: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One line of the log."""
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            self.failures.append(f"{_exception(error)} | {record.getMessage()}: {error}")


def run_seed(seed: int, limit_s: float = LIMIT_S) -> Record:
    """The history of this seed."""
    return run_plan(draw(seed), limit_s)


def run_plan(plan: Plan, limit_s: float = LIMIT_S, lines: list[str] | None = None) -> Record:
    """The history of this plan. ``lines`` gathers its transcript where it is given."""
    record = Record(plan.seed, requests=len(plan.asks), faults=len(plan.faults))
    began, world = time.process_time(), None
    try:
        with watched() as marks, logged() as log, limited(limit_s):
            world = World(plan, lines)
            outcome = world.run()
            record.failures = [f"{failure.rule} | {failure.text}" for failure in outcome.failures] + log.failures
            record.digest = outcome.digest
            record.marks = {" | ".join(mark): count for mark, count in sorted((marks + outcome.marks).items())}
    except TooLong as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])
        record.failures = [f"endless | more than {limit_s:g} s of processor time, and then it was\n{where}"]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this history's
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])
        record.failures = [f"{_exception(error)} | {error}\n{where}"]
    if world is not None:
        record.virtual_s, record.events = world.timeline.now, world.timeline.happened
        record.failures = _by_name(world, record.failures)
        if lines is not None:
            lines[:] = _by_name(world, lines)
    record.seconds = time.process_time() - began
    return record


def _by_name(world: World, lines: list[str]) -> list[str]:
    """Lines in which a request is called what it is asked by, and not by its uid."""
    names = {str(consumer.uid): consumer.ask.name for consumer in world.consumers if consumer.uid}
    if not names:
        return lines
    uids = re.compile("|".join(names))
    return [uids.sub(lambda found: names[found[0]], line) for line in lines]


def _exception(error: BaseException) -> str:
    """The rule that an exception breaks: its type, and the function in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "nowhere"
    return f"exception {type(error).__name__} at {where}"


@contextmanager
def logged() -> Iterator[Logged]:
    """Keep what the product logs to itself, but for what it did not expect."""
    log, handler = logging.getLogger("quire"), Logged()
    before = log.level, log.propagate
    log.setLevel(logging.ERROR)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Have the body end with TooLong after so much processor time. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_long(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fresh_seeds(count: int) -> list[int]:
    """Seeds that nobody has chosen."""
    return [int.from_bytes(os.urandom(5), "little") for _ in range(count)]


def run_many(seeds: Iterable[int], jobs: int = 2, limit_s: float = LIMIT_S, broken: str = "") -> Iterator[Record]:
    """The histories of all these seeds, in the order in which they end. ``broken``: run them over code with that fault
    of ``broken.py`` in it. A process that ends is a failure of the history that it was at, and another takes its place.

    Close the iterator (or leave the loop) to stop early.
    """
    pieces = _pieces(iter(seeds))
    lock, over = threading.Lock(), threading.Event()
    records: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=1000)

    def next_piece() -> list[int]:
        with lock:
            return [] if over.is_set() else next(pieces, [])

    threads = [threading.Thread(target=_serve, args=(next_piece, records, limit_s, broken)) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    left = jobs
    try:
        while left:
            record = records.get()
            if isinstance(record, BaseException):
                raise record
            if record is None:
                left -= 1
            else:
                yield record
    finally:
        over.set()
        while any(thread.is_alive() for thread in threads):  # a full queue must not hold one up
            with suppress(queue.Empty):
                records.get(timeout=0.05)


def _pieces(seeds: Iterator[int]) -> Iterator[list[int]]:
    while piece := list(islice(seeds, PIECE)):
        yield piece


def _serve(next_piece: Callable[[], list[int]], records: queue.Queue[Any], limit_s: float, broken: str) -> None:
    """One process after another, until no seeds are left."""
    try:
        piece = next_piece()
        while piece:
            with _child(limit_s, broken) as child:
                while piece:
                    done = _ask(child, piece, records)
                    piece = piece[done:]
                    if piece:  # it ended at the first of those
                        lost = f"process ended | with code {child.wait()} and without a word; its trace is above"
                        records.put(Record(piece[0], [lost]))
                        piece = piece[1:] or next_piece()
                        break
                    piece = next_piece()
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        records.put(error)
    finally:
        records.put(None)


@contextmanager
def _child(limit_s: float, broken: str) -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join([str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "simulation.run", str(limit_s), broken]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def _ask(child: subprocess.Popen[bytes], piece: list[int], records: queue.Queue[Any]) -> int:
    """Have the process run these seeds. Returns how many it has."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(" ".join(map(str, piece)).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return 0
    for done in range(len(piece)):
        line = child.stdout.readline()
        if not line.endswith(b"\n"):
            return done
        records.put(msgspec.json.decode(line, type=Record))
    return len(piece)


def main(argv: list[str], asked: IO[str], answers: IO[bytes]) -> None:
    """What a process of ``run_many`` does: its seeds come as lines, and their records go out as lines."""
    limit_s, broken = float(argv[0]), argv[1] if len(argv) > 1 else ""
    faulthandler.enable()
    with ExitStack() as stack:
        if broken:
            stack.enter_context(BROKEN[broken].put_in())
        for line in asked:
            for seed in map(int, line.split()):
                answers.write(msgspec.json.encode(run_seed(seed, limit_s)) + b"\n")
                answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin, sys.stdout.buffer)
