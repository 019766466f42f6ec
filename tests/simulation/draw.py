"""The plan of a seed, drawn from it alone.

What is newer than the rest is drawn from numbers of its own, so that most seeds mean what they meant before.
"""

from __future__ import annotations

import random

from .asks import draw_adapters, draw_asks
from .draw_faults import draw_faults, numbered
from .plan import Fault, Plan, Shape, WorkerShape
from .scenes import SCENES, SLUMBERS, slumber

LONG = 0.05
"""How many histories are long."""


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    rng = random.Random(seed)
    shape = draw_shape(rng)
    more = random.Random(f"{seed} more")  # of what is newer than the rest, which a seed means as it did before
    for worker in shape.workers:
        worker.keeps_name = more.random() < 0.15
    if more.random() < 0.04:  # a slow cluster whose line is soon full: what it tells those whom it refuses shows there
        shape.max_num_queued_tokens = more.choice([20, 60])
        for worker in shape.workers:
            worker.step_low = worker.step_high = 0.2
    if more.random() < 0.15:
        shape.adapter_slots = more.choice([1, 1, 2, 4])
    if (drafting := random.Random(f"{seed} drafts")).random() < 0.4 and not shape.pools:
        for worker in shape.workers:
            worker.drafts, worker.draft_rows = drafting.choice([0, 1, 3, 6]), drafting.choice([1, 2, 8])
    if (keeping := random.Random(f"{seed} tiers")).random() < 0.4 and not shape.whole:
        for worker in shape.workers:  # few places, so that they change hands, or many
            worker.slots, worker.disk = keeping.choice([0, 2, 7, 60]), keeping.random() < 0.4
            worker.rotten = keeping.choice([0, 0, 1, 2, 5])
    moving = random.Random(f"{seed} moves")
    shape.moves = moving.random() < 0.5
    if shape.moves and moving.random() < 0.4:
        for worker in shape.workers:
            worker.role = moving.choice(["prefill", "decode", "both"])
    poison = frozenset(kind for kind in ("worker", "detokenizer", "scheduler") if rng.random() < 0.04)
    overload = rng.random() < 0.15
    if overload and more.random() < 0.3:
        shape.queue_timeout = more.choice([0.5, 2.0, 10.0])
    asks = draw_asks(rng, shape, overload, poison)
    plan = Plan(seed, rng.random() < 0.15, shape, asks, draw_faults(rng, shape, asks))
    kind = more.random()
    if kind < LONG:
        _lengthen(more, plan, poison)
    elif kind < LONG + sum(SCENES.values()):
        scene = more.choices([*SCENES], [*SCENES.values()])[0]
        plan.asks, plan.faults = [], []
        scene(more, plan)
    elif (sleeping := random.Random(f"{seed} slumber")).random() < SLUMBERS:
        plan.asks, plan.faults = [], []
        slumber(sleeping, plan)
    if shape.adapter_slots:
        draw_adapters(more, shape, plan.asks)
    if moving.random() < 0.08:
        _draw_sleep(moving, plan)
    return plan


def _draw_sleep(rng: random.Random, plan: Plan) -> None:
    """An administrator has the workers sleep, once or twice."""
    last = max((ask.when for ask in plan.asks), default=0.0)
    for at in range(rng.choice([1, 1, 2])):
        fault = Fault(f"sleep{at}", "sleep", "s", when=round(rng.random() * (last + 0.5), 4))
        fault.seconds, fault.value = rng.choice([0.0, 0.05, 0.5, 3.0]), float(rng.choice([1, 2]))
        plan.faults.append(fault)


def _lengthen(rng: random.Random, plan: Plan, poison: frozenset[str]) -> None:
    """More requests, over more time, and more that goes wrong."""
    habits = {"span": rng.choice([10.0, 25.0])}
    plan.asks = draw_asks(rng, plan.shape, poison=poison, count=rng.choice([16, 30]), habits=habits)
    plan.faults = numbered([fault for _ in range(2) for fault in draw_faults(rng, plan.shape, plan.asks)])


def draw_shape(rng: random.Random) -> Shape:
    """A small cluster."""
    choice, chance = rng.choice, rng.random
    shape = Shape(frontends=choice([1, 1, 2]), detokenizers=choice([1, 2, 2]))
    shape.block_size, shape.max_model_len = choice([8, 8, 16]), choice([40, 64, 120])
    shape.rows = choice([1, 2, 3, 6, 10])
    shape.budget = shape.rows + choice([0, 1, 5, 40, 200])
    shape.prefix_caching, shape.chunked = chance() < 0.7, chance() < 0.75
    shape.policy = choice(["fcfs", "priority"])
    if chance() < 0.06:
        shape.pools = choice(["embed", "classify"])
        shape.whole = chance() < 0.5
        if shape.whole:
            shape.chunked, shape.budget = False, shape.max_model_len
    if chance() < 0.2:
        shape.max_num_queued_reqs = choice([1, 2, 4])
    if chance() < 0.1:
        shape.max_num_queued_tokens = choice([20, 60, 200])
    if chance() < 0.1:
        shape.max_requests_per_key = choice([1, 2, 3])
    if chance() < 0.05:
        shape.queue_timeout = choice([0.5, 2.0, 10.0])
    shape.worker_timeout, shape.step_timeout = choice([2.0, 3.0, 15.0]), choice([2.0, 4.0, 30.0])
    shape.drain_timeout = choice([0.0, 0.3, 2.0, 30.0])
    need = -(-(shape.max_model_len - 1) // shape.block_size)
    slow = choice([0.002, 0.01, 0.04])
    shape.workers = [
        WorkerShape(need + choice([0, 1, 3, 10, 40]), slow / choice([1, 2, 10]), slow, choice([0.0, 0.1, 0.1, 1.0]))
        for _ in range(choice([1, 1, 2, 2, 3]))
    ]
    return shape
