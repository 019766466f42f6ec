"""What the compute thread does of moves, and in a replica of several processes, what all of them do as one.

There each process sends its part of a page to the same process of the other replica. What the scheduler asks for comes
to the leader, which passes it on; and pages have come when all processes have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..proto.codec import from_i32
from ..proto.messages import Forget, Give, Lease, NotMoved, Take, Taken
from .kv_cache import KVCache
from .link import Arrived
from .spec import Shard

if TYPE_CHECKING:
    import torch

    from .models.model import Model
    from .moving import Mover
    from .parallel.group_link import Leader

BEFORE_RESULT_BYTES = 4 * 2**20
"""Of pages that are read before a step's result is sent: others wait for its tokens."""
BETWEEN = "\n"
"""What stands between the endpoints of a replica's processes, in the order of their numbers."""


@dataclass(frozen=True, eq=False)
class Said:
    """Posted by the links of a replica: what another process of it answered."""

    number: int
    answer: Taken | NotMoved


class PageMoves:
    """``guard`` is told which blocks (i32) are written over next. ``number`` is this process's among ``count``."""

    def __init__(
        self, mover: Mover | None, others: Leader | None, number: int, count: int, guard: Callable[[bytes], Any]
    ):
        self._mover, self._others, self._number, self._count, self._guard = mover, others, number, count, guard
        self._link: Any = None
        self._said: dict[int, dict[int, Taken]] = {}  # of each move, by process

    @property
    def on(self) -> bool:
        """Pages may move."""
        return self._mover is not None

    def attach(self, link: Any) -> None:
        """``link`` takes messages from any thread: of this process's own, and for the scheduler or the leader."""
        self._link = link
        if self._mover is not None:
            self._mover.start(lambda: link.post(Arrived()))
        if self._others is not None:
            self._others.on_taken = lambda number, answer: link.post(Said(number, answer))

    def begin(self, num_blocks: int) -> None:
        """A lease begins, with so many blocks."""
        if self._mover is not None:
            self._mover.begin(num_blocks)

    def end(self) -> None:
        """The lease is over."""
        self._said.clear()
        if self._mover is not None:
            self._mover.end()

    def handle(self, message: Take | Give | Forget | Arrived | Said, lease: Lease | None, kv: KVCache | None) -> None:
        """Pages go to another worker, or come from one. They are no part of a step: what fails ends the move alone."""
        if self._mover is None:
            return
        if isinstance(message, Arrived):
            self.take_arrived(lease, kv)
        elif isinstance(message, Said):
            if message.answer.lease == lease:
                self._answer(message.number, message.answer)
        else:
            self._do(self._mover, message, lease, kv)
            if isinstance(message, Give):
                self._give_more(self._mover, lease, kv)

    def after_step(self, lease: Lease, kv: KVCache) -> None:
        """A step is computed, and its result not sent. Pages that have come are known before it, so the next plan has
        them; and those that are to follow the step leave first, for from the result on a sequence waits for them."""
        if self._mover is not None:
            self.take_arrived(lease, kv)
            self._give_more(self._mover, lease, kv, BEFORE_RESULT_BYTES)

    def take_arrived(self, lease: Lease | None, kv: KVCache | None) -> None:
        """Put what has come from other workers into its blocks."""
        if self._mover is not None:
            for answer in self._mover.take_arrived(lease, kv):
                self._answer(self._number, answer)

    def _give_more(self, mover: Mover, lease: Lease | None, kv: KVCache | None, most: float = math.inf) -> None:
        """Do the Gives that are next in line too, until ``most`` bytes are read, and send the pages of them all."""
        while most > 0 and (give := self._link.next_of(Give)) is not None:
            self._do(mover, give, lease, kv)
            most -= 0 if kv is None else len(from_i32(give.blocks)) * kv.bytes_of_block
        mover.flush()

    def _do(self, mover: Mover, message: Take | Give | Forget, lease: Lease | None, kv: KVCache | None) -> None:
        if self._others is not None:
            self._others.send(message)
        if isinstance(message, Take):
            self._said.setdefault(message.move, {})
            self._guard(message.blocks)
        elif isinstance(message, Forget):
            self._said.pop(message.move, None)
        elif isinstance(message, Give):
            message = replace(message, endpoint=message.endpoint.split(BETWEEN)[self._number])
        if (answer := mover.handle(message, lease, kv)) is not None:
            self._answer(self._number, answer)

    def _answer(self, number: int, answer: Taken | NotMoved) -> None:
        """A process says this. Its leader answers for all: pages are there that all have."""
        if self._others is not None and isinstance(answer, Taken):
            said = self._said.get(answer.move)
            if said is None:
                return  # it was forgotten
            said[number] = answer
            if len(said) < self._count:
                return
            least = min(each.slots for each in said.values()), min(each.pages for each in said.values())
            answer = Taken(answer.lease, answer.move, *least)
        self._link.send(answer)


def pages_of(model: Model, device: torch.device, block_size: int, identity: str, shard: Shard) -> tuple[str, int]:
    """The format of a process's pages and whose they are, and the bytes of a block's. ``identity`` is the model's."""
    of = model.spec, block_size, model.cache_dtype
    told = f"{KVCache.format_of(*of, device, model.kv_scales)} of {identity}"
    if shard.size * shard.stages > 1:  # each process has its part
        told += f" in {shard.size} x {shard.stages} parts"
    return told, KVCache.block_bytes(*of)
