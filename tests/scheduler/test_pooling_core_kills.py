"""Many prompts pooled by fake workers, whose answers show every wrong block, while processes are killed."""

import asyncio
import random
import sys

import pytest
from chaos.cluster import Cluster, Shape, until

from quire.client.engine import Engine
from quire.proto.pooling import PoolingParams
from quire.scheduler.fake.fake_model import cell, pooled

KILLS = ("worker", "detokenizer", "worker", "scheduler", "worker")


def expected(ids, params):
    return pooled(b"".join(cell(p, t).to_bytes(8, "little") for p, t in enumerate(ids)), params)


async def pool_through_kills(kind):
    rng = random.Random(5)
    shape = Shape(
        workers=2, detokenizers=2, frontends=0,
        scheduler_flags=["--max-num-batched-tokens=128", "--max-num-seqs=6"],
        worker_flags=[f"--pools={kind}", "--max-model-len=128", "--num-blocks=64", "--vocab-size=256", "--delay-ms",
                      "1", "8"],
        commands={"detokenizer": [sys.executable, "-P", "-m", "quire.detokenizer", "--runner=pooling",
                                  "--skip-tokenizer-init"]},
    )  # fmt: skip
    stems = [[rng.randrange(256) for _ in range(64)] for _ in range(3)]
    kinds = ["LAST", "MEAN", "ALL"]
    prompts, asked = [], []
    async with Cluster(shape, rng) as cluster:
        engine = Engine(cluster.address)

        def ask():
            kind = kinds[len(prompts) % 3]
            params = PoolingParams(task="token_embed" if kind == "ALL" else "embed", pooling=kind)
            ids = rng.choice(stems)[: rng.randrange(65)] + [rng.randrange(256) for _ in range(rng.randrange(1, 64))]
            prompts.append((ids, params))
            asked.append(engine.pool(ids=ids, params=params))

        await engine.start()
        try:
            await engine.wait_ready(60)
            for service in KILLS:
                hit = asked[:]
                assert await until(lambda service=service: cluster.of(service), 20)
                while sum(not each.done() for each in asked) < 60:
                    ask()
                await asyncio.wait([each for each in asked if not each.done()], return_when=asyncio.FIRST_COMPLETED)
                while sum(not each.done() for each in asked) < 40:  # however fast they were: some are open when it dies
                    ask()
                member = rng.choice(cluster.of(service))
                member.told_to_end = True
                member.process.kill()
                if hit:  # a prompt that three processes in a row die over would be taken for the cause
                    await asyncio.wait(hit, timeout=60)
            found = await asyncio.wait_for(asyncio.gather(*asked), 60)
            errors = cluster.errors()
        finally:
            await engine.close()
    assert not errors
    for (ids, each), answer in zip(prompts, found, strict=True):
        assert answer.prompt_ids == ids
        rows, data = expected(ids, each)
        assert answer.data.tobytes() == data
        assert answer.data.shape == ((rows, 8) if rows else (8,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunks", "whole"])
def test_no_answer_is_lost_or_wrong(kind):
    asyncio.run(pool_through_kills(kind))
