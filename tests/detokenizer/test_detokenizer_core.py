"""The core with neither sockets nor threads: a test says what happens, in which order, and when."""

from __future__ import annotations

from typing import Any

import pytest
from detokenizer_rig import HELLO, Rig, said

from quire.detokenizer import core
from quire.detokenizer.core import SCHEDULER, SILENCE_S
from quire.proto import messages as m
from quire.proto.codec import from_i32, from_i64, i8, i32, i64
from quire.proto.errors import Refused
from quire.proto.structured import StructuredOutputsParams


def test_preparations_end_in_any_order_and_each_request_is_accepted_before_it_is_submitted() -> None:
    rig = Rig()
    order: list[tuple[str, str, int]] = []
    for uid, peer in ((1, "frontend-0"), (2, "frontend-1"), (3, "frontend-0")):
        rig.ask(uid, peer)
    take = rig.core.take

    def noted() -> list[tuple[str, Any]]:
        todo = take()
        order.extend((peer, type(message).__name__, message.uid) for peer, message in todo)
        return todo

    rig.core.take = noted  # type: ignore[method-assign]
    for which in (2, 0, 0):
        rig.prepare(which)
    assert order == [
        (peer, kind, uid)
        for engine, uid in (("frontend-0", 3), ("frontend-0", 1), ("frontend-1", 2))
        for peer, kind in ((engine, "Accepted"), (SCHEDULER, "Submit"))
    ]
    assert (rig.core.queued, rig.core.queued_bytes) == (0, 0)


def test_an_engine_that_cannot_be_told_is_gone_with_its_requests_alone() -> None:
    rig = Rig()
    for uid, peer in ((1, "frontend-0"), (2, "frontend-1"), (3, "frontend-0")):
        rig.ask(uid, peer)
    rig.prepare()
    rig.prepare()
    rig.told(SCHEDULER)
    rig.gone.add("frontend-0")
    tokens = m.TokenBatch(i64([1, 2]), i32([0, 0]), i32([0, 0]), i32([0, 0]), i32([1, 1]), i32([40, 41]), i8([0, 0]),
                          i32([-1, -1]))  # fmt: skip
    rig.scheduler(tokens)
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)]  # 3 was not submitted yet
    assert [from_i64(batch.uids) for batch in rig.told("frontend-1", m.TextBatch)] == [[2]]
    assert list(rig.core.engines) == ["frontend-1"] and list(rig.core.requests) == [2]
    rig.prepare()
    assert rig.told(SCHEDULER) == [] and rig.core.queued == 0


def test_what_was_submitted_before_its_engine_was_found_gone_is_aborted_after() -> None:
    rig = Rig()
    rig.ask(1)
    rig.gone.add("frontend-0")
    rig.told(SCHEDULER)
    rig.prepare()  # Accepted cannot be delivered
    assert said(rig.told(SCHEDULER)) == [("Submit", 1, 0), ("Abort", 1, 0)]
    assert rig.core.requests == {} and rig.core.engines == {}


def test_a_broken_connection_is_looked_for_among_all() -> None:
    rig = Rig()
    for uid in (1, 2):
        rig.ask(uid, f"frontend-{uid}")
        rig.prepare()
    rig.told(SCHEDULER)
    rig.gone.add("frontend-2")
    rig.core.connection_broke()
    rig.flush()
    assert said(rig.told(SCHEDULER)) == [("Abort", 2, 0)] and list(rig.core.engines) == ["frontend-1"]


def test_a_silent_engine_is_let_go_and_time_that_stood_still_is_not_held_against_it() -> None:
    rig = Rig(epoch=0)
    rig.ask(0, "frontend-0")
    rig.ask(1, "frontend-1")
    rig.heartbeats(15, "frontend-0")
    rig.now += 100  # this process was stopped
    rig.heartbeats(6, "frontend-0")  # the first of them ends the standstill
    assert sorted(rig.core.requests) == [0, 1] and 15 + 5 <= SILENCE_S < 15 + 6
    rig.heartbeats(1, "frontend-0")
    assert sorted(rig.core.requests) == [0] and list(rig.core.engines) == ["frontend-0"]
    rig.engine("frontend-1", m.Heartbeat())  # it is back: what it lists it is told to submit again
    rig.engine("frontend-1", m.Reconcile(i64([1]), i32([0])))
    assert sorted(rig.core.engines) == ["frontend-0", "frontend-1"]
    assert [from_i64(each.uids) for each in rig.told("frontend-1", m.Unknown)] == [[1]]


