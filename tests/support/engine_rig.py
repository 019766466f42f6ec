"""A client's core with no sockets, between a scheduler and detokenizers that do only what a test says.

Time stands still until the test moves it. ``Words`` makes what a detokenizer says; ``EngineRig`` carries messages.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from quire.client.core import HEARTBEAT_S, SCHEDULER, Connect, Disconnect, EngineCore
from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.proto import messages as m
from quire.proto.codec import Decoder, encode, f32, i8, i32, i64
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

_arrive = Decoder(m.ToDetokenizer)


class Words:
    """What a detokenizer says; ``send`` is the heir's."""

    def send(self, message: Any) -> None:
        raise NotImplementedError

    def accept(self, tokenize: m.Tokenize, ids: Any = (1, 2, 3), text: str | None = "hi") -> None:
        work = tokenize.work
        if isinstance(work, Generate):
            params = work.params.clone()
            params.max_tokens = 16
            work = Generate(params, work.seed)
        self.send(m.Accepted(tokenize.uid, tokenize.attempt, i32(ids), text, work))

    def text(
        self, tokenize: m.Tokenize, offset: int, tokens: list[int], text: str, finish: m.Finish = m.Finish.NONE,
        index: int = 0, length: int = -1, attempt: int | None = None, reason: Any = None, logprobs: Any = (),
    ) -> None:  # fmt: skip
        """One row; ``length`` is what has come with it where it ends a child and none is given."""
        if finish and length < 0:
            length = offset + len(tokens)
        self.send(
            m.TextBatch(
                uids=i64([tokenize.uid]), attempts=i32([tokenize.attempt if attempt is None else attempt]),
                indexes=i32([index]), offsets=i32([offset]), counts=i32([len(tokens)]), tokens=i32(tokens),
                texts=[text], finishes=i8([finish]), stop_reasons=[reason], lengths=i32([length]),
                started_uids=i64([tokenize.uid] if offset == 0 else []),
                started_cached=i32([2] if offset == 0 else []),
                logprob_rows=i32(range(len(logprobs))), logprobs=list(logprobs),
            )
        )  # fmt: skip

    def unknown(self, *tokenizes: m.Tokenize) -> None:
        """It has none of these."""
        self.send(m.Unknown(i64(each.uid for each in tokenizes), i32(each.attempt for each in tokenizes)))


def logprobs_of(tokens: list[int], value: float = -0.5) -> m.Logprobs:
    return m.Logprobs(i32(tokens), f32([value] * len(tokens)), i32([1] * len(tokens)), [f"<{t}>" for t in tokens])


class FakeDetokenizer(Words):
    """``identity`` is that of the core's present connection to it, "" while there is none. ``heartbeats``: it says each
    second that it lives. ``reachable``: a connection to it can be made."""

    def __init__(self, rig: EngineRig, name: str):
        self.rig, self.name, self.identity = rig, name, ""
        self.heartbeats = self.reachable = True
        self.got: deque[Any] = deque()

    def send(self, message: Any) -> None:
        assert self.identity
        self.rig.core.received(self.identity, message)
        self.rig.carry()

    def next(self, kind: type) -> Any:
        """The next message of one kind; others before it are passed over."""
        while self.got:
            if isinstance(message := self.got.popleft(), kind):
                return message
        raise AssertionError(f"{self.name} was sent no {kind.__name__}")

    def has(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.got)

    def cut(self) -> None:
        """The connection breaks."""
        identity, self.identity = self.identity, ""
        self.rig.core.disconnected(identity)
        self.rig.carry()


class EngineRig:
    """``core`` with a scheduler that is ready and knows ``count`` detokenizers."""

    def __init__(self, count: int = 1):
        self.now = 1000.0
        hello = m.Hello("frontend", "frontend-x", m.PROTOCOL, 1)
        self.core = EngineCore(hello, lambda: self.now, lambda: 1.7e9 + self.now, random.Random(0))
        self.detokenizers = [FakeDetokenizer(self, f"detokenizer-{i}") for i in range(count)]
        self.at_scheduler: list[Any] = []
        self.core.connected(SCHEDULER)
        self.peers()

    def peers(self, epoch: int = 1000, listed: Any = None, ready: bool = True, blamed: int | None = None) -> None:
        """The scheduler says who is there: all, where it is not said who."""
        names = [each.name for each in (self.detokenizers if listed is None else listed)]
        peers = [m.Peer("detokenizer", name, name) for name in names]
        self.scheduler(m.Peers(epoch, peers, 16, ready, 128 if ready else 0, blamed))

    def scheduler(self, message: Any) -> None:
        """The scheduler says ``message``."""
        self.core.received(SCHEDULER, message)
        self.carry()

    def carry(self) -> None:
        """Do what the core wants done, until it wants nothing."""
        while todo := self.core.take():
            for peer, what in todo:
                if peer == SCHEDULER:
                    self.at_scheduler.append(what)
                elif isinstance(what, Connect):
                    self._connect(peer, next(each for each in self.detokenizers if each.name == what.endpoint))
                else:
                    there = next((each for each in self.detokenizers if each.identity == peer), None)
                    if there is not None and isinstance(what, Disconnect):
                        there.identity = ""
                    elif there is not None:
                        there.got.append(_arrive(encode(what)))

    def _connect(self, peer: str, detokenizer: FakeDetokenizer) -> None:
        if detokenizer.reachable:
            assert not detokenizer.identity
            detokenizer.identity = peer
            self.core.connected(peer)
        else:
            self.core.unreachable(peer, OSError("too many open files"))

    def wait(self, seconds: float) -> None:
        """Time passes, with heartbeats on both sides."""
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now += HEARTBEAT_S
            for each in self.detokenizers:
                if each.heartbeats and each.identity:
                    each.send(m.Heartbeat())
            self.core.received(SCHEDULER, m.Heartbeat())
            self.heartbeat()

    def heartbeat(self) -> None:
        """The core's own turn."""
        self.core.heartbeat(memory=7, bad_frames=0)
        self.carry()

    def submit(self, params: SamplingParams | None = None, seed: int = 5, **fields: Any) -> OpenGeneration:
        """``fields`` are Tokenize's; prompt "hi" where nothing else is given."""
        if fields.keys().isdisjoint({"prompt", "ids", "messages"}):
            fields["prompt"] = "hi"
        work = Generate(params or SamplingParams(), seed)
        request = self.core.submit(m.Tokenize(uid=0, attempt=0, work=work, arrival=0.0, **fields), work)
        self.carry()
        return request

    def pool(self, **fields: Any) -> OpenPooling:
        work = Pool(PoolingParams())
        request = self.core.pool(m.Tokenize(0, 0, work, 0.0, prompt="hi", **fields), work)
        self.carry()
        return request


def text_of(request: OpenGeneration, index: int = 0) -> str:
    return "".join(request.children[index].parts)


def one(rig: EngineRig) -> FakeDetokenizer:
    """The only detokenizer."""
    (detokenizer,) = rig.detokenizers
    return detokenizer


def accepted(rig: EngineRig, **fields: Any) -> tuple[OpenGeneration, m.Tokenize]:
    """A request that its detokenizer has accepted, and the message that it was sent."""
    request = rig.submit(**fields)
    sent = one(rig).next(m.Tokenize)
    one(rig).accept(sent)
    return request, sent


def who_has(rig: EngineRig, kind: type = m.Tokenize) -> list[FakeDetokenizer]:
    """The detokenizer that was sent something, then the others."""
    return sorted(rig.detokenizers, key=lambda each: not each.has(kind))
