"""Plans that failed once do so no more, and those that find a fault put in by hand still find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.broken import BROKEN
from simulation.kept import BY_HAND, PLANS, load
from simulation.run import run_plan


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_mended_stays_so(path: Path) -> None:
    assert run_plan(load(path).plan).failures == []


@pytest.mark.parametrize("path", sorted(BY_HAND.glob("*.json")), ids=lambda path: path.stem)
def test_a_fault_put_in_by_hand_is_found(path: Path) -> None:
    kept = load(path)
    assert run_plan(kept.plan).failures == []
    with BROKEN[kept.was].put_in():
        assert run_plan(kept.plan).rule == kept.rule