def test_a_full_queue_refuses_new_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 2)
    monkeypatch.setattr(core, "MAX_QUEUED_BYTES", 10_000)
    rig = Rig(epoch=0)
    rig.ask(1, prompt="x" * 20_000)  # too many bytes
    for uid, attempt in ((2, 0), (3, 0), (4, 0), (5, 1)):  # 4 is one too many, and 5 a resubmission
        rig.ask(uid, attempt=attempt)
    refused = rig.told("frontend-0")
    assert [(each.uid, each.status, each.retry_after) for each in refused] == [(1, 429, 1.0), (4, 429, 1.0)]
    assert (rig.core.queued, sorted(rig.core.requests), rig.jobs) == (3, [2, 3, 5], [])
    rig.peers(1)
    while rig.jobs:
        rig.prepare()
    assert rig.core.queued_bytes == 0 and len(rig.told("frontend-0", m.Accepted)) == 3


def test_how_long_to_wait_is_what_preparations_took_and_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 20)
    rig = Rig()
    rig.now += 3600
    for uid in range(20):
        rig.ask(uid)
    rig.now += 0.1
    rig.prepare()
    rig.ask(20)
    rig.ask(21)
    assert rig.told("frontend-0", m.Failed)[0].retry_after == 1.0  # 20 at 0.1 s, in time: not an hour's share
    for uid in range(22, 62):
        rig.now += 2.0
        rig.prepare()
        rig.ask(uid)
    rig.ask(62)
    assert 35 < rig.told("frontend-0", m.Failed)[0].retry_after <= 40


def test_a_higher_attempt_replaces_one_that_is_being_prepared_checked_or_run() -> None:
    rig = Rig()
    form = StructuredOutputsParams(regex="a")
    for uid, fields in ((1, {}), (2, {"structured_outputs": form}), (3, {})):
        rig.ask(uid, **fields)
    rig.prepare(1)  # 2 waits at the gate
    rig.prepare(1)  # 3 runs
    rig.told(SCHEDULER), rig.told("frontend-0")
    for uid in (1, 2, 3):
        rig.ask(uid, attempt=1)
    rig.ask(3, attempt=0)  # late, and of no use any more
    while rig.jobs:
        rig.prepare()
    rig.checked(0)
    assert said(rig.told(SCHEDULER)) == [("Abort", 3, 0), *(("Submit", uid, 1) for uid in (1, 2, 3))]
    assert said(rig.told("frontend-0")) == [("Accepted", uid, 1) for uid in (1, 2, 3)]
    assert rig.core.queued == 0


def test_a_grammar_is_checked_before_anything_is_submitted() -> None:
    rig = Rig()
    for uid, regex in ((1, "slow"), (2, "bad"), (3, "slow")):
        rig.ask(uid, structured_outputs=StructuredOutputsParams(regex=regex), attempt=int(uid == 3))
    rig.ask(4)
    rig.told(SCHEDULER)
    while rig.jobs:
        rig.prepare()
    assert [(spec.regex, patient) for spec, _, patient in rig.checks] == [
        ("slow", False), ("bad", False), ("slow", True),
    ]  # fmt: skip
    assert said(rig.told(SCHEDULER)) == [("Submit", 4, 0)]  # it waits for none
    rig.checked(1, Refused("no such form", "structured_outputs"))
    (failed,) = rig.told("frontend-0", m.Failed)
    assert (failed.uid, failed.status, failed.param) == (2, 400, "structured_outputs")
    rig.engine("frontend-0", m.Abort(3, 1))
    rig.checked(0)
    rig.checked(0)
    assert said(rig.told(SCHEDULER)) == [("Submit", 1, 0)]  # 3 was never submitted, so nothing is aborted
    assert set(rig.core.requests) == {1, 4}


