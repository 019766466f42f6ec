"""The room that drafted tokens take in one replica's cache: blocks that nobody else needs, for as long as nobody does.

A sequence whose drafts are verified may hold blocks past the token that it has. When somebody lacks a block, those are
taken back as soon as the results under way say which drafts were kept, and until nobody lacks one, drafts go no
further than the block of the token that they follow. So nobody is preempted, or kept waiting, for room of drafts.
"""

from __future__ import annotations

from .block_pool import BlockPool, blocks_for
from .columns import Columns
from .request import Sequence


class DraftRoom:
    """Of one replica; ``tight``: somebody lacked a block when the plan before was made."""

    def __init__(self, columns: Columns, pool: BlockPool):
        self._columns, self._pool = columns, pool
        self._holders: dict[tuple, Sequence] = {}  # by key, those that may hold such blocks
        self.tight = self._lacking = False

    def begin_plan(self) -> None:
        """A plan is about to be made."""
        self.tight, self._lacking = self._lacking, False

    def lend(self, seq: Sequence) -> None:
        """``seq`` may hold blocks that its drafts alone need."""
        self._holders[seq.key] = seq

    def leave(self, seq: Sequence) -> None:
        """``seq`` gives up its row and all of its blocks."""
        self._holders.pop(seq.key, None)

    def take_back(self) -> bool:
        """Somebody lacks a block: free those that nothing scheduled and nobody's next token needs. True where there
        were any."""
        self._lacking, before = True, self._pool.free_count
        for key, seq in list(self._holders.items()):
            needed = blocks_for(max(seq.scheduled, due(seq) + 1), self._columns.block_size)
            self._pool.release_table(self._columns.cut(seq.row, needed))
            self._columns.expect_end_of_room(seq.row, seq.scheduled)
            if not seq.loose:
                del self._holders[key]
        return self._pool.free_count > before

    def coming(self) -> bool:
        """Whether a result under way may say that a block is not needed after all."""
        size = self._columns.block_size
        return any(
            self._columns.num_blocks.item(seq.row) > blocks_for(due(seq) + 1, size)
            for seq in self._holders.values()
            if seq.loose
        )


def due(seq: Sequence) -> int:
    """The next position that ``seq`` will write, or the first that it may be: each verification under way gives one
    token at least."""
    return seq.computed + seq.loose if seq.loose else seq.scheduled
