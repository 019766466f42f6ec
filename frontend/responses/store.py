"""Responses that are kept for later turns, and the events of those that run in the background."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from aiohttp import web

from ..errors import ApiError
from ..sse import to_json

MAX_STORED = 1000
"""Responses that one frontend keeps; the oldest go first."""
MAX_STORED_BYTES = 64 * 2**20
"""Bytes of their JSON, of the conversations that led to them, and of their events."""
MAX_AGE_S = 24 * 3600.0
"""Seconds for which a response is kept."""
MAX_EVENT_BYTES = 8 * 2**20
"""Bytes of the events of one response in the background; the oldest go first."""

RUNNING = ("queued", "in_progress")


class Journal:
    """The events of a response, for whoever follows it, from whichever of them on. ``grown`` is told of so many bytes
    more, or fewer, and whether there is no room is what it returns: then the oldest go."""

    def __init__(self, most_bytes: int = MAX_EVENT_BYTES, grown: Callable[[int], bool] = lambda count: False) -> None:
        self._events: deque[bytes] = deque()
        self._first = 0  # the number of the first that is kept
        self._most, self._grown, self.size = most_bytes, grown, 0
        self._ended, self._changed = False, asyncio.Event()

    def add(self, event: bytes) -> None:
        """One more event."""
        self._events.append(event)
        self.size += len(event)
        full = self._grown(len(event))
        while self.size > self._most or (full and len(self._events) > 1):
            gone = len(self._events.popleft())
            self.size -= gone
            self._first += 1
            full = self._grown(-gone)
        self._tell()

    def end(self) -> None:
        """There will be no more."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def check(self, after: int) -> None:
        """Raises ApiError where events after number ``after`` are gone."""
        if after + 1 < self._first:
            raise ApiError(
                400, f"starting_after={after}: the events before {self._first} are no longer kept; start after "
                f"{self._first - 1}, or read the response without stream.", "starting_after",
            )  # fmt: skip

    async def after(self, number: int) -> AsyncIterator[bytes]:
        """What comes after event ``number``, in pieces, up to the end. Raises ApiError as ``check`` does."""
        while True:
            self.check(number)
            changed, start = self._changed, number + 1 - self._first
            if start < len(self._events):
                fresh = [*islice(reversed(self._events), len(self._events) - start)]  # at a cost of the new ones alone
                yield b"".join(reversed(fresh))
                number = self._first + len(self._events) - 1 if start >= 0 else number
            elif self._ended:
                return
            else:
                await changed.wait()


@dataclass
class Stored:
    """A response, and the items that it was asked with: of earlier turns, and of its own without the instructions,
    which hold for one turn. ``abort`` ends one that runs in the background, which alone has a ``journal``."""

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    journal: Journal | None = None
    abort: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None  # what runs it; an event loop keeps no hold of its tasks itself
    size: int = 0
    at: float = field(default=0.0)

    @property
    def runs(self) -> bool:
        return self.response["status"] in RUNNING


class Store:
    """Responses by id, the oldest first. Those that run stay. ``name`` is in the ids that are made here."""

    def __init__(
        self, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = secrets.token_hex(4)
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._most, self._most_bytes, self._clock, self._bytes = most, most_bytes, clock, 0

    def new_id(self) -> str:
        """An id for a response, by which other frontends know where it is kept."""
        return f"resp_{self.name}{secrets.token_hex(12)}"

    def begin(self, stored: Stored) -> Journal:
        """Keep a response that runs; what its events go to. Raises ApiError 429 where all that are kept run."""
        if len(self._kept) >= self._most and all(each.runs for each in self._kept.values()):
            raise ApiError(429, f"{self._most} responses run in the background; try again later.", "background", 5.0)
        self._kept[stored.response["id"]] = stored
        stored.at = self._clock()
        self._trim()
        stored.journal = Journal(grown=partial(self._grown, stored))
        return stored.journal

    def _grown(self, stored: Stored, count: int) -> bool:
        """The events of ``stored`` have so many bytes more; whether there is no room, though others were forgotten."""
        if not self.holds(stored):
            return False
        stored.size += count
        self._bytes += count
        if self._bytes > self._most_bytes:
            self._trim()
        return self._bytes > self._most_bytes

    def put(self, stored: Stored) -> None:
        """Keep a response that has ended; what no room is left for is forgotten, itself where it alone is too large."""
        self._forget(stored.response["id"])
        stored.size = len(to_json(stored.response)) + len(to_json(stored.items))
        stored.size += stored.journal.size if stored.journal is not None else 0
        stored.at = self._clock()
        self._kept[stored.response["id"]] = stored
        self._bytes += stored.size
        self._trim()

    def get(self, id: str, owner: str) -> Stored:
        """What was kept for this owner. Raises ApiError 404."""
        self._trim()
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            raise ApiError(404, f"Response with id '{id[:80]}' not found; it may have been forgotten.", "response_id")
        return found

    def items(self, ids: set[str], owner: str) -> dict[str, dict[str, Any]]:
        """Those of the items with these ids that are in any response which is kept for this owner, the newest."""
        found: dict[str, dict[str, Any]] = {}
        for stored in reversed(self._kept.values()):
            if len(found) == len(ids):
                break
            if stored.owner == owner:
                for item in (*stored.response["output"], *stored.items):
                    if (id := item.get("id")) in ids:
                        found.setdefault(id, item)
        return found

    def drop(self, id: str, owner: str) -> None:
        """Forget it, and end it where it runs. Raises ApiError 404."""
        stored = self.get(id, owner)
        if stored.abort is not None:
            stored.abort()
        self._forget(id)

    def holds(self, stored: Stored) -> bool:
        """Whether it has not been forgotten."""
        return self._kept.get(stored.response["id"]) is stored

    def _forget(self, id: str) -> None:
        found = self._kept.pop(id, None)
        if found is not None:
            self._bytes -= found.size

    def _trim(self) -> None:
        """Forget what is too old, and the oldest while there is too much."""
        limit = self._clock() - MAX_AGE_S
        for id, stored in list(self._kept.items()):
            full = len(self._kept) > self._most or self._bytes > self._most_bytes
            if not full and stored.at > limit:
                return
            if not stored.runs:
                self._forget(id)


STORE = web.AppKey("responses", Store)
