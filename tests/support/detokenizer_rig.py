"""A detokenizer's core with neither sockets nor threads: a test says what happens, in which order, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.detokenizer.core import HEARTBEAT_S, SCHEDULER, DetokenizerCore
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto import messages as m
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import Decoder, encode
from quire.proto.errors import Refused
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Generate

MODEL = str(Path(__file__).resolve().parents[2] / "demo_model")
PREPARER = Preparer(load_tokenizer(MODEL), load_model_config(MODEL, 128))
HELLO = m.Hello("detokenizer", "detokenizer-0", m.PROTOCOL, 7, "ipc:///d")

_from_engine, _from_scheduler = Decoder(m.ToDetokenizer), Decoder(m.FromSchedulerFront)


class Rig:
    """The core, what it has sent to each peer, and what waits to be done elsewhere. Peers in ``gone`` get nothing."""

    def __init__(self, epoch: int = 1) -> None:
        self.now = 100.0
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.checks: list[tuple[StructuredOutputsParams, Callable[[Exception | None], None], bool]] = []
        self.sent: defaultdict[str, list[Any]] = defaultdict(list)
        self.gone: set[str] = set()
        self.core = DetokenizerCore(
            PREPARER,
            HELLO,
            lambda: self.now,
            lambda job, done, size: self.jobs.append((job, done)),
            lambda spec, done, patient: self.checks.append((spec, done, patient)),
        )
        self.core.connected()
        self.flush()
        if epoch:
            self.peers(epoch)

    def flush(self) -> None:
        while todo := self.core.take():
            for peer, message in todo:
                if peer == SCHEDULER or (peer in self.core.engines and peer not in self.gone):
                    self.sent[peer].append(message)
                elif peer in self.core.engines:
                    self.core.undelivered(peer)

    def engine(self, peer: str, message: Any) -> None:
        self.core.received(peer, _from_engine(encode(message)))
        self.flush()

    def scheduler(self, message: Any) -> None:
        self.core.received(SCHEDULER, _from_scheduler(encode(message)))
        self.flush()

    def peers(self, epoch: int, block_size: int = 16) -> None:
        self.scheduler(m.Peers(epoch, [], block_size, True, 0))

    def ask(self, uid: int, peer: str = "frontend-0", attempt: int = 0, prompt: str = "Hello", **params: Any) -> None:
        work = Generate(SamplingParams(**params), uid)
        self.engine(peer, m.Tokenize(uid, attempt, work, 1.0, prompt=prompt))

    def prepare(self, which: int = 0, error: Exception | None = None) -> None:
        """Another thread has done one of the ``jobs``, or raised ``error``."""
        job, done = self.jobs.pop(which)
        try:
            result = job() if error is None else error
        except Refused as refused:
            result = refused
        done(result)
        self.flush()

    def checked(self, which: int, error: Exception | None = None) -> None:
        self.checks.pop(which)[1](error)
        self.flush()

    def heartbeats(self, count: int, *alive: str) -> None:
        """So many seconds, in each of which the Engines ``alive`` are heard."""
        for _ in range(count):
            self.now += HEARTBEAT_S
            for peer in alive:
                self.engine(peer, m.Heartbeat())
            self.core.heartbeat(2**20, 3)
            self.flush()

    def told(self, peer: str, *kinds: Any) -> list[Any]:
        """What ``peer`` was sent, without what everyone is sent each second; it is forgotten."""
        said, self.sent[peer] = self.sent[peer], []
        return [each for each in said if isinstance(each, kinds or object) and not isinstance(each, m.Heartbeat)]


def said(messages: list[Any]) -> list[tuple[str, int, int]]:
    """Messages about one request each, in short."""
    return [(type(each).__name__, each.uid, each.attempt) for each in messages]
