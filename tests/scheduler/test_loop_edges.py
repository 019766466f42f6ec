"""What the scheduler's loop says of messages that could not be sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_house import House

from quire.proto.messages import Heartbeat, Lease, StepPlan
from quire.scheduler import loop
from quire.scheduler.inputs import Inputs


@pytest.mark.parametrize(("limit", "unsent"), [(loop.MAX_FRAME, 2), (64, 1)])
def test_a_plan_that_no_worker_can_be_sent_is_not_innocent(
    monkeypatch: pytest.MonkeyPatch, limit: int, unsent: int
) -> None:
    """One that is over the limit would else go from worker to worker for ever; those behind it blame nobody."""
    monkeypatch.setattr(loop, "MAX_FRAME", limit)
    lease, told = Lease(1, 0, 1), []
    outgoing = [
        ("w", StepPlan(lease, 1, drops=bytes(100))), ("v", Heartbeat()), ("w", StepPlan(lease, 2)),
        ("v", StepPlan(lease, 1)), ("w", Heartbeat()),
    ]  # fmt: skip
    inputs: Any = SimpleNamespace(
        membership=None, to_workers=lambda: outgoing, to_front=list, worker_gone=lambda *args: told.append(args)
    )
    workers: Any = SimpleNamespace(send=lambda peer, message: peer != "w")
    turns = loop.Turns(SimpleNamespace(), workers, inputs)  # type: ignore[arg-type]
    assert not turns._send()
    assert told == [("w", "is gone: it cannot be reached", unsent)]


def test_a_worker_that_is_gone_may_be_so_for_any_plan_that_it_was_sent() -> None:
    house = House()
    house.hello("d1")
    house.worker("w")
    house.submit("d1", 1, max_tokens=1)
    assert len(house.plans("w")) == 1
    Inputs(house.members).worker_gone("w", "is gone: its connection broke")
    (seq,) = house.core.requests[1].live
    assert seq.losses.count == 1
