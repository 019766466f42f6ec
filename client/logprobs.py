"""Columns of logprobs, checked and unpacked."""

from __future__ import annotations

from ..proto.codec import BadFrame, from_f32, from_i32
from ..proto.messages import Logprobs, TextBatch
from .results import TokenLogprobs


def by_row(batch: TextBatch, counts: list[int]) -> dict[int, Logprobs]:
    """The records of a TextBatch by row. Raises BadFrame where one does not fit its row."""
    rows = from_i32(batch.logprob_rows)
    if len(rows) != len(batch.logprobs):
        raise BadFrame(f"{len(rows)} rows have logprobs and there are {len(batch.logprobs)} records")
    for row, record in zip(rows, batch.logprobs, strict=True):
        if not 0 <= row < len(counts):
            raise BadFrame(f"row {row} of {len(counts)} has logprobs")
        _check(record, counts[row])
    return dict(zip(rows, batch.logprobs, strict=True))


def _check(record: Logprobs, n: int) -> None:
    """Raises BadFrame where the columns are not those of ``n`` tokens."""
    size = len(record.ids) // 4
    if not (
        len(record.ids) == len(record.values) == 4 * size
        and len(record.ranks) == 4 * n
        and (size >= n and size % n == 0 if n else size == 0)
        and len(record.texts) in (0, size)
        and all(0 <= place < size for place in record.raw)
    ):
        raise BadFrame(
            f"logprobs of {n} tokens have {len(record.ids)} bytes of ids, {len(record.values)} of values, "
            f"{len(record.ranks)} of ranks and {len(record.texts)} texts"
        )


def unpack(record: Logprobs, n: int | None = None) -> list[TokenLogprobs]:
    """One entry for each of the ``n`` tokens (as many as have ranks when left out). Raises BadFrame."""
    n = len(record.ranks) // 4 if n is None else n
    _check(record, n)
    if not n:
        return []
    ids, values = from_i32(record.ids), from_f32(record.values)
    width = len(ids) // n
    tokens = [
        TokenLogprobs(ids[at : at + width], values[at : at + width], rank, record.texts[at : at + width], {})
        for at, rank in zip(range(0, len(ids), width), from_i32(record.ranks), strict=True)
    ]
    for place, raw in record.raw.items():
        tokens[place // width].raw[place % width] = raw
    return tokens
