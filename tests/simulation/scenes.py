"""Plans that aim at what chance alone hardly reaches, each within a state that lasts for moments only.

A scene is given a plan without requests and faults, and makes its own of it: it needs a cluster that is slow in the
right place, and faults that wait for the right message. ``SCENES`` says how often each is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams

from .asks import Ask, draw_asks
from .draw_faults import draw_force
from .plan import EVENTS, LINK, LOADS, PROCESS, WORKER, Fault, Plan, WorkerShape

Scene = Callable[[random.Random, Plan], None]

AT_WORK: Mapping[str, Any] = {"span": 0.05, "hurry": 0.0, "odd": 0.0, "length": 40, "keys": [""]}
"""Users who ask for much at once and wait for it."""
LEAVING = sorted({*PROCESS, *LINK, *WORKER, *LOADS, "drain", "remove"})
"""What may strike a worker on its way out."""


def _add(rng: random.Random, plan: Plan, kind: str, target: str, other: str = "", **fields: Any) -> Fault:
    """One fault more; how hard it strikes is drawn where ``fields`` do not say."""
    fault = Fault(f"fault{len(plan.faults)}", kind)
    draw_force(rng, fault)
    fault.target, fault.other = target, other
    for name, value in fields.items():
        setattr(fault, name, round(value, 4) if isinstance(value, float) else value)
    plan.faults.append(fault)
    return fault


def _add_to_worker(rng: random.Random, plan: Plan, kind: str, worker: str, **fields: Any) -> None:
    if kind in LINK:
        _add(rng, plan, kind, *rng.choice([("s", worker), (worker, "s")]), **fields)
    else:
        _add(rng, plan, kind, worker, **fields)


def _steps(plan: Plan, seconds: float) -> None:
    for worker in plan.shape.workers:
        worker.step_low = worker.step_high = seconds


def _places(plan: Plan, letters: str) -> list[str]:
    return [place for place in plan.shape.places() if place[0] in letters]


def _open_line(plan: Plan) -> None:
    """Everybody is let in."""
    shape = plan.shape
    shape.max_num_queued_reqs, shape.max_num_queued_tokens, shape.queue_timeout = 2048, None, None


# -- workers that leave


def retreat(rng: random.Random, plan: Plan) -> None:
    """A worker is told to leave, while it serves or while it loads, and is struck on its way out."""
    shape, way = plan.shape, rng.choice(["draining", "leaving", "recalled"])
    plan.early = False
    shape.drain_timeout = rng.choice([2.0, 30.0] if way == "draining" else [0.0, 0.3, 2.0])
    _steps(plan, rng.choice([0.04, 0.1, 0.2]))
    worker = rng.choice(_places(plan, "w"))
    kind, first = rng.choice(["drain", "term"]), {"when": rng.uniform(0.02, 0.3)}
    if way == "leaving":
        kind = rng.choice(["remove", "remove", "drain"])
    elif way == "recalled":  # it loads yet when others serve
        load = WorkerShape(shape.workers[0].blocks, 0.04, 0.04, 1.0, rng.random() < 0.3)
        shape.workers = [*shape.workers[:2], load]
        kind, worker = rng.choice(["drain", "remove", "term"]), f"w{len(shape.workers) - 1}"
        first = {"after": rng.choice(["assign", "configure"]), "nth": 1, "when": rng.choice([0.0, 0.02, 0.1])}
    plan.asks = draw_asks(rng, shape, count=rng.choice([3, 6, 9]), habits=AT_WORK)
    kinds = LEAVING
    if rng.random() < 0.2:  # it says Hello again under the name that it has
        kinds = ["reset"]
        for each in shape.workers:
            each.keeps_name = True
    _add(rng, plan, kind, worker, **first)
    for _ in range(rng.choice([1, 2, 2, 3])):
        after, when = "drain", rng.choice([0.0, 0.0003, 0.003, 0.03])
        if way == "draining":
            after, when = "manage" if kind == "drain" else "drain", rng.choice([0.003, 0.02, 0.1])
        fields = {"after": after, "nth": 1, "when": when * rng.uniform(1.0, 2.0)}
        _add_to_worker(rng, plan, rng.choice(kinds), worker, **fields)


def loading(rng: random.Random, plan: Plan) -> None:
    """A worker hangs while it loads for another lease than its first, and perhaps it is told to leave then."""
    shape = plan.shape
    _steps(plan, 0.04)
    if rng.random() < 0.6:
        shape.workers = shape.workers[:1]
    plan.asks = draw_asks(rng, shape, count=rng.choice([3, 6]), habits=AT_WORK)
    worker = rng.choice(_places(plan, "w"))
    if rng.random() < 0.3:
        after = rng.choice(sorted(EVENTS))
        _add(rng, plan, "load_hangs", worker, after=after, nth=rng.randint(1, 4))
    else:
        _add(rng, plan, "load_hangs", worker, when=0.0)
    when = rng.uniform(0.02, 0.2)
    _add(rng, plan, rng.choice(["reset", "reset", "reset", "cut"]), "s", worker, when=when)
    if rng.random() < 0.6:
        _add(rng, plan, rng.choice(["drain", "remove", "term"]), worker, when=when + rng.uniform(0.2, 2.0))
        if rng.random() < 0.5:  # nobody comes in its place before it is found
            _add(rng, plan, "slow", "f0", "d0", value=0.001, seconds=640.0)


# -- requests that nobody waits for any more


def stuck(rng: random.Random, plan: Plan) -> None:
    """Workers hang in a step. Meanwhile all who know of a request are gone; or its client leaves, and word of that is
    lost with the connection to the scheduler."""
    shape = plan.shape
    plan.early = False
    if rng.random() < 0.3:
        shape.pools = rng.choice(["embed", "classify"])
        for worker in shape.workers:
            worker.drafts = 0
    _open_line(plan)
    shape.whole, shape.chunked = False, True
    shape.rows = rng.choice([2, 3, 6])
    shape.budget = shape.rows + rng.choice([0, 2, 8, 40])
    shape.step_timeout, shape.worker_timeout = 30.0, 15.0
    _steps(plan, 0.04)
    count = rng.choice([4, 6, 8])
    gone = rng.random() < 0.5
    shape.frontends = shape.frontends if gone else 2
    plan.asks = draw_asks(rng, shape, count=count, habits={**AT_WORK, "beams": 0.5, "span": 0.0})
    hangs = rng.choice([0.0, 0.01, 0.04])
    for worker in _places(plan, "w"):
        _add(rng, plan, "step_hangs", worker, when=hangs)
    then = hangs + rng.uniform(0.1, 1.0)
    if gone:
        kind = rng.choice(["kill", "kill", "vanish"])
        for place in _places(plan, "df"):
            _add(rng, plan, kind, place, when=then)
        return
    _add(rng, plan, "leaves", "f0", when=then)
    nth = sum(ask.frontend == 0 for ask in plan.asks) + rng.choice([0, 1, 1, 2])  # behind those of its frontend
    when = rng.choice([0.0, 0.0001, 0.0003])
    for detokenizer in _places(plan, "d"):
        _add(rng, plan, rng.choice(["reset", "reset", "cut"]), "s", detokenizer, after="abort", nth=nth, when=when)


def together(rng: random.Random, plan: Plan) -> None:
    """Workers and detokenizers are lost at one moment, with results on their way from the ones to the others; the
    scheduler may stand still meanwhile, and find all of it at once."""
    plan.early = False
    plan.asks = draw_asks(rng, plan.shape, habits={**AT_WORK, "beams": 0.8, "rich": 0.6})
    kind = rng.choice(["kill", "reset", "reset"])
    nth, when = rng.randint(1, 20), rng.choice([0.0, 0.0001, 0.0002, 0.0004])
    if rng.random() < 0.6:
        kind, nth, when = "kill", rng.randint(1, 8), rng.choice([0.002, 0.01])
        _add(rng, plan, "hang", "s", after="result", nth=nth, seconds=0.05)
    for place in _places(plan, "wd"):
        whom = ("s", place) if kind == "reset" else (place,)
        _add(rng, plan, kind, *whom, after="result", nth=nth, when=when)


def lost_tokens(rng: random.Random, plan: Plan) -> None:
    """A connection to a detokenizer breaks with tokens on their way, and is made again before the scheduler, which
    stands still, could notice."""
    plan.early = False
    _steps(plan, 0.02)
    plan.asks = draw_asks(rng, plan.shape, habits={**AT_WORK, "beams": 0.2})
    after, nth = rng.choice(["tokens", "tokens", "tokens", "beams"]), rng.randint(1, 15)
    _add(rng, plan, "hang", "s", after=after, nth=nth, seconds=rng.choice([0.05, 0.5, 1.5]))
    for detokenizer in _places(plan, "d"):
        _add(rng, plan, "reset", "s", detokenizer, after=after, nth=nth, when=rng.choice([0.0, 0.0001, 0.0003]))


# -- prompts in quarantine


def quarantine(rng: random.Random, plan: Plan) -> None:
    """A prompt kills the detokenizers that prepare it. When one asks to begin with it, something else happens too."""
    plan.asks = draw_asks(rng, plan.shape, poison=frozenset(("detokenizer",)), habits=AT_WORK)
    frontend = next(f"f{ask.frontend}" for ask in plan.asks if ask.poison)
    for _ in range(rng.choice([1, 1, 2])):
        kind = rng.choice(["leaves", "leaves", "term", "term", "kill", "hang", "cut", "slow", "stall", "reset"])
        detokenizer = rng.choice(_places(plan, "d"))
        whom = {"leaves": (frontend,), "term": (frontend,), "kill": (rng.choice(["s", detokenizer, frontend]),)}
        whom |= {"hang": (rng.choice([frontend, detokenizer]),)}
        when = rng.choice([0.0, 0.0001, 0.0005])
        fields = {"after": "quarantined", "nth": rng.randint(1, 4), "when": when}
        _add(rng, plan, kind, *whom.get(kind, (frontend, detokenizer)), **fields)


def slow_quarantine(rng: random.Random, plan: Plan) -> None:
    """A request that two schedulers were lost with is to begin alone; the answer takes long, and the third scheduler is
    lost meanwhile."""
    shape = plan.shape
    plan.early, shape.frontends, shape.detokenizers, shape.rows = False, 1, 1, 2
    shape.chunked, shape.whole, shape.max_model_len, shape.budget = True, False, 40, 40
    _open_line(plan)
    shape.workers = [WorkerShape(20, 0.5, 0.5)]
    search = SamplingParams(use_beam_search=True, temperature=0.0, n=2, max_tokens=8, ignore_eos=True)
    plan.asks = [Ask(name="ask0", params=search)]
    if shape.pools:
        shape.budget = 3
        plan.asks = [Ask(name="ask0", ids=[*range(4, 28)], pooling=PoolingParams())]
    delay = rng.uniform(0.7, 2.0)
    _add(rng, plan, "slow", "f0", "d0", value=delay, seconds=60.0)
    for nth in (1, 2):
        _add(rng, plan, "kill", "s", after="text", nth=nth, when=delay + rng.uniform(0.02, 0.3))
    _add(rng, plan, "kill", "s", after="quarantined", nth=1, when=rng.uniform(0.0, delay))


# -- words that come late


def late_stops(rng: random.Random, plan: Plan) -> None:
    """A stop string is found in a sequence that has lost its worker and begins again elsewhere: word of it comes
    late."""
    shape = plan.shape
    plan.early, shape.pools, shape.whole, shape.chunked, shape.max_model_len = False, "", False, True, 120
    shape.rows = shape.budget = rng.choice([1, 1, 2])
    shape.workers = [WorkerShape(60, 0.02, 0.03) for _ in range(2)]
    plan.asks = draw_asks(rng, shape, count=rng.choice([1, 2]), habits={**AT_WORK, "rich": 0.7, "beams": 0.0})
    for detokenizer in _places(plan, "d"):
        _add(rng, plan, "slow", "s", detokenizer, value=rng.choice([0.05, 0.1, 0.2]), seconds=8.0)
    for nth in rng.sample(range(2, 25), rng.choice([2, 3, 4])):
        _add_to_worker(rng, plan, rng.choice(["kill", "reset"]), rng.choice(["w0", "w1"]), after="tokens", nth=nth)


def late_answers(rng: random.Random, plan: Plan) -> None:
    """A beam search waits for the answer of its detokenizer when it loses its worker, and the answer is lost when it
    has begun again elsewhere."""
    shape = plan.shape
    plan.early, shape.pools, shape.whole, shape.chunked, shape.max_model_len = False, "", False, True, 120
    shape.rows = shape.budget = rng.choice([2, 3])
    _open_line(plan)
    shape.workers = [WorkerShape(60, 0.02, 0.03) for _ in range(2)]
    search = SamplingParams(use_beam_search=True, temperature=0.0, n=2, max_tokens=6, stop=["zz"], ignore_eos=True)
    ids = [rng.randrange(3, 30) for _ in range(rng.randint(12, 40))]
    plan.asks = [Ask(name=f"ask{at}", ids=ids[at:], params=search) for at in range(rng.choice([1, 2]))]
    for detokenizer in _places(plan, "d"):
        _add(rng, plan, "slow", "s", detokenizer, value=rng.choice([0.1, 0.2]), seconds=8.0)
    nth = rng.randint(1, 4)
    for worker in ("w0", "w1")[: rng.choice([1, 2])]:
        _add_to_worker(rng, plan, rng.choice(["kill", "reset"]), worker, after="beams", nth=nth)
    for detokenizer in _places(plan, "d"):
        _add(rng, plan, "reset", "s", detokenizer, after="beams", nth=nth, when=rng.uniform(0.02, 0.3))


def crowd(rng: random.Random, plan: Plan) -> None:
    """Sequences that decode need the blocks of one that came later, whose prompt is not done yet."""
    shape = plan.shape
    plan.early, shape.pools, shape.whole, shape.chunked, shape.block_size = False, "", False, True, 8
    shape.max_model_len, shape.rows, shape.budget = 64, 5, 5
    _open_line(plan)
    shape.workers = [WorkerShape(rng.randint(16, 24), 0.01, 0.02)]
    long = SamplingParams(max_tokens=45, ignore_eos=True)
    plan.asks = [Ask(name=f"ask{at}", ids=[4 + at] * rng.randint(1, 9), params=long) for at in range(3)]
    late = SamplingParams(max_tokens=4)
    if rng.random() < 0.7:
        late = SamplingParams(use_beam_search=True, temperature=0.0, n=2, max_tokens=4)
    ids = [rng.randrange(3, 30) for _ in range(rng.randint(30, 45))]
    plan.asks.append(Ask(name="ask3", ids=ids, params=late, when=round(rng.uniform(0.02, 0.4), 4)))


# -- workers that sleep


def slumber(rng: random.Random, plan: Plan) -> None:
    """An administrator lets the workers sleep and wakes them. They are struck as they fall asleep, while they sleep, or
    as they load again; or one hangs in a step, or as it loads again, when all are to sleep."""
    shape, worker = plan.shape, rng.choice(_places(plan, "w"))
    plan.early = False
    _open_line(plan)
    _steps(plan, rng.choice([0.01, 0.04, 0.2]))
    plan.asks = draw_asks(rng, shape, count=rng.choice([3, 6]), habits=AT_WORK)
    begins, lasts = rng.uniform(0.03, 0.3), rng.choice([0.5, 3.0, 20.0])
    way = rng.choice(["falling", "falling", "asleep", "asleep", "asleep", "waking", "hung"])
    if way == "hung":
        if rng.random() < 0.5:
            _add(rng, plan, "step_hangs", worker, when=0.0)
        else:
            _add(rng, plan, "load_hangs", worker, when=0.0)
            lasts = 0.0
    _add(rng, plan, "sleep", "s", when=begins, seconds=lasts, value=rng.choice([1.0, 2.0]))
    if way == "hung":  # nobody says that it sleeps; the limit is that on loading
        again = begins + lasts + rng.uniform(0.5, 1.5)
        _add(rng, plan, "sleep", "s", when=again, seconds=640.0, value=rng.choice([1.0, 2.0]))
        return
    if rng.random() < 0.2:  # more is put away, or all are to sleep again as they wake
        again = begins + rng.choice([0.5 * lasts, lasts, lasts + 0.01])
        _add(rng, plan, "sleep", "s", when=again, seconds=lasts, value=2.0)
    kinds = LEAVING
    if rng.random() < 0.2:  # it says Hello again under the name that it has
        kinds = ["reset"]
        for each in shape.workers:
            each.keeps_name = True
    for _ in range(rng.choice([1, 2, 2, 3])):
        after, nth, when = "rest", 1, rng.choice([0.0, 0.0001, 0.003, 0.03])
        if way == "asleep":
            after, when = "rested", rng.uniform(0.0, 0.8) * lasts
        elif way == "waking":
            after, nth = rng.choice(["assign", "configure"]), rng.randint(1, len(shape.workers))
        kind = rng.choice(kinds)
        if way == "waking" and rng.random() < 0.2:  # of what it loads next, which it does not get to here
            kind, after, when = "load_hangs", "configure", 0.0
        _add_to_worker(rng, plan, kind, worker, after=after, nth=nth, when=when)


SCENES: dict[Scene, float] = {
    retreat: 0.035, stuck: 0.02, quarantine: 0.012, together: 0.014, loading: 0.006, lost_tokens: 0.006,
    late_stops: 0.01, late_answers: 0.004, crowd: 0.004, slow_quarantine: 0.003,
}  # fmt: skip
"""Of all histories, how many are such a scene."""
SLUMBERS = 0.012
"""And how many of the others are a ``slumber``, which is newer."""
