"""One child of a request: its stream of text, its stop strings, and what goes out for each batch of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..proto.messages import Finish
from .detokenize import Stream
from .stops import StopSet, StopWatch


class News(NamedTuple):
    """What new tokens mean for the client. ``used`` of them count; ``length`` is -1 until the child has ended."""

    text: str
    used: int
    finish: int
    reason: int | str | None
    length: int


class TextSequence:
    """Decoding state of (uid, index). ``count`` is the number of output tokens taken in so far.

    Without a stream there is no text (``detokenize=False``, or no tokenizer). Stop strings count only from the token
    after the first ``min_tokens`` on; `stops.py` says where one that lies across that border belongs.

    ``text_of`` is the text of one more token where that is all there is to do beside counting it: no stop string is
    looked for and nothing is skipped. It is None where tokens must go through ``advance``.
    """

    __slots__ = ("_min", "_skip", "_stream", "_watch", "count", "done", "text_of")

    def __init__(self, stream: Stream | None, stops: StopSet | None, skip_text: int = 0, min_tokens: int = 0):
        self._stream = stream
        self._watch = StopWatch(stops) if stops else None
        self._skip = skip_text  # characters the client has already
        self._min = min_tokens
        self.count = 0
        self.done = False
        self.text_of: Callable[[int], str] | None = None
        if not stops and not skip_text:
            self.text_of = _no_text if stream is None else stream.push

    def advance(self, tokens: Sequence[int], finish: int, stop_id: int, include_stop: bool) -> News:
        """Take in new tokens. The text of a stop token is left out; a stop string overrides any other finish."""
        reason: int | str | None = stop_id if stop_id >= 0 and finish == Finish.STOP else None
        shown = tokens[:-1] if finish == Finish.STOP and not include_stop else tokens
        text, used, hit = self._decode(shown, finish != Finish.NONE)
        if hit is not None:
            finish, reason = Finish.STOP, hit
        else:
            used = len(tokens)
        self.count += used
        self.done = finish != Finish.NONE
        if self._skip:
            self._skip, text = max(0, self._skip - len(text)), text[self._skip :]
        return News(text, used, finish, reason, self.count if self.done else -1)

    def _decode(self, tokens: Sequence[int], last: bool) -> tuple[str, int, str | None]:
        """Text that may go out, the tokens taken, and the stop string met."""
        stream, watch = self._stream, self._watch
        if stream is None:
            return "", len(tokens), None
        push = stream.push
        if watch is None:
            text = push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens))
            return (text + stream.finish() if last else text), len(tokens), None
        parts = []
        early = self._min - self.count  # so many of these are among the first min_tokens
        for n, token in enumerate(tokens):
            part, hit = watch.feed(push(token), n < early)
            parts.append(part)
            if hit is not None:
                return "".join(parts), n + 1, hit
        if last:
            part, hit = watch.feed(stream.finish(), len(tokens) <= early)
            parts.append(part)
            if hit is not None:
                return "".join(parts), len(tokens), hit
            parts.append(watch.rest())
        return "".join(parts), len(tokens), None


def _no_text(token: int) -> str:
    return ""


def first_finish(
    ids: Sequence[int], eos: Collection[int], stop_ids: Collection[int], max_tokens: int, min_tokens: int = 0
) -> tuple[int, int, int]:
    """Where output ``ids`` end by the scheduler's own rules: (how many count, finish, stop id or -1).

    A resumed child may have ended just before its finish was lost.
    """
    for n, token in enumerate(ids):
        if n + 1 < min_tokens:
            continue
        if token in eos:
            return n + 1, Finish.STOP, -1
        if token in stop_ids:
            return n + 1, Finish.STOP, token
        if n + 1 >= max_tokens:
            return n + 1, Finish.LENGTH, -1
    return len(ids), Finish.NONE, -1
