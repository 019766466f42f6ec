"""What must hold: at each thing that a client sees (``Rules``), and at the end of a history (``check_end``).

A failure is a line "rule | request: what was expected, what came".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.client.results import ChildOutput, StreamEvent, TokenLogprobs
from quire.proto.losses import MAX_LOSSES
from quire.proto.messages import Finish

from .asks import Ask
from .errors import wrong_end
from .left import leftovers
from .oracle import Answer, Output, answer_to, prompt_ids

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
        answer = self.answer(consumer)
        if seen.events == 1:
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
            names = ("arrival", "first step", "first token", "last token", "end")
            got = ", ".join(f"{name} {at}" for name, at in zip(names, order, strict=True))
            self.fail("times differ", consumer, f"expected rising times, got {got}")


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
    """Each request ended, rightly; cached tokens were there to be found; poison killed no more than it may;
    nothing is left."""
    lines: list[str] = []
    for consumer in world.consumers:
        name = consumer.ask.name
        if not consumer.over:
            lines.append(f"never ended | {name}: expected an end, got none since {consumer.progressed:.3f}")
        elif (wrong := wrong_end(consumer, world)) is not None:
            lines.append(f"wrong end | {name}: {wrong}")
        if (wrong := _wrong_cached(consumer, world)) is not None:
            lines.append(f"cached tokens | {name}: {wrong}")
    return lines + _too_deadly(world) + leftovers(world)


def _too_deadly(world: Any) -> list[str]:
    """A request that kills what serves it takes three processes with it, where nothing else goes wrong; of n children
    each counts for itself. (What another one kills sends it again, and a scheduler counts the workers of each attempt.)
    """
    deaths = sum(blow[2] == "poison" for blow in world.blows)
    poison = [each.ask for each in world.consumers if each.uid in world.poisoned]
    if len(poison) != 1 or any(blow[2] not in ("poison", "ends") for blow in world.blows):
        return []
    children = 1 if poison[0].params.use_beam_search else poison[0].params.width
    most = MAX_LOSSES * (children if poison[0].poison == "worker" else 1)
    return [] if deaths <= most else [f"poison | {poison[0].name}: expected at most {most} deaths, got {deaths}"]


def _wrong_cached(consumer: Consumer, world: Any) -> str | None:
    """Tokens found in the prefix cache are whole blocks that a request of the same salt had computed."""
    request, shape = consumer.request, world.plan.shape
    got = request.cached_tokens if request is not None else 0
    if not got:
        return None
    if not shape.prefix_caching or shape.whole or _avoids_cache(consumer.ask):
        return f"expected none, got {got}"
    ids = prompt_ids(consumer.ask, shape)
    if got % shape.block_size and got != len(ids):
        return f"expected whole blocks of {shape.block_size}, got {got}"
    for other in world.consumers:
        if other is consumer and request is not None and request.attempt == 0:
            continue
        if other.ask.salt != consumer.ask.salt or other.ask.adapter != consumer.ask.adapter:
            continue
        if other.begun > consumer.ended:
            continue
        if any(_common(ids, tokens) >= got for tokens in _computed(other, shape)):
            return None
    return f"expected none, since no request of salt {consumer.ask.salt!r} had these tokens, got {got}"


def _avoids_cache(ask: Ask) -> bool:
    if ask.pooling is None:
        return bool(ask.params.skip_reading_prefix_cache)
    return bool(ask.pooling.skip_reading_prefix_cache)


def _computed(other: Consumer, shape: Any) -> Iterator[list[int]]:
    """Sequences of tokens whose keys and values it may have computed."""
    ids = prompt_ids(other.ask, shape)
    yield ids
    if isinstance(other.request, OpenGeneration):
        for child in other.request.children:
            yield [*ids, *child.tokens]


def _common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
