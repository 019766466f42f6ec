"""One replica's next step: who runs, and what they need. A room above the books. No IO.

The order of a plan: decodes first, in order of their keys, each taking the block it needs (preempting those who came
last where there is none); then chunks of prompts under way; then new rows for those who wait, as far as the token
budget goes. All blocks of the tokens a sequence has are taken when it is admitted, so only decodes ever preempt, and
whoever is preempted is not in the plan yet. The first in line is never preempted by another, so it always finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..proto.messages import StepPlan
from ..proto.work import Adapter
from .adapter_slots import AdapterSlots
from .batch import Batch, Lineup
from .beam_group import BeamGroup
from .beams import plan_beams
from .books import Books
from .columns import Ints, Rows
from .draft import Draft
from .draft_room import due
from .placement import belongs_elsewhere, cached_prefix, can_ever_hold, elsewhere, has_room
from .replica import Landing, Replica
from .request import Sequence, State
from .tiers import MAX_LOADS, Tier

TOGETHER = 8
"""Children of one request that begin together, sharing one prefill, although others wait. The rest take turns."""
LOOKAHEAD = 32
"""Waiting sequences left to other replicas in one plan; from then on those behind one that is left, and who wait for
the same adapter or for none as it does, are not looked at."""
MOST_PASSED = 256
"""The same of all adapters together: nobody behind those is looked at in this plan."""
GLANCE = 32
"""Blocks by which it is decided whether to wait for a load that cannot begin yet."""
LOADING_LOOKAHEAD = 64
"""Waiting sequences passed over in one plan because their blocks are loaded, at most."""


def plan_step(books: Books, replica: Replica) -> StepPlan | None:
    """The next step of ``replica``, or None where it has enough in flight or nothing to run."""
    if replica.has_enough(books.clock):
        return None
    if replica.tier is not None:
        replica.tier.settle(replica.pool)
    if (adapters := replica.adapters) is None:
        return _plan_step(books, replica)
    for _ in range(2):
        adapters.begin_turn(books.names.wishes[0].adapter if books.names.wishes else None)
        plan = _plan_step(books, replica)
        closed = replica.draining or replica.quarantined or books.paused
        if closed or not adapters.end_turn(books.clock()) or plan is not None:
            break  # else somebody may begin now, and nothing that happens later would have it planned
    return plan


def _plan_step(books: Books, replica: Replica) -> StepPlan | None:
    draft = Draft(replica.token_budget)
    closed = replica.draining or books.paused
    if replica.drafts:
        replica.draft_room.begin_plan()
    quarantine_next = books.quarantine_waits and not replica.quarantined and not closed
    if quarantine_next and _take_quarantined(books, replica, draft):
        return None
    if replica.quarantined:
        _plan_alone(books, replica, draft)
    if not replica.quarantined:
        wait = _decodes_wait(books, replica)
        if not wait:
            _plan_going(books, replica, draft)
        for landing in replica.take_landed() if replica.landed else ():
            _take_over(books, replica, draft, landing)
        for seq in list(replica.prefilling):
            _plan_chunk(books, replica, draft, seq)
        if not closed:
            _admit(books, replica, draft)
        if wait and not draft:
            _plan_going(books, replica, draft)
        replica.let_decodes_wait(wait)
    if not draft:
        return None
    if replica.drafts:
        draft.expect_drafts(replica, _coming(books, replica))
    return draft.seal(replica, books.clock())


def _plan_alone(books: Books, replica: Replica, draft: Draft) -> None:
    """A step of one sequence in quarantine alone, so that if the worker dies again it is known why."""
    seq = replica.quarantined[0]
    if any(other is not seq for step in replica.in_flight for other in step.sequences()):
        return
    if seq.prefilling:
        _plan_chunk(books, replica, draft, seq)
    else:
        alone = Lineup(replica.columns)
        alone.add(seq)
        _plan_decodes(books, replica, draft, alone)


def _decodes_wait(books: Books, replica: Replica) -> bool:
    """Without chunked prefill, a prompt that decodes leave no room for gets every second step to itself."""
    if books.config.enable_chunked_prefill or replica.decodes_waited or not replica.decoding:
        return False
    head = next(books.queue.in_turn(books.running_by_account), None)
    budget, decodes = replica.token_budget, sum(seq.width for seq in replica.decoding)
    if replica.drafts and _speculates(books, replica, budget):
        decodes *= 1 + replica.drafts
    return head is not None and head.total > budget - decodes


# -- decodes


def _plan_going(books: Books, replica: Replica, draft: Draft) -> None:
    """All that decode here: by verifications where this worker drafts and they are few."""
    if not replica.drafts:
        _plan_decodes(books, replica, draft, replica.going)
        return
    if _speculates(books, replica, draft.budget):
        for seq in replica.going.batch().seqs:
            if seq.state is State.RUNNING:  # else it was preempted for one before it
                _plan_verification(books, replica, draft, seq)
        return
    # Where somebody is comes to be known when its verification is answered; it waits until then.
    exact = replica.going
    if any(step.verifications for step in replica.in_flight):
        exact = Lineup(replica.columns)
        for seq in replica.going.batch().seqs:
            if not seq.loose:
                exact.add(seq)
    _plan_decodes(books, replica, draft, exact)


def _speculates(books: Books, replica: Replica, budget: int) -> bool:
    """Whether all that go on decoding do so by verifications, which leave half of the budget to prompts. Not where they
    are about to be too many: prompts and verifications in one step take longer than both apart."""
    count = len(replica.going)
    if not replica.draft_worth.drafts(count) or 2 * count * (1 + replica.drafts) > budget:
        return False
    few = replica.running + _coming(books, replica) <= replica.draft_rows
    return few and not any(isinstance(seq, BeamGroup) for seq in replica.going.batch().seqs)


def _coming(books: Books, replica: Replica) -> int:
    """How many of those in line are about to get a row here: nobody while the first of them lacks blocks."""
    if not books.queue or replica.draft_room.tight or books.paused or not replica.takes_prompts:
        return 0
    return min(len(books.queue) // len(books.replicas), len(replica.free_rows))


def _plan_verification(books: Books, replica: Replica, draft: Draft, seq: Sequence) -> None:
    """A decode of ``seq`` and of as many drafted tokens as the worker drafts at most. Nobody is preempted for those."""
    start, pool, columns, size = seq.scheduled, replica.pool, seq.columns, replica.block_size
    room = replica.draft_room
    stop = min(start + 1 + replica.drafts, seq.end)
    if room.tight:
        if start // size > due(seq) // size:
            return  # it may not need the block it would go on in, and knows soon
        stop = min(stop, (start // size + 1) * size)
    if not seq.loose:
        if _awaits_drafts(replica, seq, start):
            return
        if not _make_room(books, replica, draft, seq, start):
            replica.going.discard(seq)
            return
    for slot in range(start // size, -(-stop // size)):
        if columns.block_at(seq.row, slot) is None:  # those that it holds from ``start`` on are its own by now
            if pool.free_count <= replica.running:
                stop = slot * size
                break
            columns.put_block(seq.row, slot, draft.own_block(pool, seq.row, slot, None))
    if stop > start:
        room.lend(seq)
        draft.verify(seq, seq.computed if seq.loose else start, stop, 1 + replica.drafts)


def _plan_decodes(books: Books, replica: Replica, draft: Draft, going: Lineup) -> None:
    """One token for each. Only those at their horizon are looked at, in order; preemption takes others from the end."""
    columns, rows = replica.columns, going.rows()
    if not len(rows):
        return
    starts = columns.scheduled.of(rows)
    due = columns.horizon.reached(rows, starts)
    if len(due):
        batch = _look_at(books, replica, draft, going, starts, due)
        if batch.rows is not rows:
            starts = columns.scheduled.of(batch.rows)
    else:
        batch = going.batch()
    if batch.count:
        draft.decode(batch, starts, columns.schedule(batch.rows, starts))


def _look_at(books: Books, replica: Replica, draft: Draft, going: Lineup, starts: Ints, due: Rows) -> Batch:
    """Give those at the places ``due``, which go on from ``starts``, what they need. Returns the decodes that are left:
    without beams, those that were preempted, and those that have nothing left to schedule."""
    others, beams = draft.grow(replica, going.rows(), starts, due), []
    for seq, position in zip(going.at(others), starts[others].tolist(), strict=True):
        if seq.state is not State.RUNNING:
            continue  # it was preempted for one before it
        if isinstance(seq, BeamGroup):
            plan_beams(books, replica, draft, seq)
            beams.append(seq)
            continue
        waits = replica.drafts and _awaits_drafts(replica, seq, position)
        if waits or not _make_room(books, replica, draft, seq, position):
            going.discard(seq)
    if going is not replica.going:  # those preempted have left that one alone
        for seq in going.batch().seqs:
            if seq.state is not State.RUNNING:
                going.discard(seq)
    batch = going.batch()
    if beams:
        batch = batch.only(np.array([not isinstance(seq, BeamGroup) for seq in batch.seqs], np.bool_))
    return batch


def _awaits_drafts(replica: Replica, seq: Sequence, position: int) -> bool:
    """Where drafts are made, whether no block is free to write ``position`` in, and results under way may free one that
    drafts alone need."""
    if replica.pool.free_count or seq.columns.block_at(seq.row, position // replica.block_size) is not None:
        return False
    return not replica.draft_room.take_back() and replica.draft_room.coming()


def _make_room(books: Books, replica: Replica, draft: Draft, seq: Sequence, position: int) -> bool:
    """Give ``seq`` a block of its own to write ``position`` in. False where it has nothing to write, or had to go.

    A partial block shared with siblings is copied by all but the last of them, in the first plan after they were
    forked: there is room for that, because ``_fork`` and ``has_room`` leave one block for each row that runs.
    """
    if position >= seq.limit - 1:
        return False
    pool, columns, slot = replica.pool, replica.columns, position // replica.block_size
    held = columns.block_at(seq.row, slot)
    while held is None and not pool.free_count:
        if replica.tier is not None and replica.tier.make_room(pool):
            continue
        victim = replica.last()
        books.preempt(victim)
        if victim is seq:
            return False
    columns.put_block(seq.row, slot, draft.own_block(pool, seq.row, slot, held))
    columns.expect_end_of_room(seq.row, position)
    return True


# -- prompts


def _plan_chunk(books: Books, replica: Replica, draft: Draft, seq: Sequence) -> None:
    """As much of a prefill as the budget allows; the last token draws, for the siblings who wait for it as well."""
    count = min(seq.total - seq.scheduled, draft.budget)
    if count and draft.chunk(seq, count):
        draft.end_prompt(replica.enough_tokens)
        replica.prefilled(seq)
        for begun, sibling in enumerate(seq.take_siblings(), 1):
            if begun < TOGETHER or not books.queue:
                _fork(books, replica, draft, seq, sibling)
            else:
                books.enqueue(sibling)


def _fork(books: Books, replica: Replica, draft: Draft, parent: Sequence, seq: Sequence) -> None:
    """Give a sibling a row that shares the parent's blocks and draws from the same logits.

    A row made in this very plan cannot be forked (forks are applied before admits), so there its siblings are admitted
    with the same blocks instead. Those who find no row rejoin the queue and share through the prefix cache.
    """
    if not replica.free_rows or replica.pool.free_count < replica.running:
        books.enqueue(seq)
        return
    replica.fork(parent, seq)
    if parent.row in draft.admitted:
        draft.admit(seq)
    else:
        draft.fork(parent.row, seq.row, seq.seed())
    draft.draw_too(seq)


def _take_over(books: Books, replica: Replica, draft: Draft, landing: Landing) -> None:
    """A sequence of another replica goes on here, if it is as it was."""
    if landing.seq.generation != landing.generation:
        replica.give_up(landing.move)
    else:
        books.take_over(replica, landing)
        draft.admit(landing.seq)


# -- those who wait


class Candidate(NamedTuple):
    """One in line, and the blocks of this replica's cache that it begins with."""

    seq: Sequence
    cached: list[int]


