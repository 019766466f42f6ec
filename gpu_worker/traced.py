"""A link that also tells how long each step of a traced request took: the spans of ``--collect-detailed-traces``.

A step is what lies between its plan, as the compute thread gets it, and its result, as it is sent. So the worker itself
knows nothing of traces, and one without them pays nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ..proto.codec import from_i32
from ..proto.messages import Assign, StepPlan, StepResult, TraceRows
from ..proto.spans import CONTEXT_SIZE, Span, Spans
from .link import LeaseLost, Link

IN_FLIGHT = 8
"""Steps that are remembered at once; there are two, or three."""


class TracedLink(Link):
    """``spans`` are what it makes."""

    def __init__(self, spans: Spans, *args: Any):
        super().__init__(*args)
        self._spans = spans
        self._announced: dict[int, bytes] = {}  # rows that the next plan admits, and their contexts
        self._rows: dict[int, bytes] = {}
        self._steps: deque[tuple[int, list[Span]]] = deque(maxlen=IN_FLIGHT)

    def get(self, timeout: float | None = None) -> Any:
        while isinstance(message := super().get(timeout), TraceRows):
            rows = zip(from_i32(message.rows), message.contexts, strict=False)
            self._announced = {row: context for row, context in rows if len(context) == CONTEXT_SIZE}
        if isinstance(message, StepPlan):
            self._begin_step(message)
        elif isinstance(message, Assign | LeaseLost):
            self._announced, self._rows = {}, {}
            self._steps.clear()
        return message

    def send(self, message: Any) -> None:
        super().send(message)
        if isinstance(message, StepResult) and self._steps:
            self._end_step(message.step)

    def _begin_step(self, plan: StepPlan) -> None:
        """In the order in which a plan is applied: drops, forks, admits, run."""
        announced, self._announced = self._announced, {}
        if not announced and not self._rows:
            return
        now, rows = time.monotonic(), self._rows
        for row in from_i32(plan.drops):
            rows.pop(row, None)
        forked = {
            to: rows.get(source)
            for source, to in zip(from_i32(plan.fork_src), from_i32(plan.fork_dst), strict=False)
        }  # fmt: skip
        admitted = {admit.row: announced.get(admit.row) for admit in plan.admits}
        for row, context in [*forked.items(), *admitted.items()]:
            if context is None:
                rows.pop(row, None)
            else:
                rows[row] = context
        run = list(zip(from_i32(plan.rows), from_i32(plan.counts), strict=False))
        spans = [
            self._spans.begin("step", rows[row], now, **{
                "quire.step": plan.step, "quire.tokens": count, "quire.rows": len(run),
            }) for row, count in run if row in rows
        ]  # fmt: skip
        if spans:
            self._steps.append((plan.step, spans))

    def _end_step(self, step: int) -> None:
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= step:
            for span in self._steps.popleft()[1]:
                span.attributes["gen_ai.latency.time_in_model_execute"] = now - span.start
                self._spans.end(span, now)
