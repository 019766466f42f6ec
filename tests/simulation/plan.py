"""What is going to happen in one history, as plain data: the cluster's shape, what users ask, what goes wrong.

A plan is drawn from its seed alone. Whatever chance decides later (how long a message takes, or a step) is a hash of
the seed and of what it is about, so that to leave out a part of a plan changes nothing else: that is how a failing one
is made smaller. Every field's default is its plainest value.
"""

from __future__ import annotations

import random

import msgspec

from quire.proto.config import EngineArgs

from .asks import Ask, draw_adapters, draw_asks


class WorkerShape(msgspec.Struct, omit_defaults=True):
    """One worker: its blocks, how long a step takes it (seconds) and how long its weights. ``keeps_name``: it comes
    back under the identity that it had, and with what it was doing. ``drafts``, ``draft_rows``: as in Loaded."""

    blocks: int = 64
    step_low: float = 0.004
    step_high: float = 0.004
    load: float = 0.1
    keeps_name: bool = False
    drafts: int = 0
    draft_rows: int = 2


class Shape(msgspec.Struct, omit_defaults=True):
    """The cluster, with the scheduler's flags under their names."""

    frontends: int = 1
    detokenizers: int = 1
    workers: list[WorkerShape] = msgspec.field(default_factory=lambda: [WorkerShape()])
    max_model_len: int = 64
    pools: str = ""
    """"embed" or "classify": this cluster pools, and generates nothing."""
    whole: bool = False
    adapter_slots: int = 0
    block_size: int = 8
    rows: int = 8
    budget: int = 256
    prefix_caching: bool = True
    chunked: bool = True
    policy: str = "fcfs"
    max_num_queued_reqs: int = 2048
    max_num_queued_tokens: int | None = None
    max_requests_per_key: int | None = None
    queue_timeout: float | None = None
    worker_timeout: float = 15.0
    step_timeout: float = 30.0
    drain_timeout: float = 30.0

    def args(self) -> EngineArgs:
        """The scheduler's flags."""
        return EngineArgs(
            block_size=self.block_size, max_num_seqs=self.rows, max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.prefix_caching, enable_chunked_prefill=self.chunked,
            scheduling_policy=self.policy, max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens, max_requests_per_key=self.max_requests_per_key,
            queue_timeout=self.queue_timeout, worker_timeout=self.worker_timeout, step_timeout=self.step_timeout,
            drain_timeout=self.drain_timeout,
        )  # fmt: skip

    def places(self) -> list[str]:
        """The names of all places for processes."""
        counts = {"w": len(self.workers), "d": self.detokenizers, "f": self.frontends}
        return ["s", *(f"{letter}{at}" for letter, count in counts.items() for at in range(count))]


class Fault(msgspec.Struct, omit_defaults=True):
    """One thing that goes wrong, or that somebody does to the cluster. ``faults.py`` has the kinds.

    It strikes at ``when`` (seconds), or so long after the ``nth`` message of the kind ``after`` is sent.
    """

    name: str
    kind: str
    target: str = ""
    other: str = ""
    when: float = 0.0
    after: str = ""
    nth: int = 0
    seconds: float = 0.0
    value: float = 0.0


class Plan(msgspec.Struct, omit_defaults=True):
    """One history. ``early``: users and faults come while the server starts; else once it is ready."""

    seed: int
    early: bool = False
    shape: Shape = msgspec.field(default_factory=Shape)
    asks: list[Ask] = []
    faults: list[Fault] = []


EVENTS = {
    "plan": 6.0, "result": 6.0, "submit": 1.0, "tokenize": 1.0, "accepted": 1.0, "text": 5.0, "hello": 0.7,
    "ready": 0.2, "unknown": 0.1, "reconcile": 0.3, "abort": 0.2,
}  # fmt: skip
"""Messages that a fault may wait for, by what they are, and about how many of each a request takes."""

