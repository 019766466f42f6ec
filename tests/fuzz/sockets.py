"""One campaign for each ZeroMQ socket: frames in batches, and after each batch sound requests that must come out right.

A campaign returns what it sent. It raises AssertionError where a process died, a sound request was not served right, or
memory grew past ``MEMORY``.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from chaos.cluster import Cluster

from fuzz import targets
from fuzz.alone import LoneDetokenizer, LoneWorker
from fuzz.frames import Frames, plain
from fuzz.targets import FakePeers, Stranger, Valid, hello
from quire.proto import messages as m
from quire.proto.params import SamplingParams
from quire.proto.process import resident_bytes
from quire.proto.wire.sockets import front_endpoint, worker_endpoint

BATCH = 200
MEMORY = 128 * 2**20
"""Bytes that a process may grow by over a campaign, after its first batch."""
ANSWER_S = 60.0


@dataclass
class Result:
    """``grown``: bytes, of the process that grew most. ``served``: sound requests in between."""

    sent: int = 0
    grown: int = 0
    served: int = 0


class Watch:
    """Memory and lives of a cluster's processes over one campaign."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._pids = {member.name: member.pid for member in cluster.members}
        self._before: dict[str, int] = {}

    def look(self) -> int:
        """Bytes grown since the first look. Raises AssertionError where a process died or grew past MEMORY."""
        now = self._cluster.resident()
        died = [member.name for member in self._cluster.members if member.pid != self._pids[member.name]]
        if died or set(now) != set(self._pids):
            raise AssertionError(f"ended: {died or set(self._pids) - set(now)}; {self._cluster.surprises}")
        self._before = self._before or now
        grown = {name: size - self._before[name] for name, size in now.items()}
        most = max(grown, key=lambda name: grown[name])
        if grown[most] > MEMORY:
            raise AssertionError(f"{most} grew by {grown[most] >> 20} MiB")
        return grown[most]


async def _batches(
    cluster: Cluster, valid: Valid, count: int, frames: Frames, send: Callable[[list[bytes]], Any]
) -> Result:
    watch, result, served = Watch(cluster), Result(), valid.served
    while result.sent < count:
        batch = list(frames.take(min(BATCH, count - result.sent)))
        await send(batch)
        result.sent += BATCH
        await valid.check()
        result.grown = watch.look()
    result.sent, result.served = min(result.sent, count), valid.served - served
    return result


async def scheduler_front(cluster: Cluster, valid: Valid, count: int, rng: random.Random) -> Result:
    """As nobody, and as a detokenizer, a frontend or an operator."""
    frames = Frames(m.ToSchedulerFront, rng, targets.to_scheduler)

    async def send(batch: list[bytes]) -> None:
        kind = rng.choice(("", "detokenizer", "detokenizer", "frontend", "operator"))
        said = hello(kind) if kind else None
        stranger = Stranger(front_endpoint(cluster.address), said.incarnation if said else "", said)
        for frame in batch:
            stranger.send_frame(frame)
        await _several_frames(stranger, rng)

    return await _batches(cluster, valid, count, frames, send)


async def scheduler_workers(cluster: Cluster, valid: Valid, count: int, rng: random.Random) -> Result:
    """As nobody, and as a worker that knows its lease and goes as far as it is let."""
    lease = m.Lease(1, 0, 1)

    def sound(rng: random.Random) -> list[Any]:
        step = rng.randrange(1, 4)
        return targets.to_workers_socket(rng) + [
            plain(x)
            for x in (m.Loaded(lease, 100, 2048, targets.VOCAB), m.Ready(lease), m.StepResult(lease, step, b""))
        ]

    frames = Frames(m.ToSchedulerWorkers, rng, sound)

    async def send(batch: list[bytes]) -> None:
        nonlocal lease
        said = hello("gpu_worker") if rng.random() < 0.7 else None
        stranger = Stranger(worker_endpoint(cluster.address), said.incarnation if said else "", said)
        if said:
            assigned = await _receive(stranger, m.FromSchedulerWorkers, m.Assign)
            lease = assigned.lease
            if rng.random() < 0.5:
                stranger.send(plain(m.Loaded(lease, 100, 2048, targets.VOCAB)))
                await _receive(stranger, m.FromSchedulerWorkers, m.Configure)
                if rng.random() < 0.5:
                    stranger.send(plain(m.Ready(lease)))
        for frame in batch:
            stranger.send_frame(frame)
        if said:  # that it is gone is known before the next sound request is placed
            stranger.send(plain(m.Bye()))
            stranger.send(plain(m.Heartbeat()))
            await _receive(stranger, m.FromSchedulerWorkers, m.Bye)
        await _several_frames(stranger, rng)

    return await _batches(cluster, valid, count, frames, send)


