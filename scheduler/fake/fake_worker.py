"""A worker without a model, which speaks the real protocol and keeps its pages in a ``PageStore``.

``FakeWorkerCore`` is the process without IO: told what happens, it keeps what is to be done about it for ``take``.
``python -m quire.scheduler.fake.fake_worker`` runs it with a socket and the machine's clock.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from ...proto.codec import BadFrame, from_i32
from ...proto.messages import (
    PROTOCOL,
    AdapterReady,
    Assign,
    Bye,
    Configure,
    Drain,
    DropAdapter,
    Forget,
    FromSchedulerWorkers,
    Give,
    Heartbeat,
    Hello,
    Lease,
    LoadAdapter,
    Loaded,
    Move,
    Moved,
    NotMoved,
    Pages,
    Ready,
    Rest,
    Rested,
    StepFailed,
    StepPlan,
    Take,
    Tiers,
)
from ...proto.process import EXIT_CONFIG, die, new_incarnation, setup_logging, watch_parent
from ...proto.taking import Taking
from ...proto.wire.sockets import DISCONNECTED, Dealer, worker_endpoint
from .fake_model import tag
from .page_store import PageStore, PlanError

HEARTBEAT_S = 1.0
BAD, POISON = "bad-adapter", "poison-adapter"
"""In the path of an adapter: what becomes of it here."""


class Poisoned(Exception):
    """A prompt has come that kills this process."""


@dataclass(frozen=True, slots=True)
class SendPages:
    """To be done: send these to the worker that takes pages at ``endpoint``."""

    endpoint: str
    pages: Pages


class FakeWorker:
    """The worker's side of the protocol. ``handle`` takes what the scheduler sent and returns what to answer."""

    def __init__(
        self, num_blocks: int = 512, max_model_len: int = 2048, vocab_size: int = 1000, pages: bool = True,
        pools: bool = False, whole: bool = False, adapter_slots: int = 0, drafts: int = 0,
        draft_rows: int = 0, slots: int = 0, disk: dict[bytes, array] | None = None, rotten: int = 0,
    ):  # fmt: skip
        self.num_blocks, self.max_model_len, self.vocab_size, self.pages = num_blocks, max_model_len, vocab_size, pages
        self.pools, self.whole, self.adapter_slots = pools, whole, adapter_slots
        self.drafts, self.draft_rows = drafts, draft_rows
        self.slots, self.disk, self.rotten = slots, disk, rotten  # as in PageStore
        self.store: PageStore | None = None
        self.poison: int | None = None  # the first token of prompts that kill this process
        self.asleep, self.endpoint, self.role = -1, "", "both"  # as in Hello; with an endpoint it takes pages there
        self._taking = Taking(0)
        self._assign: Assign | None = None

    def hello(self, incarnation: str, loaded: bool = False, pid: int = 0) -> Hello:
        """The first message of a connection."""
        place = self.asleep, self.role
        return Hello("gpu_worker", incarnation, PROTOCOL, pid, self.endpoint, "fake", loaded, *place)

    def handle(self, message: Any) -> list:
        """The answers to one message; messages of another lease than the last are ignored. Raises Poisoned."""
        if isinstance(message, Assign):
            self._assign, self.store, self.asleep = message, None, -1
            sizes = (self.num_blocks, self.max_model_len, self.vocab_size)
            drafts = self.drafts, self.draft_rows
            pages = ("cells", 8 * message.block_size) if self.endpoint and not self.pools else ("", 0)
            return [Loaded(message.lease, *sizes, self.pools, self.whole, self.adapter_slots, *drafts, *pages)]
        if isinstance(message, Rest):
            self._assign, self.store, self.asleep = None, None, message.level
            return [Rested(message.lease)]
        if isinstance(message, Drain):
            return [Bye("drained")]
        if isinstance(message, Configure) and self._current(message.lease):
            assert self._assign is not None
            rows, size = self._assign.max_num_seqs, self._assign.block_size
            self.store = PageStore(
                rows, message.num_blocks, size, self.vocab_size, self.pages, self.whole, self.drafts, self.slots,
                self.disk, self.rotten,
            )  # fmt: skip
            self._taking = Taking(message.num_blocks)
            if not self.slots and self.disk is None:
                return [Ready(message.lease)]
            tiers = Tiers(message.lease, self.slots, self.disk is not None, 8 * size)
            return [tiers, Ready(message.lease), Moved(message.lease, written=b"".join(self.disk or ()))]
        if isinstance(message, Move) and self._current(message.lease) and self.store is not None:
            try:
                return list(self.store.move(message))
            except (PlanError, BadFrame) as error:
                return [StepFailed(message.lease, self.last_step + 1, f"{type(error).__name__}: {error}")]
        if isinstance(message, StepPlan) and self._current(message.lease) and self.store is not None:
            if self.poison is not None and any(from_i32(admit.ids)[0] == self.poison for admit in message.admits):
                raise Poisoned
            try:
                return [self.store.run(message)]
            except (PlanError, BadFrame) as error:
                return [StepFailed(message.lease, message.step, f"{type(error).__name__}: {error}")]
        if isinstance(message, LoadAdapter) and self._current(message.lease) and self.store is not None:
            return [self._load(message, self.store)]
        if isinstance(message, DropAdapter) and self._current(message.lease) and self.store is not None:
            self.store.adapters.pop(message.slot, None)
        if isinstance(message, Pages) and self._current(message.to):
            return self._move(message)
        if isinstance(message, Take | Give | Forget) and self._current(message.lease):
            return self._move(message)
        return []

    def _move(self, message: Take | Give | Forget | Pages) -> list:
        lease = message.to if isinstance(message, Pages) else message.lease
        try:
            if self.store is None:
                raise PlanError("there is no cache yet")
            if isinstance(message, Take):
                answers: list = [self._taking.take(message)]
                for pages in self._taking.early(message.move):
                    answers += self._move(pages)
                return answers
            if isinstance(message, Give):
                blocks = from_i32(message.blocks)
                data = self.store.read_blocks(blocks)
                pages = Pages(message.to, message.move, message.first, len(blocks), data)
                return [SendPages(message.endpoint, pages)]
            if isinstance(message, Forget):
                self._taking.forget(message)
            elif (places := self._taking.places(message)) is not None:
                self.store.write_blocks(places, message.data)
                return [self._taking.placed(message)]
        except (PlanError, BadFrame) as error:
            return [NotMoved(lease, message.move, f"{type(error).__name__}: {error}")]
        return []

    def _load(self, message: LoadAdapter, store: PageStore) -> AdapterReady:
        """What the folder's name asks for: POISON kills this process, and BAD cannot be loaded."""
        store.adapters.pop(message.slot, None)
        if POISON in message.path:
            raise Poisoned
        if BAD in message.path or not 0 <= message.slot < self.adapter_slots:
            error = f"{message.path}/adapter_model.safetensors: there is no adapter for slot {message.slot} in it."
            return AdapterReady(message.lease, message.slot, message.generation, error)
        store.adapters[message.slot] = tag(message.digest)
        return AdapterReady(message.lease, message.slot, message.generation)

    def _current(self, lease: Lease) -> bool:
        return self._assign is not None and lease == self._assign.lease

    @property
    def last_step(self) -> int:
        """The last finished step of this lease."""
        return self.store.last_step if self.store else 0


