"""What one plan asked for, kept until its result comes: the one place that knows the order of compute rows and slots.

A room above the sequences and below the replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from ..proto.standstill import Standstill
from .beam_group import BeamGroup
from .request import Request, Sequence


class Chunk(NamedTuple):
    """Tokens of a prefill. One of no tokens is a sibling's, that draws from the logits of the chunk before it."""

    seq: Sequence
    generation: int
    start: int
    tokens: int
    draws: bool

    @property
    def end(self) -> int:
        """Tokens that are computed when this step is done."""
        return self.start + self.tokens


class Search(NamedTuple):
    """One decode of each beam of a search. ``rows`` are theirs."""

    group: BeamGroup
    generation: int
    start: int
    rows: list[int]


class PromptSpan(NamedTuple):
    """Prompt tokens from ``first`` to before ``end``, whose logprobs come of compute row ``at``."""

    request: Request
    at: int
    first: int
    end: int


class Slot(NamedTuple):
    """Whom a token is drawn for."""

    seq: Sequence
    generation: int


class Step:
    """Decodes, with one compute row and one slot each; after those the ``others``: beams, then chunks that draw.

    Decodes are most of a step, and are kept as bare columns.
    """

    __slots__ = (
        "chunks", "compute_rows", "decodes", "draws", "generations", "number", "others", "prompts", "searches",
        "sent_at",
    )  # fmt: skip

    def __init__(
        self, number: int, decodes: list[Sequence], searches: list[Search], chunks: list[Chunk], sent_at: float
    ):
        self.number, self.sent_at = number, sent_at
        self.decodes, self.searches, self.chunks = decodes, searches, chunks
        self.generations = [seq.generation for seq in decodes]
        # After the decodes, as flat tables of the plan:
        self.compute_rows: list[int] = []  # row, start, tokens of each
        self.draws: list[int] = []  # compute row drawn from and row drawn for, of each of
        self.others: list[Slot] = []
        self.prompts: list[PromptSpan] = []
        for group, generation, start, rows in searches:
            for row in rows:
                self.draws += self._run(row, start, 1), row
                self.others.append(Slot(group, generation))
        at = -1
        for seq, generation, start, tokens, draws in chunks:
            if tokens:
                at = self._run(seq.row, start, tokens)
            if draws:
                self.draws += at, seq.row
                self.others.append(Slot(seq, generation))
            if seq.prompt_from >= 0:
                first = max(seq.prompt_from, start + 1)
                end = min(start + tokens + 1, seq.request.prompt_len)
                if first < end:
                    self.prompts.append(PromptSpan(seq.request, at, first, end))

    def _run(self, row: int, start: int, tokens: int) -> int:
        """Add a compute row; its number."""
        self.compute_rows += row, start, tokens
        return len(self.decodes) + len(self.compute_rows) // 3 - 1

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still, and could not have seen the result."""
        self.sent_at = standstill.since(self.sent_at)

    def slots(self) -> list[Slot]:
        """All sample slots, in the order of the result's tokens."""
        return list(map(Slot, self.decodes, self.generations)) + self.others

    def samples(self) -> int:
        """Tokens the result must have."""
        return len(self.decodes) + len(self.others)

    def drawn_for(self, number: int) -> Sequence | None:
        """The sequence of a slot, or None where it has left since."""
        if number < len(self.decodes):
            seq, generation = self.decodes[number], self.generations[number]
        else:
            seq, generation = self.others[number - len(self.decodes)]
        return seq if seq.generation == generation else None

    def of_beams(self) -> bool:
        """Some slot is a beam's."""
        return any(isinstance(slot.seq, BeamGroup) for slot in self.others)

    def sequences(self) -> list[Sequence]:
        """Those in this step that have not left since."""
        alive = [s for s, g in zip(self.decodes, self.generations, strict=True) if s.generation == g]
        alive += [search.group for search in self.searches if search.group.generation == search.generation]
        return alive + [chunk.seq for chunk in self.chunks if chunk.seq.generation == chunk.generation]