def test_a_preparation_that_fails_in_itself_fails_its_request_alone() -> None:
    rig = Rig()
    rig.ask(1)
    rig.ask(2)
    rig.told(SCHEDULER)
    rig.prepare(0, RuntimeError("inside"))
    rig.prepare()
    (failed,) = rig.told("frontend-0", m.Failed)
    assert (failed.uid, failed.status) == (1, 500) and "RuntimeError" in failed.message
    assert said(rig.told(SCHEDULER)) == [("Submit", 2, 0)]


def test_a_scheduler_that_was_restarted_is_told_all_and_given_no_hashes_of_other_blocks() -> None:
    rig = Rig()
    for uid in (1, 2, 3):
        rig.ask(uid, prompt="Hello, how are you? " * 8)
    rig.prepare()
    _, done = rig.jobs[0]
    result = rig.jobs.pop(0)[0]()  # prepared for blocks of 16, and not told yet
    rig.told(SCHEDULER)
    rig.peers(2, block_size=32)
    hello, listed = rig.told(SCHEDULER)
    assert hello == HELLO and from_i64(listed.uids) == [1]
    done(result)
    rig.flush()
    rig.prepare()  # asked for under the first scheduler too
    assert [bool(submit.hashes) for submit in rig.told(SCHEDULER, m.Submit)] == [False, False]
    rig.scheduler(m.Unknown(i64([1, 2]), i32([0, 0])))
    (gone,) = rig.told("frontend-0", m.Unknown)
    assert (from_i64(gone.uids), from_i32(gone.attempts)) == ([2], [0])  # the first was with the scheduler before
    rig.peers(1, block_size=8)  # of the scheduler that is gone
    assert (rig.core.epoch, rig.core.block_size) == (2, 32)


def test_the_scheduler_hears_of_it_only_while_it_is_connected() -> None:
    rig = Rig()
    rig.ask(1)
    rig.prepare()
    rig.ask(2)
    rig.sent.clear()
    rig.heartbeats(2)
    beat, again, listed = rig.sent[SCHEDULER]
    assert beat == again == m.Heartbeat(memory=2**20, bad_frames=3)
    assert (from_i64(listed.uids), from_i32(listed.attempts)) == ([1], [0])  # 2 is not submitted
    rig.core.disconnected()
    rig.sent.clear()
    rig.heartbeats(4)
    assert rig.sent[SCHEDULER] == [] and len(rig.sent["frontend-0"]) == 4
    rig.core.connected()
    rig.flush()
    assert [type(each) for each in rig.sent[SCHEDULER]] == [m.Hello, m.Reconcile]


def test_columns_that_make_no_sense_are_counted_and_change_nothing() -> None:
    rig = Rig()
    rig.ask(1)
    rig.prepare()
    rig.engine("frontend-0", m.Reconcile(i64([1, 2]), i32([0])))
    rig.scheduler(m.Unknown(i64([1]), b""))
    rig.told(SCHEDULER)
    assert rig.core.bad_frames == 2 and list(rig.core.requests) == [1]
    rig.heartbeats(1)
    assert rig.sent[SCHEDULER] == [m.Heartbeat(memory=2**20, bad_frames=5)]


def test_it_takes_leave_of_everyone_and_knows_why_it_was_sent_away() -> None:
    rig = Rig()
    rig.ask(1)
    rig.scheduler(m.Bye())
    assert rig.core.refused is None
    rig.scheduler(m.Bye("protocol 9 is not spoken here"))
    assert rig.core.refused == "protocol 9 is not spoken here"
    rig.told(SCHEDULER)
    rig.core.close()
    rig.flush()
    assert rig.told(SCHEDULER) == rig.told("frontend-0") == [m.Bye()]
