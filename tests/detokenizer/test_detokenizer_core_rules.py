"""The rules of the detokenizer's core, one at a time, each at its very limit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from detokenizer_rig import HELLO, PREPARER, Rig, said

from quire.detokenizer import core
from quire.detokenizer.core import HEALTH_CHECK, SCHEDULER, SILENCE_S, STOOD_STILL_S, DetokenizerCore
from quire.detokenizer.sequence import TextSequence
from quire.detokenizer.tokenize import Prepared
from quire.proto import messages as m
from quire.proto.codec import f32, from_i32, from_i64, i8, i32, i64
from quire.proto.errors import Refused
from quire.proto.losses import MAX_LOSSES
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Embeds, Generate, Pool, with_embeds

ENGINE = "frontend-0"


def running(rig: Rig, uid: int = 1, peer: str = ENGINE, **params: Any) -> None:
    """A request that the scheduler has; what was said of it so far is forgotten."""
    rig.ask(uid, peer, **params)
    rig.prepare()
    rig.told(SCHEDULER), rig.told(peer)


def tokens(uid: int, *ids: int, attempt: int = 0, offset: int = 0, finish: int = 0, index: int = 0) -> m.TokenBatch:
    return m.TokenBatch(i64([uid]), i32([attempt]), i32([index]), i32([offset]), i32([len(ids)]), i32(ids),
                        i8([finish]), i32([-1]))  # fmt: skip


def tokenize(uid: int = 1, attempt: int = 0, work: Any = None, **fields: Any) -> m.Tokenize:
    if fields.keys().isdisjoint({"prompt", "ids", "messages"}):
        fields["prompt"] = "Hello"
    return m.Tokenize(uid, attempt, work or Generate(SamplingParams(), uid), 1.0, **fields)


# ---------------------------------------------------------------- keeping in touch


def test_it_says_hello_and_what_it_has_when_it_is_connected() -> None:
    rig = Rig(epoch=0)
    assert rig.told(SCHEDULER) == [HELLO, m.Reconcile(b"", b"")]


def test_before_it_is_connected_it_says_nothing_to_the_scheduler() -> None:
    fresh = DetokenizerCore(PREPARER, HELLO, lambda: 100.0, lambda *_: None, lambda spec, done, patient: None)
    for _ in range(2):
        fresh.heartbeat(0, 0)
    assert not fresh.take()


def test_what_is_taken_is_gone() -> None:
    rig = Rig()
    rig.core.connected()
    assert rig.core.take() and not rig.core.take()


def test_a_new_one_knows_no_scheduler() -> None:
    rig = Rig(epoch=0)
    assert (rig.core.epoch, rig.core.block_size, rig.core.refused, rig.core.bad_frames) == (-1, 0, None, 0)


def test_reconcile_comes_with_every_second_heartbeat() -> None:
    rig = Rig()
    rig.told(SCHEDULER)
    seen = []
    for _ in range(4):
        rig.heartbeats(1)
        seen.append([type(each).__name__ for each in rig.told(SCHEDULER)])
    assert seen == [[], ["Reconcile"]] * 2


def test_the_scheduler_is_told_of_memory_and_of_all_frames_that_were_dropped() -> None:
    rig = Rig()
    rig.core.bad_frames = 4
    rig.sent.clear()
    rig.core.heartbeat(memory=9, bad_frames=3)
    rig.flush()
    assert rig.sent[SCHEDULER] == [m.Heartbeat(memory=9, bad_frames=7)]


def test_every_engine_is_sent_a_heartbeat_each_second() -> None:
    rig = Rig()
    for peer in ("a", "b"):
        rig.engine(peer, m.Heartbeat())
    rig.sent.clear()
    rig.heartbeats(2)
    assert (rig.sent["a"], rig.sent["b"]) == ([m.Heartbeat()] * 2, [m.Heartbeat()] * 2)


@pytest.mark.parametrize(("silent_for", "there"), [(SILENCE_S, True), (SILENCE_S + 1, False)])
def test_an_engine_may_be_silent_for_so_long_and_no_longer(silent_for: float, there: bool) -> None:
    rig = Rig()
    rig.engine(ENGINE, m.Heartbeat())
    rig.heartbeats(round(silent_for))
    assert (ENGINE in rig.core.engines) == there


def test_an_engine_that_was_silent_loses_its_requests() -> None:
    rig = Rig()
    running(rig)
    rig.heartbeats(round(SILENCE_S) + 1)
    assert said(rig.told(SCHEDULER, m.Abort)) == [("Abort", 1, 0)] and not rig.core.requests


@pytest.mark.parametrize(("gap", "there"), [(STOOD_STILL_S, False), (STOOD_STILL_S + 0.5, True)])
def test_a_late_heartbeat_of_its_own_is_a_standstill_or_not(gap: float, there: bool) -> None:
    rig = Rig()
    rig.engine(ENGINE, m.Heartbeat())
    rig.heartbeats(round(SILENCE_S) - 2)
    rig.now += gap
    rig.core.heartbeat(0, 0)
    assert (ENGINE in rig.core.engines) == there


def test_the_time_before_its_first_heartbeat_may_be_a_standstill_too() -> None:
    rig = Rig()
    rig.engine(ENGINE, m.Heartbeat())
    rig.now += SILENCE_S + 5
    rig.core.heartbeat(0, 0)
    assert ENGINE in rig.core.engines


@pytest.mark.parametrize("message", [m.Heartbeat(), m.Abort(9, 0), m.Reconcile(b"", b""), tokenize()])
def test_whatever_an_engine_says_it_is_heard(message: Any) -> None:
    rig = Rig()
    rig.now += 7
    rig.engine(ENGINE, message)
    assert rig.core.engines == {ENGINE: rig.now}


def test_an_engine_that_takes_its_leave_is_forgotten_with_its_requests() -> None:
    rig = Rig()
    running(rig)
    running(rig, 2, "frontend-1")
    rig.engine(ENGINE, m.Bye())
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)]
    assert list(rig.core.engines) == ["frontend-1"] and list(rig.core.requests) == [2]


def test_an_engine_that_nobody_knows_may_take_its_leave() -> None:
    rig = Rig()
    rig.engine("stranger", m.Bye())
    assert not rig.core.engines and not rig.told(SCHEDULER, m.Abort)


@pytest.mark.parametrize(("peer", "level"), [(f"{HEALTH_CHECK}1", logging.DEBUG), (ENGINE, logging.INFO)])
def test_health_checks_come_and_go_without_a_word(peer: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig()
    rig.engine(peer, m.Bye())
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, f"{peer} is gone; dropped 0 of its requests")
    ]


def test_a_silent_engine_s_log_says_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig()
    running(rig)
    rig.heartbeats(round(SILENCE_S) + 1)
    assert f"{ENGINE} has been silent for 20 s; dropped 1 of its requests" in caplog.text


def test_bad_columns_are_logged_with_who_sent_them(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.engine(ENGINE, m.Reconcile(i64([1]), b""))
    rig.scheduler(m.Unknown(i64([1]), b""))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"dropped a message from {ENGINE} with bad columns (1 so far)",
        "dropped a message from the scheduler with bad columns (2 so far)",
    ]


@pytest.mark.parametrize(("count", "logged"), [(19, True), (20, False), (998, False), (999, True), (1000, False)])
def test_bad_columns_are_not_logged_for_ever(count: int, logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.core.bad_frames = count
    rig.scheduler(m.Unknown(i64([1]), b""))
    assert bool(caplog.records) == logged and rig.core.bad_frames == count + 1


# ---------------------------------------------------------------- aborts


def test_an_abort_ends_a_request_and_tells_the_scheduler() -> None:
    rig = Rig()
    running(rig)
    rig.engine(ENGINE, m.Abort(1, 0))
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)] and not rig.core.requests


def test_an_abort_of_a_higher_attempt_ends_the_lower_one() -> None:
    rig = Rig()
    running(rig)
    rig.engine(ENGINE, m.Abort(1, 5))
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)]


@pytest.mark.parametrize(("peer", "uid", "attempt"), [("frontend-1", 1, 1), (ENGINE, 2, 1), (ENGINE, 1, 0)])
def test_an_abort_of_another_s_or_of_a_lower_attempt_means_nothing(peer: str, uid: int, attempt: int) -> None:
    rig = Rig()
    rig.ask(1, attempt=1)
    rig.prepare()
    rig.told(SCHEDULER)
    rig.engine(peer, m.Abort(uid, attempt))
    assert list(rig.core.requests) == [1] and not rig.told(SCHEDULER)


def test_what_is_aborted_while_it_waits_is_not_prepared() -> None:
    rig = Rig()
    rig.ask(1)
    rig.engine(ENGINE, m.Abort(1, 0))
    job, done = rig.jobs.pop()
    assert job() is None
    done(None)
    rig.flush()
    assert not rig.told(ENGINE) and (rig.core.queued, rig.core.queued_bytes) == (0, 0)


# ---------------------------------------------------------------- quarantine


def lost_twice(rig: Rig, uid: int, peer: str = ENGINE, **params: Any) -> None:
    """A request comes that its Engine has lost twice."""
    rig.engine(peer, tokenize(uid, 2, Generate(SamplingParams(**params), uid), losses=MAX_LOSSES - 1))


def test_one_in_quarantine_is_prepared_alone_and_its_engine_lets_it_begin() -> None:
    rig = Rig()
    rig.ask(1)
    lost_twice(rig, 2)
    rig.ask(3, peer="frontend-1")
    assert len(rig.jobs) == 1 and not rig.told(ENGINE)
    rig.prepare()
    assert said(rig.told(ENGINE)) == [("Accepted", 1, 0), ("Quarantined", 2, 2)] and not rig.jobs
    assert said(rig.told("frontend-1")) == [("Quarantined", 2, 2)]  # what runs there is not at fault
    rig.engine("frontend-1", m.Quarantined(2, 2))  # not its Engine
    rig.engine(ENGINE, m.Quarantined(2, 1))
    rig.engine(ENGINE, m.Quarantined(1, 0))
    assert not rig.jobs
    rig.engine(ENGINE, m.Quarantined(2, 2))
    rig.engine(ENGINE, m.Quarantined(2, 2))
    assert len(rig.jobs) == 1
    rig.prepare()
    assert said(rig.told(ENGINE)) == [("Accepted", 2, 2), ("Quarantined", 0, 0)] and len(rig.jobs) == 1
    rig.prepare()
    assert said(rig.told("frontend-1")) == [("Quarantined", 0, 0), ("Accepted", 3, 0)] and rig.core.queued == 0


def test_those_of_two_engines_take_turns() -> None:
    rig = Rig()
    lost_twice(rig, 1)
    lost_twice(rig, 2, "frontend-1")
    assert said(rig.told(ENGINE)) == [("Quarantined", 1, 2)]
    rig.engine(ENGINE, m.Quarantined(1, 2))
    assert said(rig.told("frontend-1")) == [("Quarantined", 1, 2)]
    rig.prepare(error=Refused("no", "prompt"))
    assert said(rig.told("frontend-1")) == [("Quarantined", 0, 0), ("Quarantined", 2, 2)]


def test_an_engine_that_comes_meanwhile_is_told_as_well() -> None:
    rig = Rig()
    lost_twice(rig, 1)
    rig.engine(ENGINE, m.Quarantined(1, 2))
    rig.ask(2, peer="frontend-1")
    rig.ask(3, peer="frontend-1")
    assert said(rig.told("frontend-1")) == [("Quarantined", 1, 2)] and len(rig.jobs) == 1


@pytest.mark.parametrize("end", ["abort", "gone", "replaced"])
@pytest.mark.parametrize("begun", [False, True])
def test_one_in_quarantine_that_goes_holds_up_nobody(end: str, begun: bool) -> None:
    rig = Rig()
    lost_twice(rig, 1)
    rig.ask(2, peer="frontend-1")
    if begun:
        rig.engine(ENGINE, m.Quarantined(1, 2))
    if end == "abort":
        rig.engine(ENGINE, m.Abort(1, 2))
    elif end == "gone":
        rig.engine(ENGINE, m.Bye())
    else:
        rig.ask(1, attempt=3)
    if begun:
        assert len(rig.jobs) == 1
        rig.prepare()
    while rig.jobs:
        rig.prepare()
    assert said(rig.told("frontend-1"))[-2:] == [("Quarantined", 0, 0), ("Accepted", 2, 0)]
    assert (rig.core.queued, rig.core.queued_bytes) == (0, 0)
    rig.engine(ENGINE, m.Quarantined(1, 2))
    assert not rig.jobs


def test_one_in_quarantine_is_alone_until_its_grammar_is_checked() -> None:
    rig = Rig()
    lost_twice(rig, 1, structured_outputs=StructuredOutputsParams(choice=["a"]))
    rig.ask(2)
    rig.engine(ENGINE, m.Quarantined(1, 2))
    rig.prepare()
    assert not rig.jobs and len(rig.checks) == 1
    rig.checked(0)
    assert len(rig.jobs) == 1


def test_another_s_grammar_holds_up_nobody() -> None:
    rig = Rig()
    rig.ask(1, structured_outputs=StructuredOutputsParams(choice=["a"]))
    lost_twice(rig, 2)
    rig.prepare()
    assert said(rig.told(ENGINE)) == [("Quarantined", 2, 2)] and len(rig.checks) == 1


# ---------------------------------------------------------------- what an Engine lists


def test_what_an_engine_lists_and_is_not_here_is_unknown() -> None:
    rig = Rig()
    running(rig)
    rig.engine(ENGINE, m.Reconcile(i64([1, 2, 3]), i32([0, 0, 4])))
    (unknown,) = rig.told(ENGINE)
    assert (from_i64(unknown.uids), from_i32(unknown.attempts)) == ([2, 3], [0, 4])
    assert list(rig.core.requests) == [1]


def test_a_higher_attempt_than_is_here_is_unknown() -> None:
    rig = Rig()
    running(rig)
    rig.engine(ENGINE, m.Reconcile(i64([1]), i32([1])))
    (unknown,) = rig.told(ENGINE)
    assert (from_i64(unknown.uids), from_i32(unknown.attempts)) == ([1], [1])
    assert list(rig.core.requests) == [1] and not rig.told(SCHEDULER)


def test_a_lower_attempt_than_is_here_ends_it() -> None:
    rig = Rig()
    rig.ask(1, attempt=2)
    rig.prepare()
    rig.told(SCHEDULER), rig.told(ENGINE)
    rig.engine(ENGINE, m.Reconcile(i64([1]), i32([1])))
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 2)]
    (unknown,) = rig.told(ENGINE)
    assert from_i32(unknown.attempts) == [1]


def test_what_an_engine_lists_no_longer_is_dropped() -> None:
    rig = Rig()
    running(rig)
    running(rig, 2)
    running(rig, 3, "frontend-1")
    rig.engine(ENGINE, m.Reconcile(i64([2]), i32([0])))
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)] and sorted(rig.core.requests) == [2, 3]
    assert not rig.told(ENGINE)


# ---------------------------------------------------------------- the queue of prompts


@pytest.mark.parametrize("work", [None, Pool(PoolingParams(), "pair")])
def test_bytes_that_wait_are_counted(work: Any) -> None:
    rig = Rig(epoch=0)
    resume = [m.Resume(0, i32([1, 2]), 0)] if work is None else []
    message = tokenize(1, work=work, prompt="Hello", resume=resume)
    rig.engine(ENGINE, message)
    assert (rig.core.queued, rig.core.queued_bytes) == (1, 512 + 5 + (8 if work is None else 4))


def test_bytes_of_ids_and_of_chats_are_counted() -> None:
    rig = Rig(epoch=0)
    rig.engine(ENGINE, tokenize(1, ids=i32([1, 2, 3])))
    assert rig.core.queued_bytes == 512 + 12
    parts, tools = [{"type": "text", "text": "a" * 1000}], [{"type": "function", "function": {"name": "b" * 2000}}]
    rig.engine(ENGINE, tokenize(2, messages=[{"role": "user", "content": parts}], template={"tools": tools}))
    assert 3000 < rig.core.queued_bytes - (512 + 12 + 512) < 3200


def test_the_queue_may_be_full_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED_BYTES", 2 * 517)
    rig = Rig(epoch=0)
    for uid in (1, 2):
        rig.ask(uid, prompt="Hello")
    assert not rig.told(ENGINE)
    rig.ask(3, prompt="")
    assert [(each.uid, each.status) for each in rig.told(ENGINE)] == [(3, 429)]


def test_one_that_is_refused_for_load_is_told_how_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 1)
    rig = Rig(epoch=0)
    rig.ask(1, prompt="Hello")
    rig.ask(2, prompt="Hello")
    (failed,) = rig.told(ENGINE)
    assert failed.message == "1 prompts (517 bytes) wait to be encoded; try again in 1 s."
    assert (failed.uid, failed.attempt, failed.status, failed.retry_after) == (2, 0, 429, 1.0)
    assert list(rig.core.requests) == [1] and rig.core.queued == 1


def test_the_wait_follows_from_how_long_prompts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 3)
    rig = Rig()
    for uid in range(3):
        rig.ask(uid)
    for _ in range(2):
        rig.now += 4.0
        rig.prepare()
        rig.ask(int(rig.now))
    # One that ends while others wait moves the mean by a tenth of the way to the 4 s that it took.
    mean = 0.001 + 0.1 * (4.0 - 0.001)
    mean += 0.1 * (4.0 - mean)
    rig.told(ENGINE)
    rig.ask(99)
    (failed,) = rig.told(ENGINE)
    assert failed.retry_after == round(3 * mean, 1)


def test_a_prompt_that_took_long_counts_for_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 2)
    rig = Rig()
    rig.ask(1)
    rig.ask(2)
    rig.now += 60.0
    rig.prepare()
    rig.ask(3)
    rig.ask(4)
    (failed,) = rig.told(ENGINE, m.Failed)
    assert failed.retry_after == round(2 * (0.001 + 0.1 * (10.0 - 0.001)), 1)


def test_the_time_until_the_last_one_is_no_prompt_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_QUEUED", 3)
    rig = Rig()
    rig.ask(1)
    rig.now += 9.0
    rig.prepare()  # nothing else waited: the queue may have been empty for long
    for uid in (2, 3, 4):
        rig.ask(uid)
    rig.told(ENGINE)
    rig.ask(5)
    assert rig.told(ENGINE)[0].retry_after == 1.0


def test_a_second_message_of_one_attempt_means_nothing() -> None:
    rig = Rig()
    rig.ask(1)
    rig.ask(1)
    assert (len(rig.jobs), rig.core.queued) == (1, 1)


def test_a_replaced_one_is_aborted_before_the_next_is_submitted() -> None:
    rig = Rig()
    running(rig)
    rig.ask(1, attempt=1)
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)]
    rig.prepare()
    assert said(rig.told(SCHEDULER)) == [("Submit", 1, 1)]


def test_what_comes_before_the_first_scheduler_waits_in_order() -> None:
    rig = Rig(epoch=0)
    for uid in (3, 1, 2):
        rig.ask(uid)
    assert not rig.jobs
    rig.peers(1)
    while rig.jobs:
        rig.prepare()
    assert [each.uid for each in rig.told(SCHEDULER, m.Submit)] == [3, 1, 2]


def test_numbers_that_fit_no_column_are_a_bad_frame() -> None:
    rig = Rig()
    rig.core.received(ENGINE, tokenize(2**63))
    assert (rig.core.bad_frames, rig.core.requests, rig.core.queued) == (1, {}, 0)


# ---------------------------------------------------------------- a request that is prepared


def test_a_request_is_submitted_with_all_that_it_has() -> None:
    rig = Rig()
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    rig.engine(ENGINE, m.Tokenize(
        1, 2, Generate(params, 7), 12.5, prompt="Hello", key="k", priority=-4, losses=1, cache_salt="s",
        prompt_logprobs_from=1))  # fmt: skip
    rig.prepare()
    (submit,), (accepted,) = rig.told(SCHEDULER, m.Submit), rig.told(ENGINE)
    assert (submit.uid, submit.attempt, submit.arrival, submit.key, submit.priority) == (1, 2, 12.5, "k", -4)
    assert (submit.losses, submit.prompt_logprobs_from, submit.children) == (1, 1, [])
    assert submit.ids == accepted.ids and from_i32(submit.ids) == PREPARER.tokenizer.encode("Hello", True)
    assert submit.work == accepted.work and submit.work.seed == 7 and submit.root != b""
    assert (accepted.uid, accepted.attempt, accepted.prompt) == (1, 2, "Hello")


def test_full_blocks_of_a_prompt_are_hashed() -> None:
    rig = Rig()
    rig.engine(ENGINE, tokenize(ids=i32([40] * 33)))
    rig.prepare()
    (submit,) = rig.told(SCHEDULER, m.Submit)
    assert len(submit.hashes) == 2 * 16


def test_what_is_resumed_is_replayed_to_its_engine_and_goes_on() -> None:
    rig = Rig()
    resume = [m.Resume(0, i32(PREPARER.tokenizer.encode("Hello", False)), 1)]
    rig.engine(ENGINE, tokenize(1, 1, ids=i32([40]), resume=resume))
    rig.prepare()
    accepted, replayed = rig.told(ENGINE)
    assert type(accepted) is m.Accepted
    assert (replayed.texts, from_i64(replayed.uids), from_i32(replayed.attempts)) == (["ello"], [1], [1])
    assert (from_i32(replayed.counts), replayed.tokens) == ([0], b"")
    (submit,) = rig.told(SCHEDULER, m.Submit)
    assert [child.index for child in submit.children] == [0]


def test_what_had_ended_before_is_not_submitted() -> None:
    rig = Rig()
    rig.told(SCHEDULER)
    work = Generate(SamplingParams(max_tokens=1), 1)
    rig.engine(ENGINE, tokenize(1, 1, work, ids=i32([40]), resume=[m.Resume(0, i32([41]), 0)]))
    rig.prepare()
    _, replayed = rig.told(ENGINE)
    assert (from_i32(replayed.lengths), list(replayed.finishes)) == ([1], [m.Finish.LENGTH])
    assert not rig.told(SCHEDULER) and not rig.core.requests


@pytest.mark.parametrize(
    ("error", "status", "message", "param", "retry_after"),
    [
        (Refused("no", "prompt"), 400, "no", "prompt", None), (Refused("full", None, 429), 429, "full", None, 1.0),
        (RuntimeError("inside"), 500,
         "the prompt could not be prepared (RuntimeError); the server's log says more.", None, None),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_answered(
    error: Exception, status: int, message: str, param: str | None, retry_after: float | None
) -> None:
    rig = Rig()
    rig.ask(1)
    rig.told(SCHEDULER)
    rig.prepare(0, error)
    (failed,) = rig.told(ENGINE)
    assert (failed.uid, failed.attempt, failed.status, failed.message) == (1, 0, status, message)
    assert (failed.param, failed.retry_after) == (param, retry_after)
    assert not rig.core.requests and not rig.told(SCHEDULER)


@pytest.mark.parametrize(("attempt", "patient"), [(0, False), (1, True)])
def test_a_check_is_patient_with_what_was_let_in_before(attempt: int, patient: bool) -> None:
    rig = Rig()
    rig.ask(1, attempt=attempt, structured_outputs=StructuredOutputsParams(regex="a"))
    rig.prepare()
    assert [each[2] for each in rig.checks] == [patient]


def test_a_check_that_fails_in_itself_fails_its_request() -> None:
    rig = Rig()
    rig.ask(1, structured_outputs=StructuredOutputsParams(regex="a"))
    rig.prepare()
    rig.checked(0, RuntimeError("inside"))
    assert rig.told(ENGINE)[0].status == 500 and not rig.core.requests


def test_a_check_of_one_that_is_aborted_meanwhile_means_nothing() -> None:
    rig = Rig()
    for uid in (1, 2):
        rig.ask(uid, structured_outputs=StructuredOutputsParams(regex="a"))
        rig.prepare()
        rig.engine(ENGINE, m.Abort(uid, 0))
    rig.told(SCHEDULER)
    rig.checked(0)
    rig.checked(0, Refused("no"))
    assert not rig.told(ENGINE) and not rig.told(SCHEDULER)


# ---------------------------------------------------------------- from the scheduler


def test_a_token_becomes_text_at_its_engine() -> None:
    rig = Rig()
    running(rig)
    (token,) = PREPARER.tokenizer.encode("a", False)
    rig.scheduler(tokens(1, token))
    (batch,) = rig.told(ENGINE)
    assert (batch.texts, from_i32(batch.tokens)) == (["a"], [token])


def test_a_stop_string_is_told_to_the_scheduler() -> None:
    rig = Rig()
    running(rig, stop=["b"])
    rig.scheduler(tokens(1, *PREPARER.tokenizer.encode("ab", False)))
    (stopped,) = rig.told(SCHEDULER)
    assert type(stopped) is m.Stopped and stopped.uid == 1 and not rig.core.requests


def test_a_gap_is_unknown_to_the_engine_and_aborted_at_the_scheduler() -> None:
    rig = Rig()
    running(rig)
    rig.scheduler(tokens(1, 40, offset=3))
    (unknown,) = rig.told(ENGINE)
    assert (from_i64(unknown.uids), from_i32(unknown.attempts)) == ([1], [0])
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)] and not rig.core.requests


@pytest.mark.parametrize("message", [m.Failed(1, 0, 503, "no"), m.Pooled(1, 0, 0, f32([1.0]))])
def test_an_answer_ends_a_request_and_is_passed_on(message: Any) -> None:
    rig = Rig()
    running(rig)
    rig.scheduler(message)
    assert rig.told(ENGINE) == [message] and not rig.core.requests and not rig.told(SCHEDULER)


@pytest.mark.parametrize("message", [m.Failed(1, 1, 503, "no"), m.Failed(2, 0, 503, "no")])
def test_an_answer_of_another_attempt_or_to_nobody_means_nothing(message: Any) -> None:
    rig = Rig()
    running(rig)
    rig.scheduler(message)
    assert not rig.told(ENGINE) and list(rig.core.requests) == [1]


def test_unknown_is_told_to_each_engine_of_what_is_its_own() -> None:
    rig = Rig()
    for uid, peer in ((1, "a"), (2, "b"), (3, "a")):
        running(rig, uid, peer)
    rig.ask(4, "a")  # not submitted
    rig.scheduler(m.Unknown(i64([1, 2, 3, 4, 5]), i32([0, 0, 1, 0, 0])))
    (first,), (second,) = rig.told("a"), rig.told("b")
    assert (from_i64(first.uids), from_i64(second.uids)) == ([1], [2])
    assert sorted(rig.core.requests) == [3, 4] and not rig.told(SCHEDULER)


def test_a_scheduler_of_the_same_epoch_is_not_greeted_again() -> None:
    rig = Rig()
    rig.told(SCHEDULER)
    rig.peers(1)
    assert not rig.told(SCHEDULER)


def test_the_first_scheduler_is_not_greeted_twice() -> None:
    rig = Rig(epoch=0)
    rig.told(SCHEDULER)
    rig.peers(0)
    assert not rig.told(SCHEDULER) and rig.core.epoch == 0


def test_a_scheduler_that_was_restarted_is_greeted() -> None:
    rig = Rig(epoch=0)
    rig.peers(0)
    rig.told(SCHEDULER)
    rig.peers(1)
    assert [type(each) for each in rig.told(SCHEDULER)] == [m.Hello, m.Reconcile]


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_scheduler_without_blocks_is_not_there_yet(block_size: int) -> None:
    rig = Rig(epoch=0)
    rig.peers(1, block_size)
    assert (rig.core.epoch, rig.core.block_size) == (-1, 0)


def test_blocks_may_be_of_one_token() -> None:
    rig = Rig(epoch=0)
    rig.peers(1, 1)
    assert rig.core.block_size == 1


@pytest.mark.parametrize(("most", "limit"), [(0, 128), (1, 1), (64, 64), (128, 128), (4096, 128)])
def test_a_context_is_the_smaller_of_the_scheduler_s_and_the_model_s(most: int, limit: int) -> None:
    rig = Rig()
    rig.scheduler(m.Peers(1, [], 16, True, most))
    assert rig.core.max_model_len == limit


def test_logprobs_of_a_prompt_have_texts() -> None:
    rig = Rig()
    running(rig, prompt_logprobs=0)
    (token,) = PREPARER.tokenizer.encode("a", False)
    rig.scheduler(m.PromptLogprobs(1, 0, 1, m.Logprobs(i32([token]), f32([-1.0]), i32([1]))))
    (found,) = rig.told(ENGINE)
    assert (found.uid, found.start, found.logprobs.texts) == (1, 1, ["a"])


def test_logprobs_of_a_prompt_have_no_texts_where_none_is_wanted() -> None:
    rig = Rig()
    running(rig, prompt_logprobs=0, detokenize=False)
    rig.scheduler(m.PromptLogprobs(1, 0, 1, m.Logprobs(i32([40]), f32([-1.0]), i32([1]))))
    assert rig.told(ENGINE)[0].logprobs.texts == []


def test_logprobs_of_a_prompt_have_no_texts_where_there_is_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    running(rig, prompt_logprobs=0)
    monkeypatch.setattr(PREPARER, "texts", None)
    rig.scheduler(m.PromptLogprobs(1, 0, 1, m.Logprobs(i32([40]), f32([-1.0]), i32([1]))))
    assert rig.told(ENGINE)[0].logprobs.texts == []


@pytest.mark.parametrize(("uid", "attempt"), [(2, 0), (1, 1)])
def test_logprobs_of_a_prompt_of_nobody_mean_nothing(uid: int, attempt: int) -> None:
    rig = Rig()
    running(rig, prompt_logprobs=0)
    rig.scheduler(m.PromptLogprobs(uid, attempt, 1, m.Logprobs(i32([40]), f32([-1.0]), i32([1]))))
    assert not rig.told(ENGINE)


def test_logprobs_of_a_prompt_that_make_no_sense_are_a_bad_frame() -> None:
    rig = Rig()
    running(rig, prompt_logprobs=0)
    rig.scheduler(m.PromptLogprobs(1, 0, 1, m.Logprobs(b"", b"", i32([1]))))
    assert rig.core.bad_frames == 1 and not rig.told(ENGINE)


def beams_of(uid: int, step: int, parents: list[int], ids: list[int], attempt: int = 0) -> m.BeamTokens:
    return m.BeamTokens(uid, attempt, step, i32(parents), i32(ids))


def test_candidates_that_a_stop_string_ends_are_named() -> None:
    rig = Rig()
    running(rig, use_beam_search=True, n=2, temperature=0, stop=["b"])
    a, b = (PREPARER.tokenizer.encode(letter, False)[0] for letter in "ab")
    rig.scheduler(beams_of(1, 1, [0, 0], [a, b]))
    (stopped,) = rig.told(SCHEDULER)
    assert (stopped.uid, stopped.attempt, stopped.step, from_i32(stopped.stopped)) == (1, 0, 1, [1])


@pytest.mark.parametrize(("uid", "attempt"), [(2, 0), (1, 1)])
def test_candidates_of_nobody_mean_nothing(uid: int, attempt: int) -> None:
    rig = Rig()
    running(rig, use_beam_search=True, n=2, temperature=0, stop=["b"])
    rig.scheduler(beams_of(uid, 1, [0], [40], attempt))
    assert not rig.told(SCHEDULER) and not rig.told(ENGINE)


def test_candidates_of_one_without_stop_strings_mean_nothing() -> None:
    rig = Rig()
    running(rig)
    rig.scheduler(beams_of(1, 1, [0], [40]))
    assert not rig.told(SCHEDULER) and list(rig.core.requests) == [1]


def test_candidates_out_of_step_lose_the_request() -> None:
    rig = Rig()
    running(rig, use_beam_search=True, n=2, temperature=0, stop=["b"])
    rig.scheduler(beams_of(1, 2, [0], [40]))
    assert said(rig.told(SCHEDULER)) == [("Abort", 1, 0)] and type(rig.told(ENGINE)[0]) is m.Unknown


def test_a_later_bye_without_a_reason_leaves_the_reason() -> None:
    rig = Rig()
    rig.scheduler(m.Bye("no"))
    rig.scheduler(m.Bye())
    assert rig.core.refused == "no"


def test_everyone_is_told_goodbye_once() -> None:
    rig = Rig()
    for peer in ("a", "b"):
        rig.engine(peer, m.Heartbeat())
    rig.sent.clear()
    rig.core.close()
    assert rig.core.take() == [("a", m.Bye()), ("b", m.Bye()), (SCHEDULER, m.Bye())]


@pytest.mark.parametrize(("epoch", "told"), [(1, True), (2, False)])
def test_what_was_with_a_scheduler_before_is_dropped_without_a_word(epoch: int, told: bool) -> None:
    """Its Engine hears of the new scheduler too, and from that one which request ended the other."""
    rig = Rig(epoch=1)
    running(rig, 1)
    rig.peers(epoch)
    rig.scheduler(m.Unknown(i64([1]), i32([0])))
    assert bool(rig.told(ENGINE, m.Unknown)) == told and not rig.core.requests
    rig.engine(ENGINE, m.Reconcile(i64([1]), i32([0])))  # of an Engine that has not
    assert from_i64(rig.told(ENGINE, m.Unknown)[0].uids) == [1]


# ---------------------------------------------------------------- what was prepared


PLAIN = Generate(SamplingParams(max_tokens=4), 1)
VECTORS = Embeds("float32", 2, 1, bytes(16), bytes(8))


@pytest.mark.parametrize(
    ("work", "told"), [(with_embeds(PLAIN, VECTORS), with_embeds(with_embeds(PLAIN, VECTORS), None)),
                       (Pool(PoolingParams()), Pool(PoolingParams()))],
)  # fmt: skip
def test_the_scheduler_gets_what_is_to_run_and_engine_no_embeddings_back(work: Any, told: Any) -> None:
    rig = Rig()
    rig.engine(ENGINE, tokenize(work=work, ids=i32([1])))
    rig.told(SCHEDULER)
    ((_, done),) = rig.jobs
    sequences = {} if isinstance(work, Pool) else {0: TextSequence(None, None, 0, 0)}
    done(Prepared(i32([1]), None, bytes(16), b"", 16, work, sequences, [], [], None))
    rig.flush()
    assert [message.work for message in rig.told(ENGINE) if isinstance(message, m.Accepted)] == [told]
    assert [message.work for message in rig.told(SCHEDULER) if isinstance(message, m.Submit)] == [work]
