"""One replica's next step: who runs, what they need, and the message that says so. No IO.

The order of a plan: decodes first, in order of their keys, each taking the block it needs (preempting those who came
last where there is none); then chunks of prompts under way; then new rows for those who wait, as far as the token
budget goes. All blocks of a sequence's known tokens are taken when it is admitted, so only decodes ever preempt, and
whoever is preempted is not in the plan yet. The first in line is never preempted by another, so it always finishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..proto.codec import i32, u64
from ..proto.messages import Admit, StepPlan
from .beams import BeamGroup, plan_beams, run_beams
from .block_pool import BlockPool, blocks_for
from .placement import belongs_elsewhere, cached_prefix, can_ever_hold, elsewhere, has_room
from .replica import MAX_IN_FLIGHT, Replica, Step
from .request import Request, Sequence

if TYPE_CHECKING:
    from .core import Scheduler

LOOKAHEAD = 32
"""Waiting sequences left to other replicas in one plan, at most."""


_ONE = i32([1])
_RANGE = bytearray()  # int32 0, 1, 2, … as far as was needed yet


class Draft:
    """A plan being written; see StepPlan for the columns. A draft without compute rows holds nothing at all."""

    def __init__(self, budget: int):
        self.budget = budget
        self.decodes: list[Sequence] = []
        self.groups: list[tuple[BeamGroup, int, int]] = []  # beam searches: (group, generation, beams)
        self.chunks: list[tuple[Sequence, int, int, bool]] = []
        self.prompts: list[tuple[Request, int, int, int]] = []
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []  # of the rows after the decodes, and so the next two:
        self.sample_src: list[int] = []
        self.sample_rows: list[int] = []
        self.fork_src: list[int] = []
        self.fork_dst: list[int] = []
        self.fork_seeds: list[int] = []
        self.copy_src: list[int] = []
        self.copy_dst: list[int] = []
        self.admits: list[Admit] = []
        self.admitted: set[int] = set()  # rows of ``admits``: they cannot be forked yet
        self.delta_rows: list[int] = []
        self.delta_slots: list[int] = []
        self.delta_blocks: list[int] = []
        self.append_rows: list[int] = []
        self.append_tokens: list[int] = []

    def set_blocks(self, row: int, slot: int, blocks: list[int]) -> None:
        """Entries of a row's block table, from ``slot`` on."""
        self.delta_rows.extend([row] * len(blocks))
        self.delta_slots.extend(range(slot, slot + len(blocks)))
        self.delta_blocks.extend(blocks)

    def own_block(self, pool: BlockPool, row: int, blocks: list[int], slot: int) -> None:
        """Make the block that ``row`` writes next its own: a new one at the table's end, a copy of a shared one."""
        if slot < len(blocks) and pool.refs[blocks[slot]] == 1:
            return
        block = pool.allocate()
        if slot == len(blocks):
            blocks.append(block)
        else:
            self.copy_src.append(blocks[slot])
            self.copy_dst.append(block)
            pool.release(blocks[slot])
            blocks[slot] = block
        self.delta_rows.append(row)
        self.delta_slots.append(slot)
        self.delta_blocks.append(block)


def plan(core: Scheduler, replica: Replica) -> StepPlan | None:
    """The next step of ``replica``, or None where it has enough in flight or nothing to run."""
    if len(replica.in_flight) >= MAX_IN_FLIGHT:
        return None
    draft = Draft(core.config.max_num_batched_tokens)
    if core.wary and not replica.suspects and not replica.draining and _take_suspect(core, replica, draft):
        return None
    if replica.suspects:
        _plan_alone(core, replica, draft)
    if not replica.suspects and not draft.rows:
        wait = _decodes_wait(core, replica)
        if not wait:
            _plan_decodes(core, replica, draft, replica.decoding)
        for seq in list(replica.prefilling):
            _plan_chunk(core, replica, draft, seq)
        if not replica.draining:
            _admit(core, replica, draft)
        if wait and not draft.rows:
            _plan_decodes(core, replica, draft, replica.decoding)
        replica.decodes_waited = wait
    return _seal(replica, draft) if draft.rows else None


def _plan_alone(core: Scheduler, replica: Replica, draft: Draft) -> None:
    """A step of one suspect alone, so that if the worker dies again it is known why."""
    seq = min(replica.suspects, key=lambda s: s.key)
    if any(other is not seq for step in replica.in_flight for other in step.sequences()):
        return
    if seq.prefilling:
        _plan_chunk(core, replica, draft, seq)
    else:
        _plan_decodes(core, replica, draft, [seq])


