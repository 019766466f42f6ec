"""What messages of several rooms are made of."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base of all that is sent."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of n tokens: for each the token itself, then the k most likely ones, best first.

    ``ranks`` are of the tokens themselves: 1 + the number of tokens strictly more likely. ``texts`` is filled by the
    detokenizer, one for each id (empty where nothing is to be detokenized); ``raw`` has the bytes of those tokens that
    are no whole characters, by place in ``ids``.
    """

    ids: bytes  # i32, n * (k + 1)
    values: bytes  # f32, n * (k + 1)
    ranks: bytes  # i32, n
    texts: list[str] = []
    raw: dict[int, bytes] = {}
