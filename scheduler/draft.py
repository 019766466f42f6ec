"""A plan being written, and its sealing into the message. A room above the replicas and below the planner."""

from __future__ import annotations

import numpy as np

from ..proto.codec import i32, u64
from ..proto.messages import Admit, SpeculativePlan, StepPlan
from .batch import NOBODY, Batch
from .beam_group import BeamGroup
from .block_pool import BlockPool
from .columns import Ints, Rows
from .replica import Replica
from .request import Sequence
from .step import Chunk, Search, Step, Verification

_ONE = i32([1])
FEW = 3
"""So few new blocks are given out sooner one by one."""
_NOTHING = b"", b"", b""
_NOWHERE: Ints = np.zeros(0, np.int32)


class Draft:
    """See StepPlan for the columns. A draft that runs nothing holds nothing at all."""

    prompt_tokens = 0  # of the chunks
    whole = False  # no prompt begins in this step that does not end in it
    drafts_follow = False  # those who run are likely to be drafted for

    def __init__(self, budget: int):
        self.budget = budget  # tokens that may still be scheduled
        self.decodes = NOBODY
        self.starts = self.ends = _NOWHERE  # of ``decodes``
        self.searches: list[Search] = []
        self.verifications: list[Verification] = []
        self.chunks: list[Chunk] = []
        self.admits: list[Admit] = []
        self.admitted: set[int] = set()  # rows of ``admits``: they cannot be forked yet
        self.fork_seeds: list[int] = []
        # Flat tables, one line after the other:
        self.forks: list[int] = []  # source row, row
        self.copies: list[int] = []  # source block, block
        self.grown = _NOTHING  # the same as ``deltas`` of those that ``grow``
        self.appends: list[int] = []  # row, token
        self.deltas: tuple[list[int], list[int], list[int]] = [], [], []  # rows, slots of their block tables, blocks

    def __bool__(self) -> bool:
        return self.decodes is not NOBODY or bool(self.searches or self.verifications or self.chunks)

    def spend(self, tokens: int) -> None:
        """So many tokens of the budget are scheduled."""
        self.budget -= tokens

    # -- what runs

    def decode(self, batch: Batch, starts: Ints, ends: Ints) -> None:
        """One token of each of these, of whom there is one at least, from the positions ``starts`` to ``ends``."""
        self.decodes, self.starts, self.ends = batch, starts, ends
        self.spend(batch.count)

    def search(self, group: BeamGroup) -> None:
        """One decode of each beam."""
        self.searches.append(Search(group, group.generation, group.scheduled, [beam.row for beam in group.beams]))
        group.schedule_decodes()
        self.spend(len(group.beams))

    def verify(self, seq: Sequence, first: int, stop: int, most: int) -> None:
        """A decode of ``seq``, which is at ``first`` or further, and of drafted tokens before ``stop``: ``most`` tokens
        in all, wherever it is."""
        self.verifications.append(Verification(seq, seq.generation, first, stop))
        seq.speculate(stop)
        self.spend(min(stop - first, most))

    def chunk(self, seq: Sequence, count: int) -> bool:
        """The next ``count`` tokens of a prefill. True where they are the last, and draw."""
        start, draws = seq.scheduled, seq.schedule(count)
        self.chunks.append(Chunk(seq, seq.generation, start, count, draws))
        self.prompt_tokens += count
        self.spend(count)
        return draws

    def end_prompt(self, enough: int) -> None:
        """A prompt's last token is in this step: others join it as long as ``enough`` tokens of prompts are not
        reached, for its answer would wait for theirs. Where that is fewer than a step may have, they join it whole."""
        rest = max(0, enough - self.prompt_tokens)
        if rest < self.budget:
            self.budget, self.whole = rest, True

    def draw_too(self, seq: Sequence) -> None:
        """A sibling draws from the chunk just planned."""
        self.chunks.append(Chunk(seq, seq.generation, seq.scheduled, 0, True))

    def expect_drafts(self, replica: Replica, waiting: int) -> None:
        """The worker keeps ready what its drafts need where all that run, and ``waiting`` more, will be drafted for.
        Where all that run begin in this plan, they may be the first of a burst."""
        rows = replica.running
        self.drafts_follow = replica.draft_worth.planned(rows + waiting, rows == len(self.admits))

    # -- what changes before it runs

    def admit(self, seq: Sequence) -> None:
        """A new row, with its block table."""
        row, blocks = seq.row, seq.blocks
        self.admits.append(seq.admit())
        self.admitted.add(row)
        rows, slots, held = self.deltas
        rows += [row] * len(blocks)
        slots += range(len(blocks))
        held += blocks

    def fork(self, source: int, row: int, seed: int) -> None:
        """``row`` becomes a copy of ``source``, block table and all."""
        self.forks += source, row
        self.fork_seeds.append(seed)

    def append_token(self, row: int, token: int) -> None:
        """``row`` goes on with this token."""
        self.appends += row, token

    def grow(self, replica: Replica, rows: Rows, starts: Ints, due: Rows) -> Rows:
        """Of those at the places ``due``, all that need just a new block to write ``starts`` in get it together, where
        that is quicker and nobody may have to be preempted. Returns the others."""
        pool, columns = replica.pool, replica.columns
        if len(due) < FEW or pool.free_count < replica.running:
            return due
        rows, starts = rows[due], starts[due]
        growing = columns.need_blocks(rows, starts)
        due = due[~growing]
        if len(due):
            rows, starts = rows[growing], starts[growing]
        blocks = np.array(pool.allocate_many(len(rows)), np.int32)
        slots = columns.grow(rows, starts, blocks)
        self.grown = rows.astype(np.int32).tobytes(), slots.tobytes(), blocks.tobytes()
        return due

    def own_block(self, pool: BlockPool, row: int, slot: int, held: int | None) -> int:
        """A block of its own for this slot of the table of ``row``: a new one where it holds none there, a copy of a
        shared one."""
        if held is not None and pool.refs[held] == 1:
            return held
        block = pool.allocate()
        for column, value in zip(self.deltas, (row, slot, block), strict=True):
            column.append(value)
        if held is not None:
            self.copies += held, block
            pool.release(held)
        return block

    # -- the message

    def seal(self, replica: Replica, now: float) -> StepPlan:
        """Count the step as in flight and pack the columns."""
        number, decodes = replica.last_step + 1, self.decodes
        step = Step(
            number,
            replica.columns,
            decodes,
            self.starts,
            self.ends,
            self.searches,
            self.chunks,
            now,
            self.verifications,
        )
        drops = replica.launch(step)
        message = (SpeculativePlan if self.verifications or self.drafts_follow else StepPlan)(
            lease=replica.lease,
            step=number,
            drops=i32(drops) if drops else b"",
            admits=self.admits,
            rows=decodes.packed,
            starts=self.starts.tobytes(),
            counts=_ONE * decodes.count,
            sample_src=decodes.numbers,
            sample_rows=decodes.packed,
        )
        if step.compute_rows:
            rows, starts, counts = _columns(step.compute_rows, 3)
            message.rows += rows
            message.starts += starts
            message.counts += counts
        if step.draws:
            sources, rows = _columns(step.draws, 2)
            message.sample_src += sources
            message.sample_rows += rows
        self._seal_changes(message)
        if self.verifications and isinstance(message, SpeculativePlan):
            message.draft_rows = i32(step.verified)
        return message

    def _seal_changes(self, message: StepPlan) -> None:
        """Pack what few plans have."""
        if self.grown is not _NOTHING:
            message.delta_rows, message.delta_slots, message.delta_blocks = self.grown
        if self.deltas[0]:
            rows, slots, blocks = map(i32, self.deltas)
            message.delta_rows += rows
            message.delta_slots += slots
            message.delta_blocks += blocks
        if self.forks:
            message.fork_src, message.fork_dst = _columns(self.forks, 2)
            message.fork_seeds = u64(self.fork_seeds)
        if self.copies:
            message.copy_src, message.copy_dst = _columns(self.copies, 2)
        if self.appends:
            message.append_rows, message.append_tokens = _columns(self.appends, 2)


def _columns(table: list[int], width: int) -> list[bytes]:
    """The columns of a flat table, which most often has one line."""
    if len(table) == width:
        line = i32(table)
        return [line[at : at + 4] for at in range(0, 4 * width, 4)]
    return [i32(table[at::width]) for at in range(width)]
