"""Histories of whole clusters: without faults everything must come at once, and one seed is one history."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.asks import Ask
from simulation.draw import draw
from simulation.kept import PLANS, load
from simulation.plan import Fault, Plan
from simulation.show import transcript
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


def test_a_transcript_has_what_goes_between_frontends_and_detokenizers() -> None:
    plan = Plan(1, asks=[Ask(name="ask0")], faults=[Fault("fault0", "kill", "d0", after="text", nth=4)])
    lines, record = transcript(plan)
    assert record.failures == []
    said = [line for line in lines if line.startswith(("f0.1 >", "f0.1 <"))]
    assert said[:2] == [
        "f0.1 > detokenizer-d0.1: Tokenize ask0 attempt 0", "f0.1 < detokenizer-d0.1: Accepted ask0 attempt 0",
    ]  # fmt: skip
    assert any(line.startswith("f0.1 > detokenizer-d0.2: Tokenize ask0 attempt 1 resumes 0 with ") for line in said)
