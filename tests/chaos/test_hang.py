"""A worker that stands still is found by its silence; readiness says so, and its requests go on elsewhere."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.error
import urllib.request

from chaos.asks import against_oracle, difference, from_engine, make_asks
from chaos.cluster import Cluster, Shape, until
from quire.client.engine import Engine

LIMIT_S = 60.0
"""For what takes --worker-timeout, which is 1 s here, and a few heartbeats."""


def ready(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


async def is_ready(cluster: Cluster, status: int) -> bool:
    for _ in range(int(LIMIT_S / 0.1)):
        if await asyncio.to_thread(ready, cluster.port) == status:
            return True
        await asyncio.sleep(0.1)
    return False


async def has_replicas(engine: Engine, count: int) -> bool:
    for _ in range(int(LIMIT_S / 0.1)):
        if len((await engine.stats(30.0)).replicas) == count:
            return True
        await asyncio.sleep(0.1)
    return False


async def hang() -> None:
    rng = random.Random(8)
    shape = Shape(
        workers=1, detokenizers=1, frontends=1, scheduler_flags=["--worker-timeout=1"],
        worker_flags=["--delay-ms", "10", "20", "--vocab-size=2048"],
    )  # fmt: skip
    async with Cluster(shape, rng) as cluster:
        engine = Engine(cluster.address)
        await engine.start()
        try:
            await engine.wait_ready(60)
            assert await is_ready(cluster, 200)
            asks = make_asks(8, rng, longest=200)
            streams = [engine.submit(params=ask.params(), **ask.prompt_field()) for ask in asks[:6]]
            assert await until(lambda: any(child.tokens for stream in streams for child in stream.children), 30)
            (hung,) = cluster.of("worker")
            os.kill(hung.pid, signal.SIGSTOP)
            hung.told_to_end = True
            late = [engine.submit(params=ask.params(), **ask.prompt_field()) for ask in asks[6:]]
            assert await is_ready(cluster, 503), "nobody can run a request, and readiness does not say so"
            assert not any(stream.done for stream in late)
            streams += late
            cluster.add_worker()
            assert await is_ready(cluster, 200)
            got = [from_engine(await stream.collect(), stream.prompt_logprobs, ask)
                   for ask, stream in zip(asks, streams, strict=True)]  # fmt: skip
            again = [engine.submit(params=ask.params(), **ask.prompt_field()) for ask in asks]
            for ask, stream, found in zip(asks, again, got, strict=True):
                calm = from_engine(await stream.collect(), stream.prompt_logprobs, ask)
                assert stream.accepted is not None
                assert against_oracle(ask, stream.accepted.prompt_ids, found) is None, ask.name
                assert difference(found, calm) is None, ask.name
            os.kill(hung.pid, signal.SIGCONT)
            # It learns that it was sent away, and comes back: under another name, or as the process in its place.
            assert await has_replicas(engine, 2)
            assert cluster.surprises == []
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await engine.close()


def test_a_hung_worker() -> None:
    asyncio.run(hang())
