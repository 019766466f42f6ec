"""What one plan asked for, kept until its result comes: the one place that knows the order of compute rows and slots.

A room above the sequences and below the replicas.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..proto.standstill import Standstill
from .batch import Batch
from .beam_group import BeamGroup
from .columns import Columns, Ints
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


class Verification(NamedTuple):
    """Drafted tokens of a sequence that decodes. It runs from where it is, ``first`` or later, to ``stop`` at most."""

    seq: Sequence
    generation: int
    first: int
    stop: int


class PromptSpan(NamedTuple):
    """Prompt tokens from ``first`` to before ``end``, whose logprobs come of compute row ``at``."""

    request: Request
    at: int
    first: int
    end: int


class Slot(NamedTuple):
    """Whom a token is drawn for."""

    seq: Sequence
    generation: int  # -1 where it has left since


class Step:
    """Decodes, with one compute row and one slot each; after those the ``others``: beams, verifications, then chunks
    that draw.

    Decodes are most of a step, and are kept as a batch and the positions where they start.
    """

    __slots__ = (
        "chunks", "columns", "compute_rows", "decodes", "departures", "draws", "ends", "number", "others", "prompts",
        "searches", "sent_at", "starts", "tokens", "verifications", "verified_from",
    )  # fmt: skip

    def __init__(
        self, number: int, columns: Columns, decodes: Batch, starts: Ints, ends: Ints, searches: list[Search],
        chunks: list[Chunk], sent_at: float, verifications: list[Verification] | None = None,
    ):  # fmt: skip
        self.number, self.columns, self.sent_at = number, columns, sent_at
        self.decodes, self.starts, self.ends = decodes, starts, ends
        self.searches, self.chunks, self.verifications = searches, chunks, verifications or []
        self.departures = columns.departures  # when it was planned
        self.tokens = decodes.count  # that it computes: one of each decode, of prompts, and drafted ones
        # After the decodes, as flat tables of the plan:
        self.compute_rows: list[int] = []  # row, start, tokens of each
        self.draws: list[int] = []  # compute row drawn from and row drawn for, of each of
        self.others: list[Slot] = []
        self.prompts: list[PromptSpan] = []
        for group, generation, start, rows in searches:
            for row in rows:
                self.draws += self._run(row, start, 1), row
                self.others.append(Slot(group, generation))
        self.verified_from = decodes.count + len(self.others)
        for seq, generation, first, stop in self.verifications:
            self.draws += self._run(seq.row, first, stop - first), seq.row
            self.others.append(Slot(seq, generation))
        at = 0
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

    @property
    def of_prompts(self) -> bool:
        """It has prompts in it, and beside them nothing but decodes."""
        return bool(self.chunks) and not self.verifications and not self.searches

    def _run(self, row: int, start: int, tokens: int) -> int:
        """Add a compute row; its number."""
        self.compute_rows += row, start, tokens
        self.tokens += tokens
        return self.decodes.count + len(self.compute_rows) // 3 - 1

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still, and could not have seen the result."""
        self.sent_at = standstill.since(self.sent_at)

    def decoded(self, tokens: Ints) -> tuple[Batch, Ints, Ints, Ints]:
        """The decodes whose sequences have not left since: with the positions where they start and end, and what they
        drew."""
        batch, starts, ends = self.decodes, self.starts, self.ends
        if self.others:
            tokens = tokens[: len(batch)]
        if self.columns.departures == self.departures:
            return batch, starts, ends, tokens
        here = self._here()
        if not len(here) or here.item(here.argmin()):  # all of them
            return batch, starts, ends, tokens
        return batch.only(here), starts[here], ends[here], tokens[here]

    def _here(self) -> NDArray[np.bool_]:
        """Which of the decodes have a sequence that has not left since."""
        return self.columns.left_at[self.decodes.rows] <= self.departures

    def slots(self) -> list[Slot]:
        """All sample slots, in the order of the result's tokens."""
        here = zip(self.decodes.seqs, self._here().tolist(), strict=True)
        decodes = [Slot(seq, seq.generation if there else -1) for seq, there in here]
        return decodes + self.others

    @property
    def verified(self) -> range:
        """The compute rows of verifications, and their slots, which have the same numbers."""
        return range(self.verified_from, self.verified_from + len(self.verifications))

    def speculating(self) -> list[Sequence]:
        """Those of verifications that have not left since."""
        return [each.seq for each in self.verifications if each.seq.generation == each.generation]

    def samples(self) -> int:
        """Sample slots."""
        return self.decodes.count + len(self.others)

    def drawn_for(self, number: int) -> Sequence | None:
        """The sequence of a slot, or None where it has left since."""
        if number < len(self.decodes):
            left = self.columns.left_at[self.decodes.rows[number]] > self.departures
            return None if left else self.decodes.seqs[number]
        seq, generation = self.others[number - len(self.decodes)]
        return seq if seq.generation == generation else None

    def of_beams(self) -> bool:
        """Some slot is a beam's."""
        return any(isinstance(slot.seq, BeamGroup) for slot in self.others)

    def sequences(self) -> list[Sequence]:
        """Those in this step that have not left since."""
        alive = list(compress(self.decodes.seqs, self._here().tolist()))
        alive += [search.group for search in self.searches if search.group.generation == search.generation]
        alive += self.speculating()
        return alive + [chunk.seq for chunk in self.chunks if chunk.seq.generation == chunk.generation]