def _decodes_wait(core: Scheduler, replica: Replica) -> bool:
    """Without chunked prefill, a prompt that decodes leave no room for gets every second step to itself."""
    if core.config.enable_chunked_prefill or replica.decodes_waited or not replica.decoding:
        return False
    head = next(core.queue.in_turn(core.running_by_account), None)
    return head is not None and head.known > core.config.max_num_batched_tokens - sum(s.width for s in replica.decoding)


# -- decodes


def _plan_decodes(core: Scheduler, replica: Replica, draft: Draft, seqs: list[Sequence]) -> None:
    """One token for each. Preemption takes sequences off the end of ``seqs`` while it is iterated: a list allows it."""
    rows, starts, decodes = draft.rows, draft.starts, draft.decodes
    for seq in seqs:
        position = seq.planned
        if position >= seq.horizon and not _make_room(core, replica, draft, seq):
            continue
        seq.planned = position + 1
        rows.append(seq.row)
        starts.append(position)
        decodes.append(seq)
    run_beams(draft)
    draft.budget -= len(rows)


def _make_room(core: Scheduler, replica: Replica, draft: Draft, seq: Sequence) -> bool:
    """Give ``seq`` a block of its own to write its next position in. False where it has nothing to write or had to go,
    and for a beam search, whose rows are planned apart.

    A partial block shared with siblings is copied by all but the last of them.
    """
    if isinstance(seq, BeamGroup):
        plan_beams(core, replica, draft, seq)
        return False
    if seq.planned >= seq.limit - 1:
        return False
    pool, blocks, slot = replica.pool, seq.blocks, seq.planned // replica.block_size
    while not pool.free_count and (slot == len(blocks) or pool.refs[blocks[slot]] > 1):
        victim = replica.last()
        core.preempt(victim)
        if victim is seq:
            return False
    draft.own_block(pool, seq.row, blocks, slot)
    full, end = (slot + 1) * replica.block_size, seq.limit - 1
    seq.horizon = full if full < end else end
    return True


# -- prompts


def _plan_chunk(core: Scheduler, replica: Replica, draft: Draft, seq: Sequence) -> None:
    """As much of a sequence's known tokens as the budget allows; the last of them draws."""
    count = min(seq.known - seq.planned, draft.budget)
    if not count:
        return
    at = len(draft.rows)
    draft.rows.append(seq.row)
    draft.starts.append(seq.planned)
    draft.counts.append(count)
    draft.budget -= count
    if seq.prompt_from >= 0:
        first = max(seq.prompt_from, seq.planned + 1)
        end = min(seq.planned + count + 1, seq.request.prompt_len)
        if first < end:
            draft.prompts.append((seq.request, at, first, end))
    seq.planned += count
    draws = seq.planned == seq.known
    draft.chunks.append((seq, seq.generation, seq.planned, draws))
    if draws:
        replica.prefilled(seq)
        draft.sample_src.append(at)
        draft.sample_rows.append(seq.row)
        seq.set_horizon(seq.planned)
        _fork_siblings(core, replica, draft, seq, at)


def _fork_siblings(core: Scheduler, replica: Replica, draft: Draft, parent: Sequence, at: int) -> None:
    """Give the parent's siblings rows that share its blocks and draw from the same logits.

    A row made in this very plan cannot be forked (forks are applied before admits), so there its siblings are admitted
    with the same blocks instead. Those who find no row rejoin the queue and share through the prefix cache.
    """
    siblings, parent.siblings = parent.siblings, []
    pool = replica.pool
    for seq in siblings:
        if not replica.free_rows or pool.free_count < replica.running:
            core.queue.push(seq)
            continue
        for block in parent.blocks:
            pool.share(block)
        seq.start(replica, replica.free_rows.pop(), parent.blocks[:], parent.computed)
        seq.planned = parent.planned
        replica.prefilled(seq)
        if parent.row in draft.admitted:
            draft.admits.append(seq.admit())
            draft.set_blocks(seq.row, 0, seq.blocks)
        else:
            draft.fork_src.append(parent.row)
            draft.fork_dst.append(seq.row)
            draft.fork_seeds.append(seq.seed())
        draft.chunks.append((seq, seq.generation, seq.planned, True))
        draft.sample_src.append(at)
        draft.sample_rows.append(seq.row)
        seq.horizon = parent.horizon = seq.planned  # the next write looks whether its block is shared


