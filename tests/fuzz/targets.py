"""Who is fuzzed: a cluster of real processes, or one process between fakes of its peers. All over raw sockets."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from chaos.asks import Ask, Outcome, against_oracle, difference, from_engine, make_asks
from chaos.cluster import Cluster, Shape, until

from fuzz.frames import plain
from quire.client.engine import Engine
from quire.client.results import RequestError
from quire.proto import messages as m
from quire.proto.codec import i8, i32, i64
from quire.proto.hashing import hash_blocks
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.process import new_incarnation
from quire.proto.wire.sockets import Router, front_endpoint
from quire.proto.work import Adapter, Generate, Pool, Text

VOCAB = 2048
ADAPTER = Adapter("a", "/nowhere/a", bytes(16))


class Valid:
    """Sound requests through an Engine, each held against what it must come to."""

    def __init__(self, cluster: Cluster, rng: random.Random):
        self.engine, self.rng = Engine(cluster.address), rng
        self.asks = [ask for ask in make_asks(24, random.Random(3), longest=24) if not ask.held]
        self._known: dict[str, Outcome] = {}
        self.served = 0

    async def start(self) -> None:
        await self.engine.start()
        await self.engine.wait_ready(60)
        for ask in self.asks:
            self._known[ask.name] = await self._run(ask)

    async def check(self, count: int = 3) -> None:
        """Some of them. Raises AssertionError or RequestError where one is not served right."""
        asks = self.rng.sample(self.asks, count)
        async with asyncio.timeout(60):
            for ask, got in zip(asks, await asyncio.gather(*(self._run(ask) for ask in asks)), strict=True):
                wrong = difference(got, self._known[ask.name])
                if wrong is not None:
                    raise AssertionError(f"{ask.name}: {wrong}")
        self.served += count

    async def _run(self, ask: Ask) -> Outcome:
        stream = self.engine.submit(params=ask.params(), **ask.prompt_field())
        got = from_engine(await stream.collect(), stream.prompt_logprobs, ask)
        assert stream.accepted is not None
        wrong = against_oracle(ask, stream.accepted.prompt_ids, got)
        if wrong is not None:
            raise AssertionError(f"{ask.name}: {wrong}")
        return got


def shape(**changes: Any) -> Shape:
    """A small cluster with a worker that keeps pages."""
    fields: dict[str, Any] = {
        "workers": 1, "detokenizers": 1, "frontends": 1, "worker_flags": ["--vocab-size=2048", "--num-blocks=2000"],
    }  # fmt: skip
    return Shape(**{**fields, **changes})


class Stranger:
    """A DEALER of our own, under any identity. It keeps nothing of what it is sent."""

    def __init__(self, endpoint: str, identity: str = "", hello: m.Hello | None = None):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.connect(endpoint)
        if hello is not None:
            self.send(plain(hello))

    def send(self, value: Any) -> None:
        self.send_frame(msgspec.msgpack.encode(value))

    def send_frame(self, frame: bytes) -> None:
        self._socket.send(frame)

    def send_frames(self, frames: Iterable[bytes]) -> None:
        self._socket.send_multipart(list(frames))

    def drain(self) -> list[bytes]:
        """What has been received, now forgotten here."""
        found = []
        while self._socket.poll(0):
            found.append(self._socket.recv_multipart()[-1])
        return found

    def close(self) -> None:
        self._socket.close()


def hello(kind: str) -> m.Hello:
    """A sound Hello of a process that does not exist."""
    incarnation = new_incarnation({"operator": "operator"}.get(kind, kind))
    return m.Hello(
        kind, incarnation, m.PROTOCOL, os.getpid(), endpoint="ipc:///nowhere" if kind == "detokenizer" else ""
    )


# ---------------------------------------------------------------- sound messages, to be changed


def to_scheduler(rng: random.Random) -> list[Any]:
    """What a detokenizer sends."""
    uid, ids = rng.randrange(1, 50), i32([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))])
    params = SamplingParams(
        max_tokens=rng.randrange(1, 9), n=rng.choice((1, 1, 2)), temperature=1.0, logprobs=rng.choice((None, 2)),
        stop=rng.choice((None, ["ab"])), prompt_logprobs=rng.choice((None, None, 1)),
    )  # fmt: skip
    children = rng.choice(([], [m.Child(0, i32([5, 6]))]))
    hashes = b"".join(hash_blocks(ids, 16))
    work = rng.choice((*[Generate(params, 7, [2])] * 2, Pool(PoolingParams(task="embed", pooling="LAST"))))
    messages = [
        m.Submit(uid, rng.choice((0, 1, 2)), ids, hashes, work, time.time(), children),
        m.Abort(uid, 0), m.Stopped(uid, 0, 0, 3), m.BeamStopped(uid, 0, 1, i32([0])), m.Reconcile(i64([uid]), i32([0])),
        m.GetStats(3), m.GetView(4, 1), m.Heartbeat(), m.Manage(1, "list"),
        m.Adapters([m.AdapterEntry("a", uid, ADAPTER)]),
        m.Register(1, ADAPTER), m.Unregister(2, "a"),
    ]  # fmt: skip
    return [plain(message) for message in [*messages, *messages[:1] * 6]]


def to_workers_socket(rng: random.Random) -> list[Any]:
    """What a worker sends."""
    lease = m.Lease(int(time.time() * 1000), rng.randrange(3), rng.randrange(9))
    result = m.StepResult(lease, rng.randrange(1, 5), i32([3, 4]))
    return [plain(x) for x in (hello("gpu_worker"), m.Loaded(lease, 500, 2048, VOCAB), m.Ready(lease), result,
                               m.Heartbeat(), m.StepFailed(lease, 1, "no"), m.Compiled(lease),
                               m.Tiers(lease, 4, True, 64), m.Moved(lease, 1, i32([0]), bytes(16), bytes(32), 0.5),
                               m.AdapterReady(lease, 0, 1), m.Drain("tired"))]  # fmt: skip


def to_detokenizer(rng: random.Random) -> list[Any]:
    """What an Engine sends."""
    uid = rng.randrange(1, 50)
    params = SamplingParams(max_tokens=rng.randrange(1, 9), temperature=1.0, logprobs=rng.choice((None, 2)))
    work, chat = Generate(params, 7), [{"role": "user", "content": "Hi"}]
    asks = [
        m.Tokenize(uid, 0, work, time.time(), prompt="once upon a time"),
        m.Tokenize(uid, 1, work, time.time(), ids=i32([5, 6, 7]), resume=[m.Resume(0, i32([9, 10]), 2)]),
        m.Tokenize(uid, 0, work, time.time(), messages=chat, template={"add_generation_prompt": True}),
        m.Tokenize(uid, 0, Pool(PoolingParams(), "upon a time"), time.time(), prompt="once"),
        m.Tokenize(uid, 0, Text(["once", 5], pieces=True), time.time(), prompt=""),
    ]
    return [
        plain(message)
        for message in [
            *asks * 3,
            m.Abort(uid, 0),
            m.Quarantined(uid, 0),
            m.Reconcile(i64([uid]), i32([0])),
            m.Heartbeat(),
        ]
    ]


def text_batch(uid: int, attempt: int, offset: int, tokens: list[int], text: str, finish: m.Finish) -> m.TextBatch:
    """One row."""
    length = offset + len(tokens) if finish else -1
    return m.TextBatch(i64([uid]), i32([attempt]), i32([0]), i32([offset]), i32([len(tokens)]), i32(tokens), [text],
                       i8([finish]), [None], i32([length]))  # fmt: skip


def to_engine(uid: int) -> list[Any]:
    """What a detokenizer sends back about a request."""
    params = SamplingParams(max_tokens=5)
    return [plain(x) for x in (
        text_batch(uid, 0, 0, [1, 2], "ab", m.Finish.NONE), text_batch(uid, 0, 2, [3], "c", m.Finish.STOP),
        m.Accepted(uid, 0, i32([5]), "x", Generate(params, 7)), m.Failed(uid, 0, 500, "no"),
        m.Unknown(i64([uid]), i32([0])), m.Quarantined(uid, 0), m.Pooled(uid, 0, 0, bytes(8)),
        m.PromptLogprobs(uid, 0, 1, m.Logprobs(i32([5, 6]), i32([0, 0]), i32([1]), ["a", "b"])), m.Heartbeat(),
    )]  # fmt: skip


def from_scheduler(rng: random.Random) -> list[Any]:
    """What the scheduler sends the front side."""
    uid = rng.randrange(1, 9)
    batch = m.TokenBatch(i64([uid]), i32([0]), i32([0]), i32([0]), i32([1]), i32([7]), i8([0]), i32([-1]))
    return [plain(x) for x in (
        batch, m.Failed(uid, 0, 500, "no"), m.Unknown(i64([uid]), i32([0])), m.Stats(1, *[0] * 11, []), m.Heartbeat(),
        m.PromptLogprobs(uid, 0, 1, m.Logprobs(i32([5, 6]), i32([0, 0]), i32([1]))),
        m.BeamTokens(uid, 0, 1, i32([0]), i32([4])), m.Pooled(uid, 0, 0, bytes(8)),
    )]  # fmt: skip


# ---------------------------------------------------------------- an Engine between fakes


class FakePeers:
    """A scheduler and a detokenizer that are ours, in a folder of their own, and an Engine that believes in them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qz-")
        folder = Path(self._folder.name)
        folder.chmod(0o700)
        address = f"ipc://{folder}"
        self.context = zmq.Context()
        self.scheduler: Router[Any] = Router(m.ToSchedulerFront, front_endpoint(address), context=self.context)
        self.detokenizer: Router[Any] = Router(m.ToDetokenizer, f"{address}/d", context=self.context)
        self.engine = Engine(address)
        self.asked: dict[int, tuple[str, m.Tokenize]] = {}
        self.front_peer = self.text_peer = ""

    async def start(self) -> None:
        self.scheduler.attach(self._on_scheduler)
        self.detokenizer.attach(self._on_detokenizer)
        await self.engine.start()
        await self.engine.wait_ready(60)

    def _on_scheduler(self, peer: str, message: Any) -> None:
        self.front_peer = peer
        if isinstance(message, m.Hello):
            self.announce()

    def announce(self) -> None:
        listed = [m.Peer("detokenizer", "detokenizer-1", self.detokenizer.endpoint)]
        self.scheduler.send(self.front_peer, m.Peers(5, listed, 16, True, 2048))

    def _on_detokenizer(self, peer: str, message: Any) -> None:
        self.text_peer = peer
        if isinstance(message, m.Tokenize):
            self.asked[message.uid] = (peer, message)

    async def check(self) -> None:
        """One sound request comes to what it must.

        What was sent before may by chance have been about its number: then the next one's must do.
        """
        try:
            await self._check()
        except RequestError:
            await self._check()

    async def _check(self) -> None:
        stream = self.engine.submit(ids=[5, 6], params=SamplingParams(max_tokens=2))
        async with asyncio.timeout(60):
            await until(lambda: stream.uid in self.asked and self.asked[stream.uid][0] == self.text_peer, 60)
            peer, message = self.asked[stream.uid]
            self.detokenizer.send(peer, m.Accepted(stream.uid, message.attempt, i32([5, 6]), None, message.work))
            batch = text_batch(stream.uid, message.attempt, 0, [1, 2], "ab", m.Finish.LENGTH)
            self.detokenizer.send(peer, batch)
            (child,) = await stream.collect()
        if (child.tokens, "".join(child.parts), child.finish) != ([1, 2], "ab", m.Finish.LENGTH):
            raise AssertionError(f"a sound answer came to {child}")

    async def close(self) -> None:
        await self.engine.close()
        self.scheduler.close()
        self.detokenizer.close()
        self.context.destroy(linger=0)
        self._folder.cleanup()
