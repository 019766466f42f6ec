"""The scheduler's state, and everything that can happen to it. No IO: a test or a bench drives it directly.

Events come in (``submit``, ``abort``, ``stopped``, ``open``, ``add_replica``, ``end_lease``, ``commit``), plans go out
by ``plan``, and what the front side is owed gathers in ``outbox``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from ..proto.codec import BadFrame, from_i32, from_i64, i32, i64
from ..proto.config import EngineArgs
from ..proto.messages import (
    BeamStopped,
    Failed,
    Finish,
    Pooled,
    Reconcile,
    ReplicaStats,
    SlotPooled,
    Stats,
    StepPlan,
    StepResult,
    Stopped,
    Submit,
    Unknown,
)
from . import commit as committing
from . import planner
from .accounts import Accounts
from .beams import BeamGroup, answered
from .block_pool import PoolError
from .intake import Refused, check_fits, check_kind, check_width, read_request
from .outbox import Outbox
from .placement import can_ever_hold
from .queue import WaitingQueue
from .replica import Replica
from .request import MAX_LOSSES, Request, Sequence, State

log = logging.getLogger(__name__)

UNPLACED_S = 60.0
"""How long a request that only a larger worker could hold waits for one, as long as there are others."""


class Scheduler:
    """All requests, the queue, and the replicas that are ready. ``clock`` gives seconds that only rise."""

    def __init__(self, config: EngineArgs, clock: Callable[[], float] = time.monotonic):
        self.config, self.clock = config.check(), clock
        self.requests: dict[int, Request] = {}
        self.queue = WaitingQueue(config.max_num_queued_reqs, config.max_num_queued_tokens)
        self.replicas: dict[int, Replica] = {}
        self.accounts = Accounts(config.max_requests_per_key)
        self.loading = 0  # replicas on their way: nobody knows yet what they will hold
        self._deadlines: dict[int, tuple[float, Request]] = {}  # of those who wait, and may only so long; in order
        self.lost_owners: set[str] = set()  # detokenizers whose connection broke; they may come back
        self.wary = False  # somebody in line may be what kills workers
        self.shrunk = False  # a worker left, or never came: those who wait for one of its size may wait in vain
        self._unplaced: dict[int, float] = {}  # uids that no replica could hold, and since when
        self.outbox = Outbox()
        self.max_model_len = 0  # of the replica with the shortest; 0 until one was ready
        self.vocab_size = 0
        # Counters since the start.
        self.preemptions = self.steps = self.bad_messages = 0
        self.prefix_queries = self.prefix_hits = self.prompt_tokens = self.generation_tokens = 0

    # -- requests

    def submit(self, owner: str, message: Submit) -> None:
        """Queue a request, or answer Failed. A higher attempt replaces a lower one, a lower one is ignored."""
        known = self.requests.get(message.uid)
        if known is not None:
            if message.attempt <= known.attempt:
                return
            self.drop(known)
        try:
            request = read_request(
                owner, message, self.config.block_size, self.vocab_size, self.config.scheduling_policy == "priority"
            )
            if message.losses >= MAX_LOSSES:
                raise Refused(_poison(message.uid, message.losses), status=500)
            self._settle(request)
        except Refused as no:
            self._refuse(owner, message, no.status, str(no), no.param)
            return
        except BadFrame as error:
            self.bad_messages += 1
            self._refuse(owner, message, 400, f"The request does not make sense: {error}.")
            return
        full = self._full(request) if not message.attempt else None
        if full:
            self._refuse(owner, message, 429, full[0] + ". Please try again later.", retry_after=full[1])
            return
        self._enqueue(request)

    def _full(self, request: Request) -> tuple[str, float] | None:
        """Why a new request is refused for load, and the seconds until it likely is not; or None."""
        now = self.clock()
        if (mine := self.accounts.full(request.account, now)) is not None:
            return mine
        if (full := self.queue.full(request.prompt_len)) is not None:
            return f"The server is full: {full}", self.queue.retry_after(request.prompt_len, now)
        return None

    def _settle(self, request: Request) -> None:
        """Check the request against what the replicas hold, as far as that is known."""
        check_width(request, self.config.max_num_seqs)
        if self.replicas:
            config, replicas = self.config, self.replicas.values()
            if not self.loading:
                check_kind(request, {r.pools for r in replicas})
            blocks = None if self.loading else max(r.pool.num_blocks for r in replicas)
            check_fits(
                request, self.max_model_len, blocks, config.block_size, config.max_num_batched_tokens,
                config.enable_chunked_prefill and not any(r.whole for r in replicas),
            )  # fmt: skip

    def _enqueue(self, request: Request) -> None:
        now = self.clock()
        self.requests[request.uid] = request
        self.queue.enter(request)
        self.accounts.enter(request, now)
        if self.config.queue_timeout is not None and not request.attempt:
            self._deadlines[request.uid] = now + self.config.queue_timeout, request
        self.wary = self.wary or any(seq.suspect for seq in request.live)
        sink = self.outbox.sink(request.owner)
        parent: Sequence | None = None
        for seq in list(request.live):
            seq.sink = sink
            finish, stop_id = Finish.NONE, -1
            if seq.outputs:
                finish, stop_id = request.finish_of(seq.outputs[-1], len(seq.outputs))
            if finish is Finish.NONE and seq.known >= seq.limit and request.pooling is None:
                finish = Finish.LENGTH
            if finish is not Finish.NONE:  # it had ended before its last attempt was lost
                self.end(seq, finish, stop_id, with_token=False)
            elif parent is None or seq.outputs:
                self.queue.push(seq)
                parent = seq if parent is None and not seq.outputs else parent
            else:
                parent.siblings.append(seq)

    def _refuse(
        self, owner: str, message: Submit, status: int, text: str, param: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        self.outbox.put(owner, Failed(message.uid, message.attempt, status, text, param, retry_after))

    def bad(self, peer: str, why: object) -> None:
        """Count a message that makes no sense."""
        self.bad_messages += 1
        if self.bad_messages <= 20 or self.bad_messages % 1000 == 0:
            log.warning("dropped a bad message from %r (%d so far): %s", peer, self.bad_messages, why)

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

    def drop_unanswered(self, owner: str) -> None:
        """The connection to ``owner`` broke, and with it perhaps an answer that a beam search waits for: should
        ``owner`` come back, it is told Unknown."""
        for request in self.owned_by(owner):
            if any(isinstance(seq, BeamGroup) and seq.asked for seq in request.live):
                self.drop(request)

    def open(self, owner: str, message: Reconcile) -> None:
        """Answer Unknown for what this detokenizer believes in and we lack; drop what it no longer believes in."""
        uids, attempts = from_i64(message.uids), from_i32(message.attempts)
        if len(uids) != len(attempts):
            raise BadFrame(f"{len(uids)} uids and {len(attempts)} attempts")
        believed = dict(zip(uids, attempts, strict=True))
        for request in list(self.requests.values()):
            if request.owner == owner and believed.get(request.uid) != request.attempt:
                self.drop(request)
        gone = [(uid, attempt) for uid, attempt in believed.items() if not self._has(owner, uid, attempt)]
        if gone:
            self.outbox.put(owner, Unknown(i64([uid for uid, _ in gone]), i32([attempt for _, attempt in gone])))

    def _has(self, owner: str, uid: int, attempt: int) -> bool:
        request = self.requests.get(uid)
        return request is not None and (request.owner, request.attempt) == (owner, attempt)

    def owned_by(self, owner: str) -> list[Request]:
        """The requests this detokenizer submitted."""
        return [request for request in self.requests.values() if request.owner == owner]

    # -- ends

    def end(self, seq: Sequence, finish: Finish, stop_id: int, with_token: bool = True) -> None:
        """``seq`` ends by its own tokens; the detokenizer is told."""
        self.outbox.finished(seq, finish, stop_id, with_token)
        self.leave(seq)

    def answer(self, seq: Sequence, found: SlotPooled) -> None:
        """``seq`` was pooled, and that was all of it."""
        request = seq.request
        self.outbox.put(request.owner, Pooled(request.uid, request.attempt, found.rows, found.data))
        self.leave(seq)

    def fail(
        self, request: Request, status: int, text: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        """End a request with an error."""
        self.outbox.put(request.owner, Failed(request.uid, request.attempt, status, text, param, retry_after))
        self.drop(request)

    def drop(self, request: Request) -> None:
        """End a request without a word."""
        for seq in request.live:
            if seq.state is State.WAITING:
                self.queue.remove(seq)
            self.generation_tokens += len(seq.outputs)
            seq.finish()
        request.live = []
        self._forget(request)

    def leave(self, seq: Sequence) -> None:
        """``seq`` is finished, and nobody is told."""
        request = seq.request
        request.live.remove(seq)
        if seq.state is State.WAITING and not self.queue.remove(seq):
            for other in request.live:  # it waited with a sibling for that one's prefill
                if seq in other.siblings:
                    other.siblings.remove(seq)
        if seq.siblings:  # the next of them prefills for the rest
            heir, *heir.siblings = seq.siblings
            self.queue.push(heir)
            seq.siblings = []
        self.generation_tokens += len(seq.outputs)
        seq.finish()
        if not request.live:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if not request.started:
            self.queue.leave(request)
            self._deadlines.pop(request.uid, None)
        del self.requests[request.uid]
        now = self.clock()
        self.queue.rate.freed(now)
        self.accounts.leave(request, now)

    def expire(self) -> None:
        """Once a second: end requests whose time is up, those that waited for their first step for longer than
        ``queue_timeout``, and those that no replica could hold for ``UNPLACED_S``."""
        now = self.clock()
        for deadline, request in list(self._deadlines.values()):
            if deadline > now:
                break
            text = f"The request waited for {self.config.queue_timeout:g} s, the limit, for its first step. "
            retry = self.queue.time_to_drain(now)
            self.fail(request, 503, text + "Please try again later.", retry_after=retry)
        self._expire_unplaced(now)
        self.wary = self.wary and any(seq.suspect for seq in self.queue)

    def _expire_unplaced(self, now: float) -> None:
        replicas = list(self.replicas.values())
        if self.loading or not replicas or not self.shrunk:  # what comes, or comes back, may hold it
            self._unplaced.clear()
            return
        unplaced = {s.uid: s.request for s in self.queue if not any(can_ever_hold(r, s) for r in replicas)}
        self.shrunk = bool(unplaced)
        self._unplaced = {uid: self._unplaced.get(uid, now) for uid in unplaced}
        for uid, request in unplaced.items():
            if now - self._unplaced[uid] >= UNPLACED_S:
                largest = max(r.pool.num_blocks for r in replicas)
                text = f"No worker is left that could hold this request: the largest has {largest} KV blocks of "
                text += f"{self.config.block_size} tokens, and no larger one came within {UNPLACED_S:g} s."
                self.fail(request, 503, text, retry_after=UNPLACED_S)

    # -- running sequences

    def running_by_account(self) -> Counter[str]:
        """Rows held by each API key."""
        counts: Counter[str] = Counter()
        for replica in self.replicas.values():
            for seq in replica.sequences():
                counts[seq.request.account] += seq.width
        return counts

    def note_start(self, seq: Sequence) -> None:
        """``seq`` got a row from the queue."""
        request = seq.request
        if seq.generation == 0:
            self.prefix_queries += seq.known
            self.prefix_hits += seq.computed
        if not request.started:
            request.started = True
            self.queue.leave(request)
            self._deadlines.pop(request.uid, None)
            self.prompt_tokens += request.prompt_len
            self.outbox.started(request, min(seq.computed, request.prompt_len))

    def preempt(self, seq: Sequence) -> None:
        """Make room: back to its place in line."""
        self.preemptions += 1
        self.requeue(seq)

    def requeue(self, seq: Sequence) -> None:
        """Preempted, drained or robbed of its worker: all the same."""
        seq.requeue()
        self.queue.push(seq)

    # -- replicas

    def add_replica(self, replica: Replica) -> None:
        """A worker is ready. Requests that waited to know what it holds are checked now."""
        self.replicas[replica.number] = replica
        self._measure()
        for request in [r for r in self.requests.values() if not r.started]:
            try:
                self._settle(request)
            except Refused as no:
                self.fail(request, no.status, str(no), no.param)

    def _measure(self) -> None:
        if self.replicas:
            self.max_model_len = min(r.max_model_len for r in self.replicas.values())
            self.vocab_size = min(r.vocab_size for r in self.replicas.values())

    def end_lease(self, replica: Replica, blame: bool = True) -> None:
        """The worker is gone, or not to be trusted. ``blame``: what it was running may be why."""
        del self.replicas[replica.number]
        self._measure()
        self.shrunk = True
        poisonous: dict[int, Request] = {}
        if blame:
            for seq in {s.key: s for step in replica.in_flight for s in step.sequences()}.values():
                seq.losses = seq.losses + 1 if seq.computed <= seq.mark else 1
                seq.mark = max(seq.mark, seq.computed)
                self.wary = self.wary or seq.losses >= MAX_LOSSES - 1
                if seq.losses >= MAX_LOSSES:
                    poisonous[seq.uid] = seq.request
        for seq in replica.sequences():
            self.requeue(seq)
        replica.in_flight.clear()
        for request in poisonous.values():
            self.fail(request, 500, _poison(request.uid, MAX_LOSSES))

    def plan(self, replica: Replica) -> StepPlan | None:
        """The next step to send to ``replica``, or None."""
        plan = planner.plan(self, replica)
        if plan is not None:
            replica.in_flight[-1].sent_at = self.clock()
        return plan

    def commit(self, replica: Replica, result: StepResult) -> None:
        """A step is done. BadFrame: the result cannot be right, and the lease must end."""
        replica.progress_at = self.clock()
        committing.commit(self, replica, result)

    # -- looking in

    def stats(self, token: int = 0, bad_frames: int = 0) -> Stats:
        """Everything countable, at this moment."""
        replicas = list(self.replicas.values())
        running = sum(len(r.sequences()) for r in replicas)
        live = [seq for request in self.requests.values() for seq in request.live]
        return Stats(
            token=token,
            running=running,
            waiting=len(live) - running,
            blocks=sum(r.pool.num_blocks for r in replicas),
            blocks_used=sum(r.pool.used for r in replicas),
            preemptions=self.preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens + sum(len(seq.outputs) for seq in live),
            steps=self.steps,
            bad_frames=bad_frames + self.bad_messages,
            replicas=[
                ReplicaStats(
                    r.number, "draining" if r.draining else "ready", r.device, len(r.sequences()), r.pool.num_blocks,
                    r.pool.used, r.last_step,
                )
                for r in replicas
            ],
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Every live sequence is in exactly one place, and every replica's books balance. PoolError otherwise."""
        for replica in self.replicas.values():
            replica.check_integrity()
        parked = [seq for r in self.requests.values() for s in r.live for seq in s.siblings]
        running = [seq for replica in self.replicas.values() for seq in replica.sequences()]
        placed = sorted(
            [(s.key, s.state.value) for s in [*self.queue, *parked]] + [(s.key, "running") for s in running]
        )
        live = sorted((s.key, s.state.value) for r in self.requests.values() for s in r.live)
        if placed != live:
            raise PoolError(f"{len(live)} live sequences, {len(placed)} placed: {set(live) ^ set(placed)}")
        fresh = [r for r in self.requests.values() if not r.started]
        if (self.queue.fresh_requests, self.queue.fresh_tokens) != (len(fresh), sum(r.prompt_len for r in fresh)):
            raise PoolError(f"{self.queue.fresh_requests} requests are counted as waiting, {len(fresh)} are")


def _poison(uid: int, losses: int) -> str:
    return (
        f"A process died {losses} times while it ran request {uid}, which got no further in between; it is taken for "
        "the cause and given up, so that others can go on."
    )
