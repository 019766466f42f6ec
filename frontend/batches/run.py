"""Answer all requests of a file that a journal does not have yet, some at a time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from ..errors import MAX_MESSAGE
from ..sse import to_json
from .journal import Journal, Record
from .lines import Line, LineError, Lines

Answer = Callable[[Line], Awaitable[tuple[int, bytes]]]
"""What gives a request's status and JSON; it asks again by itself where it is refused for load."""


def told(custom_id: str | None, status: int, body: bytes, as_vllm: bool) -> bytes:
    """A line of the output. An error stands in ``error``, as in `vllm run-batch`, or is the body, as at OpenAI."""
    failed, raw = status != 200, msgspec.Raw(body if b"\n" not in body else to_json(msgspec.json.decode(body)))
    response: dict[str, Any] = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": raw}
    if failed and as_vllm:
        response["body"] = None
    error = raw if failed and as_vllm else None
    return to_json(
        {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    )


def not_done(custom_id: str | None, code: str, message: str) -> bytes:
    """A line of the output for a request that was never answered."""
    error = {"code": code, "message": message[:MAX_MESSAGE]}
    return to_json({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error})


class Run:
    """``window`` requests are under way at most. ``on_kept`` is called, in another thread, when answers
    are on the disk."""

    def __init__(
        self, lines: Lines, journal: Journal, answer: Answer, window: int, as_vllm: bool = False,
        on_kept: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self._lines, self._journal, self._answer, self._as_vllm = lines, journal, answer, as_vllm
        self._window, self._on_kept = window, on_kept
        self._done: asyncio.Queue[Record] = asyncio.Queue(window)

    async def go(self) -> None:
        """Return when every request has its answer in the journal. What has been answered is kept however this ends.

        Raises OSError where it cannot be kept.
        """
        waiting = iter([place for place in range(len(self._lines)) if place not in self._journal])
        keeper = asyncio.create_task(self._keep())
        lanes = [asyncio.create_task(self._lane(waiting)) for _ in range(self._window)]
        answered = asyncio.create_task(self._all_kept(lanes))
        try:
            ended, _ = await asyncio.wait([answered, keeper], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # the keeper ends by an error alone
        finally:
            for task in (answered, *lanes, keeper):
                task.cancel()
            await asyncio.gather(answered, *lanes, keeper, return_exceptions=True)
            if left := self._taken():
                self._journal.append(left)

    async def _all_kept(self, lanes: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*lanes)
        await self._done.join()

    async def _lane(self, waiting: Iterator[int]) -> None:
        for place in waiting:
            await self._done.put(await self._one(place))

    async def _one(self, place: int) -> Record:
        try:
            line = self._lines.read(place)
        except LineError as error:
            fault = {"message": error.message, "type": "BadRequestError", "param": error.param, "code": 400}
            return place, False, told(error.custom_id, 400, to_json({"error": fault}), self._as_vllm)
        status, body = await self._answer(line)
        return place, status == 200, told(line.custom_id, status, body, self._as_vllm)

    async def _keep(self) -> None:
        """Write what is answered, all that is there in one go."""
        while True:
            records = [await self._done.get(), *self._taken()]
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, records))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # a thread cannot be told to stop
                raise
            for _ in records:
                self._done.task_done()

    def _write(self, records: list[Record]) -> None:
        self._journal.append(records)
        self._on_kept()

    def _taken(self) -> list[Record]:
        return [self._done.get_nowait() for _ in range(self._done.qsize())]
