"""Scenes reach what they are for, and a scene is one plan."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from simulation.draw import draw_shape
from simulation.plan import Plan
from simulation.run import run_plan
from simulation.scenes import (
    LEAVING,
    SCENES,
    Scene,
    crowd,
    late_answers,
    late_stops,
    loading,
    lost_tokens,
    quarantine,
    retreat,
    slow_quarantine,
    slumber,
    stuck,
    together,
)  # fmt: skip

MOST = 60


def make(scene: Scene, seed: int) -> Plan:
    """One of this kind."""
    rng = random.Random(seed)
    plan = Plan(seed, shape=draw_shape(rng))
    scene(rng, plan)
    return plan


@pytest.mark.parametrize(
    ("scene", "part"),
    [
        (retreat, "| worker draining"),
        (retreat, "| worker leaving"),
        (retreat, "| worker recalled"),
        (loading, "| hung while it loads |"),
        (stuck, "| owner forgotten |"),
        (stuck, "| not believed in |"),
        (together, "| waiting | undelivered |"),
        (lost_tokens, "| tokens missing |"),
        (quarantine, "asks to begin | aborted |"),
        (slow_quarantine, "asks to begin | replaced |"),
        (late_stops, "| waiting | stop string |"),
        (late_answers, "| prefill | answer lost |"),
        (crowd, "| prefill | preempted |"),
        (slumber, "| asleep | hung while it loads |"),
        (slumber, "| asleep | second Hello |"),
        (slumber, "| recalled | Rested |"),
        (slumber, "| load_hangs | worker configuring"),
    ],
)
def test_it_reaches_what_it_is_for(scene: Scene, part: str) -> None:
    marks = Counter[str]()
    for seed in range(MOST):
        record = run_plan(make(scene, seed))
        assert record.failures == [], seed
        marks.update(mark for mark, count in record.marks.items() if count and part in mark)
        if marks:
            return
    raise AssertionError(f"no mark like {part!r} in {MOST} histories")


def test_every_fault_strikes_a_worker_that_sleeps() -> None:
    missing = {f"fault | {kind} | worker asleep" for kind in LEAVING}
    for seed in range(2 * MOST):
        record = run_plan(make(slumber, seed))
        assert record.failures == [], seed
        missing -= {mark for mark, count in record.marks.items() if count}
        if not missing:
            return
    raise AssertionError(f"not reached in {2 * MOST} histories: {sorted(missing)}")


@pytest.mark.parametrize("scene", [*SCENES, slumber])
def test_a_seed_is_one_plan(scene: Scene) -> None:
    assert msgspec.json.encode(make(scene, 3)) == msgspec.json.encode(make(scene, 3))
