"""The scheduler and fake workers as processes of their own, driven over real sockets by a toy detokenizer."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.proto.codec import encode, from_i8, from_i32, from_i64, i32, i64
from quire.proto.hashing import hash_blocks
from quire.proto.messages import (
    PROTOCOL,
    Abort,
    Bye,
    Failed,
    FromSchedulerFront,
    FromSchedulerWorkers,
    GetStats,
    Heartbeat,
    Hello,
    Peers,
    Reconcile,
    Stats,
    StepResult,
    Submit,
    TokenBatch,
    Unknown,
)
from quire.proto.params import SamplingParams
from quire.proto.process import EXIT_CONFIG, new_incarnation
from quire.proto.wire.sockets import Dealer, front_endpoint, worker_endpoint
from quire.proto.work import Generate
from quire.scheduler.fake.fake_model import expected_tokens

VOCAB = 1000
WAIT_S = 60.0
STOPS_AT = """
import os, signal, sys
from quire.scheduler.fake import fake_worker
at, run = int(sys.argv.pop(1)), fake_worker.PageStore.run
def once(store, plan):
    if plan.step == at:
        fake_worker.PageStore.run = run
        os.kill(os.getpid(), signal.SIGSTOP)
    return run(store, plan)
fake_worker.PageStore.run = once
fake_worker.main()
"""
"""A fake worker that stops itself (SIGSTOP) before a step: in the middle of its streams, at whatever pace."""
JUMPS = """
import select, signal, time
real, poll, signals, jumps = time.monotonic, select.poll, [], []
time.monotonic = lambda: real() + 300 * len(jumps)
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
class Late:
    def __init__(self):
        self.own = poll()
        self.register = self.own.register
    def poll(self, timeout):
        events = self.own.poll(timeout)
        jumps[:] = signals
        return events
