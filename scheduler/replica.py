"""One replica: a worker's rows, its block pool, who runs there, and the steps in flight.

Everything here dies with the lease: a worker that comes back gets a new Replica. A room above the steps and sequences,
below the books; all of its state is written by its own methods.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..proto.messages import Lease
from ..proto.standstill import Standstill
from ..proto.work import Adapter
from . import request
from .adapter_slots import AdapterSlots
from .batch import Batch, Lineup
from .block_lives import BlockLives, make_pool
from .block_pool import PoolError, blocks_for
from .columns import Columns, Ints, Rows, StopIds
from .draft_room import DraftRoom
from .draft_worth import DraftWorth
from .pace import Pace
from .request import Sequence
from .step import Step
from .tiers import Tier

MAX_IN_FLIGHT = 2
"""Plans sent and not yet answered: one runs while the next waits at the worker's door. The next waits here, for a few
milliseconds, where the last pages of a sequence are on their way: else that would wait for it too."""
STALL_S = 2.0
"""After so long without a result a worker is no good place for those who wait, as long as another has room. It may be
sound for all that: it loses nothing but what it would have been given."""

_key = attrgetter("key")
_ONE, _ZERO = np.array(1, np.int32), np.array(0, np.int32)


class Reserved(NamedTuple):
    """A row and blocks for a sequence that is on its way here, and its adapter's slot (-1: none). ``blocks`` grows with
    it."""

    row: int
    blocks: list[int]
    adapter_slot: int


class Landing(NamedTuple):
    """A sequence whose blocks are all here; the next plan takes it over, unless its generation has passed. It waits
    since its last token elsewhere came."""

    move: int
    seq: Sequence
    generation: int
    since: float


class Replica:
    """A worker that can run plans. Lists of sequences are kept in order of their keys, first come first.

    ``columns`` has of each row what steps read and change.
    """

    def __init__(
        self, number: int, lease: Lease, peer: str, num_rows: int, num_blocks: int, block_size: int,
        max_model_len: int, vocab_size: int, caching: bool = True, device: str = "", pools: bool = False,
        whole: bool = False, adapter_slots: int = 0, drafts: int = 0, draft_rows: int = 0, drafts_always: bool = False,
        tier: Tier | None = None, lives: BlockLives | None = None,
    ):  # fmt: skip
        self.number, self.lease, self.peer, self.device = number, lease, peer, device
        self.pools, self.whole, self.drafts, self.draft_rows = pools, whole, drafts, draft_rows  # as in Loaded
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.adapters = AdapterSlots(lease, adapter_slots) if adapter_slots else None
        self.tier = tier if caching and not whole else None
        self.pool = make_pool(num_blocks, caching and not whole, self.tier, lives)
        self.num_rows, self.free_rows = num_rows, list(range(num_rows - 1, -1, -1))
        self.columns = Columns(num_rows, block_size, min(blocks_for(max_model_len, block_size), num_blocks))
        self.draft_room = DraftRoom(self.columns, self.pool)
        self.stop_ids = StopIds(vocab_size)  # of all that run here
        self.decoding: list[Sequence] = []
        self.going = Lineup(self.columns)  # those of ``decoding`` that have something left to schedule
        self.prefilling: list[Sequence] = []
        self.quarantined: list[Sequence] = []  # those who run here and may be what ends workers
        self.held: set[Sequence] = set()  # of ``decoding``: on their way to another replica, and not planned here
        self.leaving: set[Sequence] = set()  # of ``prefilling``: they are held when they would decode
        self.reserved: dict[int, Reserved] = {}  # by the number of the move
        self.landed: list[Landing] = []
        self.expected: dict[int, float] = {}  # moves whose last pages are on their way, and until when plans wait
        self.drops: list[int] = []  # rows given up since the last plan
        self.in_flight: deque[Step] = deque()
        self.last_step = 0
        self.progress_at = 0.0  # when the last result came
        self.pace, self.draft_worth = Pace(), DraftWorth(draft_rows, drafts_always)
        self.decodes_waited = False  # the last plan left the decodes out to take a whole prompt
        self.draining = False
        # What is known of its worker where blocks may move between workers:
        self.role, self.endpoint, self.kv_format, self.block_bytes = "both", "", "", 0
        self.token_budget = self.enough_tokens = 0  # of a step, at most; of its prompts, see Draft.end_prompt

    @property
    def running(self) -> int:
        """Rows that are held."""
        return self.num_rows - len(self.free_rows)

    def sequences(self) -> list[Sequence]:
        """All that hold a row here."""
        return self.decoding + self.prefilling

    def last(self) -> Sequence:
        """The running sequence that came last: the one to preempt."""
        tails = self.decoding[-1:] + self.prefilling[-1:]
        return max(tails, key=_key)

    # -- steps

    def may_spend(self, tokens: int, enough: int | None = None) -> None:
        """So many tokens a step, at most; where a step's time grows with its tokens, of prompts ``enough`` are that."""
        self.token_budget, self.enough_tokens = tokens, enough or tokens

    def has_enough(self, clock: Callable[[], float]) -> bool:
        """No plan is to be made for it now."""
        flying = len(self.in_flight)
        if flying >= MAX_IN_FLIGHT:
            return True
        if self.expected:
            return flying > 0 or max(self.expected.values()) > clock()
        return flying > 0 and self.pace.until > 0.0 and bool(self.free_rows) and self.pace.until > clock()

    def launch(self, step: Step) -> list[int]:
        """``step`` is on its way. Returns the rows given up since the one before."""
        self.last_step = step.number
        if not self.in_flight:
            self.pace.begins(step, step.sent_at)
        self.in_flight.append(step)
        drops, self.drops = self.drops, []
        return drops

    def finish_step(self, now: float, tokens: int) -> Step:
        """The result of the oldest step in flight has come, with so many tokens."""
        seconds, before, self.progress_at = self.waited(now), self.progress_at, now
        step = self.in_flight.popleft()
        self.pace.ended(step, seconds)
        if self.drafts:
            self.draft_worth.ended(step, tokens, seconds, now - before)
        if self.in_flight:
            self.pace.begins(self.in_flight[0], now)
        return step

    def withdraw(self, count: int) -> None:
        """The last ``count`` plans never left. The lease is about to end."""
        for _ in range(min(count, len(self.in_flight))):
            self.in_flight.pop()

    def abandon_steps(self) -> list[Sequence]:
        """No result will come any more. Returns the sequences that were in a step in flight."""
        lost = {seq.key: seq for step in self.in_flight for seq in step.sequences()}
        self.in_flight.clear()
        return list(lost.values())

    def waited(self, now: float) -> float:
        """Seconds for which the oldest step in flight has run; 0 where there is none."""
        return now - max(self.in_flight[0].sent_at, self.progress_at) if self.in_flight else 0.0

    def stalled(self, now: float) -> bool:
        """Its step takes long: it hangs, or has much to do."""
        return self.waited(now) > STALL_S

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still: the steps in flight get that time again."""
        self.progress_at = standstill.since(self.progress_at)
        for step in self.in_flight:
            step.forgive(standstill)

    def drain(self) -> None:
        """Place nothing new here."""
        self.draining = True

    def let_decodes_wait(self, waited: bool) -> None:
        """Remember whether the decodes were left out of the last plan."""
        self.decodes_waited = waited

    # -- rows

    def start(self, seq: Sequence, cached: list[int]) -> None:
        """Rows, and blocks for all tokens of ``seq``; the ``cached`` ones are held before others are taken."""
        for block in cached:
            self.pool.share(block)
        fresh = blocks_for(seq.total, self.block_size) - len(cached)
        blocks = cached + self.pool.allocate_many(fresh)
        rows = [self.free_rows.pop() for _ in range(seq.width)]
        self._begin(seq, rows, blocks, len(cached) * self.block_size)

    def _begin(self, seq: Sequence, rows: list[int], blocks: list[int], computed: int) -> None:
        seq.start(self.number, self.columns, rows, blocks, computed)
        if self.adapters is not None and (adapter := seq.request.adapter) is not None:
            seq.use_adapter(self.adapters.take(adapter))
        self.stop_ids.add(seq.stops)
        _insert(self.prefilling, seq)
        self.update_quarantine(seq)

    def fork(self, parent: Sequence, seq: Sequence) -> None:
        """A row for ``seq`` with the blocks of ``parent``, whose prompt is scheduled as a whole."""
        for block in parent.blocks:
            self.pool.share(block)
        seq.fork(parent, self.free_rows.pop())
        if self.adapters is not None and (adapter := seq.request.adapter) is not None:
            seq.use_adapter(self.adapters.take(adapter))
        self.stop_ids.add(seq.stops)
        self._decode(seq)
        self.update_quarantine(seq)

    def prefilled(self, seq: Sequence) -> None:
        """The whole of ``seq`` is scheduled: from here on it decodes."""
        del self.prefilling[_find(self.prefilling, seq)]
        seq.begin_decoding()
        self._decode(seq)
        if seq in self.leaving:
            self.hold(seq)

    def _decode(self, seq: Sequence) -> None:
        """``seq`` takes its place among those that decode."""
        _insert(self.decoding, seq)
        self.going.add(seq)

    def release(self, seq: Sequence) -> None:
        """Take back rows and blocks of ``seq``, which is about to leave the state "running".

        Both may be given out in the next plan although steps in flight still write there: those writes come first.
        """
        running = self.prefilling if seq.prefilling else self.decoding
        del running[_find(running, seq)]
        self.going.discard(seq)
        self.held.discard(seq)
        self.leaving.discard(seq)
        if self.drafts:
            self.draft_room.leave(seq)
        self.stop_ids.remove(seq.stops)
        if self.adapters is not None and seq.adapter_slot >= 0:
            self.adapters.leave(seq.adapter_slot)
        if self.quarantined:
            self.update_quarantine(seq, leaves=True)
        rows, filled, tables = seq.holdings()
        self.free_rows += rows
        self.drop_rows(filled)
        for table in tables:
            self.pool.release_table(table)

    # -- moves

    @property
    def takes_prompts(self) -> bool:
        """It is for those who wait."""
        return self.role != "decode" and not self.draining

    def set_place(self, role: str, endpoint: str, kv_format: str, block_bytes: int) -> None:
        """What its worker said of itself."""
        self.role, self.endpoint, self.kv_format, self.block_bytes = role, endpoint, kv_format, block_bytes

    def hold(self, seq: Sequence) -> None:
        """``seq``, which decodes, is planned no more: it goes elsewhere."""
        self.held.add(seq)
        self.going.discard(seq)

    def hold_when_prefilled(self, seq: Sequence) -> None:
        """``seq``, whose prompt is under way, decodes elsewhere."""
        self.leaving.add(seq)

    def let_go_on(self, seq: Sequence) -> None:
        """It stays after all."""
        self.leaving.discard(seq)
        if seq in self.held:
            self.held.discard(seq)
            if seq.loose or seq.scheduled < seq.end:  # with verifications in flight it may be further back
                self.going.add(seq)

    def reserve(self, move: int, cached: list[int], fresh: int, adapter: Adapter | None = None) -> Reserved:
        """A row, and blocks: the ``cached`` ones, and so many more. There must be room, and ``adapter`` ready."""
        for block in cached:
            self.pool.share(block)
        slot = -1 if adapter is None or self.adapters is None else self.adapters.take(adapter)
        blocks = cached + self.pool.allocate_many(fresh)
        reserved = self.reserved[move] = Reserved(self.free_rows.pop(), blocks, slot)
        return reserved

    def reserve_more(self, move: int, count: int) -> list[int]:
        """So many blocks more. There must be room."""
        blocks = self.pool.allocate_many(count)
        self.reserved[move].blocks.extend(blocks)
        return blocks

    def offer(self, move: int, seq: Sequence, first: int, full: int) -> None:
        """The pages of these slots have come, and the blocks are full: others may share them."""
        if self.pool.caching and full > first:
            hashes = seq.hash_blocks(full, self.block_size)
            self.pool.register_many(self.reserved[move].blocks[first:full], hashes[first:full])

    def give_up(self, move: int) -> None:
        """Nobody comes by this move."""
        reserved = self._take_reserved(move)
        self.free_rows.append(reserved.row)
        self.pool.release_table(reserved.blocks)
        self.landed = [landing for landing in self.landed if landing.move != move]

    def _take_reserved(self, move: int) -> Reserved:
        reserved = self.reserved.pop(move)
        self.expected.pop(move, None)
        if self.adapters is not None and reserved.adapter_slot >= 0:
            self.adapters.leave(reserved.adapter_slot)
        return reserved

    def expect(self, move: int, until: float) -> None:
        """Its last pages are on their way. No second plan is made beside one in flight until they come, and before
        ``until`` none at all, so that the next one has it."""
        self.expected[move] = until

    def land(self, landing: Landing) -> None:
        """All its pages are here."""
        self.expected.pop(landing.move, None)
        self.landed.append(landing)

    def take_landed(self) -> list[Landing]:
        """Those whom a plan takes over now."""
        landed, self.landed = self.landed, []
        return landed

    def arrive(self, landing: Landing, computed: int) -> None:
        """``landing.seq``, which waits, goes on here with so much computed."""
        row, blocks, _ = self._take_reserved(landing.move)
        need = blocks_for(landing.seq.total, self.block_size)
        self.pool.release_table(blocks[need:])
        self._begin(landing.seq, [row], blocks[:need], computed)

    def drop_rows(self, rows: list[int]) -> None:
        """The worker is told with the next plan that these rows are given up."""
        self.drops += rows

    # -- what is computed

    def commit_decodes(self, batch: Batch, due: Rows, ends: Ints) -> list[int]:
        """Decodes brought those of ``batch`` at the places ``due`` to their milestones: offer full blocks to the prefix
        cache, and set when to look again. Returns the places of those that are as long as they may grow.

        That needs the columns only. To look their sequences up, which were last used a block ago, would take most of
        the time."""
        columns, rows, ends = self.columns, batch.rows[due], ends[due]
        longest = columns.at_end(rows, ends)
        filled, full = rows, ends
        if self.quarantined or len(longest):  # not all are there because a block is full
            which = ends % columns.size == _ZERO
            filled, full = rows[which], ends[which]
        if len(filled):
            blocks = columns.fill_blocks(filled)
            if self.pool.caching and not self.quarantined:
                hashes = columns.continue_chains(filled, blocks, request.hash_block)
                held = columns.tables[filled, full // columns.size - _ONE]
                self.pool.register_many(held.tolist(), hashes)
        if self.quarantined:
            for at, computed in zip(due.tolist(), ends.tolist(), strict=True):
                self.commit(batch.seqs[at], computed - 1, computed)
        else:
            columns.expect_next_blocks(rows, ends)
        return due[longest].tolist() if len(longest) else []

    def commit(self, seq: Sequence, before: int, computed: int) -> None:
        """The same for one sequence, of which so much was computed ``before``."""
        seq.register(self.pool, self.block_size, before, computed)
        if self.quarantined:
            self.update_quarantine(seq)

    def update_quarantine(self, seq: Sequence, leaves: bool = False) -> None:
        """Keep ``quarantined`` true to ``seq``, which has begun, computed something, or leaves."""
        held, inside = seq in self.quarantined, seq.quarantined and not leaves
        if inside and not held:
            self.quarantined.append(seq)
        elif held and not inside:
            self.quarantined.remove(seq)

    def check_integrity(self) -> None:
        """Raises PoolError where rows, lists or blocks do not add up."""
        running = self.sequences()
        coming = list(self.reserved.values())
        tables = [table for seq in running for table in seq.holdings().tables] + [each.blocks for each in coming]
        if self.tier is not None:
            tables += self.tier.tables()
            if wrong := self.tier.check_integrity():
                raise PoolError(wrong)
        self.pool.check_integrity(tables)
        held = [row for seq in running for row in seq.holdings().rows] + [each.row for each in coming]
        if sorted(held + self.free_rows) != list(range(self.num_rows)):
            raise PoolError(f"rows {sorted(held)} are held and {sorted(self.free_rows)} free of {self.num_rows}")
        for seq in running:
            if not 0 <= seq.computed <= seq.scheduled <= max(seq.limit - 1, seq.total):
                raise PoolError(
                    f"computed {seq.computed}, scheduled {seq.scheduled}, total {seq.total}, limit {seq.limit}"
                )
            table = max(seq.holdings().tables, key=len)
            if seq.computed > seq.total or seq.scheduled > len(table) * self.block_size:
                raise PoolError(f"scheduled {seq.scheduled} of {len(table)} blocks of {self.block_size}")
            seq.check_look_ahead(self.block_size, self.pool.refs)
            if (flying := sum(seq in step.speculating() for step in self.in_flight)) != seq.loose:
                raise PoolError(f"{flying} verifications are in flight of a sequence that counts {seq.loose}")
        if self.adapters is not None:
            users = [seq.adapter_slot for seq in running] + [each.adapter_slot for each in coming]
            self.adapters.check_integrity([slot for slot in users if slot >= 0])
        if any((seq.request.adapter is None) is not (seq.adapter_slot < 0) for seq in running):
            raise PoolError("a sequence runs without its adapter, or with one that is not its own")
        if self.stop_ids != StopIds(self.vocab_size, (seq.stops for seq in running)):
            raise PoolError("the stop ids looked for are not those of the sequences that run")
        batch = self.going.batch()
        if batch.rows.tolist() != [seq.row for seq in batch.seqs]:
            raise PoolError(f"{batch.rows.tolist()} are not the rows of those that go on decoding")
        columns, rows = self.columns, batch.rows
        if columns.horizon.overlooks(rows, columns.scheduled.of(rows)):
            raise PoolError("plans go by before somebody is at its horizon")
        if columns.milestone.overlooks(rows, columns.computed.of(rows) + 1):
            raise PoolError("commits go by before somebody is at its milestone")
        if not self.expected.keys() <= self.reserved.keys():
            raise PoolError("pages are expected of a move that has nothing reserved")
        if not self.held.issubset(self.decoding) or self.held.intersection(batch.seqs):
            raise PoolError("a sequence is held that does not decode here, or goes on all the same")
        left_out = (seq for seq in self.decoding if seq not in batch.seqs and seq not in self.held)
        if any(seq.scheduled < seq.limit - 1 for seq in left_out):
            raise PoolError("a sequence that decodes is left out")
        if {seq.key for seq in self.quarantined} != {seq.key for seq in running if seq.quarantined}:
            raise PoolError(f"{[seq.key for seq in self.quarantined]} run in quarantine, and others must")
        for name, seqs in (("decoding", self.decoding), ("prefilling", self.prefilling)):
            if [s.key for s in seqs] != sorted(s.key for s in seqs):
                raise PoolError(f"{name} is out of order")
            if any(s.prefilling != (name == "prefilling") or s.prefilling > (s.scheduled < s.total) for s in seqs):
                raise PoolError(f"{name} holds a sequence that is not")


def _insert(seqs: list[Sequence], seq: Sequence) -> None:
    """In order. Most come last."""
    if seqs and seq.key < seqs[-1].key:
        insort(seqs, seq, key=_key)
    else:
        seqs.append(seq)


def _find(seqs: list[Sequence], seq: Sequence) -> int:
    at = bisect_left(seqs, seq.key, key=_key)
    if at == len(seqs) or seqs[at] is not seq:
        raise PoolError(f"sequence {seq.key} is not where its state says")
    return at
