"""A step's run with drafted tokens in it, what is drawn at each of their positions, and which of them are kept.

A draw is a function of (logits, parameters, history, seed, position), so a drafted token is right exactly where it is
the token that is drawn there. All positions of a row are drawn at once, each from the logits after the tokens before
it, and the row keeps what was drawn up to the first position at which that is not what was drafted.

What depends on more than a position and the tokens before it is drawn position by position, only as far as drafts are
right: penalties, whose counts follow each draw, and grammars and logits processors, which are on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...proto.codec import i32
from ...proto.messages import Lease, Logprobs, SlotFailed, SpeculativeResult
from ..outcome import MARKS, NO_ROOM, ROOM, Outcome, PromptGroup
from ..sampling.sample_batch import Failure
from ..sampling.sampler import Sampled
from ..state import Run, logprob_bytes
from ..transfer import Download

Record = tuple[np.ndarray, np.ndarray, np.ndarray]
"""ids int32 [k + 1], values float32 [k + 1] and rank int32 [1] of one token"""


class Drafted(NamedTuple):
    """The rows of a step that speculate: compute rows ``at`` and on, and slots of the same numbers."""

    at: int
    rows: list[int]
    starts: list[int]  # where each is
    counts: list[int]  # how many tokens are drafted after the one that each has there
    drafts: list[list[int]]  # these; none while they are in the rows alone


class Wide(NamedTuple):
    """A run with a slot for every position at which something is drawn; ``firsts``: the first one of each slot of the
    plan."""

    run: Run
    firsts: list[int]


def wide_run(of: list[int], starts: list[int], counts: list[int]) -> Wide:
    """The run of a step of nothing but these rows, ``counts`` tokens of each: something is drawn after every one."""
    rows, many = np.array(of), np.array(counts)
    first = np.array(starts)
    ends, total = first + many, many.cumsum()
    src = np.arange(len(rows)).repeat(many)
    outputs = np.arange(total[-1])
    positions = outputs + (ends + 1 - total)[src]
    run = Run(rows, first, many, ends, src, rows[src], positions, len(src) == len(rows), outputs)
    return Wide(run, (total - many).tolist())


def widen(run: Run, drafted: Drafted) -> Wide:
    """``run`` has in it one slot for each row, which draws from its last token."""
    counts = np.ones(len(run.sample_src), np.int64)
    counts[drafted.at : drafted.at + len(drafted.rows)] += drafted.counts
    ends = counts.cumsum()
    back = ends.repeat(counts) - 1 - np.arange(ends[-1])  # from the last slot of each row
    src, rows = run.sample_src.repeat(counts), run.sample_rows.repeat(counts)
    positions = run.positions.repeat(counts) - back
    outputs = run.counts.cumsum()[src] - 1 - back
    wide = Run(run.rows, run.starts, run.counts, run.ends, src, rows, positions, False, outputs)
    return Wide(wide, (ends - counts).tolist())


class Draws:
    """What a step draws, by slots of the wide run, on the host."""

    def __init__(self, slots: int):
        self.tokens = [-1] * slots  # -1: nothing was drawn there
        self.failed: dict[int, Failure] = {}
        self.records: dict[int, Record] = {}

    def take(self, sampled: Sampled, failed: dict[int, Failure], slots: list[int]) -> list[int]:
        """Take over what was sampled for these slots. Returns their tokens."""
        tokens: list[int] = (sampled.tokens if sampled.told is None else sampled.told).tolist()
        if sampled.told is not None:
            for at, token in enumerate(tokens):
                if token < 0:
                    failed.setdefault(at, MARKS[token])
                    tokens[at] = 0
        for at, why in failed.items():
            self.failed[slots[at]] = why
        for slot, token in zip(slots, tokens, strict=True):
            self.tokens[slot] = token
        for group in sampled.logprobs or ():
            ids, values, ranks = group.ids.cpu().numpy(), group.values.cpu().numpy(), group.ranks.cpu().numpy()
            for at, slot in enumerate(group.slots.tolist()):
                self.records[slots[slot]] = ids[at], values[at], ranks[at : at + 1]
        return tokens

    def right(self, first: int, draft: list[int]) -> int:
        """How many tokens of a draft are right, where ``first`` is the first slot of its row. A row that fails at a
        later position than its first keeps what is before; it fails there in the next step."""
        count = 0
        for slot, token in enumerate(draft, first):
            if self.tokens[slot] != token or (self.failed and (slot in self.failed or slot + 1 in self.failed)):
                break
            count += 1
        return count


class SpeculativeOutcome(Outcome):
    """One launched step in which rows speculated. ``kept``: tokens of each slot of the plan."""

    def __init__(
        self, download: Download, device: torch.device, draws: Draws, wide: Wide, kept: list[int], drafted: Drafted,
        prompts: list[PromptGroup],
    ):  # fmt: skip
        firsts, drawn = wide.firsts, draws.tokens
        failed = {slot: draws.failed[first] for slot, first in enumerate(firsts) if first in draws.failed}
        tokens = [token for first, count in zip(firsts, kept, strict=True) for token in drawn[first : first + count]]
        super().__init__(download, torch.tensor(tokens, dtype=torch.int32, device=device), (), prompts, failed)
        self._kept, self._found = kept, drafted.counts
        self._records: dict[int, list[Record]] = {}
        if draws.records:
            for slot, (first, count) in enumerate(zip(firsts, kept, strict=True)):
                if first in draws.records and slot not in failed:
                    self._records[slot] = [draws.records[first + place] for place in range(count)]

    def result(self, lease: Lease, step: int) -> SpeculativeResult:
        plain, room = super().result(lease, step), ROOM
        failed, slots, found = plain.failed, [], []
        for slot, records in self._records.items():
            ids, values, ranks = map(np.concatenate, zip(*records, strict=True))
            room -= logprob_bytes(len(records), len(records[0][0]) - 1)
            if room < 0:  # who asks for so many is not drafted for
                failed = [*failed, SlotFailed(slot, 503, NO_ROOM.format(k=len(ids) - 1), "logprobs")]
                continue
            slots.append(slot)
            found.append(Logprobs(ids.tobytes(), values.tobytes(), ranks.tobytes()))
        return SpeculativeResult(
            lease, step, plain.tokens, i32(self._kept), i32(slots), found, plain.prompts, failed,
            drafted=i32(self._found),
        )  # fmt: skip


class Verified(Outcome):
    """A step of nothing but rows that speculate, which is on the host: ``tokens`` are int32 of all rows, ``kept`` says
    how many of each, and ``drafted`` how many were drafted."""

    def __init__(self, tokens: bytes, kept: list[int], drafted: list[int]) -> None:  # nothing is to be downloaded
        self._tokens, self._kept, self._drafted = tokens, kept, drafted

    def result(self, lease: Lease, step: int) -> SpeculativeResult:
        return SpeculativeResult(lease, step, self._tokens, counts=i32(self._kept), drafted=i32(self._drafted))
