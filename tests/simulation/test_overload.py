"""More than a cluster can do: who is refused is told when a place is likely to be free, and keys share what runs."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from statistics import mean

import pytest

from quire.proto.params import SamplingParams
from simulation.asks import A, Ask
from simulation.consumer import Consumer
from simulation.plan import Plan, Shape, WorkerShape
from simulation.world import World

STEP_S, TOKENS, ROWS = 0.2, 20, 2


def crowd(rng: random.Random, count: int, rate: float, keys: list[str], prompts: Sequence[int] = (1,)) -> list[Ask]:
    """Requests that come at random, each of ``TOKENS`` tokens after a prompt of one of these lengths."""
    asks, now = [], 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        params, ids = SamplingParams(max_tokens=TOKENS, ignore_eos=True), [A] * rng.choice(prompts)
        asks.append(Ask(name=f"ask{number}", when=round(now, 3), key=rng.choice(keys), ids=ids, params=params))
    return asks


def refusals(world: World) -> list[tuple[Consumer, float]]:
    """Those that were refused, and the seconds that each was told."""
    found = [(each, each.error) for each in world.consumers if each.error is not None]
    assert {error.status for _, error in found} == {429}
    return [(each, error.retry_after or 0.0) for each, error in found]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 2}, {"max_requests_per_key": 4}])
def test_retry_after_is_when_a_place_becomes_free(seed: int, limit: dict[str, int]) -> None:
    """By the rule of bench/overload.py: a refusal's is compared with the time until the next request was let in, or a
    second where that is less; the means agree within a factor of 2."""
    rng, rate = random.Random(seed), 2 * ROWS / (STEP_S * TOKENS)
    shape = Shape(rows=ROWS, workers=[WorkerShape(step_low=STEP_S, step_high=STEP_S)], **limit)
    world = World(Plan(seed, shape=shape, asks=crowd(rng, 200, rate, ["k"])))
    assert world.run().failures == []
    let_in = sorted(each.begun for each in world.consumers if each.error is None)
    told, waited = [], []
    for each, seconds in refusals(world):
        after = let_in[bisect_right(let_in, each.ended) :]
        if after:
            told.append(seconds)
            waited.append(max(1.0, after[0] - each.ended))
    assert len(told) > 40
    assert 0.5 < mean(told) / mean(waited) < 2


def test_a_long_prompt_is_told_to_wait_for_more_places_than_a_short_one() -> None:
    rng, rate = random.Random(0), 2 * ROWS / (STEP_S * TOKENS)
    shape = Shape(rows=ROWS, workers=[WorkerShape(step_low=STEP_S, step_high=STEP_S)], max_num_queued_tokens=24)
    world = World(Plan(0, shape=shape, asks=crowd(rng, 200, rate, ["k"], [4, 20])))
    assert world.run().failures == []
    told: dict[int, list[float]] = {4: [], 20: []}
    for each, seconds in refusals(world):
        told[len(each.ask.ids)].append(seconds)
    assert mean(told[20]) > 1.5 * mean(told[4])


def test_a_key_that_asks_for_little_does_not_wait_behind_one_that_asks_for_much() -> None:
    """Of nine requests of one key and one of another each second, the other's go next."""
    shape = Shape(rows=ROWS, workers=[WorkerShape(step_low=STEP_S, step_high=STEP_S)])
    asks = crowd(random.Random(1), 60, 4 * ROWS / (STEP_S * TOKENS), ["greedy"] * 9 + ["modest"])
    world = World(Plan(1, shape=shape, asks=asks))
    assert world.run().failures == []
    waits: dict[str, list[float]] = {}
    for each in world.consumers:
        assert each.request is not None and each.request.metrics.time_in_queue is not None
        waits.setdefault(each.ask.key, []).append(each.request.metrics.time_in_queue)
    assert max(waits["modest"]) < 2.5 * STEP_S * TOKENS
    assert mean(waits["greedy"]) > 4 * mean(waits["modest"])
