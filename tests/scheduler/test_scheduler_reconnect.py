"""A connection that broke and was back before the scheduler had noticed: nothing waits for what was lost with it."""

from __future__ import annotations

from scheduler_rig import Rig

from quire.proto.codec import f32, i32, i64
from quire.proto.messages import PROTOCOL, Hello, Logprobs, Reconcile, StepResult, Unknown
from quire.scheduler.membership import Membership


def asked_of(rig: Rig, owner: str = "detok") -> int:
    """A beam search with a stop string, one step of it done: the detokenizer is asked about its candidates."""
    uid = rig.submit(8, n=2, best_of=2, use_beam_search=True, stop=["x"], temperature=0.0, logprobs=0, max_tokens=9)
    plan = rig.plan()
    assert plan is not None
    ids = i32([7, 7, 8, 9, 10])
    record = Logprobs(ids, f32([-1.0, -1.0, -2.0, -3.0, -4.0]), i32([1]))
    rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([7]), b"", i32([0]), [record]))
    assert rig.plan() is None  # it waits for the answer
    return uid


def test_a_search_whose_question_was_lost_in_a_short_break_starts_again() -> None:
    rig = Rig()
    members = Membership(rig.core, 1)
    hello = Hello("detokenizer", "detok", PROTOCOL, 1)
    members.on_front("detok", hello)
    searching, plain = asked_of(rig), rig.submit(8)
    rig.core.outbox.take()  # the question goes down with the connection
    members.on_front("detok", hello)
    members.on_front("detok", Reconcile(i64([searching, plain]), i32([0, 0])))
    assert list(rig.core.requests) == [plain]
    (gone,) = [message for _, message in rig.core.outbox.take() if isinstance(message, Unknown)]
    assert gone.uids == i64([searching])
