"""What processes may say to one another, and hold of one another: rules that are broken before any answer is wrong.

A second guard mends much of what goes wrong between processes (a Reconcile, the look for gaps between tokens), at the
price of work done twice and of seconds. Here the first guards are held to what they are for. Lines are "rule | what".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

from quire.client import core as client_core
from quire.client.generation import OpenGeneration
from quire.detokenizer.columns import rows_of
from quire.detokenizer.core import DetokenizerCore
from quire.proto import messages as m
from quire.proto.codec import from_i32, from_i64
from quire.scheduler import membership, worker_registry
from quire.scheduler.beam_group import BeamGroup

LATE_S = 2.0
"""What is looked at once a second may come so much later."""
STOOD_S = membership.STOOD_STILL_S + 1.0
"""A scheduler that did not run for so long has noticed it."""

Fail = Callable[[str], None]


class Exchange:
    """What was said so far in one history. ``struck(kind)`` says whether a fault of that kind has struck."""

    def __init__(self, fail: Fail, struck: Callable[[str], bool]):
        self._fail, self._struck = fail, struck
        self._asked: dict[int, int] = {}  # the last attempt of each request that its Engine has sent
        self.places: dict[int, tuple[int, float]] = {}  # of each request when it was sent first: priority and arrival
        self._submitted: set[tuple[int, int]] = set()
        self._unnamed = 0  # messages that make no sense, under a name that ZeroMQ made

    # -- Engine and detokenizer

    def asked(self, message: m.Tokenize) -> None:
        """An Engine sends an attempt: each is a higher one."""
        last = self._asked.get(message.uid, -1)
        if message.attempt <= last:
            self._fail(f"attempt not raised | {message.uid}: attempt {message.attempt} is sent after {last}")
        self._asked[message.uid] = message.attempt
        self.places.setdefault(message.uid, (message.priority, message.arrival))

    def submitted(self, message: m.Submit, aborted: dict[int, int]) -> None:
        """A detokenizer submits an attempt: once, and not after it was told that nobody wants it."""
        name = message.uid, message.attempt
        if name in self._submitted:
            self._fail(f"submitted twice | {message.uid}: attempt {message.attempt}")
        self._submitted.add(name)
        if aborted.get(message.uid, -1) >= message.attempt:
            self._fail(f"submitted though aborted | {message.uid}: attempt {message.attempt}")

    def text(self, core: client_core.EngineCore, batch: m.TextBatch) -> None:
        """Tokens come to an Engine, which has none of those of the present attempt yet."""
        rows = zip(from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.indexes), from_i32(batch.offsets),
                   from_i32(batch.counts), strict=True)  # fmt: skip
        for uid, attempt, index, offset, count in rows:
            request = core.open.get(uid)
            if count and isinstance(request, OpenGeneration) and request.attempt == attempt:
                have = len(request.children[index].tokens)
                if offset < have:
                    self._fail(f"tokens sent twice | {uid}.{index}: those from {offset} on, and {have} are there")

    def tokens(self, core: DetokenizerCore, batch: m.TokenBatch, cut: Collection[tuple[int, int]] = ()) -> None:
        """Tokens come to a detokenizer, and follow those that it has. ``cut``: attempts that were open when its
        connection broke, of which some may be lost on the way: the gap is what tells of it."""
        for uid, attempt, index, offset, count, *_ in rows_of(batch):
            request = core.requests.get(uid)
            if request is None or request.attempt != attempt or (sequence := request.sequences.get(index)) is None:
                continue
            if count and offset != sequence.count and (offset < sequence.count or (uid, attempt) not in cut):
                rule = "tokens sent twice" if offset < sequence.count else "tokens lost"
                self._fail(f"{rule} | {uid}.{index}: those from {offset} on, and {sequence.count} are there")

    def after_peers(self, core: client_core.EngineCore, before: list[tuple[Any, int]]) -> None:
        """An Engine has heard of a scheduler. ``before``: what was accepted before, where that is a new one."""
        for request, attempt in before:
            if not request.done and request.attempt == attempt:
                self._fail(f"not sent again | {request.uid}: what the scheduler before this one had")

    def after_heartbeat(self, core: client_core.EngineCore) -> None:
        """An Engine has looked for detokenizers that are silent."""
        now = core.clock()
        for link in core.links.values():
            if link.ready and now - link.heard > client_core.SILENCE_S + LATE_S:
                self._fail(f"silence ignored | {link.incarnation} was not heard for {now - link.heard:.2f} s")

    # -- the scheduler

    def listens(self, members: membership.Membership) -> None:
        """A scheduler begins. What is left of a connection whose name another has taken over comes under a name that
        ZeroMQ makes; a Hello among it is refused, and nobody broke the protocol."""
        self._unnamed, bad = 0, members.core.bad

        def noted(peer: str, why: object) -> None:
            self._unnamed += peer.startswith("\0")
            bad(peer, why)

        members.core.bad = noted  # type: ignore[method-assign]

    def turned(self, members: membership.Membership) -> None:
        """The scheduler had a turn: who has requests is known, who is silent or hangs has no lease, and nobody breaks
        the protocol but where a fault of the plan does."""
        core, config = members.core, members.config
        for request in core.requests.values():
            if request.owner not in members.front:
                self._fail(f"owner unknown | {request.uid} is kept for {request.owner}, which is gone")
        now = core.clock()
        silent, hung = (max(worker_registry.LEAST_TIMEOUT_S, each) + LATE_S
                        for each in (config.worker_timeout, config.step_timeout))  # fmt: skip
        for peer, worker in members.registry.workers.items():
            if worker.replica is None:
                continue
            if now - worker.heartbeat_at > silent:
                self._fail(f"silence ignored | {peer} was not heard for {now - worker.heartbeat_at:.2f} s")
            if worker.replica.waited(now) > hung:
                self._fail(f"hung step | {peer} is at its step for {worker.replica.waited(now):.2f} s")
        if core.bad_messages > self._unnamed and not self._struck("answers_twice"):
            self._fail("protocol broken | the scheduler got messages that cannot be")


def watch_scheduler(members: membership.Membership, fail: Fail, stood_still: Callable[[], float]) -> None:
    """Have each Submit, Abort and send that failed looked at, and each lease that ends. ``stood_still``: when this
    scheduler last went on after it had not run for ``STOOD_S``."""
    core = members.core
    submit, abort, undelivered, end_lease = core.submit, core.abort, members.undelivered, core.end_lease
    owner_returned, retry = core.owner_returned, core.queue.retry_after

    def submitted(owner: str, message: m.Submit) -> None:
        earlier = core.requests.get(message.uid)
        submit(owner, message)
        if earlier is not None and message.attempt <= earlier.attempt and core.requests.get(message.uid) is not earlier:
            fail(f"later attempt lost | {message.uid}: attempt {earlier.attempt}, to a Submit of {message.attempt}")

    def aborted(uid: int, attempt: int) -> None:
        request = core.requests.get(uid)
        abort(uid, attempt)
        if request is not None and attempt < request.attempt and core.requests.get(uid) is not request:
            fail(f"later attempt lost | {uid}: attempt {request.attempt}, to an Abort of {attempt}")

    def not_delivered(peer: str, message: Any) -> None:
        undelivered(peer, message)
        for uid in from_i64(message.uids) if isinstance(message, m.TokenBatch) else []:
            request = core.requests.get(uid)
            if request is not None and request.owner == peer:
                fail(f"tokens lost | {uid} goes on, and {peer} did not get its tokens")

    def lease_ended(replica: Any, blame: bool = True) -> None:
        if blame and core.clock() - stood_still() < worker_registry.STOPPED_S - 1.0:
            fail(f"blamed for a standstill | {replica.peer}: what ran there pays for what the scheduler did not see")
        end_lease(replica, blame)

    def returned(owner: str) -> None:
        owner_returned(owner)
        asked = (r for r in core.owned_by(owner) if any(isinstance(s, BeamGroup) and s.asked for s in r.live))
        for request in asked:
            fail(f"beams unanswered | {request.uid} waits for what was lost with the connection to {owner}")

    def retry_after(prompt_len: int, now: float) -> float:
        told, queue = retry(prompt_len, now), core.queue
        waiting = sorted((r.prompt_len for r in core.requests.values() if not r.started), reverse=True)
        if queue.max_tokens is not None and waiting:
            excess = sum(waiting) + prompt_len - queue.max_tokens
            least = 1 + sum(1 for sofar in accumulate(waiting[:-1]) if sofar < excess)
            if told < queue.rate.seconds(least, now):
                fail(f"Retry-After | {told:g} s are told, and {least} requests at least have to start before")
        return told

    core.queue.retry_after = retry_after  # type: ignore[method-assign]
    core.submit, core.abort, core.end_lease = submitted, aborted, lease_ended  # type: ignore[method-assign]
    core.owner_returned = returned  # type: ignore[method-assign]
    members.undelivered = not_delivered  # type: ignore[method-assign]


def watch_blame(core: Any, workers: Any, fail: Fail) -> None:
    """Where a lease ends, nobody pays for a plan that never left: ``workers`` is the socket that they leave by."""
    send, end_lease = workers.send, core.end_lease
    left: dict[int, int] = {}  # by the number of the lease, the last step whose plan was sent

    def sent(peer: str, message: Any) -> bool:
        reached: bool = send(peer, message)
        if reached and isinstance(message, m.StepPlan):
            left[message.lease.counter] = message.step
        return reached

    def lease_ended(replica: Any, blame: bool = True) -> None:
        last = replica.in_flight[-1].number if replica.in_flight else 0
        if blame and last > left.get(replica.lease.counter, 0):
            fail(f"innocent | {replica.peer}: what is in step {last} pays for its end, and that plan never left")
        end_lease(replica, blame)

    workers.send, core.end_lease = sent, lease_ended
