"""The spans that a scheduler makes of traced requests, and that it does nothing else because of them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import recorded_world
import scheduler_rig
import scheduler_world
from scheduler_rig import Rig

from quire.proto.codec import from_i32, i32
from quire.proto.config import EngineArgs
from quire.proto.messages import Submit, Taken, TracedSubmit, TraceRows
from quire.proto.params import SamplingParams
from quire.proto.spans import Span, Spans
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.moves import Moves
from quire.scheduler.replay import Replay
from quire.scheduler.replica import Replica
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


# ---------------------------------------------------------------- who is traced


def ask(
    core: TracedScheduler, uid: int = 1, attempt: int = 0, trace: bytes | None = CONTEXT, prompt: int = 8, n: int = 1
) -> None:
    """A request as a detokenizer sends it; one with no ``trace`` at all is a Submit."""
    work = Generate(SamplingParams(max_tokens=4, n=n), 1)
    told = uid, attempt, i32([*range(prompt)]), b"", work, float(uid)
    TracedScheduler.submit(core, "detok", Submit(*told) if trace is None else TracedSubmit(*told, trace=trace))


@pytest.mark.parametrize("trace", [None, b"", CONTEXT[:-1], CONTEXT + b"x"], ids=["none", "empty", "short", "long"])
def test_one_without_a_context_is_served_and_not_traced(traced: None, trace: bytes | None) -> None:
    rig = Rig()
    ask(rig.core, trace=trace)
    rig.run()
    assert len(rig.tokens[1, 0]) == 4 and not MADE


def test_one_that_is_refused_is_not_traced(traced: None) -> None:
    rig = Rig(max_model_len=16)
    ask(rig.core, prompt=17)
    assert rig.failed().status == 400 and not MADE and not rig.core._followed


def test_each_attempt_is_traced_once(traced: None) -> None:
    rig = Rig()
    for rig.now, attempt in enumerate((0, 0, 1, 1, 0)):  # some come twice, or late
        ask(rig.core, attempt=attempt)
    rig.run()
    schedules = [span for span in MADE if span.name == "schedule"]
    assert [(span.attributes["quire.attempt"], span.start) for span in schedules] == [(0, 0), (1, 2)]
    assert [span.name for span in MADE] == ["queue", "schedule", "queue", "prefill", "decode", "schedule"]


def test_nothing_is_kept_of_one_that_ends_while_it_waits(traced: None) -> None:
    rig = Rig()
    rig.submit(8, n=3)
    rig.core.drop(rig.core.requests[1])
    assert [span.name for span in MADE] == ["queue"] * 3 + ["schedule"]
    assert not rig.core._followed and not rig.core._siblings and not rig.core._prefills


def test_what_is_traced_runs_as_if_it_were_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind in (Scheduler, Traced):
        monkeypatch.setattr(scheduler_rig, "Scheduler", kind)
        rig = Rig(blocks=7)
        for length in (8, 20):
            rig.submit(length, n=2, max_tokens=16)
        rig.run()
        assert rig.core.preemptions
        found.append((rig.tokens, rig.ends, rig.started, rig.core.stats()))
    assert found[0] == found[1]


def test_a_recording_has_nothing_of_the_traces(traced: None) -> None:
    rig = Rig()
    plain = Scheduler(rig.core.config, rig.core.clock)
    assert rig.core.recorded().keys() == vars(plain).keys()
    assert rig.core.recorded()["queue"] is rig.core.queue


# ---------------------------------------------------------------- what its spans say


def told(name: str) -> list[dict[str, Any]]:
    """The attributes of all spans of this name."""
    return [span.attributes for span in MADE if span.name == name]


def test_each_phase_says_where_it_was_and_what_came_of_it(traced: None) -> None:
    rig = Rig([64, 64])
    rig.replica.drain()
    prompt = rig.prompt(20, 1)
    for count in (1, 2):
        uid = rig.submit(prompt, n=2, max_tokens=5)
        while rig.plan(1) is not None:
            rig.work(1)
        assert len(told("schedule")) == count and uid == count
    assert told("schedule")[0] == {"gen_ai.usage.prompt_tokens": 20, "quire.attempt": 0, "quire.waiting": 1}
    assert told("queue") == [{"quire.sequence": at, "quire.output_tokens": 0} for at in (0, 1)] * 2
    assert {each["quire.replica"] for each in told("prefill") + told("decode")} == {1}
    assert [each["quire.output_tokens"] for each in told("decode")] == [5] * 4
    assert sorted(each["quire.cached_tokens"] for each in told("prefill")) == [0, 0, 16, 16]
    assert [each["quire.sequence"] for each in told("decode")] == [0, 1] * 2


def running(blocks: int | list[int] = 64) -> Rig:
    """A rig with a request that decodes at the first replica."""
    rig = Rig(blocks)
    rig.submit(20, max_tokens=30)
    rig.step()
    rig.step()
    return rig


def why(rig: Rig) -> list[tuple[str, int]]:
    """What has had sequences go back in line, and from which replica, as both kinds of span tell it."""
    names = ("drained", "preempted", "worker_lost", "worker_left")
    spans = [*MADE, *(followed.span for followed in rig.core._followed.values())]
    found = [(name, told["quire.replica"]) for span in spans for name, _, told in span.events if name in names]
    phases = [phase for followed in rig.core._followed.values() for phase in followed.phases.values()]
    queues = [span for span in [*MADE, *phases] if span.name == "queue" and "quire.why" in span.attributes]
    assert [span.attributes["quire.why"] for span in queues] == [name for name, _ in found]
    assert not any("quire.replica" in span.attributes for span in queues)
    return found


def test_why_a_sequence_waits_again(traced: None) -> None:
    rig = running()
    (seq,) = rig.core.requests[1].live

    def runs(number: int) -> Replica:
        """It runs on this replica again."""
        replica = rig.core.replicas.get(number) or rig.add(number, 64)
        rig.step(number)
        rig.step(number)
        assert seq.replica == number
        return replica

    rig.core.requeue(seq)  # a drain's patience is over
    rig.core.end_lease(runs(0))
    rig.core.requeue(runs(1).decoding[0])
    rig.core.end_lease(runs(1), blame=False)
    rig.core.preempt(runs(2).decoding[0])
    rig.core.requeue(runs(2).decoding[0])
    assert why(rig) == [
        ("drained", 0), ("worker_lost", 0), ("drained", 1), ("worker_left", 1), ("preempted", 2), ("drained", 2),
    ]  # fmt: skip


def test_one_that_moves_decodes_on_elsewhere(traced: None) -> None:
    rig = running([64, 64])
    giver, taker = rig.core.replicas.values()
    for replica in (giver, taker):
        replica.set_place("both", f"ipc://{replica.number}", "kv", 2**20)
    giver.drain()
    moves = Moves(rig.core)
    for pages in (0, 2, 3):
        moves.heard(taker, Taken(taker.lease, 1, 999, pages))
        moves.advance()
        rig.now += 0.5
    assert rig.core.plan(taker) is not None and rig.core.moves == 1
    (followed,) = rig.core._followed.values()
    assert followed.span.events == [("moved", 1.5, {"quire.from": 0, "quire.replica": 1})]
    assert [told["quire.replica"] for told in told("decode")] == [0]
    decode = followed.phases[0]
    assert (decode.name, decode.start) == ("decode", 1.5)
    assert decode.attributes == {"quire.replica": 1, "quire.sequence": 0}


def test_workers_that_do_not_trace_are_told_nothing_of_it() -> None:
    core = TracedScheduler(EngineArgs(block_size=8), lambda: 0.0, Spans(MADE.append, random.Random(1)), rows=False)
    rig = Rig()
    core.add_replica(rig.replica)
    ask(core)
    sent = [("w0", core.plan(core.replicas[0]))]
    assert sent[0][1] is not None and core._followed and core.with_rows(sent) == sent


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