class _Absent(set[bytes]):
    """Adapters, by digest, whose turn has not come in these slots, b"" for none: nobody of theirs is looked at. All
    others are too once others have all turns of this plan."""

    def __init__(self, slots: AdapterSlots) -> None:
        super().__init__()
        self._slots = slots

    def __contains__(self, digest: object) -> bool:
        return super().__contains__(digest) or (digest != b"" and not self._slots.has_turn(digest))


def _candidates(books: Books, replica: Replica) -> Iterator[Candidate]:
    """Those in line that are this replica's to take, in order, each with its cached blocks: passed over are those that
    only a larger replica could ever hold, those that are better off on another one, and those whose adapter, or whose
    blocks, are not here yet."""
    now = books.clock()
    others = elsewhere(replica, books.replicas.values(), now) if len(books.replicas) > 1 else []
    stalled = bool(others) and replica.stalled(now)
    absent = set[bytes]() if replica.adapters is None else _Absent(replica.adapters)
    passed = 0

    prefillers = [] if replica.role != "decode" else [r for r in books.replicas.values() if r.takes_prompts]

    def fits(seq: Sequence) -> bool:
        if prefillers and any(can_ever_hold(each, seq) for each in prefillers):
            return False
        return can_ever_hold(replica, seq) and not (seq.request.asks_prompt and seq.request.carried())

    for seq in books.queue.in_turn(books.running_by_account, fits, absent):
        adapter = seq.request.adapter
        if adapter is not None and not (_may_admit if others else _admits)(replica, adapter):
            absent.add(adapter.digest)
            continue
        if replica.tier is not None and replica.tier.coming(seq):
            continue
        cached = cached_prefix(replica, seq)
        if not others:
            yield Candidate(seq, cached)
        elif belongs_elsewhere(seq, replica, cached, others, stalled, now):
            if (passed := passed + 1) >= MOST_PASSED:
                return
            if passed >= LOOKAHEAD:
                absent.add(b"" if adapter is None else adapter.digest)
        elif adapter is None or _admits(replica, adapter):
            yield Candidate(seq, cached)
        else:
            absent.add(adapter.digest)


