"""A pooling request as the client keeps it: it has no tokens, and is answered all at once."""

from __future__ import annotations

from ..proto.messages import Tokenize
from ..proto.work import Pool
from .request import OpenRequest
from .results import Pooled


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
