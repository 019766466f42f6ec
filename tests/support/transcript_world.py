"""The commands of tests/scheduler/transcripts: a scheduler with its membership, fake workers and a clock that stands
still until it is told to go on. ``test_transcripts.py`` lists the commands.
"""

from __future__ import annotations

import shlex
from collections import deque
from typing import Any

from quire.proto.codec import i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks
from quire.proto.messages import (
    PROTOCOL,
    Abort,
    Assign,
    BeamStopped,
    BeamTokens,
    Bye,
    Child,
    Configure,
    Drain,
    Heartbeat,
    Hello,
    Manage,
    StepFailed,
    StepPlan,
    StepResult,
    Stopped,
    Submit,
)
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.inputs import plans_to
from quire.scheduler.membership import Membership
from quire.scheduler.transcript import Transcript

DEFAULTS = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
BEAT_S = 0.5


class TranscriptWorld:
    """``run`` takes a command line and returns the lines that come back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fakes: dict[str, FakeWorker] = {}
        self.inbox: dict[str, deque[Any]] = {}
        self.kept: dict[str, Any] = {}  # results that are on their way
        self.lost: set[str] = set()  # what is sent there does not arrive
        self.questions: list[BeamTokens] = []
        self.arrivals = 0
        self.do_config({})

    def run(self, line: str) -> list[str]:
        """Run one command."""
        name, *words = shlex.split(line)
        plain = [word for word in words if "=" not in word]
        named = {
            key.replace("-", "_"): value for key, _, value in (word.partition("=") for word in words if "=" in word)
        }
        try:
            getattr(self, "do_" + name)(named, *plain)
        except LookupError as error:
            self.inputs.lines.append(f"error: {error}")
        self.deliver()
        self.core.check_integrity()
        return self.inputs.take()

    def deliver(self) -> None:
        """What is owed goes out, as in the loop: workers first."""
        outgoing, gone = self.inputs.to_workers(), set()
        for at, (peer, message) in enumerate(outgoing):
            if peer in gone:
                continue
            if peer in self.lost:
                gone.add(peer)
                self.inputs.worker_gone(peer, "is gone: it cannot be reached", plans_to(peer, outgoing[at:]))
            elif isinstance(message, Bye):
                self.fakes.pop(peer, None)
            elif peer in self.fakes:
                self.inbox[peer].append(message)
        for peer, message in self.inputs.to_front():
            if peer in self.lost:
                self.inputs.undelivered(peer, message)
            elif isinstance(message, BeamTokens):
                self.questions.append(message)

    # -- who is there

    def do_config(self, named: dict[str, str]) -> None:
        flags = {name: parse(value) for name, value in named.items()}
        self.core = Scheduler(EngineArgs(**{**DEFAULTS, **flags}), clock=lambda: self.now)
        self.inputs = Transcript(Membership(self.core, 1))
        self.fakes.clear()
        self.do_detokenizer({}, "d0")
        self.deliver()
        self.inputs.take()

    def do_detokenizer(self, named: dict[str, str], name: str) -> None:
        self.lost.discard(name)
        self.inputs.front(name, Hello("detokenizer", name, PROTOCOL, 1))

    def do_operator(self, named: dict[str, str], name: str) -> None:
        self.inputs.front(name, Hello("operator", name, PROTOCOL, 1))

    def do_hello(self, named: dict[str, str], name: str) -> None:
        sizes = {"num_blocks": 16, "max_model_len": 64, "vocab_size": 100}
        flags = {key: parse(value) for key, value in named.items() if key != "loaded"}
        self.fakes[name], self.inbox[name] = FakeWorker(**{**sizes, **flags}), deque()
        self.inputs.worker(name, self.fakes[name].hello(name, "loaded" in named))

    def do_loaded(self, named: dict[str, str], name: str) -> None:
        self.answer(name, Assign)

    def do_ready(self, named: dict[str, str], name: str) -> None:
        self.answer(name, Configure)

    def do_worker(self, named: dict[str, str], name: str) -> None:
        """All three at once; only that it is ready is told."""
        self.do_hello(named, name)
        for step in (self.do_loaded, self.do_ready):
            self.deliver()
            step({}, name)
        self.deliver()
        blocks = self.fakes[name].num_blocks
        self.inputs.lines = [f"  worker {name} is ready with {blocks} blocks"]

    def do_lose(self, named: dict[str, str], name: str) -> None:
        if name in self.fakes:
            del self.fakes[name]
            self.inputs.worker_gone(name, "is gone: its connection broke")
        else:
            self.inputs.front_gone(name)

    def do_unreachable(self, named: dict[str, str], name: str) -> None:
        self.lost.add(name)

    def do_drain(self, named: dict[str, str], name: str) -> None:
        self.inputs.worker(name, Drain(named.get("reason", "it was asked to end")))

    def do_beat(self, named: dict[str, str], name: str) -> None:
        self.inputs.worker(name, Heartbeat())

    def do_leave(self, named: dict[str, str], name: str) -> None:
        self.answer(name, Drain)

    def do_manage(self, named: dict[str, str], name: str, action: str, worker: str = "") -> None:
        self.inputs.front(name, Manage(1, action, worker, float(named.get("timeout", -1))))

    # -- requests

    def do_submit(self, named: dict[str, str], uid: str) -> None:
        self.arrivals += 1
        prompt = self.prompt(named.pop("prompt", "8"))
        meta = {name: parse(named.pop(name)) for name in ("attempt", "priority", "losses") if name in named}
        eos = ints(named.pop("eos", ""))
        children = [Child(int(index), i32(ints(tokens))) for index, _, tokens in
                    (word.partition("+") for word in named.pop("resume", "").split())]  # fmt: skip
        key, owner = named.pop("key", ""), named.pop("owner", "d0")
        params = SamplingParams(**{"max_tokens": 4, **{name: parse(value) for name, value in named.items()}})
        ids = i32(prompt)
        hashes = b"".join(hash_blocks(ids, self.core.config.block_size))
        work = Generate(params, int(uid) * 1000, eos)
        message = Submit(
            int(uid), meta.get("attempt", 0), ids, hashes, work, float(self.arrivals), children, key,
            meta.get("priority", 0), meta.get("losses", 0),
        )  # fmt: skip
        self.inputs.front(owner, message)

    def do_embed(self, named: dict[str, str], uid: str) -> None:
        self.arrivals += 1
        ids = i32(self.prompt(named.get("prompt", "8")))
        work = Pool(PoolingParams(task="embed", pooling="LAST"))
        self.inputs.front("d0", Submit(int(uid), 0, ids, b"", work, float(self.arrivals)))

    def prompt(self, text: str) -> list[int]:
        """``20`` is 20 tokens that no other prompt begins with; ``16a+4`` 16 tokens of text a, then 4 of its own."""
        shared, _, own = text.partition("+") if text[-1].isalpha() or "+" in text else ("", "", text)
        ids = [ord(shared[-1]) % 90 + i % 7 for i in range(int(shared[:-1]))] if shared else []
        return ids + [(self.arrivals * 31 + i) % 100 for i in range(int(own or 0))]

    def do_abort(self, named: dict[str, str], uid: str) -> None:
        self.inputs.front("d0", Abort(int(uid), int(named.get("attempt", 0))))

    def do_stopped(self, named: dict[str, str], child: str, length: str) -> None:
        uid, _, index = child.partition(".")
        self.inputs.front("d0", Stopped(int(uid), 0, int(index), int(length)))

    def do_answer(self, named: dict[str, str], *stopped: str) -> None:
        """The detokenizer says which candidates of the oldest question end."""
        question = self.questions.pop(0)
        answer = BeamStopped(question.uid, question.attempt, question.step, i32(map(int, stopped)))
        self.inputs.front("d0", answer)

    # -- steps and time

    def do_plan(self, named: dict[str, str]) -> None:
        self.inputs.plans()

    def do_run(self, named: dict[str, str], name: str) -> None:
        """The worker runs the oldest plan it has; ``tokens=`` are drawn in place of its own."""
        self.inputs.worker(name, self.result(name, named))

    def do_keep(self, named: dict[str, str], name: str) -> None:
        """The same, and the result stays on its way."""
        self.kept[name] = self.result(name, named)
        self.inputs.lines.append(f"  the result of step {self.kept[name].step} is on its way")

    def do_arrive(self, named: dict[str, str], name: str) -> None:
        """What was kept arrives."""
        self.inputs.worker(name, self.kept.pop(name))

    def do_step(self, named: dict[str, str], name: str) -> None:
        """A plan, run, and the next plan."""
        self.inputs.plans()
        self.deliver()
        self.do_run(named, name)

    def do_finish(self, named: dict[str, str]) -> None:
        """Until nothing is left to run."""
        for _ in range(200):
            self.inputs.plans()
            self.deliver()
            busy = [name for name in self.fakes if any(isinstance(m, StepPlan) for m in self.inbox[name])]
            if not busy:
                return
            for name in busy:
                self.do_run({}, name)
                self.deliver()
        raise AssertionError("it does not end")

    def do_fail(self, named: dict[str, str], name: str, *error: str) -> None:
        plan = self.next(name, StepPlan)
        self.inputs.worker(name, StepFailed(plan.lease, plan.step, " ".join(error)))

    def do_tick(self, named: dict[str, str], seconds: str, *silent: str) -> None:
        """Time passes in turns of half a second, and all but the ``silent`` workers beat."""
        until = self.now + float(seconds)
        while self.now < until:
            self.now = min(until, self.now + BEAT_S)
            self.turn(silent)

    def do_sleep(self, named: dict[str, str], seconds: str) -> None:
        """The scheduler's own process stands still."""
        self.now += float(seconds)
        self.turn(tuple(self.fakes))

    def turn(self, silent: tuple[str, ...]) -> None:
        self.inputs.notice()
        for name in list(self.fakes):
            if name not in silent and name in self.inputs.registry.workers:
                self.inputs.worker(name, Heartbeat())
        self.inputs.tick()
        self.deliver()

    def do_stats(self, named: dict[str, str]) -> None:
        stats = self.core.stats()
        names = ("running", "waiting", "blocks_used", "preemptions", "prefix_queries", "prefix_hits", "steps")
        self.inputs.lines.append("  " + ", ".join(f"{name} {getattr(stats, name)}" for name in names))

    # -- workers' answers

    def next(self, name: str, kind: type) -> Any:
        """The oldest message of this kind that waits at a worker; what came before it is read."""
        while self.inbox[name]:
            message = self.inbox[name].popleft()
            if isinstance(message, kind):
                return message
        raise LookupError(f"no {kind.__name__} waits at {name}")

    def answer(self, name: str, kind: type) -> None:
        for answer in self.fakes[name].handle(self.next(name, kind)):
            self.inputs.worker(name, answer)

    def result(self, name: str, named: dict[str, str]) -> StepResult:
        (result,) = self.fakes[name].handle(self.next(name, StepPlan))
        if "tokens" in named:
            result.tokens = i32(ints(named["tokens"]))
        return result


def parse(value: str) -> Any:
    """A flag's or parameter's value: a number, true, false, none, a list with commas, or a word."""
    words = {"true": True, "false": False, "none": None}
    if value in words:
        return words[value]
    if "," in value:
        return [parse(part) for part in value.split(",") if part]
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        return value


def ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
