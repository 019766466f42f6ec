"""More than a cluster can do: who is refused is told when a place is likely to be free, and keys share what runs."""

from __future__ import annotations

import random
from bisect import bisect_right
from statistics import mean

import pytest

from quire.proto.params import SamplingParams
from simulation.asks import Ask
from simulation.plan import Plan, Shape, WorkerShape
from simulation.world import World

STEP_S, TOKENS, ROWS = 0.2, 20, 2


def crowd(rng: random.Random, count: int, rate: float, keys: list[str]) -> list[Ask]:
    """Requests that come at random, each of ``TOKENS`` tokens."""
    asks, now = [], 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        asks.append(Ask(name=f"ask{number}", when=round(now, 3), key=rng.choice(keys), params=params))
    return asks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [{"max_num_queued_reqs": 2}, {"max_requests_per_key": 4}])
def test_retry_after_is_when_a_place_becomes_free(seed: int, limit: dict[str, int]) -> None:
    """By the rule of bench/overload.py: a refusal's is compared with the time until the next request was let in, or a
    second where that is less; the means agree within a factor of 2."""
    capacity = ROWS / (STEP_S * TOKENS)
    shape = Shape(rows=ROWS, workers=[WorkerShape(step_low=STEP_S, step_high=STEP_S)], **limit)
    world = World(Plan(seed, shape, crowd(random.Random(seed), 200, 2 * capacity, ["k"])))
    assert world.run().failures == []
    refused = [each for each in world.consumers if each.error is not None]
    let_in = sorted(each.begun for each in world.consumers if each.error is None)
    assert {each.error.status for each in refused if each.error is not None} == {429}
    told, waited = [], []
    for each in refused:
        after = let_in[bisect_right(let_in, each.ended) :]
        if after and each.error is not None:
            told.append(each.error.retry_after or 0.0)
            waited.append(max(1.0, after[0] - each.ended))
    assert len(told) > 40
    assert 0.5 < mean(told) / mean(waited) < 2


def test_a_key_that_asks_for_little_does_not_wait_behind_one_that_asks_for_much() -> None:
    """Of nine requests of one key and one of another each second, the other's go next."""
    shape = Shape(rows=ROWS, workers=[WorkerShape(step_low=STEP_S, step_high=STEP_S)])
    asks = crowd(random.Random(1), 60, 4 * ROWS / (STEP_S * TOKENS), ["greedy"] * 9 + ["modest"])
    world = World(Plan(1, shape, asks))
    assert world.run().failures == []
    waits: dict[str, list[float]] = {}
    for each in world.consumers:
        assert each.request is not None and each.request.metrics.time_in_queue is not None
        waits.setdefault(each.ask.key, []).append(each.request.metrics.time_in_queue)
    assert max(waits["modest"]) < 2.5 * STEP_S * TOKENS
    assert mean(waits["greedy"]) > 4 * mean(waits["modest"])
