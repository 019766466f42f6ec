"""The ring of steps: what an entry says, which ones an answer has, and for how long they are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scheduler_house import House

from quire.proto.messages import GetView, StepView, View
from quire.scheduler.watch import Watch

IDLE: Any = SimpleNamespace(decodes=[], verifications=[], searches=[], chunks=[])
MOST = 256
"""Entries of an answer, as docs/look-inside.md says."""


def ring(*kinds: str) -> Watch:
    """``kinds``: "step", "again" for one that computes something again, "loss"."""
    watch, again = Watch(0, 0, 0), 0
    for kind in kinds:
        again += kind == "again"
        if kind == "loss":
            watch.event("loss", 0, 0.0)
        else:
            watch.step(0, IDLE, 0.0, 0.1, preemptions=0, recomputed=again)
    return watch


def numbers(found: list[StepView]) -> list[int]:
    return [entry.number for entry in found]


def test_a_step_counts_rows_that_draw_and_tokens_of_prompts() -> None:
    step: Any = SimpleNamespace(
        decodes=[0] * 3, verifications=[0] * 5, searches=[SimpleNamespace(rows=[1, 2]), SimpleNamespace(rows=[3] * 9)],
        chunks=[SimpleNamespace(tokens=8), SimpleNamespace(tokens=4)],
    )  # fmt: skip
    watch = Watch(6, 0, 0)
    watch.step(2, step, 50.0, 0.25, preemptions=0, recomputed=0)
    assert watch.since(0) == [StepView(7, "step", 2, 50.0, 0.25, 12, 3 + 5 + 2 + 9)]


def test_what_is_put_back_and_computed_again_is_told_once() -> None:
    watch = Watch(0, 4, 100)  # before anybody watched
    for preemptions, recomputed in ((4, 100), (6, 130), (6, 135), (7, 135)):
        watch.step(0, IDLE, 0.0, 0.1, preemptions, recomputed)
    assert [(each.preempted, each.recomputed) for each in watch.since(0)] == [(0, 0), (2, 30), (0, 5), (1, 0)]


def test_a_worker_that_comes_or_goes_computes_nothing() -> None:
    watch = Watch(0, 0, 0)
    watch.event("join", 3, 7.0)
    watch.event("loss", 3, 8.0, requeued=5)
    assert watch.since(0) == [
        StepView(1, "join", 3, 7.0, 0.0, 0, 0, 0, 0, 0), StepView(2, "loss", 3, 8.0, 0.0, 0, 0, 0, 0, 5),
    ]  # fmt: skip


def test_an_answer_begins_after_what_is_known() -> None:
    watch = ring(*["step"] * 5)
    assert numbers(watch.since(3)) == [4, 5] and watch.since(5) == []
    assert numbers(watch.since(-2)) == numbers(watch.since(0)) == [1, 2, 3, 4, 5]
    assert numbers(watch.since(6)) == [1, 2, 3, 4, 5]  # of a scheduler before this one


def test_an_answer_has_as_many_entries_as_the_page_takes() -> None:
    assert numbers(ring(*["step"] * MOST).since(0)) == list(range(1, MOST + 1))
    assert numbers(ring(*["step"] * (MOST + 1)).since(0)) == list(range(2, MOST + 2))
    assert numbers(ring(*["loss"] * (MOST + 1)).since(0)) == list(range(2, MOST + 2))


def test_what_is_computed_again_is_told_before_other_steps() -> None:
    watch = ring("step", "again", "loss", *["step"] * (MOST - 1))
    assert numbers(watch.since(0)) == [2, 3, *range(5, MOST + 3)]


def test_the_ring_has_the_last_1024() -> None:
    watch = ring(*["loss"] * 1030)
    assert (watch.ring[0].number, watch.ring[-1].number, len(watch.ring)) == (7, 1030, 1024)
    assert len(watch.since(0)) == MOST


def test_steps_are_kept_for_five_seconds_after_the_last_look() -> None:
    house = House()
    house.hello("f1", "frontend")
    for _ in range(2):  # each look is as good as the first
        house.members.on_front("f1", GetView(1, 0))
        assert house.told("f1", View)
        house.later(4.0)
        assert house.core.watch is not None
    house.later(1.0)
    assert house.core.watch is None
