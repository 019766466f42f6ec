"""Spans: what a traced request did in one process, from when to when, and under which span of which other process.

A span is data. Who makes them is given what exports them (``tracing.py``), so nothing here reads a clock or imports
OpenTelemetry. A *context* is what travels in messages: 16 bytes of the trace's id and 8 of the parent's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .codec import BadFrame

CONTEXT_SIZE = 24
_TRACE_SIZE = 16


@dataclass(slots=True)
class Span:
    """One part of a trace. Times are in seconds of ``time.monotonic`` in the process that makes it."""

    name: str
    trace: bytes  # 16 bytes
    id: bytes  # 8 bytes
    parent: bytes  # 8 bytes; empty: the trace begins with it
    start: float
    end: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    error: str = ""
    server: bool = False  # it answers somebody else's call

    @property
    def context(self) -> bytes:
        """What the spans below it are told."""
        return self.trace + self.id

    def event(self, name: str, now: float, **attributes: Any) -> None:
        """Something that happened at one moment of it."""
        self.events.append((name, now, attributes))


class Spans:
    """Begins and ends the spans of one process. ``export`` takes one that has ended, and neither waits nor raises."""

    def __init__(self, export: Callable[[Span], None], rng: random.Random):
        self._export, self._rng = export, rng

    def begin(self, name: str, context: bytes, now: float, **attributes: Any) -> Span:
        """A span under that of ``context``. Raises BadFrame where that is none."""
        if len(context) != CONTEXT_SIZE:
            raise BadFrame(f"the context of a trace has {len(context)} bytes, not {CONTEXT_SIZE}")
        trace, parent = context[:_TRACE_SIZE], context[_TRACE_SIZE:]
        return Span(name, trace, self.new_id(8), parent, now, attributes=attributes)

    def end(self, span: Span, now: float) -> None:
        """Nothing more happens in it."""
        span.end = now
        self._export(span)

    def new_id(self, size: int) -> bytes:
        """So many bytes, not all of them 0."""
        return self._rng.randrange(1, 256**size).to_bytes(size, "big")
