"""What goes wrong, drawn by chance: which kinds of faults, when, whom they strike and how hard."""

from __future__ import annotations

import random

from .asks import Ask
from .plan import EVENTS, FAMILIES, LINK, WORKER, Fault, Shape


def numbered(faults: list[Fault]) -> list[Fault]:
    """The same, each with a name of its own."""
    for at, fault in enumerate(faults):
        fault.name = f"fault{at}"
    return faults


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
        _draw_target(rng, fault, shape, places)
        draw_force(rng, fault)
        faults.append(fault)
    return faults


def _draw_target(rng: random.Random, fault: Fault, shape: Shape, places: list[str]) -> None:
    """Whom it strikes."""
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


def draw_force(rng: random.Random, fault: Fault) -> None:
    """For how long it strikes, and how hard."""
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
