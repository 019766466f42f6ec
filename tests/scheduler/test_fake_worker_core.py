"""The fake worker's process without IO: when it makes a connection anew, and when it leaves."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from quire.proto import messages as m
from quire.proto.codec import i32
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.fake.fake_worker import Connect, FakeWorker, FakeWorkerCore, Leave, Poisoned

LEASE = m.Lease(1, 0, 1)
ASSIGN = m.Assign(LEASE, 4, 64, 64)


def started(worker: FakeWorker | None = None) -> FakeWorkerCore:
    names = count(1)
    core = FakeWorkerCore(worker or FakeWorker(), lambda: f"w-{next(names)}", pid=7)
    core.start()
    assert core.take() == [Connect("w-1"), hello("w-1", loaded=False)]
    return core


def hello(name: str, loaded: bool) -> m.Hello:
    return m.Hello("gpu_worker", name, m.PROTOCOL, 7, device="fake", loaded=loaded)


def again(name: str) -> list[Any]:
    """What is to be done for another connection."""
    return [Connect(name), hello(name, loaded=True)]


def ready(core: FakeWorkerCore) -> None:
    core.received(ASSIGN)
    core.received(m.Configure(LEASE, 16))
    assert [type(each) for each in core.take()] == [m.Loaded, m.Ready]


def test_a_lease_that_ends_is_followed_by_a_hello_under_another_name() -> None:
    core = started()
    core.disconnected()
    assert core.take() == again("w-2")
    core.received(m.Bye(again=True))
    assert core.take() == again("w-3")
    ready(core)
    core.heartbeat()
    core.received(m.StepPlan(LEASE, 5))  # steps are missing
    beat, failed, *rest = core.take()
    assert beat == m.Heartbeat(0) and isinstance(failed, m.StepFailed) and rest == again("w-4")


def test_it_leaves_when_it_is_drained_or_sent_away() -> None:
    core = started()
    core.drain()
    assert core.take() == [m.Drain("it was asked to end")]
    core.received(m.Drain())
    assert core.take() == [m.Bye("drained"), Leave(0)]
    core = started()
    core.drain()
    core.disconnected()  # nobody is there to drain it
    assert core.take()[1:] == [Leave(0)]
    core = started()
    core.received(m.Bye("protocol 9 is not spoken here"))
    assert core.take() == [Leave(78, "protocol 9 is not spoken here")]


def test_a_poisoned_prompt_is_the_end_of_it() -> None:
    worker = FakeWorker()
    worker.poison = 13
    core = started(worker)
    ready(core)
    admit = m.Admit(0, 1, 0, i32([13, 14]), 2, Generate(SamplingParams(max_tokens=4), 0))
    with pytest.raises(Poisoned):
        core.received(m.StepPlan(LEASE, 1, admits=[admit]))
