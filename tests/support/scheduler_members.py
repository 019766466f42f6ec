"""The world of ``scheduler_world`` behind the whole registry: workers say Hello, send heartbeats, drain and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler_world import VOCAB, World

from quire.proto.codec import Decoder, encode
from quire.proto.messages import (
    PROTOCOL,
    Bye,
    Drain,
    Failed,
    FromSchedulerWorkers,
    Heartbeat,
    Hello,
    Manage,
    StepPlan,
    ToSchedulerWorkers,
)
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.membership import Membership

to_worker, from_worker = Decoder(FromSchedulerWorkers), Decoder(ToSchedulerWorkers)
TURN_S = 0.05
TIMEOUT_S, STEP_S, DRAIN_S = 3.0, 6.0, 2.0


class Sim:
    """A worker's process. ``stopped`` is until when it does nothing, ``hung`` until when its step does not end."""

    def __init__(self, fake: FakeWorker, now: float):
        self.fake, self.beat_at = fake, now
        self.inbox: list[bytes] = []
        self.stopped = self.hung = 0.0


class MembersWorld(World):
    """Nothing that happens here is enough to take a request for poison, so every stream must come whole."""

    def __init__(self, seed: int):
        self.sims: dict[str, Sim] = {}
        self.members: Membership | None = None
        self.names = 0
        super().__init__(seed)
        self.kills_left = self.rng.choice([0, 1, 2])
        self.core.config.worker_timeout, self.core.config.step_timeout = TIMEOUT_S, STEP_S
        self.core.config.drain_timeout = DRAIN_S

    @property
    def registry(self) -> Any:
        if self.members is None:
            self.members = Membership(self.core, 1)
            self.members.on_front("detok", Hello("detokenizer", "detok", PROTOCOL, 1))
            self.members.on_front("boss", Hello("operator", "boss", PROTOCOL, 1))
        return self.members.registry

    def add_worker(self, number: int = 0, fake: FakeWorker | None = None) -> None:
        if fake is None:
            need = -(-(self.max_model_len - 1) // self.config.block_size)
            drafts, draft_rows = self.drafts()
            blocks = need + self.rng.choice([0, 1, 3, 10, 40])
            fake = FakeWorker(blocks, self.max_model_len, VOCAB, drafts=drafts, draft_rows=draft_rows)
        self.names += 1
        peer = f"gpu_worker-{self.names}"
        self.sims[peer] = Sim(fake, self.now)
        self.registry.on_worker(peer, fake.hello(peer, loaded=fake.store is not None))

    def some(self) -> str | None:
        return self.rng.choice(list(self.sims)) if self.sims else None

    # -- what may happen

    def actions(self) -> list[Callable[[], None]]:
        calm = [self.abort, self.stop, self.resubmit, self.preempt, self.join, self.leave, self.leave, self.removed]
        return [*calm, self.stand_still, self.kill, self.freeze, self.hang, self.pause]

    def join(self) -> None:
        if len(self.sims) < 4:
            self.add_worker()

    def leave(self) -> None:
        if peer := self.some():
            self.registry.on_worker(peer, Drain("it was asked to end"))

    def removed(self) -> None:
        if peer := self.some():
            action, timeout = self.rng.choice([("remove", -1.0), ("drain", 0.3), ("drain", -1.0), ("list", 0.0)])
            assert self.members is not None
            self.members.on_front("boss", Manage(1, action, peer, timeout))

    def stand_still(self) -> None:
        """The scheduler's own process: whatever the workers did meanwhile comes at once."""
        self.now += self.rng.choice([1.0, 5.0, 30.0])

    def harm(self) -> str | None:
        """Somebody whose loss will be held against what runs there."""
        if not self.kills_left or not (peer := self.some()):
            return None
        self.kills_left -= 1
        return peer

    def kill(self) -> None:
        if peer := self.harm():
            del self.sims[peer]
            self.registry.gone(peer, "is gone: its connection broke")
            if self.rng.random() < 0.7:
                self.add_worker()

    def freeze(self) -> None:
        """SIGSTOP for long; results that were on their way come late, to nobody."""
        if peer := self.harm():
            self.sims[peer].stopped = self.now + TIMEOUT_S + self.rng.choice([1.5, 4.0])

    def hang(self) -> None:
        if peer := self.harm():
            self.sims[peer].hung = self.now + STEP_S + 60.0

    def pause(self) -> None:
        """SIGSTOP for a while: nobody notices."""
        if peer := self.some():
            self.sims[peer].stopped = max(self.sims[peer].stopped, self.now + TIMEOUT_S / 2)

    # -- time and messages

    def pass_time(self) -> None:
        self.now += TURN_S
        assert self.members is not None
        if not self.sims:
            self.add_worker()
        self.members.notice()
        for peer, sim in list(self.sims.items()):
            if sim.stopped <= self.now and self.now - sim.beat_at >= 1.0:
                sim.beat_at = self.now
                self.registry.on_worker(peer, Heartbeat(sim.fake.last_step))
        self.members.tick()
        self.route()
        numbers = [worker.lease.replica for worker in self.registry.workers.values()]
        assert len(set(numbers)) == len(numbers)

    def route(self) -> None:
        messages, self.registry.to_workers = self.registry.to_workers, []
        for peer, message in messages:
            if peer in self.sims:
                self.sims[peer].inbox.append(encode(message))
            else:
                self.registry.gone(peer, "is gone: it cannot be reached")

    def plan(self) -> None:
        self.registry.plans()
        self.core.check_integrity()
        self.route()

    def work(self) -> bool:
        """One worker handles its next message."""
        busy = [peer for peer, sim in self.sims.items() if sim.inbox and max(sim.stopped, sim.hung) <= self.now]
        if not busy:
            return any(sim.inbox for sim in self.sims.values())
        peer = self.rng.choice(busy)
        sim = self.sims[peer]
        message = to_worker(sim.inbox.pop(0))
        if isinstance(message, Bye):
            del self.sims[peer]
            if message.again:
                self.add_worker(fake=sim.fake)
        else:
            for answer in sim.fake.handle(message):
                self.registry.on_worker(peer, from_worker(encode(answer)))
                if isinstance(answer, Bye):
                    assert not any(isinstance(to_worker(frame), StepPlan) for frame in sim.inbox)
                    del self.sims[peer]
        self.route()
        return True

    def may_fail(self, message: Failed) -> bool:
        return message.status == 400 or (message.status == 503 and "No worker is left" in message.message)

    def finish(self) -> None:
        for peer, sim in list(self.sims.items()):
            if sim.hung > self.now:  # it never answers
                del self.sims[peer]
                self.registry.gone(peer, "hung")
            sim.stopped = 0.0
        super().finish()