select.poll = Late
from quire.scheduler.main import main
from quire.proto.work import Generate
main()
"""
"""A scheduler that has waited 300 s by its clock when it goes on after SIGUSR1."""
FLAGS = "--block-size=8", "--max-num-seqs=16", "--max-num-batched-tokens=64"


class Stack:
    """One folder of sockets and the processes started in it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qs-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o700)
        self.address = f"ipc://{self.folder}"
        self.processes: list[subprocess.Popen] = []

    def start(self, module: str, *flags: str) -> subprocess.Popen:
        return self._run("-m", f"quire.scheduler{module}", f"--scheduler={self.address}", *flags)

    def _run(self, *command: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-P", *command], stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def scheduler(self, *flags: str) -> subprocess.Popen:
        return self.start("", *FLAGS, *flags)

    def scheduler_that_jumps(self, *flags: str) -> subprocess.Popen:
        return self._run("-c", JUMPS, f"--scheduler={self.address}", *FLAGS, *flags)

    def worker(self, *flags: str, stops_at: int = 0) -> subprocess.Popen:
        if stops_at:
            return self._run("-c", STOPS_AT, str(stops_at), f"--scheduler={self.address}", *flags)
        return self.start(".fake.fake_worker", *flags)

    def stop(self, process: subprocess.Popen, how: int = signal.SIGTERM) -> str:
        """End it; what it wrote to standard error."""
        if process.poll() is None:
            process.send_signal(how)
        return process.communicate(timeout=WAIT_S)[1]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                self.stop(process, signal.SIGKILL)
            elif process.stderr is not None:
                process.stderr.close()
        self._folder.cleanup()


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.close()


class Front:
    """A toy detokenizer and the Engine behind it."""

    def __init__(self, stack: Stack):
        self.name = new_incarnation("detokenizer")
        self.wire: Dealer = Dealer(FromSchedulerFront, front_endpoint(stack.address), self.name)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}
        self.other: list[Any] = []
        self.peers: Peers | None = None
        self.wire.send(Hello("detokenizer", self.name, PROTOCOL, os.getpid()))

    def submit(self, uid: int, prompt: list[int], max_tokens: int, attempt: int = 1) -> None:
        ids = i32(prompt)
        params = SamplingParams(max_tokens=max_tokens)
        self.tokens[uid] = []
        self.finished.pop(uid, None)  # of an earlier attempt
        hashes = b"".join(hash_blocks(ids, 8))
        self.wire.send(Submit(uid, attempt, ids, hashes, Generate(params, uid), time.time()))

    def until(self, done: Callable[[], Any]) -> None:
        """Take messages until ``done()``; fails after a minute."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < deadline, (self.tokens, self.other)
            self.wire.socket.poll(100)
            while (message := self.wire.recv()) is not None:
                self._take(message)

    def _take(self, message: Any) -> None:
        if isinstance(message, Peers):
            self.peers = message
        elif isinstance(message, TokenBatch):
            at, flat = 0, from_i32(message.tokens)
            columns = (message.uids, message.offsets, message.counts, message.finishes)
            for uid, offset, count, finish in zip(
                from_i64(columns[0]), from_i32(columns[1]), from_i32(columns[2]), from_i8(columns[3]), strict=True
            ):
                assert offset == len(self.tokens[uid])
                self.tokens[uid] += flat[at : at + count]
                at += count
                if finish:
                    self.finished[uid] = finish
        elif not isinstance(message, Heartbeat):
            self.other.append(message)

    def ready(self) -> bool:
        return self.peers is not None and self.peers.ready

    def stats(self) -> Stats:
        self.wire.send(GetStats(7))
        self.until(lambda: any(isinstance(m, Stats) for m in self.other))
        found = next(m for m in self.other if isinstance(m, Stats))
        self.other.remove(found)
        return found

    def close(self) -> None:
        self.wire.close()


@pytest.fixture
def front(stack: Stack) -> Iterator[Front]:
    front = Front(stack)
    yield front
    front.close()


def stopped(process: subprocess.Popen) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


PROMPTS = {uid: [(uid * 7 + i) % VOCAB for i in range(3 + 9 * uid)] for uid in range(1, 7)}


@pytest.mark.slow
def test_streams_survive_kill_9_of_a_worker(stack: Stack, front: Front) -> None:
    stack.scheduler()
    victim = stack.worker("--delay-ms", "2", "6", stops_at=12)
    other = stack.worker("--delay-ms", "2", "6", "--seed=1")
    front.until(lambda: front.peers and sum(p.kind == "gpu_worker" for p in front.peers.peers) == 2)
    front.until(lambda: len(front.stats().replicas) == 2)
    for uid, prompt in PROMPTS.items():
        front.submit(uid, prompt, max_tokens=60)
    front.until(lambda: stopped(victim) and any(front.tokens[u] for u in PROMPTS if u not in front.finished))
    stack.stop(victim, signal.SIGKILL)
    front.until(lambda: len(front.finished) == len(PROMPTS))
    for uid, prompt in PROMPTS.items():
        assert front.tokens[uid] == expected_tokens(prompt, uid, 60, VOCAB)
    assert len(front.stats().replicas) == 1
    stack.stop(other)
    front.until(lambda: not front.ready())
    front.submit(50, [1, 2], max_tokens=5)  # waits for a worker
    stack.worker()
    front.until(lambda: 50 in front.finished)
    assert front.tokens[50] == expected_tokens([1, 2], 50, 5, VOCAB)
    stats = front.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.bad_frames) == (0, 0, 0, 0)
    assert front.other == []


@pytest.mark.slow
def test_a_stopped_worker_is_found_and_comes_back_with_a_new_name(stack: Stack, front: Front) -> None:
    scheduler = stack.scheduler("--worker-timeout=2", "--step-timeout=60")
    worker = stack.worker(stops_at=12)
    front.until(front.ready)
    front.submit(1, PROMPTS[1], max_tokens=60)
    front.until(lambda: len(front.tokens[1]) > 5)
    front.until(lambda: stopped(worker) and front.stats().waiting == 1)
    front.until(lambda: not front.ready())
    worker.send_signal(signal.SIGCONT)
    front.until(lambda: 1 in front.finished)
    assert front.tokens[1] == expected_tokens(PROMPTS[1], 1, 60, VOCAB)
    assert worker.poll() is None
    said = stack.stop(scheduler)
    assert "was silent for 2 s" in said and "its weights still loaded" in said


@pytest.mark.slow
def test_a_stopped_scheduler_loses_nothing(stack: Stack, front: Front) -> None:
    scheduler = stack.scheduler_that_jumps("--worker-timeout=60", "--step-timeout=60")
    stack.worker("--delay-ms", "2", "4")
    front.until(front.ready)
    front.submit(1, PROMPTS[1], max_tokens=200)
    front.until(lambda: len(front.tokens[1]) > 5)
    scheduler.send_signal(signal.SIGSTOP)
    scheduler.send_signal(signal.SIGUSR1)  # when it goes on, five minutes have passed
    time.sleep(1.0)
    scheduler.send_signal(signal.SIGCONT)
    front.until(lambda: 1 in front.finished)
    assert front.tokens[1] == expected_tokens(PROMPTS[1], 1, 200, VOCAB)
    said = stack.stop(scheduler)
    assert "stood still for" in said and "loses its lease" not in said


@pytest.mark.slow
def test_a_worker_that_is_asked_to_end_drains(stack: Stack, front: Front) -> None:
    scheduler = stack.scheduler("--drain-timeout=0.5")
    leaving = stack.worker("--delay-ms", "30", "40")  # a minute for all of it
    front.until(front.ready)
    for uid in (1, 2):
        front.submit(uid, PROMPTS[uid], max_tokens=1500)
    front.until(lambda: all(len(front.tokens[uid]) > 2 for uid in (1, 2)))
    stack.stop(leaving)
    assert leaving.returncode == 0
    stack.worker()
    front.until(lambda: len(front.finished) == 2)
    for uid in (1, 2):
        assert front.tokens[uid] == expected_tokens(PROMPTS[uid], uid, 1500, VOCAB)
    said = stack.stop(scheduler)
    told = [line for line in said.splitlines() if "drains (it was asked to end)" in line or "is drained after" in line]
    assert len(told) == 2 and "2 sequences" in told[0] and "2 of 2 sequences go back in line" in told[1], told


@pytest.mark.slow
def test_a_request_that_kills_workers_ends_with_a_500(stack: Stack, front: Front) -> None:
    stack.scheduler()
    flags = ("--delay-ms", "1", "2", "--poison=666")
    workers = [stack.worker(*flags)]
    front.until(front.ready)
    for uid in (1, 2, 3):
        front.submit(uid, PROMPTS[uid], max_tokens=150)
    front.until(lambda: all(len(front.tokens[uid]) > 3 for uid in (1, 2, 3)))
    front.submit(9, [666, 1, 2], max_tokens=10)

    def ended() -> bool:
        if workers[-1].poll() is not None:
            assert workers[-1].returncode == 70
            workers.append(stack.worker(*flags))
        return len(front.finished) == 3 and bool(front.other)

    front.until(ended)
    assert [worker.wait(WAIT_S) for worker in workers[:3]] == [70] * 3
    assert all(worker.poll() is None for worker in workers[3:])
    for uid in (1, 2, 3):
        assert front.tokens[uid] == expected_tokens(PROMPTS[uid], uid, 150, VOCAB)
    (failed,) = front.other
    assert (failed.uid, failed.status) == (9, 500) and "3 times" in failed.message and "request 9" in failed.message


GARBAGE = [
    b"", b"\x00", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", pickle.dumps({"a": print}), encode(["Nonsense", 1]),
    encode(Heartbeat())[:-1], encode(["Submit", 1, 1]), os.urandom(10_000), b"\x91" * 5000,
]  # fmt: skip


def test_garbage_is_dropped_and_counted(stack: Stack, front: Front) -> None:
    stack.scheduler()
    stack.worker()
    front.until(front.ready)
    context = zmq.Context.instance()
    for endpoint in (front_endpoint(stack.address), worker_endpoint(stack.address)):
        with context.socket(zmq.DEALER) as raw:
            raw.linger = int(WAIT_S * 1000)
            raw.connect(endpoint)
            for frame in GARBAGE:
                raw.send(frame)
            raw.send_multipart([b"two", b"frames"])
    front.wire.socket.send(b"from one who is known")
    ids = i32([1, 2, 3])
    params = SamplingParams(max_tokens=3)
    for bad in (
        Submit(90, 1, ids[:-1], b"", Generate(params, 1), 0.0),  # not whole ids
        Submit(91, 1, ids, b"12345", Generate(params, 1), 0.0),  # hashes of nothing
        Submit(92, 1, ids, b"", Generate(params, 1), float("nan")),
    ):
        front.wire.send(bad)
    front.wire.send(Reconcile(i64([1, 2]), i32([1])))
    front.until(lambda: len([m for m in front.other if isinstance(m, Failed)]) == 3)
    assert {m.status for m in front.other} == {400}
    front.other.clear()
    expected = 2 * (len(GARBAGE) + 1) + 1 + 3 + 1
    front.until(lambda: front.stats().bad_frames >= expected)
    assert front.stats().bad_frames == expected
    front.submit(1, PROMPTS[1], max_tokens=20)
    front.until(lambda: 1 in front.finished)
    assert front.tokens[1] == expected_tokens(PROMPTS[1], 1, 20, VOCAB)


def test_a_worker_that_makes_no_sense_is_expelled(stack: Stack, front: Front) -> None:
    stack.scheduler()
    stack.worker()
    front.until(front.ready)
    name = new_incarnation("gpu_worker")
    mad: Dealer = Dealer(FromSchedulerWorkers, worker_endpoint(stack.address), name)

    def receive(kind: str) -> Any:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            mad.socket.poll(100)
            message = mad.recv()
            if type(message).__name__ == kind:
                return message
        raise AssertionError(f"no {kind}")

    mad.send(Hello("gpu_worker", name, PROTOCOL, 1))
    lease = receive("Assign").lease
    mad.send(StepResult(lease, 1, i32([1, 2, 3])))
    assert "result of step 1" in receive("Bye").reason
    mad.close()
    front.submit(1, PROMPTS[2], max_tokens=20)
    front.until(lambda: 1 in front.finished)
    assert front.tokens[1] == expected_tokens(PROMPTS[2], 1, 20, VOCAB)


def test_wrong_protocol_gets_bye(stack: Stack) -> None:
    stack.scheduler()
    for kind, union, endpoint in (
        ("detokenizer", FromSchedulerFront, front_endpoint(stack.address)),
        ("gpu_worker", FromSchedulerWorkers, worker_endpoint(stack.address)),
    ):
        name = new_incarnation(kind)
        wire: Dealer = Dealer(union, endpoint, name)
        wire.send(Hello(kind, name, PROTOCOL + 1, 1))
        assert wire.socket.poll(int(WAIT_S * 1000))
        message = wire.recv()
        assert isinstance(message, Bye)
        assert f"protocol {PROTOCOL + 1}" in message.reason
        wire.close()


def test_second_scheduler_is_refused_and_the_first_leaves_no_files(stack: Stack, front: Front) -> None:
    first = stack.scheduler()
    front.until(lambda: front.peers is not None)
    second = stack.scheduler()
    error = second.communicate(timeout=WAIT_S)[1]
    assert second.returncode == EXIT_CONFIG
    assert error.count("\n") == 1
    assert "another scheduler serves" in error
    assert first.poll() is None
    assert sorted(p.name for p in stack.folder.iterdir()) == ["scheduler.front", "scheduler.lock", "scheduler.workers"]
    stack.stop(first)
    assert first.returncode == 0
    assert [p.name for p in stack.folder.iterdir()] == ["scheduler.lock"]


@pytest.mark.slow
def test_a_new_scheduler_takes_over_after_kill_9(stack: Stack, front: Front) -> None:
    first = stack.scheduler()
    stack.worker("--delay-ms", "2", "4")
    front.until(front.ready)
    assert front.peers is not None
    epoch = front.peers.epoch
    front.submit(1, PROMPTS[3], max_tokens=500)
    front.until(lambda: len(front.tokens[1]) > 3)
    stack.stop(first, signal.SIGKILL)
    stack.scheduler()

    def answered() -> bool:
        """What is sent into a connection that has not been found broken yet is lost: asked again."""
        front.wire.send(Reconcile(i64([1]), i32([1])))
        return any(isinstance(m, Unknown) and from_i64(m.uids) == [1] for m in front.other)

    front.until(answered)  # a stranger still: answered all the same
    front.wire.send(Hello("detokenizer", front.name, PROTOCOL, os.getpid()))
    front.until(lambda: front.peers and front.peers.epoch > epoch and front.peers.ready)
    front.submit(1, PROMPTS[3], max_tokens=30, attempt=2)
    front.until(lambda: 1 in front.finished)
    assert front.tokens[1] == expected_tokens(PROMPTS[3], 1, 30, VOCAB)


def test_abort_and_a_lost_detokenizer_free_their_blocks(stack: Stack, front: Front) -> None:
    stack.scheduler()
    stack.worker("--delay-ms", "20", "30", "--max-model-len=4000", "--num-blocks=2000")  # a minute and more for each
    front.until(front.ready)
    lost = Front(stack)
    for client, uid in ((front, 1), (lost, 2), (lost, 3)):
        client.submit(uid, PROMPTS[4], max_tokens=3000)
        client.until(lambda client=client, uid=uid: client.tokens[uid])
    assert front.stats().running == 3
    front.wire.send(Abort(1, 1))
    lost.close()
    front.until(lambda: front.stats().running == 0)
    assert front.stats().blocks_used == 0