@dataclass(frozen=True, slots=True)
class Connect:
    """To be done: close the connection there is, and open one under this identity."""

    identity: str


@dataclass(frozen=True, slots=True)
class Leave:
    """To be done: end the process with this exit code. ``reason`` is why the scheduler sent it away."""

    code: int
    reason: str = ""


class FakeWorkerCore:
    """The process of a worker. ``new_identity`` names each of its connections anew."""

    def __init__(self, worker: FakeWorker, new_identity: Callable[[], str], pid: int = 0):
        self.worker = worker
        self._new_identity, self._pid = new_identity, pid
        self._loaded = self._leaving = False
        self._todo: list[Any] = []

    def take(self) -> list[Any]:
        """What is to be done, in order: a message to send, Connect or Leave."""
        todo, self._todo = self._todo, []
        return todo

    def start(self) -> None:
        """Say Hello, under an identity of its own."""
        identity = self._new_identity()
        self._todo += [Connect(identity), self.worker.hello(identity, self._loaded, self._pid)]
        self._loaded = True

    def disconnected(self) -> None:
        """The connection broke, and with it the lease ended."""
        if self._leaving:
            self._todo.append(Leave(0))
        else:
            self.start()

    def drain(self) -> None:
        """It was asked to end: it asks to be drained."""
        self._leaving = True
        self._todo.append(Drain("it was asked to end"))

    def heartbeat(self) -> None:
        """To be called every ``HEARTBEAT_S``."""
        self._todo.append(Heartbeat(self.worker.last_step))

    def received(self, message: Any) -> None:
        """The scheduler sent this. Raises Poisoned."""
        if isinstance(message, Bye):
            if message.again:
                self.disconnected()
            else:
                self._todo.append(Leave(EXIT_CONFIG, message.reason))
            return
        for answer in self.worker.handle(message):
            self._todo.append(answer)
            if isinstance(answer, StepFailed):
                self.disconnected()
            elif isinstance(answer, Bye):
                self._todo.append(Leave(0))


