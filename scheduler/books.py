"""The scheduler's state, and the primitive transitions that keep it consistent. No IO.

Submitting (``intake.py``), planning (``planner.py``, ``beams.py``) and committing (``commit.py``) are rooms above it,
which take the books and change them by these methods alone; ``core.py`` is the front that names them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..proto.config import CPU_ENOUGH_TOKENS, EngineArgs
from ..proto.losses import MAX_LOSSES
from ..proto.messages import AdapterStats, Failed, Finish, ReplicaStats, Stats, TierStats
from ..proto.messages.operators import SLEEP_STATES
from .accounts import Accounts
from .adapter_names import AdapterNames
from .beam_group import BeamGroup
from .block_lives import BlockLives
from .block_pool import PoolError
from .outbox import Outbox
from .placement import can_ever_hold
from .queue import WaitingQueue
from .replica import Landing, Replica
from .request import Request, Sequence, State
from .tally import Speculation, Tally

log = logging.getLogger(__name__)

UNPLACED_S = 60.0
"""How long a request that only a larger worker could hold waits for one, as long as there are others."""


class Books:
    """All requests, the queue, and the replicas that are ready. ``clock`` gives seconds that only rise."""

    def __init__(self, config: EngineArgs, clock: Callable[[], float]):
        self.config, self.clock = config.check(), clock
        self.requests: dict[int, Request] = {}
        self.queue = WaitingQueue(config.max_num_queued_reqs, config.max_num_queued_tokens)
        self.replicas: dict[int, Replica] = {}
        self.accounts = Accounts(config.max_requests_per_key)
        self.outbox = Outbox()
        self.names = AdapterNames()
        self.adapter_losses: dict[bytes, int] = {}  # of workers while they loaded it, by digest, since it last was
        self.loading: set[int] = set()  # replicas on their way, by number: nobody knows yet what they will hold
        self.shrunk = False  # a worker left, or never came: those who wait for one of its size may wait in vain
        self.lost_owners: set[str] = set()  # detokenizers whose connection broke; they may come back
        self.paused = False  # nobody in line is admitted: the workers are about to sleep
        self.quarantine_waits = False  # somebody in line may be what ends workers
        self._deadlines: dict[int, tuple[float, Request]] = {}  # of those who wait, and may only so long; in order
        self._unplaced: dict[int, float] = {}  # uids that no replica could hold, and since when
        self.max_model_len = 0  # of the replica with the shortest; 0 until one was ready
        self.vocab_size = 0
        # Counters since the start.
        self.preemptions = self.steps = self.bad_messages = 0
        self.speculation, self.tally = Speculation(), Tally()
        self.lives = BlockLives(config.kv_cache_metrics_sample, clock) if config.kv_cache_metrics else None
        self.moves = self.moved_tokens = self.recomputed_tokens = 0
        self.tiers: TierStats | None = None  # where a worker has tiers
        self.prefix_queries = self.prefix_hits = self.prompt_tokens = self.generation_tokens = 0

    def bad(self, peer: str, why: object) -> None:
        """Count and log a message that makes no sense."""
        self.count_bad()
        if self.bad_messages <= 20 or self.bad_messages % 1000 == 0:
            log.warning("dropped a bad message from %r (%d so far): %s", peer, self.bad_messages, why)

    def count_bad(self) -> None:
        """Count a message that makes no sense, and was answered."""
        self.bad_messages += 1

    # -- owners

    def owned_by(self, owner: str) -> list[Request]:
        """The requests this detokenizer submitted."""
        return [request for request in self.requests.values() if request.owner == owner]

    def owner_lost(self, owner: str) -> None:
        """The connection to ``owner`` broke; it may come back."""
        self.lost_owners.add(owner)
        self._drop_unanswered(owner)

    def owner_returned(self, owner: str) -> None:
        """``owner`` is here, perhaps again: its connection may have broken before anybody noticed."""
        self._drop_unanswered(owner)
        self.lost_owners.discard(owner)

    def forget_owner(self, owner: str) -> None:
        """``owner`` did not come back."""
        for request in self.owned_by(owner):
            self.drop(request)
        self.outbox.forget(owner)
        self.names.forget(owner)
        self.lost_owners.discard(owner)

    def _drop_unanswered(self, owner: str) -> None:
        """With the connection, an answer was perhaps lost that a beam search waits for: should ``owner`` come back, it
        is told Unknown."""
        for request in self.owned_by(owner):
            if any(isinstance(seq, BeamGroup) and seq.asked for seq in request.live):
                self.drop(request)

    # -- requests

    def enter(self, request: Request) -> None:
        """A request that was found sound: its sequences wait, but for those that had ended already."""
        now = self.clock()
        self.requests[request.uid] = request
        request.enter(self.outbox.number(request.owner))
        self.queue.enter(request)
        if request.adapter is not None:
            self.names.entered(request.adapter)
        self.accounts.enter(request, now)
        if self.config.queue_timeout is not None and not request.attempt:
            self._deadlines[request.uid] = now + self.config.queue_timeout, request
        parent: Sequence | None = None
        for seq in list(request.live):
            finish, stop_id = Finish.NONE, -1
            if seq.outputs:
                finish, stop_id = request.finish_of(seq.outputs[-1], seq.output_len)
                if finish is Finish.NONE and seq.total >= seq.limit:
                    finish = Finish.LENGTH
            if finish is not Finish.NONE:  # it had ended before its last attempt was lost
                self.end(seq, finish, stop_id)
            elif parent is None or seq.outputs:
                self.enqueue(seq)
                parent = parent if seq.outputs else seq
            else:
                parent.siblings.append(seq)

    def enqueue(self, seq: Sequence) -> None:
        """``seq`` takes its place in line."""
        self.queue.push(seq)
        self.quarantine_waits = self.quarantine_waits or seq.quarantined

    def end(self, seq: Sequence, finish: Finish, stop_id: int, place: int | None = None) -> None:
        """``seq`` ends by its own tokens; the detokenizer is told. ``place``: of its last token in the batch that is
        being gathered, None where it is not in it."""
        self.outbox.finished(seq, finish, stop_id, place)
        self.leave(seq)

    def answer(self, seq: Sequence, message: Any, tokens: int = 0) -> None:
        """``seq`` ends with one message that has all of its output: a pooled vector, or the beams found."""
        self.outbox.put(seq.owner, message)
        self.generation_tokens += tokens
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
            self._finish(seq)
        request.live.clear()
        self._forget(request)

    def leave(self, seq: Sequence) -> None:
        """``seq`` is finished, and nobody is told."""
        request = seq.request
        request.live.remove(seq)
        if seq.state is State.WAITING and not self.queue.remove(seq):
            for other in request.live:  # it waited with a sibling for that one's prefill
                if seq in other.siblings:
                    other.siblings.remove(seq)
        heir = seq.heir()
        if heir is not None:
            self.enqueue(heir)
        self._finish(seq)
        if not request.live:
            self._forget(request)

    def _finish(self, seq: Sequence) -> None:
        self.generation_tokens += seq.output_len
        if seq.state is State.RUNNING:
            self.replicas[seq.replica].release(seq)
        seq.finish()

    def _forget(self, request: Request) -> None:
        if not request.started:
            self._has_started(request)
        del self.requests[request.uid]
        self.tally.ended(request.uid)
        now = self.clock()
        self.queue.rate.freed(now)
        self.accounts.leave(request, now)
        if request.adapter is not None:
            self.names.left(request.adapter)
            self.drop_adapters()

    def drop_adapters(self) -> None:
        """Have workers drop the adapters that nobody needs any more."""
        while self.names.unused:
            adapter = self.names.unused.pop()
            for replica in self.replicas.values():
                if replica.adapters is not None:
                    replica.adapters.drop(adapter)

    def _has_started(self, request: Request) -> None:
        """It waits for its first step no more."""
        self.queue.leave(request)
        self._deadlines.pop(request.uid, None)

    # -- time

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
        self.quarantine_waits = self.quarantine_waits and any(seq.quarantined for seq in self.queue)

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
        request, computed = seq.request, seq.computed
        if seq.generation == 0:
            self.prefix_queries += seq.total
            self.prefix_hits += computed
        else:
            self.recomputed_tokens += seq.total - 1 - computed
        if not request.started:
            request.start()
            self._has_started(request)
            self.prompt_tokens += request.prompt_len
            self.outbox.started(request, min(computed, request.prompt_len))

    def preempt(self, seq: Sequence) -> None:
        """Make room: back to its place in line."""
        self.preemptions += 1
        self.tally.preempted(seq.uid)
        self.requeue(seq)

    def requeue(self, seq: Sequence) -> None:
        """Preempted, drained or robbed of its worker: all the same."""
        self.replicas[seq.replica].release(seq)
        seq.requeue()
        self.enqueue(seq)

    def take_over(self, replica: Replica, landing: Landing) -> None:
        """A sequence that runs elsewhere goes on at ``replica``, where its keys and values are by now."""
        seq = landing.seq
        computed = seq.computed
        self.replicas[seq.replica].release(seq)
        seq.requeue()
        replica.arrive(landing, computed)
        self.moves += 1
        self.moved_tokens += computed
        log.debug("sequence %d.%d goes on at replica %d after %.1f ms", seq.uid, seq.index, replica.number,
                  1000 * (self.clock() - landing.since))  # fmt: skip

    def finish_step(self, replica: Replica, tokens: int) -> None:
        """The result of its oldest step is being committed, with so many tokens."""
        self.steps += 1
        self.tally.step(replica.in_flight[0].tokens)
        replica.finish_step(self.clock(), tokens)

    # -- replicas

    def planning_at(self, now: float) -> float:
        """When a plan is to be made that waits for nothing else; infinity where none does."""
        untils = [replica.pace.until for replica in self.replicas.values() if replica.in_flight]
        return min((until for until in untils if until > now), default=math.inf)

    def pause(self, paused: bool) -> None:
        """Whether those in line wait although there may be room."""
        self.paused = paused

    def expect_replica(self, number: int) -> None:
        """A worker joins as this replica, and loads; what it will hold is not known yet."""
        self.loading.add(number)

    def give_up_replica(self, number: int) -> None:
        """The worker that was to be this replica left, or was lost, before it was ready."""
        self.loading.discard(number)
        self.shrunk = True

    def count_tiers(self) -> TierStats:
        """A worker has tiers: what it does with them is counted here."""
        if self.tiers is None:
            self.tiers = TierStats()
        return self.tiers

    def add_replica(self, replica: Replica) -> None:
        """A worker is ready. The default budget of a step for a CPU is for those that generate, because where vectors
        are all that comes out no answer is held up between its tokens."""
        self.loading.discard(replica.number)
        cpu = replica.device.startswith("cpu") and not replica.pools
        enough = CPU_ENOUGH_TOKENS if cpu and self.config.enable_chunked_prefill else None
        replica.may_spend(self.config.token_budget(cpu), enough)
        self.replicas[replica.number] = replica
        self.speculation.expect(replica.drafts)
        self._measure()

    def _measure(self) -> None:
        if self.replicas:
            self.max_model_len = min(r.max_model_len for r in self.replicas.values())
            self.vocab_size = min(r.vocab_size for r in self.replicas.values())

    def end_lease(self, replica: Replica, blame: bool = True) -> None:
        """The worker is gone, or not to be trusted. ``blame``: what it was running may be why."""
        exhausted: dict[int, Request] = {}
        lost = replica.abandon_steps()
        if blame:
            for seq in lost:
                if seq.note_loss():
                    exhausted[seq.uid] = seq.request
        for seq in replica.sequences():
            self.requeue(seq)
        del self.replicas[replica.number]
        self._measure()
        self.shrunk = True
        for request in exhausted.values():
            self.fail(request, 500, losses_text(request.uid, MAX_LOSSES))

    def reset_prefix_cache(self) -> str:
        """Forget all cached blocks; why that cannot be now, or "". Whatever holds blocks would register more of the old
        ones."""
        if used := sum(replica.pool.used for replica in self.replicas.values()):
            return f"the prefix cache cannot be reset while {used} blocks are in use; wait until no request is open."
        for replica in self.replicas.values():
            replica.pool.forget_cached()
        return ""

    # -- looking in

    def stats(
        self, token: int = 0, bad_frames: int = 0, compilations: int = 0, sleep_state: str = SLEEP_STATES[0]
    ) -> Stats:
        """Everything countable, at this moment."""
        replicas = list(self.replicas.values())
        running = sum(len(r.sequences()) for r in replicas)
        live = [seq for request in self.requests.values() for seq in request.live]
        stats = Stats(
            token=token,
            running=running,
            waiting=len(live) - running,
            blocks=sum(r.pool.num_blocks for r in replicas),
            blocks_used=sum(r.pool.used for r in replicas),
            preemptions=self.preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens + sum(seq.output_len for seq in live),
            steps=self.steps,
            bad_frames=bad_frames + self.bad_messages,
            replicas=[
                ReplicaStats(
                    r.number, "draining" if r.draining else "ready", r.device, len(r.sequences()), r.pool.num_blocks,
                    r.pool.used, r.last_step,
                )
                for r in replicas
            ],
            compilations=compilations,
            drafts=self.speculation.drafts,
            draft_tokens=self.speculation.draft_tokens,
            accepted=list(self.speculation.accepted),
            moves=self.moves,
            moved_tokens=self.moved_tokens,
            recomputed_tokens=self.recomputed_tokens,
            tiers=self.tiers,
            work=self.tally.stats(
                self.config, len(live) - running if self.paused else self._deferred(live, running), sleep_state,
                self.lives.times if self.lives is not None else None,
            ),
        )  # fmt: skip
        most = max((len(r.adapters.slots) for r in replicas if r.adapters is not None), default=0)
        return self._with_adapters(stats, most, live) if most else stats

    def _deferred(self, live: list[Sequence], running: int) -> int:
        """Sequences that wait for another's prompt, or to run alone after losses, and not for room."""
        alone = sum(seq.quarantined for seq in self.queue) if self.quarantine_waits else 0
        return len(live) - running - len(self.queue) + alone

    def _with_adapters(self, stats: Stats, slots: int, live: list[Sequence]) -> AdapterStats:
        names: dict[State, set[str]] = {State.RUNNING: set(), State.WAITING: set()}
        for seq in live:
            if (adapter := seq.request.adapter) is not None:
                names[seq.state].add(adapter.name)
        fields = {name: getattr(stats, name) for name in Stats.__struct_fields__}
        running, waiting = sorted(names[State.RUNNING]), sorted(names[State.WAITING])
        return AdapterStats(**fields, max_loras=slots, running_adapters=running, waiting_adapters=waiting)

    def check_integrity(self) -> None:
        """Every live sequence is in exactly one place, and every replica's books balance. PoolError otherwise."""
        for replica in self.replicas.values():
            replica.check_integrity()
        parked = [seq for r in self.requests.values() for s in r.live for seq in s.siblings]
        running = [(seq, replica.number) for replica in self.replicas.values() for seq in replica.sequences()]
        placed = [(seq.key, "waiting", -1) for seq in [*self.queue, *parked]]
        placed += [(seq.key, "running", number) for seq, number in running]
        live = [(s.key, s.state.value, s.replica) for r in self.requests.values() for s in r.live]
        if sorted(placed) != sorted(live):
            raise PoolError(f"{len(live)} live sequences, {len(placed)} placed: {set(live) ^ set(placed)}")
        fresh = [r for r in self.requests.values() if not r.started]
        if (self.queue.fresh_requests, self.queue.fresh_tokens) != (len(fresh), sum(r.prompt_len for r in fresh)):
            raise PoolError(f"{self.queue.fresh_requests} requests are counted as waiting, {len(fresh)} are")
        if not self.quarantine_waits and any(seq.quarantined for seq in self.queue):
            raise PoolError("a sequence waits in quarantine, and the planner does not look for one")


def losses_text(uid: int, losses: int) -> str:
    """What the client is told of a request that is taken for what ends workers."""
    return (
        f"A process died {losses} times while it ran request {uid}, which got no further in between; it is taken for "
        "the cause and given up, so that others can go on."
    )
