"""The columns of a step: a TokenBatch taken apart, a TextBatch put together; checks on what has columns."""

from __future__ import annotations

from array import array
from typing import Any

from ..proto.codec import BadFrame, from_i8, from_i32, from_i64, i32, i64
from ..proto.messages import Finish, Logprobs, TextBatch, TokenBatch, Tokenize
from ..proto.work import Generate
from .sequence import News

_ONE, _MINUS_ONE = i32([1]), i32([-1])
_LAST = max(Finish)


class Outbox:
    """The columns of one Engine's next TextBatch.

    Nearly every row is one token of a child that goes on, so what else there is to tell stands apart, in ``others``.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, str]] = []  # uid, attempt, index, offset, text
        self.tokens: list[int] = []
        self.others: dict[int, tuple[int, News]] = {}  # by row: how many tokens, and what ended
        self.started: list[tuple[int, int]] = []
        self.logprobs: dict[int, Logprobs] = {}  # by row

    def add(
        self, uid: int, attempt: int, index: int, offset: int, tokens: list[int], news: News,
        logprobs: Logprobs | None = None,
    ) -> None:  # fmt: skip
        """One row: ``tokens`` of child ``index``, before which there were ``offset``, and what they mean."""
        row = len(self.rows)
        if logprobs is not None:
            self.logprobs[row] = logprobs
        if news.finish or len(tokens) != 1:
            self.others[row] = len(tokens), news
        self.rows.append((uid, attempt, index, offset, news.text))
        self.tokens += tokens

    def batch(self) -> TextBatch:
        """All rows, as they are sent."""
        count = len(self.rows)
        columns: Any = map(list, zip(*self.rows, strict=True)) if count else ([],) * 5
        uids, attempts, indexes, offsets, texts = columns
        counts, lengths, finishes = array("i", _ONE * count), array("i", _MINUS_ONE * count), bytearray(count)
        reasons: list[int | str | None] = [None] * count
        for row, (tokens, news) in self.others.items():
            counts[row], finishes[row], reasons[row], lengths[row] = tokens, news.finish, news.reason, news.length
        return TextBatch(
            uids=i64(uids), attempts=i32(attempts), indexes=i32(indexes), offsets=i32(offsets),
            counts=counts.tobytes(), tokens=i32(self.tokens), texts=texts, finishes=bytes(finishes),
            stop_reasons=reasons, lengths=lengths.tobytes(),
            started_uids=i64([uid for uid, _ in self.started]) if self.started else b"",
            started_cached=i32([cached for _, cached in self.started]) if self.started else b"",
            logprob_rows=i32(self.logprobs) if self.logprobs else b"", logprobs=list(self.logprobs.values()),
        )  # fmt: skip


def rows_of(message: TokenBatch) -> list[tuple[int, int, int, int, int, int, int]]:
    """(uid, attempt, index, offset, count, finish, stop id) of each row. Raises BadFrame where columns disagree."""
    counts, finishes = from_i32(message.counts), from_i8(message.finishes)
    columns = [from_i64(message.uids), from_i32(message.attempts), from_i32(message.indexes),
               from_i32(message.offsets), counts, finishes, from_i32(message.stop_ids)]  # fmt: skip
    sizes = [len(column) for column in columns]
    if sizes.count(sizes[0]) != len(sizes):
        raise BadFrame(f"TokenBatch has columns of {sizes} items")
    if 4 * sum(counts) != len(message.tokens) or (counts and min(counts) < 0):
        raise BadFrame(f"TokenBatch counts {sum(counts)} tokens and holds {len(message.tokens)} bytes of them")
    if finishes and not 0 <= min(finishes) <= max(finishes) <= _LAST:
        raise BadFrame("TokenBatch holds an unknown finish")
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


def check_tokenize(message: Tokenize) -> None:
    """Raise BadFrame for numbers that would not fit the columns they go into, or that name no child."""
    if not -(2**63) <= message.uid < 2**63 or not 0 <= message.attempt < 2**31:
        raise BadFrame(f"uid {message.uid} or attempt {message.attempt} is out of range")
    indexes = [resume.index for resume in message.resume]
    n = message.work.params.n if isinstance(message.work, Generate) else 0
    if len(set(indexes)) < len(indexes) or not all(0 <= index < n for index in indexes):
        raise BadFrame(f"resumed children {indexes[:8]} of n={n} are out of range or named twice")
    if any(resume.text_sent < 0 for resume in message.resume):
        raise BadFrame("a resumed child has a negative text_sent")
    if not 0 <= message.prompt_logprobs_from < 2**31:
        raise BadFrame(f"prompt_logprobs_from {message.prompt_logprobs_from} is out of range")


def pairs_of(uids: bytes, others: bytes) -> list[tuple[int, int]]:
    """An int64 and an int32 column side by side."""
    first, second = from_i64(uids), from_i32(others)
    if len(first) != len(second):
        raise BadFrame(f"columns of {len(first)} uids and {len(second)} other items")
    return list(zip(first, second, strict=True))
