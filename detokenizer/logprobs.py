"""Texts of the tokens in a record of logprobs, and cutting records as their tokens are cut.

A token's text is what it adds after other text, so that texts of a sequence's tokens joined are nearly its text:
" word" keeps the space that decoding the token by itself would lose (SentencePiece, WordPiece), and special tokens
are shown. A token that is no whole character (a byte of one, the half of an emoji) has U+FFFD for what is broken, and
its bytes in ``raw``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..proto.codec import BadFrame, from_i32
from ..proto.messages import Logprobs, TokenBatch


class TokenTexts(dict[int, str]):
    """Id -> text, found once for each id; ``raw`` has the bytes of those that are no whole characters."""

    def __init__(self, piece: Callable[[int], str | bytes]):
        super().__init__()
        self._piece = piece
        self.raw: dict[int, bytes] = {}

    def __missing__(self, token: int) -> str:
        piece = self._piece(token)
        if isinstance(piece, bytes):
            self.raw[token] = piece
            piece = piece.decode("utf-8", "replace")
        self[token] = piece
        return piece

    def fill(self, logprobs: Logprobs) -> None:
        """Set ``texts`` and ``raw``."""
        ids = from_i32(logprobs.ids)
        logprobs.texts = [self[token] for token in ids]
        raw = self.raw
        if not raw.keys().isdisjoint(ids):
            logprobs.raw = {at: raw[token] for at, token in enumerate(ids) if token in raw}


def check_logprobs(logprobs: Logprobs, count: int) -> None:
    """Raise BadFrame unless the columns are those of ``count`` tokens, at least one."""
    group, rest = divmod(len(logprobs.ids), 4 * count) if count > 0 else (0, 0)
    if group < 1 or rest or len(logprobs.values) != len(logprobs.ids) or len(logprobs.ranks) != 4 * count:
        sizes = (len(logprobs.ids), len(logprobs.values), len(logprobs.ranks))
        raise BadFrame(f"logprobs of {count} tokens have columns of {sizes} bytes")


def logprobs_of(message: TokenBatch, counts: list[int]) -> dict[int, Logprobs]:
    """The records of a batch by row. Raises BadFrame where columns disagree."""
    if not message.logprob_rows and not message.logprobs:
        return {}
    rows = from_i32(message.logprob_rows)
    if len(rows) != len(message.logprobs) or rows != sorted(set(rows)) or rows[0] < 0 or rows[-1] >= len(counts):
        raise BadFrame(f"TokenBatch has {len(message.logprobs)} logprobs of rows {rows[:8]} of {len(counts)}")
    for row, logprobs in zip(rows, message.logprobs, strict=True):
        check_logprobs(logprobs, counts[row])
    return dict(zip(rows, message.logprobs, strict=True))


def cut(logprobs: Logprobs, count: int, start: int, stop: int) -> Logprobs | None:
    """The record of tokens [start, stop) out of ``count``; None where none are left."""
    if start >= stop:
        return None
    if start == 0 and stop == count:
        return logprobs
    group = len(logprobs.ids) // count
    part = slice(start * group, stop * group)
    return Logprobs(logprobs.ids[part], logprobs.values[part], logprobs.ranks[4 * start : 4 * stop])
