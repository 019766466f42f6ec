"""A detokenizer that also tells what became of requests that are traced: the spans of ``docs/tracing.md``.

It looks at what its base class does and changes none of it but the Submit of such a request, which carries the trace
on.
"""

from __future__ import annotations

from typing import Any

from ..proto.codec import from_i64
from ..proto.messages import Failed, Submit, TokenBatch, Tokenize, TracedSubmit, TracedTokenize
from ..proto.spans import CONTEXT_SIZE, Span, Spans
from .core import DetokenizerCore
from .request import Request


class Followed:
    """A request that is traced, the context of its span in the frontend, and what is done with it now."""

    __slots__ = ("context", "request", "span")

    def __init__(self, request: Request, context: bytes, span: Span):
        self.request, self.context = request, context
        self.span: Span | None = span


class TracedDetokenizer(DetokenizerCore):
    """``spans`` are what it makes; the rest is as in its base class."""

    def __init__(self, spans: Spans, *args: Any):
        super().__init__(*args)
        self._spans = spans
        self._followed: dict[int, Followed] = {}

    def received(self, peer: str, message: Any) -> None:
        if self._followed and isinstance(message, TokenBatch) and message.started_uids:
            self._note_started(message)
        super().received(peer, message)
        self._end_those_gone()

    def heartbeat(self, memory: int, bad_frames: int) -> None:
        super().heartbeat(memory, bad_frames)
        self._end_those_gone()

    def _tokenize(self, peer: str, message: Tokenize) -> None:
        before, queued, now = self.requests.get(message.uid), self.queued, self.clock()
        super()._tokenize(peer, message)
        request = self.requests.get(message.uid)
        if not isinstance(message, TracedTokenize) or len(message.trace) != CONTEXT_SIZE:
            return
        if request is not None and request is not before:
            self._end_those_gone()
            asked = {"quire.attempt": message.attempt, "quire.queued": queued}
            span = self._spans.begin("tokenize", message.trace, now, **asked)
            self._followed[message.uid] = Followed(request, message.trace, span)

    def _put(self, peer: str, message: Any) -> None:
        if isinstance(message, Failed | Submit) and (followed := self._followed.get(message.uid)) is not None:
            if isinstance(message, Failed):
                if followed.span is not None and followed.span.name == "tokenize":
                    followed.span.error = message.message
            else:
                self._end(followed, **{"gen_ai.usage.prompt_tokens": len(message.ids) // 4})
                told = {name: getattr(message, name) for name in Submit.__struct_fields__}
                message = TracedSubmit(**told, trace=followed.context)
        super()._put(peer, message)

    def _refuse(self, request: Request, result: Exception | None) -> None:
        super()._refuse(request, result)
        self._end_those_gone()

    def _note_started(self, message: TokenBatch) -> None:
        """Text of these follows."""
        for uid in from_i64(message.started_uids):
            if (followed := self._followed.get(uid)) is not None and followed.span is None:
                followed.span = self._spans.begin("detokenize", followed.context, self.clock())

    def _end(self, followed: Followed, **attributes: Any) -> None:
        if (span := followed.span) is not None:
            span.attributes |= attributes
            self._spans.end(span, self.clock())
            followed.span = None

    def _end_those_gone(self) -> None:
        """Whatever had a request leave, its last span ends with it."""
        for uid in [uid for uid, each in self._followed.items() if self.requests.get(uid) is not each.request]:
            self._end(self._followed.pop(uid))
