"""Some thousand inputs for each socket and the HTTP port; `python bench/fuzz.py` sends a hundred thousand."""

from __future__ import annotations

import asyncio
import random

from chaos.cluster import Cluster

from fuzz import sockets, targets, web

COUNT = 1200


async def campaigns() -> None:
    rng = random.Random(17)
    async with Cluster(targets.shape(), rng) as cluster:
        valid = targets.Valid(cluster, rng)
        try:
            await valid.start()
            for campaign in (sockets.scheduler_front, sockets.scheduler_workers, sockets.detokenizer_router):
                result = await campaign(cluster, valid, COUNT, rng)
                print(campaign.__name__, result)
            result, statuses = await web.routes(cluster, valid, COUNT, rng)
            print("http", result, dict(statuses))
            assert statuses[200] and statuses[400]
            stats = await valid.engine.stats(60.0)
            print(stats)
            assert stats.bad_frames > COUNT // 4, "bad frames are counted"
            assert cluster.surprises == []
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await valid.engine.close()


def test_sockets_and_routes() -> None:
    asyncio.run(campaigns())


def test_an_engine_between_liars() -> None:
    print(asyncio.run(sockets.engine_dealers(COUNT * 3, random.Random(18))))


def test_a_worker_and_a_detokenizer_under_a_scheduler_that_lies() -> None:
    async def both() -> None:
        print(await asyncio.gather(sockets.worker_dealer(COUNT // 6, random.Random(19)),
                                   sockets.detokenizer_dealer(COUNT // 3, random.Random(20))))  # fmt: skip

    asyncio.run(both())
