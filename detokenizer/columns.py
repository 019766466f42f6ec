"""The columns of a step: a TokenBatch taken apart, a TextBatch put together; checks on what has columns."""

from __future__ import annotations

from typing import Any

from ..proto.codec import BadFrame, from_i8, from_i32, from_i64, i8, i32, i64
from ..proto.messages import Finish, Logprobs, TextBatch, TokenBatch, Tokenize
from ..proto.work import Generate
from .sequence import News


class Outbox:
    """The columns of one Engine's next TextBatch."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, str, int, int | str | None, int]] = []
        self.tokens: list[int] = []
        self.started: list[tuple[int, int]] = []
        self.logprobs: dict[int, Logprobs] = {}  # by row

    def add(
        self, uid: int, attempt: int, index: int, offset: int, tokens: list[int], news: News,
        logprobs: Logprobs | None = None,
    ) -> None:  # fmt: skip
        """One row: ``tokens`` of child ``index``, before which there were ``offset``, and what they mean."""
        if logprobs is not None:
            self.logprobs[len(self.rows)] = logprobs
        self.rows.append((uid, attempt, index, offset, len(tokens), news.text, news.finish,
                          news.reason, news.length))  # fmt: skip
        self.tokens += tokens

    def batch(self) -> TextBatch:
        """All rows, as they are sent."""
        columns: Any = zip(*self.rows, strict=True) if self.rows else ((),) * 9
        uids, attempts, indexes, offsets, counts, texts, finishes, reasons, lengths = columns
        return TextBatch(
            uids=i64(uids), attempts=i32(attempts), indexes=i32(indexes), offsets=i32(offsets), counts=i32(counts),
            tokens=i32(self.tokens), texts=list(texts), finishes=i8(finishes), stop_reasons=list(reasons),
            lengths=i32(lengths), started_uids=i64([uid for uid, _ in self.started]),
            started_cached=i32([cached for _, cached in self.started]),
            logprob_rows=i32(self.logprobs), logprobs=list(self.logprobs.values()),
        )  # fmt: skip


def rows_of(message: TokenBatch) -> list[tuple[int, int, int, int, int, int, int]]:
    """(uid, attempt, index, offset, count, finish, stop id) of each row. Raises BadFrame where columns disagree."""
    counts, finishes = from_i32(message.counts), from_i8(message.finishes)
    columns = [from_i64(message.uids), from_i32(message.attempts), from_i32(message.indexes),
               from_i32(message.offsets), counts, finishes, from_i32(message.stop_ids)]  # fmt: skip
    if len({len(column) for column in columns}) != 1:
        raise BadFrame(f"TokenBatch has columns of {[len(column) for column in columns]} items")
    if min(counts, default=0) < 0 or 4 * sum(counts) != len(message.tokens):
        raise BadFrame(f"TokenBatch counts {sum(counts)} tokens and holds {len(message.tokens)} bytes of them")
    if min(finishes, default=0) < 0 or max(finishes, default=0) > max(Finish):
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
