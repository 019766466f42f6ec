"""Requests as the client keeps them, opened and fed by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from quire.client.best import to_wire
from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.client.results import StreamEvent, TokenLogprobs
from quire.proto import messages as m
from quire.proto.codec import i32
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

T = TypeVar("T")
PROMPT = [5, 6, 7]
NONE, STOP, LENGTH, ABORT = m.Finish.NONE, m.Finish.STOP, m.Finish.LENGTH, m.Finish.ABORT


def opened(params: SamplingParams | None = None, accepted: bool = True, **fields: Any) -> OpenGeneration:
    """One that generates; ``fields`` are Tokenize's, prompt "hi" where there are none."""
    asked = params or SamplingParams()
    work = Generate(to_wire(asked), 7)
    request = OpenGeneration(m.Tokenize(1, 0, work, 0.0, **(fields or {"prompt": "hi"})), work, asked, 100.0)
    if accepted:
        accept(request)
    return request


def accept(request: OpenGeneration, ids: list[int] = PROMPT, max_tokens: int = 30) -> None:
    """Its prompt is known, and its ``max_tokens``."""
    params = request.message.work.params.clone()
    params.max_tokens = max_tokens
    request.accept(m.Accepted(request.uid, request.attempt, i32(ids), "hi", Generate(params, 7)))


def take(
    request: OpenGeneration, offset: int, tokens: list[int], text: str = "", finish: m.Finish = NONE, index: int = 0,
    length: int = -1, now: float = 200.0, logprobs: Any = (), reason: Any = None,
) -> bool:  # fmt: skip
    """One row of a TextBatch."""
    return request.take(index, offset, list(tokens), text, finish, reason, length, now, list(logprobs))


def lp(token: int, value: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs([token], [value], 1, ["x"], {})


def events(request: OpenGeneration) -> list[StreamEvent]:
    """Those that wait, which wait no longer."""
    found = list(request.pending.values())
    request.pending.clear()
    return found


def pooling(accepted: bool = True) -> OpenPooling:
    """One that is pooled."""
    request = OpenPooling(m.Tokenize(1, 0, Pool(PoolingParams()), 0.0, prompt="hi"), Pool(PoolingParams()), 100.0)
    if accepted:
        request.accept(m.Accepted(1, 0, i32(PROMPT), "hi", request.work))
    return request


def in_turns(main: Coroutine[Any, Any, T], most: int = 100) -> T:
    """``asyncio.run`` where nothing comes from outside: what is not done after so many turns of the loop never is."""

    async def bounded() -> T:
        task = asyncio.ensure_future(main)
        for _ in range(most):
            if not task.done():
                await asyncio.sleep(0)
        assert task.done(), "it waits for ever"
        return task.result()

    return asyncio.run(bounded())