async def detokenizer_router(cluster: Cluster, valid: Valid, count: int, rng: random.Random) -> Result:
    """As an Engine."""
    frames = Frames(m.ToDetokenizer, rng, targets.to_detokenizer)
    (path,) = [path for path in (cluster.folder / "s").iterdir() if path.name.startswith("detokenizer-")]

    async def send(batch: list[bytes]) -> None:
        stranger = Stranger(f"ipc://{path}")
        for frame in batch:
            stranger.send_frame(frame)
        await _several_frames(stranger, rng)

    return await _batches(cluster, valid, count, frames, send)


async def engine_dealers(count: int, rng: random.Random) -> Result:
    """Both of an Engine's sockets, from a scheduler and a detokenizer that lie. Peers and Bye are orders."""
    peers = FakePeers()
    await peers.start()
    try:
        await peers.check()
        orders = (m.Peers, m.Bye)
        victim = peers.engine.submit(ids=[7])
        supplies = [
            (
                Frames(m.FromSchedulerFront, rng, targets.from_scheduler, orders),
                peers.scheduler,
                lambda: peers.front_peer,
            ),
            (
                Frames(m.FromDetokenizer, rng, lambda _: targets.to_engine(victim.uid), orders),
                peers.detokenizer,
                lambda: peers.text_peer,
            ),
        ]
        result, before = Result(), 0
        while result.sent < count:
            victim = peers.engine.submit(ids=[7], params=SamplingParams(max_tokens=9))
            frames, router, peer = rng.choice(supplies)
            for frame in frames.take(min(BATCH, count - result.sent)):
                router.send_frame(peer(), frame)
            result.sent += BATCH
            await asyncio.sleep(0)
            peers.engine.submit(ids=[7]).abort()  # its number may have been in what was sent
            await peers.check()
            victim.abort()
            result.served += 1
            before = before or resident_bytes()
            result.grown = resident_bytes() - before
        if result.grown > MEMORY:
            raise AssertionError(f"the Engine's process grew by {result.grown >> 20} MiB")
        result.sent = min(result.sent, count)
        return result
    finally:
        await peers.close()


async def worker_dealer(count: int, rng: random.Random) -> Result:
    """A worker's socket, from a scheduler that lies. Bye, Drain and an Assign of other sizes are orders.

    A lie in a plan costs the lease, so each few frames have a lease of their own.
    """
    async with LoneWorker(rng) as worker:
        frames = Frames(m.FromSchedulerWorkers, rng, worker.sound, (m.Bye, m.Drain), worker.order)

        async def lie(supply: Iterator[bytes]) -> int:
            await worker.open()
            if rng.random() < 0.02:
                worker.wire.send(worker.peer, m.Bye("it was silent", again=True))
            lot = itertools.islice(supply, rng.choice((1, 3, 10, 30, 100)))
            return sum(worker.wire.send_frame(worker.peer, frame) for frame in lot)

        return await _lies(worker, count, frames, lie)


async def detokenizer_dealer(count: int, rng: random.Random) -> Result:
    """A detokenizer's socket, from a scheduler that lies, about requests that are there. Bye is an order."""
    async with LoneDetokenizer(rng) as detokenizer:
        frames = Frames(m.FromSchedulerFront, rng, detokenizer.sound, (m.Bye,))

        async def lie(supply: Iterator[bytes]) -> int:
            await detokenizer.victims()
            lot = itertools.islice(supply, rng.choice((5, 10, 50)))
            return sum(detokenizer.wire.send_frame(detokenizer.peer, frame) for frame in lot)

        return await _lies(detokenizer, count, frames, lie)


async def _lies(
    alone: LoneWorker | LoneDetokenizer, count: int, frames: Frames,
    lie: Callable[[Iterator[bytes]], Awaitable[int]],
) -> Result:  # fmt: skip
    """``lie`` sends the next few frames, and returns how many it could."""
    await alone.check()
    watch, result = Watch(alone), Result()
    while result.sent < count:
        supply, sent = frames.take(min(BATCH, count - result.sent)), -1
        while sent:
            sent = await lie(supply)
            result.sent += sent
        await alone.check()
        result.served += 1
        result.grown = watch.look()
    return result


async def _several_frames(stranger: Stranger, rng: random.Random) -> None:
    """Messages of more frames than one, and of none that is not empty; then it goes, politely or not."""
    stranger.send_frames([rng.randbytes(3) for _ in range(rng.randrange(1, 5))])
    stranger.send_frames([b""])
    await asyncio.sleep(0.01)
    stranger.drain()
    stranger.close()


async def _receive(stranger: Stranger, union: Any, kind: type) -> Any:
    decoder = msgspec.msgpack.Decoder(union)
    async with asyncio.timeout(ANSWER_S):
        while True:
            for frame in stranger.drain():
                message = decoder.decode(frame)
                if isinstance(message, kind):
                    return message
            await asyncio.sleep(0.005)