PROCESS = ("kill", "kill", "kill", "stop", "stop", "hang", "vanish", "term")
LINK = ("cut", "cut", "one_way", "slow", "stall", "reset", "reset")
WORKER = ("step_fails", "step_hangs", "step_late", "answers_twice", "shrinks", "slot_fails")
OPERATOR = ("drain", "remove", "join", "clock")
FAMILIES = (PROCESS, LINK, WORKER, OPERATOR)


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
    poison = frozenset(kind for kind in ("worker", "detokenizer", "scheduler") if rng.random() < 0.04)
    asks = draw_asks(rng, shape, rng.random() < 0.15, poison)
    if shape.adapter_slots:
        draw_adapters(more, shape, asks)
    return Plan(seed, rng.random() < 0.15, shape, asks, draw_faults(rng, shape, asks))


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


def draw_faults(rng: random.Random, shape: Shape, asks: list[Ask]) -> list[Fault]:
    """What goes wrong. Each history has kinds of its own, and a number of its own, so that rare pairs are reached:
    many have one kind alone, and some nothing that goes wrong."""
    count = rng.choice([0, 1, 1, 2, 2, 3, 4, 6, 12])
    families = rng.sample(FAMILIES, rng.choice([1, 1, 1, 2, 2, 3, 4]))
    kinds = sorted({rng.choice(rng.choice(families)) for _ in range(rng.choice([1, 2, 3]))})
    places = shape.places()
    if rng.random() < 0.3:  # one kind of process has all the bad luck
        letter = rng.choice("wwsdf")
        places = [place for place in places if place[0] == letter]
    last = max((ask.when for ask in asks), default=0.0)
    by_event, begin = rng.random() < 0.5, rng.choice([0.0, 0.05])
    faults: list[Fault] = []
    for at in range(count):
        fault = Fault(f"fault{at}", rng.choice(kinds))
        if faults and rng.random() < 0.25:  # several at once
            fault.when, fault.after, fault.nth = faults[-1].when, faults[-1].after, faults[-1].nth
        elif by_event and rng.random() < 0.8:
            fault.after = rng.choice(sorted(EVENTS))
            fault.nth = 1 + int(rng.random() ** 2 * EVENTS[fault.after] * (2 + len(asks)))
            fault.when = rng.choice([0.0, 0.0, 0.0003, 0.003])
        else:
            fault.when = round(begin + rng.random() * (last + rng.choice([0.1, 0.3, 1.0, 4.0])), 4)
        _draw_rest(rng, fault, shape, places)
        faults.append(fault)
    return faults


def _draw_rest(rng: random.Random, fault: Fault, shape: Shape, places: list[str]) -> None:
    """Whom it strikes, for how long and how hard."""
    workers = [f"w{at}" for at in range(len(shape.workers))]
    fault.target = rng.choice(places)
    if fault.kind in (*WORKER, "drain", "remove"):
        fault.target = rng.choice(workers)
    elif fault.kind == "join":
        fault.target = rng.choice(["w", "w", "d"]) + str(rng.choice([5, 6]))
    elif fault.kind == "clock":
        fault.target, fault.value = rng.choice(["s", "s", "f0"]), rng.choice([-3600.0, -5.0, -0.5, 3600.0])
    elif fault.kind in LINK:
        fault.target, fault.other = _draw_link(rng, shape)
    if fault.kind in ("stop", "hang", "cut", "one_way", "stall"):
        fault.seconds = rng.choice([0.05, 0.5, 1.5, 2.5, 4.0, 8.0, 13.0, 25.0])
        if fault.kind in ("stop", "hang") and rng.random() < 0.1:
            fault.seconds = 70.0  # its supervisor kills it
        if fault.kind == "stop" and rng.random() < 0.05:
            fault.target = "v"  # the supervisor itself
    elif fault.kind == "slow":
        fault.seconds, fault.value = rng.choice([0.5, 3.0, 10.0]), rng.choice([0.05, 0.3, 2.0])
    elif fault.kind == "step_late":
        fault.value = rng.choice([0.3, 1.5, 3.0, 6.0])
    elif fault.kind == "shrinks":
        fault.value = rng.choice([0.3, 0.6, 0.9])


def _draw_link(rng: random.Random, shape: Shape) -> tuple[str, str]:
    """Two places that are connected, in either order."""
    links = [("s", place) for place in shape.places()[1:]]
    links += [(f"f{f}", f"d{d}") for f in range(shape.frontends) for d in range(shape.detokenizers)]
    pair = rng.choice(links)
    return pair if rng.random() < 0.5 else pair[::-1]
