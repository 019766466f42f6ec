"""A plan being written, and its sealing into the message. A room above the replicas and below the planner."""

from __future__ import annotations

from ..proto.codec import i32, u64
from ..proto.messages import Admit, StepPlan
from .beam_group import BeamGroup
from .block_pool import BlockPool
from .replica import Replica
from .request import Sequence
from .step import Chunk, Search, Step

_ONE = i32([1])
_RANGE = bytearray()  # int32 0, 1, 2, … as far as was needed yet


class Draft:
    """See StepPlan for the columns. A draft that runs nothing holds nothing at all."""

    def __init__(self, budget: int):
        self.budget = budget  # tokens that may still be scheduled
        self.decodes: list[Sequence] = []
        self.generations: list[int] = []  # of ``decodes``, and so the next two:
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.searches: list[Search] = []
        self.chunks: list[Chunk] = []
        self.admits: list[Admit] = []
        self.admitted: set[int] = set()  # rows of ``admits``: they cannot be forked yet
        self.fork_src: list[int] = []
        self.fork_dst: list[int] = []
        self.fork_seeds: list[int] = []
        self.copy_src: list[int] = []
        self.copy_dst: list[int] = []
        self.delta_rows: list[int] = []
        self.delta_slots: list[int] = []
        self.delta_blocks: list[int] = []
        self.append_rows: list[int] = []
        self.append_tokens: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.decodes or self.searches or self.chunks)

    def spend(self, tokens: int) -> None:
        """So many tokens of the budget are scheduled."""
        self.budget -= tokens

    # -- what runs (decodes are written by the planner's loop)

    def search(self, group: BeamGroup) -> None:
        """One decode of each beam."""
        self.searches.append(Search(group, group.generation, group.scheduled, [beam.row for beam in group.beams]))
        group.schedule_decodes()
        self.spend(len(group.beams))

    def chunk(self, seq: Sequence, count: int) -> bool:
        """The next ``count`` tokens of a prefill. True where they are the last, and draw."""
        start, draws = seq.scheduled, seq.schedule(count)
        self.chunks.append(Chunk(seq, seq.generation, start, count, draws))
        self.spend(count)
        return draws

    def draw_too(self, seq: Sequence) -> None:
        """A sibling draws from the chunk just planned."""
        self.chunks.append(Chunk(seq, seq.generation, seq.scheduled, 0, True))

    # -- what changes before it runs

    def admit(self, seq: Sequence) -> None:
        """A new row, with its block table."""
        self.admits.append(seq.admit())
        self.admitted.add(seq.row)
        self.delta_rows.extend([seq.row] * len(seq.blocks))
        self.delta_slots.extend(range(len(seq.blocks)))
        self.delta_blocks.extend(seq.blocks)

    def fork(self, source: int, row: int, seed: int) -> None:
        """``row`` becomes a copy of ``source``, block table and all."""
        self.fork_src.append(source)
        self.fork_dst.append(row)
        self.fork_seeds.append(seed)

    def append_token(self, row: int, token: int) -> None:
        """``row`` goes on with this token."""
        self.append_rows.append(row)
        self.append_tokens.append(token)

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

    # -- the message

    def seal(self, replica: Replica, now: float) -> StepPlan:
        """Count the step as in flight and pack the columns."""
        step = Step(replica.last_step + 1, self.decodes, self.generations, self.searches, self.chunks, now)
        drops = replica.launch(step)
        rows, size = i32(self.rows + [run.row for run in step.compute_rows]), 4 * len(self.rows)
        while len(_RANGE) < size:
            _RANGE.extend(i32(range(len(_RANGE) // 4, len(_RANGE) // 2 + 64)))
        return StepPlan(
            lease=replica.lease,
            step=step.number,
            drops=i32(drops),
            fork_src=i32(self.fork_src),
            fork_dst=i32(self.fork_dst),
            fork_seeds=u64(self.fork_seeds),
            copy_src=i32(self.copy_src),
            copy_dst=i32(self.copy_dst),
            admits=self.admits,
            delta_rows=i32(self.delta_rows),
            delta_slots=i32(self.delta_slots),
            delta_blocks=i32(self.delta_blocks),
            append_rows=i32(self.append_rows),
            append_tokens=i32(self.append_tokens),
            rows=rows,
            starts=i32(self.starts + [run.start for run in step.compute_rows]),
            counts=_ONE * len(self.rows) + i32([run.tokens for run in step.compute_rows]),
            sample_src=bytes(_RANGE[:size]) + i32([slot.source for slot in step.others]),
            sample_rows=rows[:size] + i32([slot.row for slot in step.others]),
        )
