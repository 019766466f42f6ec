"""What a client knows of adapters' names, and what it has asked the scheduler to make of them. No IO.

The names are a copy of the scheduler's, which outlives it: of two entries of one name the higher generation counts, so
a new scheduler is told everything, and nothing that is older than what it knows does any harm. Of two of one generation
the scheduler's counts, so all frontends agree, also where they were started with different --lora-modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from ..proto.messages import AdapterEntry, Adapters, Register, Unregister
from ..proto.work import Adapter

MAX_REMOVED = 1000
"""Removed names that are remembered, as many as the scheduler remembers."""


class AdapterBook:
    """Names of adapters, and questions about them that are not answered yet."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}
        self._asked: dict[int, Register | Unregister] = {}  # by token
        self._tokens = 0

    def get(self, name: str) -> Adapter | None:
        """The adapter of this name; None where there is none."""
        entry = self._entries.get(name)
        return entry.adapter if entry is not None else None

    def __iter__(self) -> Iterator[AdapterEntry]:
        """Those that are there, in the order in which they came."""
        return (entry for entry in self._entries.values() if entry.adapter is not None)

    def merge(self, entries: Iterable[AdapterEntry]) -> None:
        """Take over what is not older than what is known."""
        for entry in entries:
            known = self._entries.get(entry.name)
            if known is None or (entry.generation >= known.generation and entry != known):
                self._entries.pop(entry.name, None)  # removed ones are forgotten in the order in which they were
                self._entries[entry.name] = entry
        removed = [name for name, entry in self._entries.items() if entry.adapter is None]
        for name in removed[: max(0, len(removed) - MAX_REMOVED)]:
            del self._entries[name]

    def ask(self, message: Register | Unregister) -> int:
        """The scheduler is asked this, under a token that is returned."""
        self._tokens += 1
        message.token = self._tokens
        self._asked[message.token] = message
        return message.token

    def answered(self, token: int) -> None:
        """It has answered, or nobody waits for that any more."""
        self._asked.pop(token, None)

    def introduction(self) -> list[Any]:
        """What to tell and ask a scheduler that may know nothing."""
        told: list[Any] = [Adapters(list(self._entries.values()))] if self._entries else []
        return told + [replace(message, again=True) for message in self._asked.values()]
