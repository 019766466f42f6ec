"""A pooling request as the client keeps it: it has no tokens, and is answered all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ..proto.messages import Tokenize
from .stream import OpenRequest, Pooled, RequestError


class PoolRequest(OpenRequest):
    """``answer`` is what the consumer awaits; ``abort`` is called with the uid where it is cancelled.

    A lost one is sent again as it was: from the text, which gives the same tokens.
    """

    def __init__(self, message: Tokenize, abort: Callable[[int], None]):
        super().__init__(message, message.params)
        self.answer: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self._give_up = abort
        self.answer.add_done_callback(self._look)

    def again(self) -> Tokenize:
        """The message of the present attempt."""
        return msgspec.structs.replace(self.message, attempt=self.attempt, losses=self.losses.count)

    def settle(self, rows: int, data: bytes) -> None:
        """Take the answer; ValueError where it is not what it says."""
        import numpy as np  # which those who only generate do without

        values = np.frombuffer(data, np.float32)
        if rows < 0 or not len(values) or self.accepted is None or (rows and rows != len(self.accepted.prompt_ids)):
            raise ValueError(f"{rows} rows of {len(data)} bytes answer request {self.uid}")
        shaped = values.reshape(rows, -1) if rows else values
        if not self.answer.done():
            self.answer.set_result(Pooled(self.accepted.prompt_ids, shaped, self.cached_tokens))

    def end(self, error: RequestError | None = None) -> None:
        """Nothing more will come."""
        super().end(error)
        if self.answer.done():
            return
        if error is None:
            self.answer.cancel()
        else:
            self.answer.set_exception(error)

    def _look(self, answer: asyncio.Future[Pooled]) -> None:
        if answer.cancelled() and not self.done:
            self._give_up(self.uid)