def _admits(replica: Replica, adapter: Adapter) -> bool:
    return replica.adapters is not None and replica.adapters.admits(adapter)


def _may_admit(replica: Replica, adapter: Adapter) -> bool:
    return replica.adapters is not None and replica.adapters.may_admit(adapter)


def _admit(books: Books, replica: Replica, draft: Draft) -> None:
    """Rows for those in line, strictly in order: whoever does not fit holds up those behind it."""
    if not books.queue:
        return
    chunked = books.config.enable_chunked_prefill and not replica.whole
    loading = 0
    if draft.budget and replica.free_rows:
        for seq, cached in _candidates(books, replica):
            if replica.tier is not None and _loads(replica, replica.tier, seq, cached):
                if (loading := loading + 1) == LOADING_LOOKAHEAD:
                    return
                continue
            if not _finds_room(replica, seq, cached):
                break
            if draft.whole or not chunked:
                rest = seq.total - len(cached) * replica.block_size
                if draft.budget < min(rest, replica.token_budget):
                    return  # a preempted sequence may have outgrown the budget; only then is it split
            if seq.quarantined:
                return  # it is the first in line now, and its turn comes alone
            _start(books, replica, draft, seq, cached)
            _plan_chunk(books, replica, draft, seq)
            if not draft.budget or not replica.free_rows:
                return
        else:
            return
    books.queue.rate.waiting(books.clock())


