"""A replica's slots for adapters: what is in each, who uses it, and whose turn it is to be loaded.

A sequence may begin where its adapter is ready in a slot. Where more adapters are asked for than there are slots, the
line of those who wait decides: the adapters that come first in it, as many as there are slots, are *granted*. Only
sequences of granted adapters begin, and a granted adapter that is not here is given a slot that nobody uses, the one
used longest ago. Where all are used, as many as are lacking are *closed*: nobody new begins with them, whatever comes,
until they have run empty and been given away. So the first in line waits for one slot to run empty, and no longer.

Nothing waits for a load but those who need it. A room beside the block pool: it knows adapters, and not who uses them.
"""

from __future__ import annotations

from ..proto.codec import BadFrame
from ..proto.messages import AdapterReady, DropAdapter, Lease, LoadAdapter
from ..proto.work import Adapter
from .block_pool import PoolError

RETRY_S, FAILED_S = 10.0, 300.0
"""After a failed load the same adapter is not tried again here for the first, as long as another replica has it or may
load it; for the second it counts as one that this replica cannot load."""


class Slot:
    """One slot. ``users`` are the sequences that run with it; ``used`` says when one last began, in turns.
    ``unwanted``: it is emptied when the last of them ends."""

    __slots__ = ("adapter", "closed", "generation", "ready", "unwanted", "used", "users")

    def __init__(self) -> None:
        self.adapter: Adapter | None = None
        self.generation = self.users = self.used = 0
        self.ready = self.closed = self.unwanted = False


