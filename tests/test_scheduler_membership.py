"""Hello to Bye, leases and timers, on a clock that the test moves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.proto.codec import BadFrame, Decoder, encode, f32, from_i32, i32, i64
from quire.proto.config import EngineArgs
from quire.proto.messages import (
    PROTOCOL,
    Abort,
    Assign,
    BeamStopped,
    BeamTokens,
    Beat,
    Bye,
    Child,
    Configure,
    Drain,
    Failed,
    GetStats,
    Gone,
    Hello,
    Lease,
    Loaded,
    Logprobs,
    Open,
    Peers,
    PromptLogprobs,
    Ready,
    Stats,
    StepFailed,
    StepPlan,
    StepResult,
    Stopped,
    Submit,
    TokenBatch,
    ToSchedulerFront,
    ToSchedulerWorkers,
)
from quire.proto.params import SamplingParams
from quire.scheduler.core import Scheduler
from quire.scheduler.fake_worker import FakeWorker
from quire.scheduler.membership import LOST_FRONT_S, SILENT_WORKER_S, STEP_LIMIT_S, Membership


class House:
    """Membership with its two sockets replaced by lists."""

    def __init__(self) -> None:
        self.now = 100.0
        config = EngineArgs(block_size=8, max_num_seqs=8, max_num_batched_tokens=32)
        self.core = Scheduler(config, clock=lambda: self.now)
        self.members = Membership(self.core, epoch=42)

    def hello(self, name: str, kind: str = "detokenizer", protocol: int = PROTOCOL) -> None:
        hello = Hello(kind, name, protocol, 1, endpoint=f"ipc:///x/{name}")
        (self.members.on_worker if kind == "gpu_worker" else self.members.on_front)(name, hello)

    def worker(self, name: str, blocks: int = 64) -> Lease:
        """A worker that is ready; its lease."""
        self.hello(name, "gpu_worker")
        (assign,) = self.sent(name, Assign)
        self.members.on_worker(name, Loaded(assign.lease, blocks, 128, 1000))
        (configure,) = self.sent(name, Configure)
        assert configure.num_blocks == blocks
        self.members.on_worker(name, Ready(assign.lease))
        return assign.lease

    def submit(self, peer: str, uid: int, attempt: int = 1, max_tokens: int = 20) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.members.on_front(peer, Submit(uid, attempt, i32([1, 2, 3]), b"", params, [], 1, float(uid)))

    def sent(self, worker: str, kind: type) -> list[Any]:
        """What a worker was sent since the last look; the rest is forgotten."""
        messages, self.members.to_workers = self.members.to_workers, []
        return [m for peer, m in messages if peer == worker and isinstance(m, kind)]

    def told(self, peer: str, kind: type) -> list[Any]:
        """The same for the front side."""
        return [m for to, m in self.core.outbox.take() if to == peer and isinstance(m, kind)]

    def plans(self, worker: str) -> list[StepPlan]:
        self.members.plans()
        return self.sent(worker, StepPlan)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.members.tick()


@pytest.fixture
def house() -> House:
    return House()


def test_peers_are_told_on_every_change(house: House) -> None:
    house.hello("d1")
    (peers,) = house.told("d1", Peers)
    assert (peers.epoch, peers.block_size, peers.ready, peers.max_model_len) == (42, 8, False, 0)
    house.hello("f1", "frontend")
    assert [p.kind for p in house.told("d1", Peers)[-1].peers] == ["detokenizer", "frontend"]
    house.worker("w1")
    peers = house.told("f1", Peers)[-1]
    assert (peers.ready, peers.max_model_len, len(peers.peers)) == (True, 128, 3)
    house.members.worker_gone("w1", "died")
    peers = house.told("d1", Peers)[-1]
    assert (peers.ready, peers.max_model_len, len(peers.peers)) == (False, 128, 2)
    house.members.front_gone("f1")
    assert len(house.told("d1", Peers)[-1].peers) == 1


def test_another_protocol_gets_bye(house: House) -> None:
    house.hello("d1", protocol=PROTOCOL + 1)
    house.hello("w1", "gpu_worker", protocol=0)
    assert "protocol" in house.told("d1", Bye)[0].reason
    assert "protocol 0" in house.sent("w1", Bye)[0].reason
    assert not house.members.front
    assert not house.members.workers


@pytest.mark.parametrize("hello", [Hello("nobody", "x", PROTOCOL, 1), Hello("detokenizer", "other", PROTOCOL, 1)])
def test_a_hello_that_lies_is_counted(house: House, hello: Hello) -> None:
    house.members.on_front("x", hello)
    house.members.on_worker("x", hello)
    assert house.core.bad_messages == 2
    assert not house.members.front


def test_results_of_another_lease_are_dropped(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    first, second = house.plans("w1")
    stale = Lease(41, lease.replica, lease.counter)
    house.members.on_worker("w1", StepResult(stale, 1, i32([5])))
    house.members.on_worker("w9", StepResult(lease, 1, i32([5])))
    assert house.core.steps == 0
    house.members.on_worker("w1", StepResult(lease, first.step, i32([5])))
    house.members.on_worker("w1", StepResult(lease, second.step, i32([5])))
    assert house.core.steps == 2
    assert house.core.bad_messages == 0


@pytest.mark.parametrize("tokens", [b"", b"123", i32([-5]), i32([1, 2])])
def test_a_malformed_result_ends_the_lease(house: House, tokens: bytes) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.members.on_worker("w1", StepResult(lease, 1, tokens))
    assert house.sent("w1", Bye)
    assert not house.core.replicas
    assert house.core.bad_messages == 1
    assert len(house.core.queue) == 1
    house.core.check_integrity()
    house.worker("w2")
    assert house.plans("w2")


def test_a_failed_step_ends_the_lease_and_the_worker_comes_back(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.members.on_worker("w1", StepFailed(lease, 1, "boom"))
    assert not house.core.replicas
    again = house.worker("w1b")
    assert again.counter > lease.counter
    (plan, _) = house.plans("w1b")
    assert (plan.lease, plan.step) == (again, 1)


@pytest.mark.parametrize("bad", [Ready, StepResult, lambda lease: Loaded(lease, 0, 128, 1000)])
def test_a_worker_out_of_turn_is_expelled(house: House, bad: Any) -> None:
    house.hello("w1", "gpu_worker")
    (assign,) = house.sent("w1", Assign)
    house.members.on_worker("w1", bad(assign.lease, 1, b"") if bad is StepResult else bad(assign.lease))
    assert house.sent("w1", Bye)
    assert not house.members.workers
    assert house.core.loading == 0


def test_workers_take_the_lowest_free_number(house: House) -> None:
    assert [house.worker(f"w{i}").replica for i in range(3)] == [0, 1, 2]
    house.members.on_worker("w1", Bye())
    assert house.worker("w7").replica == 1


def test_a_lost_detokenizers_requests_wait_five_seconds(house: House) -> None:
    house.hello("d1")
    house.hello("d2")
    house.worker("w1")
    for uid in (1, 2):
        house.submit("d1", uid)
    house.members.front_gone("d1")
    house.later(LOST_FRONT_S - 0.5)
    assert set(house.core.requests) == {1, 2}
    house.submit("d2", 2, attempt=2)
    house.later(1.5)
    assert set(house.core.requests) == {2}
    assert house.core.requests[2].owner == "d2"
    assert "d1" not in house.members.front


def test_a_detokenizer_that_comes_back_in_time_keeps_its_requests(house: House) -> None:
    house.hello("d1")
    house.submit("d1", 1)
    house.members.front_gone("d1")
    house.later(2.0)
    house.hello("d1")
    house.later(60.0)
    assert set(house.core.requests) == {1}


def test_requests_whose_tokens_were_lost_end_at_once(house: House) -> None:
    house.hello("d1")
    lease = house.worker("w1")
    house.submit("d1", 1)
    plan = house.plans("w1")[0]
    house.submit("d1", 2)
    house.core.outbox.take()
    house.members.on_worker("w1", StepResult(lease, plan.step, i32([5])))
    (batch,) = house.told("d1", TokenBatch)
    house.members.undelivered("d1", batch)
    assert set(house.core.requests) == {2}


def test_strangers_are_told_that_nothing_is_here(house: House) -> None:
    house.submit("old", 7, attempt=3)
    house.members.on_front("old", Abort(7, 3))
    house.members.on_front("old", Beat())
    (gone,) = house.told("old", Gone)
    assert (gone.uids, gone.attempts) == (i64([7]), i32([3]))
    assert house.core.bad_messages == 1


def test_everyone_is_beaten_to_every_second(house: House) -> None:
    house.hello("d1")
    house.hello("w1", "gpu_worker")
    house.later(0.0)
    house.later(0.4)
    house.later(0.4)
    assert (len(house.told("d1", Beat)), len(house.sent("w1", Beat))) == (1, 1)
    assert 0 < house.members.timeout() <= 0.3
    house.later(0.3)
    assert (len(house.told("d1", Beat)), len(house.sent("w1", Beat))) == (1, 1)


def test_a_silent_worker_and_a_hung_step_are_found(house: House) -> None:
    house.hello("d1")
    house.worker("silent")
    house.later(SILENT_WORKER_S + 1)
    assert not house.members.workers
    house.worker("hung")
    house.submit("d1", 1)
    house.plans("hung")
    for _ in range(int(STEP_LIMIT_S / 10) + 1):
        assert "hung" in house.members.workers
        house.members.on_worker("hung", Beat(0))
        house.later(10.0)
    assert "hung" not in house.members.workers
    assert len(house.core.queue) == 1


def test_a_worker_that_loads_for_long_is_not_silent(house: House) -> None:
    house.hello("w1", "gpu_worker")
    house.later(10 * SILENT_WORKER_S)
    assert "w1" in house.members.workers


def test_drain_sends_requests_elsewhere_without_blame(house: House) -> None:
    house.hello("d1")
    worker = FakeWorker(64, 128, 1000)
    house.worker("w1")
    house.submit("d1", 1)
    house.plans("w1")
    house.members.drain("w1", "going home")
    (drain,) = house.sent("w1", Drain)
    house.core.check_integrity()
    assert house.plans("w1") == []
    house.worker("w2")
    assert house.plans("w2")
    (bye,) = worker.handle(drain)
    house.members.on_worker("w1", bye)
    assert list(house.core.replicas) == [1]
    assert house.core.requests[1].live[0].losses == 0


def test_stats_answer_the_one_who_asks(house: House) -> None:
    house.hello("f1", "frontend")
    house.members.wire_bad_frames = 3
    house.members.on_front("f1", GetStats(9))
    (stats,) = house.told("f1", Stats)
    assert (stats.token, stats.bad_frames) == (9, 3)


def test_sound_messages_with_mad_values_break_nothing(house: House) -> None:
    """Everything that decodes is handled: refused, counted or ignored, and the books still balance."""
    rng = random.Random(5)
    front, workers = Decoder(ToSchedulerFront), Decoder(ToSchedulerWorkers)
    house.hello("d1")
    house.worker("w1")

    def number() -> int:
        return rng.choice([0, 1, 1, 2, 3, 7, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, rng.getrandbits(20)])

    def column() -> bytes:
        return rng.choice([b"", i32([1]), i32([1, 2, 3]), i64([1, 2]), i32([-1]), b"odd", i32([5] * 40)])

    def lease() -> Lease:
        worker = house.members.workers.get("w1")
        return worker.lease if worker and rng.random() < 0.8 else Lease(number(), number(), number())

    def params() -> SamplingParams:
        return SamplingParams(n=rng.randint(1, 20), max_tokens=rng.choice([None, 1, 20, 2**31 - 1]))

    def answer() -> Any:
        worker = house.members.workers.get("w1")
        if worker is None or worker.replica is None or not worker.replica.in_flight:
            return Submit(rng.randint(10, 30), 1, i32([1, 2, 3]), b"", SamplingParams(max_tokens=20), [], 1, 1.0)
        step = worker.replica.in_flight[0]
        return StepResult(worker.lease, step.number, i32([5] * step.samples()))

    makers = [
        *[answer] * 12,
        lambda: Submit(
            number(),
            number(),
            column(),
            rng.choice([b"", column()]),
            params(),
            [number()],
            number(),
            rng.choice([1.0, float("nan"), -1e300]),
            rng.choice([[], [Child(number(), column())]]),
            priority=number(),
            losses=number(),
        ),
        lambda: Abort(number(), number()),
        lambda: Stopped(number(), number(), number(), number()),
        lambda: Open(column(), column()),
        lambda: GetStats(number()),
        lambda: Hello(rng.choice(["detokenizer", "gpu_worker", ""]), "w1", rng.choice([1, number()]), number()),
        lambda: Loaded(lease(), number(), number(), number()),
        lambda: Ready(lease()),
        lambda: StepResult(lease(), rng.choice([number(), 1, 2, 3, 4, 5]), column(), column()),
        lambda: StepFailed(lease(), number(), "?"),
        lambda: Beat(number(), number(), number()),
        Bye,
    ]
    for turn in range(4000):
        if turn % 40 == 0:
            house.hello("d1")
            house.members.worker_gone("w1", "makes room for the next")
            house.worker("w1")
        frame = encode(rng.choice(makers)())
        for decode, handle, peer in (
            (front, house.members.on_front, "d1"),
            (workers, house.members.on_worker, "w1"),
        ):
            try:
                message = decode(frame)
            except BadFrame:
                continue
            handle(peer, message)
        house.later(0.05)
        house.members.plans()
        for _, out in [*house.core.outbox.take(), *house.members.to_workers]:
            encode(out)
        house.members.to_workers.clear()
        house.core.check_integrity()
    assert house.core.bad_messages > 100
    assert house.core.steps > 0


def search(house: House, uid: int) -> None:
    """A beam search with stop strings that has asked its first question."""
    params = SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=9, stop=["x"])
    house.members.on_front("d1", Submit(uid, 1, i32([1, 2, 3]), b"", params, [], 1, float(uid)))
    (plan,) = house.plans("w1")
    record = Logprobs(i32([7, 7, 8, 9, 10]), f32([-1, -1, -2, -3, -4]), i32([1]))
    house.members.on_worker("w1", StepResult(plan.lease, plan.step, i32([7]), b"", i32([0]), [record]))


def test_a_beam_search_asks_and_is_answered(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    (question,) = house.told("d1", BeamTokens)
    assert (question.uid, question.step, question.tokens) == (5, 1, i32([7, 8, 9, 10]))
    assert house.plans("w1") == []
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([1])))
    (plan,) = house.plans("w1")
    assert from_i32(plan.append_tokens) == [7, 9]
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([77])))  # nobody asked: not even looked at
    assert 5 in house.core.requests


def test_a_wrong_answer_is_counted_and_fails_the_search(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    house.members.on_front("d1", BeamStopped(5, 1, 1, i32([9])))
    assert [message.status for message in house.told("d1", Failed)] == [500]
    assert house.core.bad_messages == 1
    assert not house.core.requests


def test_a_question_or_answer_lost_on_its_way_drops_the_search(house: House) -> None:
    house.hello("d1")
    house.worker("w1")
    search(house, 5)
    (question,) = house.told("d1", BeamTokens)
    house.submit("d1", 4)
    house.members.front_gone("d1")
    assert list(house.core.requests) == [4]
    house.hello("d1")
    house.members.on_front("d1", Open(i64([4, 5]), i32([1, 1])))
    assert house.told("d1", Gone) == [Gone(i64([5]), i32([1]))]
    house.members.undelivered("d1", PromptLogprobs(4, 1, 1, Logprobs(b"", b"", b"")))
    house.hello("d1")
    search(house, 5)
    house.members.undelivered("d1", question)
    assert not house.core.requests
