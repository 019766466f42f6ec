"""The spans that a scheduler makes of traced requests, and that it does nothing else because of them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import recorded_world
import scheduler_rig
import scheduler_world
from scheduler_rig import Rig

from quire.proto.codec import from_i32
from quire.proto.messages import Submit, TracedSubmit, TraceRows
from quire.proto.spans import Span, Spans
from quire.scheduler.replay import Replay
from quire.scheduler.traced import TracedScheduler

CONTEXT = bytes(range(1, 25))
MADE: list[Span] = []
"""The spans of the last scheduler that was made."""


class Traced(TracedScheduler):
    """All that it is sent is traced."""

    def __init__(self, config, clock):
        MADE.clear()
        super().__init__(config, clock, Spans(MADE.append, random.Random(1)), rows=True)

    def submit(self, owner: str, message: Submit) -> None:
        told = {name: getattr(message, name) for name in Submit.__struct_fields__}
        super().submit(owner, TracedSubmit(**told, trace=CONTEXT))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_rig, "Scheduler", Traced)


def phases(rig: Rig, index: int = 0, of: int = 1) -> list[str]:
    """What sequence ``index`` of the request that came ``of``-th was in, one after the other, without gaps."""
    spans = MADE
    schedules = {span.id: span for span in spans if span.name == "schedule"}
    assert all(span.trace + span.parent == CONTEXT for span in schedules.values())
    mine = sorted(schedules.values(), key=lambda span: span.start)[of - 1]
    found = [s for s in spans if s.parent == mine.id and s.attributes["quire.sequence"] == index]
    assert all(before.end == after.start for before, after in pairwise(found))
    assert found[0].start == mine.start and found[-1].end <= mine.end
    return [span.name for span in found]


def events(rig: Rig, name: str) -> list[dict]:
    return [told for span in MADE for what, _, told in span.events if what == name]


def test_every_child_has_its_own_phases(traced: None) -> None:
    rig = Rig()
    rig.submit(20, n=3, max_tokens=5)
    rig.run()
    assert [phases(rig, index) for index in range(3)] == [["queue", "prefill", "decode"]] * 3
    assert rig.core._followed == {} and rig.core._prefills == {} and not rig.core._siblings


def test_a_preempted_request_waits_again(traced: None) -> None:
    rig = Rig(blocks=6)
    for _ in range(2):
        rig.now += 1
        rig.submit(8, max_tokens=30)
    rig.run()
    (event,) = events(rig, "preempted")
    assert phases(rig) == ["queue", "prefill", "decode"]
    assert phases(rig, of=2) == ["queue", "prefill", "decode"] * 2 and event["quire.output_tokens"] > 0


def test_an_end_by_a_fault_is_the_spans_error(traced: None) -> None:
    rig = Rig()
    uid = rig.submit(8)
    rig.step()
    rig.core.fail(rig.core.requests[uid], 500, "why")
    assert [span.error for span in MADE if span.name == "schedule"] == ["why"]
    assert phases(rig) == ["queue", "prefill", "decode"]


def test_a_worker_is_told_of_the_rows_before_the_plan_that_admits_them(traced: None) -> None:
    rig = Rig()
    rig.submit(8)
    plan = rig.plan()
    assert plan is not None
    (_, rows), told = rig.core.with_rows([("w0", plan)])
    assert isinstance(rows, TraceRows) and told == ("w0", plan) and rows.step == plan.step
    assert from_i32(rows.rows) == [plan.admits[0].row] and rows.contexts[0][:16] == CONTEXT[:16]
    rig.work()
    later = [("w0", rig.plan())]
    assert rig.core.with_rows(later) == later


def test_a_recording_of_one_that_traces_is_replayed_by_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler_world, "Scheduler", Traced)
    world = recorded_world.RecordedWorld(200, tmp_path / "r", 0.15, False)
    while world.ring.number <= 9:  # so often that it begins with a snapshot
        world.run()
    assert MADE
    world.recorder.close()
    replay = Replay(str(tmp_path / "r"))
    assert all(not turn.different for turn in replay.turns()) and not replay.whole