def main(argv: list[str] | None = None) -> None:
    """Serve until the scheduler says Bye or a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m quire.scheduler.fake.fake_worker")
    parser.add_argument("--scheduler", required=True, help="the scheduler's address")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--page-store", choices=("on", "off"), default="on", help="off: ids in turn")
    parser.add_argument("--pools", choices=("no", "chunks", "whole"), default="no", help="pool prompts; whole: uncut")
    parser.add_argument("--max-loras", type=int, default=0, help="slots for adapters")
    parser.add_argument("--host-slots", type=int, default=0, help="blocks kept in host memory")
    parser.add_argument("--delay-ms", type=float, nargs=2, default=(0.0, 0.0), metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--poison", type=int, help="a prompt that begins with this token kills the worker")
    args = parser.parse_args(argv)
    setup_logging("fake_worker")
    watch_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    worker = FakeWorker(
        args.num_blocks, args.max_model_len, args.vocab_size, args.page_store == "on", args.pools != "no",
        args.pools == "whole", args.max_loras, args.host_slots,
    )  # fmt: skip
    worker.poison = args.poison
    core = FakeWorkerCore(worker, lambda: new_incarnation("gpu_worker"), os.getpid())
    _Process(core, args.scheduler, tuple(args.delay_ms), random.Random(args.seed)).run()


_leaving: list[int] = []  # signals that came


def _leave(number: int, frame: object) -> None:
    """The first asks to drain, the second ends it."""
    if _leaving:
        sys.exit(0)
    _leaving.append(number)


class _Process:
    """The core with a socket. A step takes a time that is drawn from ``delay_ms``."""

    def __init__(self, core: FakeWorkerCore, address: str, delay_ms: tuple[float, float], rng: random.Random):
        self._core, self._endpoint, self._delay_ms, self._rng = core, worker_endpoint(address), delay_ms, rng
        self._wire: Dealer[Any] | None = None
        self._poller = zmq.Poller()
        self._asked = False

    def run(self) -> None:
        """Until the core wants to leave, which is a SystemExit."""
        self._core.start()
        due = time.monotonic() + HEARTBEAT_S
        while True:
            if _leaving and not self._asked:
                self._asked = True
                self._core.drain()
            if time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_S
                self._core.heartbeat()
            wire = self._flush()
            readable = dict(self._poller.poll(min(100, max(0, int((due - time.monotonic()) * 1000)))))
            if any(event == DISCONNECTED for event in iter(wire.next_event, None)):
                self._core.disconnected()
            # One at a time: behind a slow plan the next one always waits; heartbeats and signals cannot wait for a gap.
            elif wire.socket in readable and (message := wire.recv()) is not None:
                self._received(message)

    def _received(self, message: Any) -> None:
        if isinstance(message, StepPlan) and self._delay_ms[1]:
            time.sleep(self._rng.uniform(*self._delay_ms) / 1000)
        try:
            self._core.received(message)
        except Poisoned:
            os._exit(70)

    def _flush(self) -> Dealer[Any]:
        """Do what the core wants done; the connection there is then."""
        for what in self._core.take():
            if isinstance(what, Connect):
                self._connect(what.identity)
            elif isinstance(what, Leave):
                self._close()
                if what.code:
                    die("fake_worker", what.reason, what.code)
                sys.exit(0)
            elif self._wire is not None:
                self._wire.send(what)
        assert self._wire is not None
        return self._wire

    def _connect(self, identity: str) -> None:
        self._close()
        self._wire = Dealer(FromSchedulerWorkers, self._endpoint, identity)
        self._poller = zmq.Poller()
        self._poller.register(self._wire.socket, zmq.POLLIN)
        self._poller.register(self._wire.monitor(), zmq.POLLIN)

    def _close(self) -> None:
        if self._wire is not None:
            self._wire.close()


if __name__ == "__main__":
    main()
