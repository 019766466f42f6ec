"""Logprobs records as bytes: counted, cut and joined without being unpacked."""

from __future__ import annotations

from ..proto.codec import BadFrame
from ..proto.messages import Logprobs


def count_logprobs(record: Logprobs) -> int:
    """Tokens in a record of a worker's; BadFrame where its columns do not fit together."""
    size, count = len(record.ids), len(record.ranks) // 4
    if not count or len(record.ranks) % 4 or len(record.values) != size or not size or size % (4 * count):
        raise BadFrame(f"logprobs of {size} bytes of ids, {len(record.values)} of values, {len(record.ranks)} of ranks")
    if record.texts or record.raw:
        raise BadFrame("logprobs with texts, of a worker that knows none")
    return count


def first_logprobs(record: Logprobs, tokens: int) -> Logprobs:
    """The first ``tokens`` tokens of the record."""
    count = len(record.ranks) // 4
    if tokens == count:
        return record
    group = tokens * (len(record.ids) // count)
    return Logprobs(record.ids[:group], record.values[:group], record.ranks[: 4 * tokens])


def skip_logprobs(record: Logprobs, tokens: int) -> Logprobs:
    """The record without its first ``tokens`` tokens."""
    if not tokens:
        return record
    group = tokens * (len(record.ids) // (len(record.ranks) // 4))
    return Logprobs(record.ids[group:], record.values[group:], record.ranks[4 * tokens :])
