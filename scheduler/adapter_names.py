"""The names of adapters, loads that an operator waits for, and who still needs what a name meant before.

What a name means is kept by every frontend too.
Each side tells the other all that it knows when they meet, and of two entries of one name the higher generation counts;
of equal ones, which frontends with different --lora-modules have, the one that came here first.
So whatever order they meet in, all end with the same names, and those outlive any process but the last. Generations
rise from this scheduler's start in ms: above all that one before it gave out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..proto.messages import AdapterEntry, Register
from ..proto.work import Adapter

MAX_NAMES, MAX_REMOVED = 10_000, 1000
"""Names that are known at once, and removed ones that are remembered so that no frontend brings them back."""
MAX_WISHES = 256


class Wish(NamedTuple):
    """An adapter that is to be loaded before its name is known. ``since``: by the scheduler's clock."""

    peer: str
    asked: Register
    since: float = 0.0

    @property
    def adapter(self) -> Adapter:
        """What is to be loaded."""
        return self.asked.adapter


class AdapterNames:
    """What every name means, and who waits for one to mean something."""

    def __init__(self) -> None:
        self.entries: dict[str, AdapterEntry] = {}
        self.wishes: list[Wish] = []
        self.unused: list[Adapter] = []  # which no name means any more, and no request needs: to be dropped
        self._requests: Counter[bytes] = Counter()  # for each adapter, by digest
        self._former: dict[bytes, Adapter] = {}  # what names meant that no name means now
        self._generation = 0

    def begin(self, epoch: int) -> None:
        """Generations are above ``epoch``."""
        self._generation = max(self._generation, epoch)

    def get(self, name: str) -> Adapter | None:
        """What a name means now."""
        entry = self.entries.get(name)
        return entry.adapter if entry is not None else None

    def merge(self, entries: Iterable[AdapterEntry]) -> list[AdapterEntry]:
        """Take over what a frontend knows and this does not; those that are new."""
        taken = []
        for entry in entries:
            known = self.entries.get(entry.name)
            newer = known is None or entry.generation > known.generation
            if newer and (known is not None or len(self.entries) < MAX_NAMES + MAX_REMOVED):
                taken.append(self._put(entry))
        return taken

    def set(self, name: str, adapter: Adapter | None, parent: str = "") -> AdapterEntry:
        """A name means something else from now on, or nothing."""
        self._generation = max([self._generation, *(entry.generation for entry in self.entries.values())]) + 1
        return self._put(AdapterEntry(name, self._generation, adapter, parent))

    def _put(self, entry: AdapterEntry) -> AdapterEntry:
        before = self.entries.pop(entry.name, None)  # removed ones are forgotten in the order in which they were
        self.entries[entry.name] = entry
        if entry.adapter is not None:
            self._former.pop(entry.adapter.digest, None)
        if before is not None and before.adapter is not None:
            self._retire(before.adapter)
        removed = [name for name, each in self.entries.items() if each.adapter is None]
        for name in removed[: max(0, len(removed) - MAX_REMOVED)]:
            del self.entries[name]
        return entry

    # -- what nobody needs

    def _retire(self, adapter: Adapter) -> None:
        """A name meant this one until now."""
        known = (entry.adapter for entry in self.entries.values())
        if any(each is not None and each.digest == adapter.digest for each in known):
            return
        self._former[adapter.digest] = adapter
        for digest in list(self._former)[: max(0, len(self._former) - MAX_REMOVED)]:
            del self._former[digest]
        if adapter.digest not in self._requests:
            self.unused.append(adapter)

    def entered(self, adapter: Adapter) -> None:
        """A request for it is there."""
        self._requests[adapter.digest] += 1

    def left(self, adapter: Adapter) -> None:
        """It is there no more."""
        self._requests[adapter.digest] -= 1
        if not self._requests[adapter.digest]:
            del self._requests[adapter.digest]
            if adapter.digest in self._former:
                self.unused.append(adapter)

    def is_unused(self, adapter: Adapter) -> bool:
        """A name meant it before, and neither a name nor a request does now."""
        return adapter.digest in self._former and adapter.digest not in self._requests

    # -- wishes

    def refusal(self, asked: Register) -> tuple[int, str] | None:
        """Why an adapter cannot get its name: a status and a text; or None."""
        name = asked.adapter.name
        taken = self.get(name) is not None
        if not (asked.replace or asked.again) and (taken or any(wish.adapter.name == name for wish in self.wishes)):
            return 400, (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        known = sum(entry.adapter is not None for entry in self.entries.values())
        if not taken and known >= MAX_NAMES:
            return 400, f"{known} lora adapters are known, which is the limit; unload one."
        if len(self.wishes) >= MAX_WISHES:
            return 429, f"{len(self.wishes)} lora adapters wait to be loaded, which is the limit; try again in a while."
        return None

    def wish(self, peer: str, asked: Register, now: float) -> None:
        """Load this one as soon as a worker can."""
        self.wishes = [wish for wish in self.wishes if (wish.peer, wish.asked.token) != (peer, asked.token)]
        self.wishes.append(Wish(peer, asked, now))

    def forget(self, peer: str) -> None:
        """Nobody is there any more to be told."""
        self.wishes = [wish for wish in self.wishes if wish.peer != peer]

    def withdrawn(self, before: float) -> list[Wish]:
        """Those who have waited since before that time; they wait no more."""
        found = [wish for wish in self.wishes if wish.since < before]
        self.wishes = [wish for wish in self.wishes if wish.since >= before]
        return found

    def granted(self, digest: bytes) -> list[Wish]:
        """Those who wished for this adapter; they wait no more."""
        found = [wish for wish in self.wishes if wish.adapter.digest == digest]
        self.wishes = [wish for wish in self.wishes if wish.adapter.digest != digest]
        return found
