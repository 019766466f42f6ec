"""One replica: a worker's rows, its block pool, who runs there, and the steps in flight.

Everything here dies with the lease: a worker that comes back gets a new Replica.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from ..proto.messages import Lease
from .block_pool import BlockPool, PoolError
from .request import Request, Sequence

if TYPE_CHECKING:
    from .beams import BeamGroup

MAX_IN_FLIGHT = 2
"""Plans sent and not yet answered: one runs while the next waits at the worker's door."""
STALL_S = 2.0
"""After so long without a result a worker is no good place for those who wait, as long as another has room. It may be
sound for all that: it loses nothing but what it would have been given."""

_key = attrgetter("key")


class Step:
    """What one plan asked for, kept until its result comes.

    The result has one token for each of ``decodes``, then one for each beam of ``groups``, then one for each of
    ``chunks`` that draws.
    """

    __slots__ = ("chunks", "decodes", "generations", "groups", "number", "prompts", "sent_at")

    def __init__(
        self, number: int, decodes: list[Sequence], chunks: list[tuple[Sequence, int, int, bool]],
        prompts: list[tuple[Request, int, int, int]], groups: list[tuple[BeamGroup, int, int]],
    ):  # fmt: skip
        self.number = number
        self.decodes = decodes
        self.generations = [seq.generation for seq in decodes]
        self.chunks = chunks  # (sequence, generation, tokens computed when this step is done, draws a token)
        self.prompts = prompts  # (request, compute row, first and past the last prompt token whose logprobs come)
        self.groups = groups  # beam searches: (sequence, generation, beams)
        self.sent_at = 0.0

    def samples(self) -> int:
        """Tokens the result must have."""
        return len(self.decodes) + sum(n for _, _, n in self.groups) + sum(draws for _, _, _, draws in self.chunks)

    def searches(self) -> bool:
        """Some slot is a beam's."""
        return bool(self.groups) or any(draws and seq.width > 1 for seq, _, _, draws in self.chunks)

    def slots(self) -> list[tuple[Sequence, int]]:
        """Each slot's sequence, and its generation when it was planned."""
        slots = list(zip(self.decodes, self.generations, strict=True))
        for seq, generation, beams in self.groups:
            slots += [(seq, generation)] * beams
        return slots + [(seq, generation) for seq, generation, _, draws in self.chunks if draws]

    def sequences(self) -> list[Sequence]:
        """Those in this step that have not left since."""
        alive = [s for s, g in zip(self.decodes, self.generations, strict=True) if s.generation == g]
        alive += [s for s, g, _ in self.groups if s.generation == g]
        return alive + [s for s, g, _, _ in self.chunks if s.generation == g]


class Replica:
    """A worker that can run plans. Lists of sequences are kept in order of their keys, first come first."""

    def __init__(
        self, number: int, lease: Lease, peer: str, num_rows: int, num_blocks: int, block_size: int,
        max_model_len: int, vocab_size: int, caching: bool = True, device: str = "", pools: bool = False,
        whole: bool = False,
    ):  # fmt: skip
        self.number, self.lease, self.peer, self.device = number, lease, peer, device
        self.pools, self.whole = pools, whole  # as in Loaded
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.pool = BlockPool(num_blocks, caching and not whole)
        self.num_rows = num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.suspects: list[Sequence] = []
        self.drops: list[int] = []  # rows given up since the last plan
        self.in_flight: deque[Step] = deque()
        self.last_step = 0
        self.progress_at = 0.0  # when the last result came
        self.decodes_waited = False  # the last plan left the decodes out to take a whole prompt
        self.draining = False

    @property
    def running(self) -> int:
        """Rows that are held."""
        return self.num_rows - len(self.free_rows)

    def stalled(self, now: float) -> bool:
        """Its step takes long: it hangs, or has much to do."""
        return bool(self.in_flight) and now - max(self.in_flight[0].sent_at, self.progress_at) > STALL_S

    def sequences(self) -> list[Sequence]:
        """All that hold a row here."""
        return self.decoding + self.prefilling

    def last(self) -> Sequence:
        """The running sequence that came last: the one to preempt."""
        tails = self.decoding[-1:] + self.prefilling[-1:]
        return max(tails, key=_key)

    def join(self, seq: Sequence) -> None:
        """Called by ``Sequence.start``."""
        insort(self.prefilling if seq.prefilling else self.decoding, seq, key=_key)
        if seq.suspect:
            self.suspects.append(seq)

    def prefilled(self, seq: Sequence) -> None:
        """The whole of ``seq`` is planned: from here on it decodes."""
        del self.prefilling[_find(self.prefilling, seq)]
        seq.prefilling = False
        insort(self.decoding, seq, key=_key)

    def leave(self, seq: Sequence) -> None:
        """Called by the state machine: take back the row and the blocks.

        Both may be given out in the next plan although steps in flight still write there: a worker changes its state
        in plan order on one stream, so those writes come first.
        """
        running = self.prefilling if seq.prefilling else self.decoding
        del running[_find(running, seq)]
        if seq in self.suspects:
            self.suspects.remove(seq)
        rows, filled, tables = seq.holdings()
        self.free_rows += rows
        self.drops += filled
        for table in tables:
            self.pool.release_table(table)

    def check_integrity(self) -> None:
        """Raises PoolError where rows, lists or blocks do not add up."""
        running = self.sequences()
        self.pool.check_integrity([table for seq in running for table in seq.holdings()[2]])
        rows = [row for seq in running for row in seq.holdings()[0]]
        if sorted(rows + self.free_rows) != list(range(self.num_rows)):
            raise PoolError(f"rows {sorted(rows)} are held and {sorted(self.free_rows)} free of {self.num_rows}")
        for seq in running:
            if not 0 <= seq.computed <= seq.planned <= max(seq.limit - 1, seq.known):
                raise PoolError(f"computed {seq.computed}, planned {seq.planned}, known {seq.known}, limit {seq.limit}")
            table = max(seq.holdings()[2], key=len)
            if seq.computed > seq.known or seq.planned > len(table) * self.block_size:
                raise PoolError(f"planned {seq.planned} of {len(table)} blocks of {self.block_size}")
        for name, seqs in (("decoding", self.decoding), ("prefilling", self.prefilling)):
            if [s.key for s in seqs] != sorted(s.key for s in seqs):
                raise PoolError(f"{name} is out of order")
            if any(s.prefilling != (name == "prefilling") or s.prefilling > (s.planned < s.known) for s in seqs):
                raise PoolError(f"{name} holds a sequence that is not")


def _find(seqs: list[Sequence], seq: Sequence) -> int:
    at = bisect_left(seqs, seq.key, key=_key)
    if at == len(seqs) or seqs[at] is not seq:
        raise PoolError(f"sequence {seq.key} is not where its state says")
    return at