class AdapterSlots:
    """The slots of one replica; dies with its lease."""

    def __init__(self, lease: Lease, count: int):
        self.lease = lease
        self.slots = [Slot() for _ in range(count)]
        self.orders: list[LoadAdapter | DropAdapter] = []  # to be sent
        self._held: dict[bytes, int] = {}  # slot of each adapter that is ready or on its way, by digest
        self._failed: dict[bytes, float] = {}  # when a load did that another replica has made
        self._granted: dict[bytes, Adapter] = {}  # in this plan, in order
        self._asked = False  # whether anybody needed an adapter in this plan
        self._generations = self._turns = 0
        self._began = 0.0  # when the worker came to the first of those that it loads, one after another
        self.stuck = False  # that load hangs: nothing is loaded here until it ends

    @property
    def loading(self) -> list[Adapter]:
        """What is on its way, in the order in which the worker loads it."""
        slots = sorted(self.slots, key=lambda slot: slot.generation)
        return [slot.adapter for slot in slots if slot.adapter is not None and not slot.ready]

    def look(self, before: float) -> Adapter | None:
        """What the worker has been loading since before that time, for which all behind it wait; or None."""
        loading = self.loading
        self.stuck = bool(loading) and self._began < before
        return loading[0] if self.stuck else None

    def has(self, adapter: Adapter) -> bool:
        """It is ready here."""
        number = self._held.get(adapter.digest)
        return number is not None and self.slots[number].ready

    def takes(self, adapter: Adapter) -> bool:
        """A sequence whose turn it is may begin with it."""
        number = self._held.get(adapter.digest)
        return number is not None and self.slots[number].ready and not self.slots[number].closed

    def holds(self, adapter: Adapter) -> bool:
        """It is ready here, or on its way."""
        return adapter.digest in self._held

    def could_take(self, adapter: Adapter, now: float) -> bool:
        """It is here, or there is a slot that nobody uses."""
        if (number := self._held.get(adapter.digest)) is not None:
            return not self.slots[number].closed and (self.slots[number].ready or not self.stuck)
        if self.stuck or self._failed_lately(adapter, now):
            return False
        return any(slot.adapter is None or (slot.ready and not slot.users) for slot in self.slots)

    def may_have(self, adapter: Adapter, now: float) -> bool:
        """It is ready here, or may come: it could be loaded, and that has not failed."""
        return self.has(adapter) or not (self.stuck or now - self._failed.get(adapter.digest, -FAILED_S) < FAILED_S)

    def want(self, adapter: Adapter, now: float) -> None:
        """A sequence that runs elsewhere is to come here: have ``adapter`` loaded, where a slot is free for it. One at
        a time, so that those whose turn it is in line wait for no others."""
        if self.loading or adapter.digest in self._held or self._failed_lately(adapter, now):
            return
        if (number := self._free_slot()) is not None:
            self._load(number, adapter, now)

    # -- turns

    def begin_turn(self, first: Adapter | None = None) -> None:
        """A plan is made: nothing is granted yet but ``first``, where there is one."""
        self._granted.clear()
        self._asked = first is not None
        if first is not None:
            self._granted[first.digest] = first

    def may_admit(self, adapter: Adapter) -> bool:
        """False where others have had all turns of this plan; nothing is granted by asking."""
        return self.has_turn(adapter.digest)

    def has_turn(self, digest: object) -> bool:
        """The same, of an adapter's digest."""
        return len(self._granted) < len(self.slots) or digest in self._granted

    def admits(self, adapter: Adapter) -> bool:
        """The next in line needs ``adapter``: whether it may begin now."""
        self._asked = True
        if not self.may_admit(adapter):
            return False
        self._granted[adapter.digest] = adapter
        return self.takes(adapter)

    def end_turn(self, now: float) -> bool:
        """Load what was granted and is not here, as far as slots are free for it, and close slots for the rest. True
        where a slot was opened, so that somebody may begin who could not in this plan."""
        if not self._asked:
            return False  # nobody looked at the line, or nobody in it needs an adapter
        lacking = 0
        for adapter in list(self._granted.values()):
            if adapter.digest not in self._held and not self._failed_lately(adapter, now):
                if self.stuck:
                    continue
                if (number := self._free_slot()) is not None:
                    self._load(number, adapter, now)
                else:
                    lacking += 1
        return self._close(lacking)

    def _close(self, count: int) -> bool:
        """Have so many slots closed: those that are stay so, as long as somebody lacks one. Whether any was opened."""
        closed = [slot for slot in self.slots if slot.closed]
        opened = sorted(closed, key=self._is_granted, reverse=True)[: max(0, len(closed) - count)]
        for slot in opened:
            slot.closed = False
        if count > len(closed):
            open_ones = [slot for slot in self.slots if slot.ready and not slot.closed and not self._is_granted(slot)]
            for slot in sorted(open_ones, key=lambda slot: slot.used)[: count - len(closed)]:
                slot.closed = True
        return bool(opened)

    def _is_granted(self, slot: Slot) -> bool:
        return slot.adapter is not None and slot.adapter.digest in self._granted

    def _free_slot(self) -> int | None:
        """An empty slot, or the one used longest ago of those that nobody uses and nobody will."""
        idle = []
        for number, slot in enumerate(self.slots):
            if slot.adapter is None:
                return number
            if slot.ready and not slot.users and (slot.closed or not self._is_granted(slot)):
                idle.append((slot.used, number))
        return min(idle)[1] if idle else None

    def _load(self, number: int, adapter: Adapter, now: float) -> None:
        slot = self.slots[number]
        if slot.adapter is not None:
            del self._held[slot.adapter.digest]
        if not self.loading:
            self._began = now
        self._generations += 1
        slot.adapter, slot.generation = adapter, self._generations
        slot.ready = slot.closed = slot.unwanted = False
        self._held[adapter.digest] = number
        self.orders.append(LoadAdapter(self.lease, number, adapter.name, adapter.path, slot.generation, adapter.digest))

    def drop(self, adapter: Adapter) -> None:
        """Nobody needs it any more: its slot is emptied as soon as nobody runs with it, and the worker keeps nothing of
        its files. One that is on its way is left alone, for whoever asks again when it has come."""
        number = self._held.get(adapter.digest, -1)
        if number < 0:
            self.orders.append(DropAdapter(self.lease, -1, adapter.digest))
            return
        slot = self.slots[number]
        slot.unwanted = slot.ready
        if slot.ready and not slot.users:
            self._empty(number)

    def _empty(self, number: int) -> None:
        slot = self.slots[number]
        assert slot.adapter is not None  # somebody wanted it once
        del self._held[slot.adapter.digest]
        self.orders.append(DropAdapter(self.lease, number, slot.adapter.digest))
        slot.adapter, slot.ready, slot.closed, slot.unwanted = None, False, False, False

    def take_orders(self) -> list[LoadAdapter | DropAdapter]:
        """What is to be sent, behind the plans made so far."""
        orders, self.orders = self.orders, []
        return orders

    def loaded(self, message: AdapterReady, now: float) -> Adapter:
        """A load has ended; the adapter that it was of. Raises BadFrame where none was asked for."""
        number = message.slot
        slot = self.slots[number] if 0 <= number < len(self.slots) else None
        if slot is None or slot.adapter is None or slot.ready or message.generation != slot.generation:
            raise BadFrame(f"slot {number} is not being loaded (generation {message.generation})")
        adapter, self._began, self.stuck = slot.adapter, now, False
        if message.error:
            slot.adapter = None
            del self._held[adapter.digest]
        else:
            slot.ready = True
            self._failed.pop(adapter.digest, None)
        return adapter

    def note_failed(self, adapter: Adapter, now: float) -> None:
        """Wait a while before it is tried here again."""
        self._failed = {digest: since for digest, since in self._failed.items() if now - since < FAILED_S}
        self._failed[adapter.digest] = now

    def forget_failed(self, adapter: Adapter) -> None:
        """Nobody waits for it any more; who asks for it next has it tried again."""
        self._failed.pop(adapter.digest, None)

    def _failed_lately(self, adapter: Adapter, now: float) -> bool:
        return bool(self._failed) and now - self._failed.get(adapter.digest, -RETRY_S) < RETRY_S

    # -- users

    def take(self, adapter: Adapter) -> int:
        """One more sequence runs with ``adapter``, which is ready; the number of its slot."""
        number = self._held[adapter.digest]
        slot = self.slots[number]
        if not slot.ready:
            raise PoolError(f"a sequence begins with adapter {adapter.name!r}, which is not ready in slot {number}")
        self._turns += 1
        slot.users, slot.used, slot.unwanted = slot.users + 1, self._turns, False
        return number

    def leave(self, number: int) -> None:
        """A sequence that ran with this slot does so no more."""
        slot = self.slots[number]
        slot.users -= 1
        if slot.unwanted and not slot.users:
            self._empty(number)

    def check_integrity(self, users: list[int]) -> None:
        """PoolError where the slots are not those that ``users``, one entry for each running sequence, hold."""
        for number, slot in enumerate(self.slots):
            if slot.users != users.count(number):
                raise PoolError(f"adapter slot {number} counts {slot.users} users and has {users.count(number)}")
            if slot.users and not slot.ready:
                raise PoolError(f"adapter slot {number} is used and not ready")
        held = {slot.adapter.digest: number for number, slot in enumerate(self.slots) if slot.adapter is not None}
        if held != self._held:
            raise PoolError("the adapters that are held are not those of the slots")
