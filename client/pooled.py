"""Requests that draw no tokens, as the client keeps them: they are answered all at once."""

from __future__ import annotations

from ..proto.codec import from_i32
from ..proto.messages import Accepted, Tokenize
from ..proto.work import Pool, Text
from .request import OpenRequest
from .results import Pooled, Told


class OpenPooling(OpenRequest):
    """``pooled`` is its answer, once it has come. A lost one is sent again as it was: from the text, which gives the
    same tokens."""

    def __init__(self, message: Tokenize, work: Pool, now: float):
        super().__init__(message, now)
        self.work = work
        self.pooled: Pooled | None = None

    def take(self, rows: int, data: bytes) -> None:
        """Take the answer; ValueError where it is not what it says."""
        import numpy as np  # which those who only generate do without

        values = np.frombuffer(data, np.float32)
        if not len(values) or self.accepted is None or (rows and rows != len(self.accepted.prompt_ids)):
            raise ValueError(f"{rows} rows of {len(data)} bytes answer request {self.uid}")
        shaped = values.reshape(rows, -1) if rows else values
        self.pooled = Pooled(self.accepted.prompt_ids, shaped, self.cached_tokens)


class OpenText(OpenRequest):
    """Text to tokens, or back. ``told`` is its answer, which comes with its acceptance."""

    def __init__(self, message: Tokenize, now: float):
        super().__init__(message, now)
        self.told: Told | None = None

    def accept(self, message: Accepted) -> None:
        if isinstance(message.work, Text):
            self.told = Told(from_i32(message.ids), message.prompt, message.work)
        super().accept(message)
