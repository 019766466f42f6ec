"""The scheduler without its sockets: the books, and what may be done with them. A test or a bench drives it directly.

Events come in (``submit``, ``abort``, ``stopped``, ``open``, ``add_replica``, ``end_lease``, ``commit``), plans go out
by ``plan``, and what the front side is owed gathers in ``outbox``. No IO.
"""

from __future__ import annotations

from collections.abc import Callable

from ..proto.codec import BadFrame, from_i32, from_i64, i32, i64
from ..proto.config import EngineArgs
from ..proto.messages import AdapterReady, BeamStopped, Reconcile, StepPlan, StepResult, Stopped, Submit, Unknown
from .adapters import Answer, load_ended
from .beam_group import BeamGroup
from .beams import answered
from .books import Books
from .commit import commit_result
from .intake import check_waiting, take_in
from .planner import plan_step
from .replica import Replica
from .watch import KEPT_S, Watch


class Scheduler(Books):
    """The books with the rooms above them. ``watch`` is there while somebody looks at the steps."""

    def __init__(self, config: EngineArgs, clock: Callable[[], float]):
        super().__init__(config, clock)
        self.watch: Watch | None = None

    def submit(self, owner: str, message: Submit) -> None:
        """Queue a request, or answer Failed. A higher attempt replaces a lower one, a lower one is ignored."""
        take_in(self, owner, message)

    def abort(self, uid: int, attempt: int) -> None:
        """The client is gone. A stale attempt's abort, or one for an unknown uid, does nothing."""
        request = self.requests.get(uid)
        if request is not None and attempt >= request.attempt:
            self.drop(request)

    def stopped(self, message: Stopped) -> None:
        """The detokenizer found a stop string: this child needs nothing more, and nobody is told."""
        request = self.requests.get(message.uid)
        if request is None or message.attempt != request.attempt:
            return
        for seq in request.live:
            if seq.index == message.index and not isinstance(seq, BeamGroup):
                self.leave(seq)
                break

    def beam_stopped(self, message: BeamStopped) -> None:
        """The detokenizer says which candidates of a beam search end. BadFrame, and the request fails, where it says
        something else."""
        request = self.requests.get(message.uid)
        if request is None or message.attempt != request.attempt:
            return
        for group in request.live:
            if isinstance(group, BeamGroup):
                try:
                    answered(self, group, message.step, from_i32(message.stopped))
                except BadFrame as error:
                    self.fail(request, 500, f"The beam search cannot go on: {error}.")
                    raise
                break

    def open(self, owner: str, message: Reconcile) -> None:
        """Answer Unknown for what this detokenizer believes in and we lack; drop what it no longer believes in."""
        uids, attempts = from_i64(message.uids), from_i32(message.attempts)
        if len(uids) != len(attempts):
            raise BadFrame(f"{len(uids)} uids and {len(attempts)} attempts")
        believed = dict(zip(uids, attempts, strict=True))
        for request in self.owned_by(owner):
            if believed.get(request.uid) != request.attempt:
                self.drop(request)
        here = {request.uid: request.attempt for request in self.owned_by(owner)}
        gone = [(uid, attempt) for uid, attempt in believed.items() if here.get(uid) != attempt]
        if gone:
            self.outbox.put(owner, Unknown(i64([uid for uid, _ in gone]), i32([attempt for _, attempt in gone])))

    def add_replica(self, replica: Replica) -> None:
        """A worker is ready. Requests that waited to know what it holds are checked now."""
        super().add_replica(replica)
        check_waiting(self)
        if self.watch is not None:
            self.watch.event("join", replica.number, self.clock())

    def end_lease(self, replica: Replica, blame: bool = True) -> None:
        """The worker is gone, or not to be trusted. ``blame``: what it was running may be why."""
        if self.watch is not None:
            self.watch.event("loss" if blame else "leave", replica.number, self.clock(), len(replica.sequences()))
        super().end_lease(replica, blame)

    def plan(self, replica: Replica) -> StepPlan | None:
        """The next step to send to ``replica``, or None."""
        return plan_step(self, replica)

    def commit(self, replica: Replica, result: StepResult) -> None:
        """A step is done. BadFrame: the result cannot be right, and the lease must end."""
        if (watch := self.watch) is None or not replica.in_flight:
            commit_result(self, replica, result)
            return
        step, now = replica.in_flight[0], self.clock()
        seconds = replica.waited(now)
        commit_result(self, replica, result)
        watch.step(replica.number, step, now, seconds, self.preemptions, self.recomputed_tokens)

    def open_watch(self) -> Watch:
        """Somebody looks at the steps: they are kept from now on."""
        if self.watch is None:
            self.watch = Watch(self.steps, self.preemptions, self.recomputed_tokens)
        self.watch.ask(self.clock())
        return self.watch

    def close_watch(self) -> bool:
        """Once a second: keep steps no longer than somebody asks for them. True where nobody does any more."""
        if self.watch is None or self.clock() - self.watch.asked_at < KEPT_S:
            return False
        self.watch = None
        return True

    def adapter_ready(self, replica: Replica, message: AdapterReady) -> list[Answer]:
        """A load has ended; what those who wished for the adapter are told. BadFrame: the lease must end."""
        return load_ended(self, replica, message)
