"""A request that kills what serves it gets a 500 at its third loss, and everybody else what they asked for."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from chaos.asks import Ask, difference, from_engine, make_asks
from chaos.cluster import Cluster, Shape, until
from chaos.poison import POISON
from quire.client.engine import Engine, RequestError
from quire.proto.params import SamplingParams

HERE = Path(__file__).parent
INNOCENTS = 24
FAKE = ["--delay-ms", "1", "3", "--vocab-size=2048"]


def poisoned(service: str) -> Shape:
    """A cluster whose processes of one service die of the prompt."""
    shape = Shape(frontends=0, worker_flags=FAKE, scheduler_flags=["--max-num-seqs=64"])
    shape.commands[service] = [sys.executable, "-P", str(HERE / "poison.py"), service]
    return shape


def submit(engine: Engine, ask: Ask):
    return engine.submit(params=ask.params(), **ask.prompt_field())


async def outcome(stream, ask: Ask):
    return from_engine(await stream.collect(), stream.prompt_logprobs, ask)


async def poison(service: str) -> None:
    rng = random.Random(5)
    asks = make_asks(INNOCENTS, rng, longest=60)
    async with Cluster(poisoned(service), rng) as cluster:
        engine = Engine(cluster.address)
        await engine.start()
        try:
            await engine.wait_ready(60)
            wanted = await asyncio.gather(*(outcome(submit(engine, ask), ask) for ask in asks))
            # All at once, the poison amid them: some are being looked at by a detokenizer while it does.
            streams = [submit(engine, ask) for ask in asks[: INNOCENTS // 2]]
            poisonous = engine.submit(ids=POISON, params=SamplingParams(max_tokens=50))
            streams += [submit(engine, ask) for ask in asks[INNOCENTS // 2 :]]
            others = [asyncio.ensure_future(outcome(*each)) for each in zip(streams, asks, strict=True)]
            with pytest.raises(RequestError) as caught:
                async with asyncio.timeout(60):
                    await poisonous.collect()
            assert caught.value.status == 500 and "3 times" in caught.value.message
            for ask, got, calm in zip(asks, await asyncio.gather(*others), wanted, strict=True):
                assert difference(got, calm) is None, ask.name
            codes = [code for member in cluster.members if member.service == service for code in member.codes]
            assert codes == [9, 9, 9]
            assert {surprise.split("-")[0] for surprise in cluster.surprises} == {service}
            assert await until(lambda: all(member.alive for member in cluster.members), 10)
            assert difference(await outcome(submit(engine, asks[0]), asks[0]), wanted[0]) is None
        except BaseException:
            print(cluster.logs())
            raise
        finally:
            await engine.close()


@pytest.mark.parametrize("service", ["worker", "detokenizer", "scheduler"])
def test_poison(service: str) -> None:
    asyncio.run(poison(service))
