"""What must hold: at each thing that a client sees (``Rules``), and at the end of a history (``check_end``).

A failure is a line "rule | request: what was expected, what came".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.client.results import ChildOutput, StreamEvent, TokenLogprobs
from quire.proto.messages import Finish

from .oracle import Answer, Output, answer_to

if TYPE_CHECKING:
    from .consumer import Consumer

Logprobs = Sequence[TokenLogprobs | None]


@dataclass(slots=True)
class Seen:
    """What a client has seen of each child, put together from its events."""

    events: int = 0
    children: dict[int, ChildOutput] = field(default_factory=dict)
    answer: Answer | None = None  # what must come


class Rules:
    """``fail`` is told each line; ``say`` what clients see, for a transcript."""

    def __init__(self, shape: Any, fail: Callable[[str], None], say: Callable[[str], None] | None = None):
        self.shape, self._fail, self._say = shape, fail, say

    def fail(self, rule: str, consumer: Consumer, text: str) -> None:
        """A rule is broken."""
        self._fail(f"{rule} | {consumer.ask.name}: {text}")

    # -- while it runs

    def event(self, consumer: Consumer, event: StreamEvent) -> None:
        """One event of a stream: what follows what has come, as far as it goes, and no more."""
        request, seen = consumer.request, consumer.seen
        assert isinstance(request, OpenGeneration)
        if self._say is not None:
            self._say(_in_words(consumer, event))
        first = seen.answer is None
        answer = self.answer(consumer)
        if first:
            self._prompt(consumer, answer)
        if consumer.held and not request.done:
            self.fail("shown early", consumer, f"expected nothing before its end, got {event}")
        if not 0 <= event.index < len(answer.children):
            self.fail("no such child", consumer, f"expected one of {len(answer.children)}, got {event.index}")
            return
        child = seen.children.setdefault(event.index, ChildOutput())
        if child.finish:
            self.fail("after its end", consumer, f"child {event.index}: expected nothing more, got {event}")
            return
        child.tokens += event.tokens
        child.parts.append(event.text)
        child.logprobs += event.logprobs
        child.finish, child.stop_reason = event.finish, event.stop_reason
        if event.finish:
            if event.length != len(child.tokens):
                text = f"child {event.index}: expected length {len(child.tokens)}, got {event.length}"
                self.fail("usage differs", consumer, text)
            self._whole(consumer, event.index, child, answer.children[event.index])
        else:
            self._prefix(consumer, event.index, child, answer.children[event.index])

    def answer(self, consumer: Consumer) -> Answer:
        """What must come of it in the end."""
        request = consumer.request
        if consumer.seen.answer is None:
            seed = request.work.seed if isinstance(request, OpenGeneration) else 0
            consumer.seen.answer = answer_to(consumer.ask, seed, self.shape)
        return consumer.seen.answer

    def _prompt(self, consumer: Consumer, answer: Answer) -> None:
        """The prompt as run, and its logprobs, are there before the first event."""
        request = consumer.request
        accepted = request.accepted if request is not None else None
        if accepted is None or accepted.prompt_ids != answer.prompt_ids:
            got = accepted and accepted.prompt_ids
            self.fail("prompt differs", consumer, f"expected ids {answer.prompt_ids}, got {got}")
        elif accepted.prompt != answer.prompt:
            self.fail("prompt differs", consumer, f"expected {answer.prompt!r}, got {accepted.prompt!r}")
        if isinstance(request, OpenGeneration):
            self._logprobs(consumer, "prompt", request.prompt_logprobs, answer.prompt_logprobs)

    def _prefix(self, consumer: Consumer, index: int, child: ChildOutput, wanted: Output) -> None:
        count, text = len(child.tokens), "".join(child.parts)
        if child.tokens != wanted.tokens[:count]:
            self.fail("tokens differ", consumer, f"child {index}: expected {wanted.tokens[:count]}, got {child.tokens}")
        if not wanted.text.startswith(text):
            self.fail("text differs", consumer, f"child {index}: expected {wanted.text!r}, got {text!r}")
        self._logprobs(consumer, f"child {index}", child.logprobs, wanted.logprobs[:count])

    def _whole(self, consumer: Consumer, index: int, child: ChildOutput, wanted: Output) -> None:
        self._prefix(consumer, index, child, wanted)
        count, text = len(child.tokens), "".join(child.parts)
        if count < len(wanted.tokens):
            self.fail("tokens missing", consumer, f"child {index}: expected {wanted.tokens}, got {child.tokens}")
        if len(text) < len(wanted.text):
            self.fail("text missing", consumer, f"child {index}: expected {wanted.text!r}, got {text!r}")
        if (child.finish, child.stop_reason) != (wanted.finish, wanted.reason):
            got = f"{child.finish!r} {child.stop_reason!r}"
            self.fail(
                "finish differs", consumer, f"child {index}: expected {wanted.finish!r} {wanted.reason!r}, got {got}"
            )

    def _logprobs(self, consumer: Consumer, what: str, got: Logprobs | None, wanted: Logprobs | None) -> None:
        if got == wanted:
            return
        if got is None or wanted is None or len(got) != len(wanted):
            sizes = [each if each is None else len(each) for each in (wanted, got)]
            self.fail("logprobs differ", consumer, f"{what}: expected {sizes[0]}, got {sizes[1]}")
        else:
            at = next(n for n, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
            self.fail("logprobs differ", consumer, f"{what}, token {at}: expected {wanted[at]}, got {got[at]}")

    # -- at its end

    def end(self, consumer: Consumer) -> None:
        """It is over, in whatever way."""
        if self._say is not None:
            self._say(f"{consumer.ask.name} {_end_in_words(consumer)}")
        request = consumer.request
        if consumer.left or consumer.cut_off or consumer.error is not None or request is None:
            return
        if isinstance(request, OpenPooling):
            self._pooled(consumer, request)
            return
        answer = self.answer(consumer)
        if consumer.ask.quiet or not consumer.seen.events:
            self._prompt(consumer, answer)
        if len(request.children) != len(answer.children):
            text = f"expected {len(answer.children)} children, got {len(request.children)}"
            self.fail("children missing", consumer, text)
            return
        for index, (child, wanted) in enumerate(zip(request.children, answer.children, strict=True)):
            self._whole(consumer, index, child, wanted)
            self._child(consumer, index, child, wanted)
        self._times(consumer)

    def _child(self, consumer: Consumer, index: int, child: ChildOutput, wanted: Output) -> None:
        """What was seen is what is kept; the sums agree."""
        text = "".join(child.parts)
        if child.chars != len(text) and not consumer.held:
            self.fail("usage differs", consumer, f"child {index}: expected {len(text)} characters, got {child.chars}")
        if child.cumulative != wanted.cumulative:
            self.fail("sum differs", consumer, f"child {index}: expected {wanted.cumulative}, got {child.cumulative}")
        seen = consumer.seen.children.get(index)
        if consumer.ask.quiet:
            if seen is not None:
                self.fail("shown early", consumer, "it waits for the end only, and was given events")
        elif seen is None or (seen.tokens, "".join(seen.parts)) != (child.tokens, text) or not seen.finish:
            self.fail("events missing", consumer, f"child {index}: expected {child.tokens} {text!r}, got {seen}")

    def _pooled(self, consumer: Consumer, request: OpenPooling) -> None:
        answer = self.answer(consumer)
        self._prompt(consumer, answer)
        got = request.pooled
        assert answer.pooled is not None
        rows, data = answer.pooled
        if got is None or got.data.tobytes() != data or (got.data.ndim == 2) != bool(rows):
            self.fail("vectors differ", consumer, f"expected {rows} rows of {len(data)} bytes, got {got}")

    def _times(self, consumer: Consumer) -> None:
        request = consumer.request
        assert request is not None
        times = request.metrics
        order = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time,
                 times.finished_time]  # fmt: skip
        known = [each for each in order if each is not None]
        if known != sorted(known) or len(known) < len(order):
            self.fail("times differ", consumer, f"expected rising times, got {order}")


def _in_words(consumer: Consumer, event: StreamEvent) -> str:
    end = f", ends: {Finish(event.finish).name} {event.stop_reason!r}" if event.finish else ""
    return f"{consumer.ask.name}.{event.index} sees {event.text!r} {event.tokens}{end}"


def _end_in_words(consumer: Consumer) -> str:
    error = consumer.error
    if error is not None:
        return f"is refused: {error.status} {error.message}"
    return "leaves" if consumer.left else "loses its frontend" if consumer.cut_off else "is done"


# ---------------------------------------------------------------- at the end of a history


def check_end(world: Any) -> list[str]:
    """Each request ended, and each error was one that the rules allow."""
    lines: list[str] = []
    for consumer in world.consumers:
        if not consumer.over:
            lines.append(
                f"never ended | {consumer.ask.name}: expected an end, got none since {consumer.progressed:.3f}"
            )
    return lines