# -- those who wait


def _candidates(core: Scheduler, replica: Replica) -> Iterator[tuple[Sequence, list[int]]]:
    """Those in line that are this replica's to take, in order, each with its cached blocks: passed over are those that
    only a larger replica could ever hold, and those that are better off on another one."""
    now = core.clock()
    others, stalled = elsewhere(replica, core.replicas.values(), now), replica.stalled(now)
    passed = 0
    for seq in core.queue.in_turn(core.running_by_account):
        if not can_ever_hold(replica, seq) or (seq.request.asks_prompt and seq.request.carried()):
            continue
        cached = cached_prefix(replica, seq)
        if not others or not belongs_elsewhere(seq, replica, cached, others, stalled):
            yield seq, cached
        elif (passed := passed + 1) == LOOKAHEAD:
            return


def _admit(core: Scheduler, replica: Replica, draft: Draft) -> None:
    """Rows for those in line, strictly in order: whoever does not fit holds up those behind it."""
    if not core.queue:
        return
    chunked = core.config.enable_chunked_prefill and not replica.whole
    budget = core.config.max_num_batched_tokens
    if draft.budget and replica.free_rows:
        for seq, cached in _candidates(core, replica):
            if not has_room(replica, seq, cached):
                break
            rest = seq.known - len(cached) * replica.block_size
            if not chunked and draft.budget < min(rest, budget):
                return  # a preempted sequence may have outgrown the budget; only then is it split
            if seq.suspect:
                core.wary = True
                return  # it is the first in line now, and its turn comes alone
            _start(core, replica, draft, seq, cached)
            _plan_chunk(core, replica, draft, seq)
            if not draft.budget or not replica.free_rows:
                return
        else:
            return
    core.queue.rate.waiting(core.clock())


def _take_suspect(core: Scheduler, replica: Replica, draft: Draft) -> bool:
    """Where the first in line may be what kills workers, admit it in a plan of its own, with nothing else in flight.
    True while that is still to come."""
    found = next(_candidates(core, replica), None)
    if found is None or not found[0].suspect or not has_room(replica, *found):
        return False
    if not replica.in_flight:
        _start(core, replica, draft, *found)
    return bool(replica.in_flight)


def _start(core: Scheduler, replica: Replica, draft: Draft, seq: Sequence, cached: list[int]) -> None:
    """A row and blocks for all known tokens; the cached ones are held before others are taken."""
    core.queue.remove(seq)
    pool = replica.pool
    for block in cached:
        pool.share(block)
    fresh = blocks_for(seq.known, replica.block_size) - len(cached)
    blocks = cached + [pool.allocate() for _ in range(fresh)]
    seq.start(replica, replica.free_rows.pop(), blocks, len(cached) * replica.block_size)
    if seq.request.asks_prompt:
        seq.prompt_from = seq.request.prompt_done
    draft.admits.append(seq.admit())
    draft.admitted.add(seq.row)
    draft.set_blocks(seq.row, 0, blocks)
    core.note_start(seq)


# -- the message


def _seal(replica: Replica, draft: Draft) -> StepPlan:
    """Count the step as in flight and pack the columns."""
    replica.last_step += 1
    replica.in_flight.append(Step(replica.last_step, draft.decodes, draft.chunks, draft.prompts, draft.groups))
    drops, replica.drops = replica.drops, []
    rows, decodes = i32(draft.rows), 4 * len(draft.decodes)
    while len(_RANGE) < decodes:
        _RANGE.extend(i32(range(len(_RANGE) // 4, len(_RANGE) // 2 + 64)))
    return StepPlan(
        lease=replica.lease,
        step=replica.last_step,
        drops=i32(drops),
        fork_src=i32(draft.fork_src),
        fork_dst=i32(draft.fork_dst),
        fork_seeds=u64(draft.fork_seeds),
        copy_src=i32(draft.copy_src),
        copy_dst=i32(draft.copy_dst),
        admits=draft.admits,
        delta_rows=i32(draft.delta_rows),
        delta_slots=i32(draft.delta_slots),
        delta_blocks=i32(draft.delta_blocks),
        append_rows=i32(draft.append_rows),
        append_tokens=i32(draft.append_tokens),
        rows=rows,
        starts=i32(draft.starts),
        counts=_ONE * len(draft.decodes) + i32(draft.counts),
        sample_src=bytes(_RANGE[:decodes]) + i32(draft.sample_src),
        sample_rows=rows[:decodes] + i32(draft.sample_rows),
    )
