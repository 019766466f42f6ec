"""Histories of whole clusters: without faults everything must come at once, and one seed is one history."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.kept import PLANS, load
from simulation.plan import Plan, draw
from simulation.world import World


def history(plan: Plan) -> tuple[list[str], list[str]]:
    """Failures, and the transcript."""
    lines: list[str] = []
    failures = World(plan, lines).run().failures
    return [f"{each.rule} | {each.text}" for each in failures], lines


@pytest.mark.parametrize("seed", range(40))
def test_without_faults(seed: int) -> None:
    plan = draw(seed)
    plan.faults = []
    assert World(plan).run().failures == []


@pytest.mark.parametrize("seed", [3, 11, 29])
def test_a_seed_is_one_history(seed: int) -> None:
    first, second = history(draw(seed)), history(draw(seed))
    assert first == second
    assert first[1]


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_what_failed_once(path: Path) -> None:
    assert World(load(path).plan).run().failures == []
