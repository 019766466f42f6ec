"""A scheduler that also tells what became of requests that are traced: the spans of ``docs/tracing.md``.

It looks at what its base class does and changes none of it, so one without traces pays nothing, and a recording of one
with traces is replayed by one without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..proto.codec import i32
from ..proto.config import EngineArgs
from ..proto.messages import StepPlan, StepResult, Submit, TracedSubmit, TraceRows
from ..proto.spans import CONTEXT_SIZE, Span, Spans
from .core import Scheduler
from .replica import Landing, Replica
from .request import Request, Sequence, State

Outgoing = list[tuple[str, Any]]


class Followed:
    """A request that is traced: the span of all its time here, and what each of its sequences is in, by index."""

    __slots__ = ("attempt", "phases", "span")

    def __init__(self, span: Span, attempt: int):
        self.span, self.attempt = span, attempt
        self.phases: dict[int, Span] = {}


class TracedScheduler(Scheduler):
    """``rows``: workers are told which rows to trace."""

    def __init__(self, config: EngineArgs, clock: Callable[[], float], spans: Spans, rows: bool):
        super().__init__(config, clock)
        self._spans, self._rows = spans, rows
        self._followed: dict[int, Followed] = {}
        self._prefills: dict[Sequence, int] = {}  # sequences in prefill, and how many tokens that is
        self._siblings: set[Sequence] = set()  # that wait, perhaps to be forked
        self._why = "drained"  # what has a sequence go back in line

    # -- requests

    def submit(self, owner: str, message: Submit) -> None:
        super().submit(owner, message)
        if not isinstance(message, TracedSubmit) or len(message.trace) != CONTEXT_SIZE:
            return
        request, known = self.requests.get(message.uid), self._followed.get(message.uid)
        if request is None or request.attempt != message.attempt or (known and known.attempt == message.attempt):
            return
        now = self.clock()
        span = self._spans.begin("schedule", message.trace, now, **{
            "gen_ai.usage.prompt_tokens": request.prompt_len, "quire.attempt": request.attempt,
            "quire.waiting": len(self.queue),
        })  # fmt: skip
        followed = self._followed[request.uid] = Followed(span, request.attempt)
        for seq in request.live:
            self._enter_phase(followed, seq, "queue")
            if len(request.live) > 1:
                self._siblings.add(seq)

    def fail(
        self, request: Request, status: int, text: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        if (followed := self._followed.get(request.uid)) is not None:
            followed.span.error = text
        super().fail(request, status, text, param, retry_after)

    def _finish(self, seq: Sequence) -> None:
        if (followed := self._followed.get(seq.uid)) is not None:
            self._leave_phase(followed, seq)
        super()._finish(seq)

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        if (followed := self._followed.pop(request.uid, None)) is not None:
            self._spans.end(followed.span, self.clock())

    # -- sequences

    def note_start(self, seq: Sequence) -> None:
        super().note_start(seq)
        if (followed := self._followed.get(seq.uid)) is not None:
            self._enter_phase(followed, seq, "prefill", **{"quire.cached_tokens": seq.computed})
            self._prefills[seq] = seq.total

    def preempt(self, seq: Sequence) -> None:
        self._why = "preempted"
        super().preempt(seq)
        self._why = "drained"

    def end_lease(self, replica: Replica, blame: bool = True) -> None:
        self._why = "worker_lost" if blame else "worker_left"
        super().end_lease(replica, blame)
        self._why = "drained"

    def requeue(self, seq: Sequence) -> None:
        if (followed := self._followed.get(seq.uid)) is not None:
            outputs, replica = seq.output_len, seq.replica
            followed.span.event(self._why, self.clock(), **{"quire.output_tokens": outputs, "quire.replica": replica})
            self._enter_phase(followed, seq, "queue", **{"quire.why": self._why})
        super().requeue(seq)

    def take_over(self, replica: Replica, landing: Landing) -> None:
        seq, before = landing.seq, landing.seq.replica
        super().take_over(replica, landing)
        if (followed := self._followed.get(seq.uid)) is not None:
            followed.span.event("moved", self.clock(), **{"quire.from": before, "quire.replica": replica.number})
            self._enter_phase(followed, seq, "decode")

    def plan(self, replica: Replica) -> StepPlan | None:
        plan = super().plan(replica)
        for seq in [seq for seq in self._siblings if seq.state is not State.WAITING]:
            self._siblings.discard(seq)
            followed = self._followed.get(seq.uid)
            if followed is not None and seq.state is State.RUNNING and seq not in self._prefills:
                self._enter_phase(followed, seq, "prefill", **{"quire.cached_tokens": seq.computed})
                self._prefills[seq] = seq.total
        return plan

    def commit(self, replica: Replica, result: StepResult) -> None:
        super().commit(replica, result)
        for seq in [seq for seq, total in self._prefills.items() if seq.computed >= total]:
            self._enter_phase(self._followed[seq.uid], seq, "decode")

    def _enter_phase(self, followed: Followed, seq: Sequence, name: str, **attributes: Any) -> None:
        """``seq`` is in the next part of its way."""
        self._leave_phase(followed, seq)
        if seq.state is State.RUNNING and name != "queue":
            attributes["quire.replica"] = seq.replica
        attributes["quire.sequence"] = seq.index
        followed.phases[seq.index] = self._spans.begin(name, followed.span.context, self.clock(), **attributes)

    def _leave_phase(self, followed: Followed, seq: Sequence) -> None:
        self._prefills.pop(seq, None)
        self._siblings.discard(seq)
        if (phase := followed.phases.pop(seq.index, None)) is not None:
            phase.attributes["quire.output_tokens"] = seq.output_len
            self._spans.end(phase, self.clock())

    # -- workers

    def with_rows(self, outgoing: Outgoing) -> Outgoing:
        """What workers are sent, with TraceRows before each plan that admits somebody who is traced."""
        if not self._rows or not self._followed:
            return outgoing
        told: Outgoing = []
        for peer, message in outgoing:
            admits = message.admits if isinstance(message, StepPlan) else ()
            if found := [(each.row, self._followed[each.uid]) for each in admits if each.uid in self._followed]:
                rows, contexts = i32([row for row, _ in found]), [followed.span.context for _, followed in found]
                told.append((peer, TraceRows(message.lease, message.step, rows, contexts)))
            told.append((peer, message))
        return told

    # -- recordings

    def recorded(self) -> dict[str, Any]:
        """Its attributes but for those of the traces."""
        ours = ("_spans", "_rows", "_followed", "_prefills", "_siblings", "_why")
        return {name: value for name, value in vars(self).items() if name not in ours}
