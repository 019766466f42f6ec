"""Which blocks a worker's pages of moves go into: what a worker with a model and one without do alike."""

from __future__ import annotations

from .codec import BadFrame, from_i32
from .messages import Forget, Pages, Take, Taken

MAX_EARLY = 32
"""Messages of pages that are kept before their Take has come, which is on another connection."""


class Taking:
    """The moves to one worker, under one lease. Their numbers rise."""

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._blocks: dict[int, list[int]] = {}  # of each move, by slot
        self._pages: dict[int, int] = {}  # slots before which pages have come
        self._latest = 0  # the last move that it was told of
        self._early: list[Pages] = []  # of later ones

    def take(self, message: Take) -> Taken:
        """These blocks are for the slots that follow those it knows. BadFrame where they are not."""
        blocks, known = from_i32(message.blocks), self._blocks.setdefault(message.move, [])
        if message.first != len(known) or not all(0 <= block < self._num_blocks for block in blocks):
            raise BadFrame(f"blocks for slots from {message.first} on of move {message.move}, of which {len(known)} "
                           f"are known, in a cache of {self._num_blocks}")  # fmt: skip
        known += blocks
        self._latest = max(self._latest, message.move)
        pages = self._pages.setdefault(message.move, message.pages)
        return Taken(message.lease, message.move, len(known), pages)

    def is_early(self, pages: Pages) -> bool:
        """They came before their Take, and are to be kept until that comes."""
        return pages.move > self._latest and pages.move not in self._blocks

    def early(self, move: int) -> list[Pages]:
        """Pages of ``move`` that came before its Take: they are to be put into their places now."""
        found = [pages for pages in self._early if pages.move == move]
        self._early = [pages for pages in self._early if pages.move > self._latest]
        return found

    def forget(self, message: Forget) -> None:
        """Pages of this move are not wanted any more."""
        self._blocks.pop(message.move, None)
        self._pages.pop(message.move, None)

    def places(self, pages: Pages) -> list[int] | None:
        """The blocks that these are for; None where they are not wanted now, or some before them were lost."""
        blocks = self._blocks.get(pages.move)
        if self.is_early(pages) and len(self._early) < MAX_EARLY:
            self._early.append(pages)
        if blocks is None or pages.first != self._pages[pages.move] or pages.count < 1:
            return None
        end = pages.first + pages.count
        return blocks[pages.first : end] if end <= len(blocks) else None

    def placed(self, pages: Pages) -> Taken:
        """These are in their blocks."""
        self._pages[pages.move] = end = pages.first + pages.count
        return Taken(pages.to, pages.move, len(self._blocks[pages.move]), end)
