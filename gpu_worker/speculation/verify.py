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
    rows: np.ndarray  # int64 [R]
    starts: np.ndarray  # int64 [R], where each is
    drafts: np.ndarray  # int32 [R, K]
    found: np.ndarray  # int64 [R], how many of the drafts count


class Wide(NamedTuple):
    """``run`` with a slot for every position at which something is drawn; ``slots``: the first one of each slot of the
    plan, and their number at the end."""

    run: Run
    slots: np.ndarray  # int64 [S + 1]


def widen(run: Run, drafted: Drafted) -> Wide:
    """``run`` has in it one slot for each row, which draws from its last token."""
    counts = np.ones(len(run.sample_src), np.int64)
    counts[drafted.at : drafted.at + len(drafted.rows)] += drafted.found
    slots = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=slots[1:])
    back = np.repeat(slots[1:], counts) - 1 - np.arange(slots[-1])  # from the last slot of each row
    src, rows = np.repeat(run.sample_src, counts), np.repeat(run.sample_rows, counts)
    positions = np.repeat(run.positions, counts) - back
    outputs = run.counts.cumsum()[src] - 1 - back
    wide = Run(run.rows, run.starts, run.counts, run.ends, src, rows, positions, False, outputs)
    return Wide(wide, slots)


class Draws:
    """What a step draws, by slots of the wide run, on the host."""

    def __init__(self, slots: int):
        self.tokens = np.zeros(slots, np.int32)
        self.failed: dict[int, Failure] = {}
        self.records: dict[int, Record] = {}

    def take(self, sampled: Sampled, failed: dict[int, Failure], slots: np.ndarray) -> np.ndarray:
        """Take over what was sampled for these slots. Returns their tokens, int32."""
        tokens = (sampled.tokens if sampled.told is None else sampled.told).cpu().numpy()
        named = slots.tolist()
        for at in np.flatnonzero(tokens < 0).tolist():
            failed.setdefault(at, MARKS[int(tokens[at])])
        self.failed |= {named[at]: why for at, why in failed.items()}
        self.tokens[slots] = tokens = np.maximum(tokens, 0)
        for group in sampled.logprobs or ():
            ids, values, ranks = group.ids.cpu().numpy(), group.values.cpu().numpy(), group.ranks.cpu().numpy()
            for at, slot in enumerate(group.slots.tolist()):
                self.records[named[slot]] = ids[at], values[at], ranks[at : at + 1]
        return tokens

    def keep(self, wide: Wide, drafted: Drafted) -> np.ndarray:
        """How many tokens each slot of the plan keeps, int64 [S]: those before the first that was not drafted, and that
        one. A slot that fails at a later position than its first keeps what is before; it fails in the next step."""
        kept = np.ones(len(wide.slots) - 1, np.int64)
        for number, found in enumerate(drafted.found.tolist()):
            if found:
                first = wide.slots.item(drafted.at + number)
                wrong = self.tokens[first : first + found] != drafted.drafts[number, :found]
                right = int(wrong.argmax()) if wrong.any() else found
                failed = [place for place in range(right + 1) if first + place in self.failed] if self.failed else []
                if failed:
                    right = max(0, failed[0] - 1)
                kept[drafted.at + number] += right
        return kept

    def kept_slots(self, wide: Wide, kept: np.ndarray) -> np.ndarray:
        """The slots of the wide run that count, int64, rising."""
        ends = kept.cumsum()
        return np.arange(ends[-1]) + np.repeat(wide.slots[:-1] - (ends - kept), kept)


class SpeculativeOutcome(Outcome):
    """One launched step in which rows speculated. ``kept`` int64 [S] tokens of each slot of the plan."""

    def __init__(
        self, download: Download, tokens: torch.Tensor, draws: Draws, wide: Wide, kept: np.ndarray, drafted: Drafted,
        prompts: list[PromptGroup],
    ):  # fmt: skip
        firsts = wide.slots[:-1].tolist()
        failed = {slot: draws.failed[first] for slot, first in enumerate(firsts) if first in draws.failed}
        super().__init__(download, tokens, (), prompts, failed)
        self._kept, self._found = kept, drafted.found
        self._records: dict[int, list[Record]] = {}
        if draws.records:
            for slot, (first, count) in enumerate(zip(firsts, kept.tolist(), strict=True)):
                if first in draws.records and slot not in failed:
                    self._records[slot] = [draws.records[first + place] for place in range(count)]

    def result(self, lease: Lease, step: int) -> SpeculativeResult:
        plain, room = super().result(lease, step), ROOM
        failed, slots, found = plain.failed, [], []
        for slot, records in self._records.items():
            ids, values, ranks = map(np.concatenate, zip(*records, strict=True))
            room -= logprob_bytes(len(records), len(records[0][0]) - 1)
            if room < 0:  # who asks for so many is not drafted for
                failed.append(SlotFailed(slot, 503, NO_ROOM.format(k=len(ids) - 1), "logprobs"))
                continue
            slots.append(slot)
            found.append(Logprobs(ids.tobytes(), values.tobytes(), ranks.tobytes()))
        return SpeculativeResult(
            lease, step, plain.tokens, self._kept.astype(np.int32).tobytes(), i32(slots), found, plain.prompts, failed,
            drafted=self._found.astype(np.int32).tobytes(),
        )  # fmt: skip