def _finds_room(replica: Replica, seq: Sequence, cached: list[int]) -> bool:
    """``has_room``, if need be once what was loaded for others in line is given up. Theirs may be found in the cache
    all the same; were it kept, each of several might hold what another waits for."""
    if has_room(replica, seq, cached):
        return True
    if replica.drafts and replica.draft_room.take_back() and has_room(replica, seq, cached):
        return True
    tier = replica.tier
    return tier is not None and tier.make_room(replica.pool, seq) and has_room(replica, seq, cached)


def _loads(replica: Replica, tier: Tier, seq: Sequence, cached: list[int]) -> bool:
    """Whether ``seq`` waits for blocks that are loaded, perhaps for another that begins alike. A load begins here where
    they are kept, there is room for all of it, and that is sooner than to compute them. Nobody behind waits for it."""
    size = replica.block_size
    first, limit = len(cached), seq.reusable() // size
    if seq.quarantined or first >= limit:
        return False
    hashes = seq.hash_blocks(limit, size)
    if hashes[first] in tier.on_their_way:
        return True
    if len(tier.loads) >= MAX_LOADS:  # it may have to wait for its turn, and is looked at in every plan until then
        limit = min(limit, first + GLANCE)
    found = tier.find(replica.pool, hashes, first, limit)
    count = tier.worth(hashes[first : first + found], size) if found else 0
    if found and not count and tier.measure_again():
        count = found
    if not count or not _finds_room(replica, seq, cached):
        return False
    if len(tier.loads) < MAX_LOADS:
        # What was given up to make room may have taken places in host memory.
        if not (count := tier.find(replica.pool, hashes, first, first + count)):
            return False
        tier.begin(replica.lease, replica.pool, seq, cached, hashes[first : first + count])
    return True


def _take_quarantined(books: Books, replica: Replica, draft: Draft) -> bool:
    """Where the first in line may be what ends workers, admit it in a plan of its own, with nothing else in flight.
    True while that is still to come."""
    found = next(_candidates(books, replica), None)
    if found is None or not found.seq.quarantined or not _finds_room(replica, *found):
        return False
    loading = replica.adapters is not None and bool(replica.adapters.loading)  # which may be what ends workers too
    if not replica.in_flight and not loading:
        _start(books, replica, draft, *found)
    return bool(replica.in_flight) or loading


def _start(books: Books, replica: Replica, draft: Draft, seq: Sequence, cached: list[int]) -> None:
    """A row, and blocks for all tokens."""
    books.queue.remove(seq)
    replica.start(seq, cached)
    if replica.tier is not None:
        replica.tier.started(replica.pool, seq.total - seq.computed)
    draft.admit(seq)
    books.note_start(seq)
