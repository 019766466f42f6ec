"""What a step has to tell, on its way from the device to ``StepResult``.

Packing is done by whoever waits for the step, which on a GPU is a thread of its own, so that the compute thread goes on
to the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..proto.codec import MAX_FRAME, i32
from ..proto.messages import Lease, Logprobs, PromptChunk, SlotFailed, StepResult
from .kernels import marks
from .sampling.logprobs import LogprobGroup
from .sampling.sample_batch import Failure
from .state import Span, logprob_bytes
from .transfer import Arrival, Download

ROOM = MAX_FRAME // 8 * 3
"""Bytes that the prompts' logprobs of one result may take, and again those of its tokens; with both a frame fits."""

NAN = Failure(
    500, "the logits are NaN (the model's, or a logits processor's), so no token can be drawn.", corrupted=True
)
FORBIDDEN = Failure(
    400,
    "no token is left to draw: allowed_token_ids, bad_words, min_tokens, logit_bias, logits processors and the "
    "structure asked for forbid every one.",
)
MARKS = {marks.NAN: NAN, marks.FORBIDDEN: FORBIDDEN}
NO_ROOM = "logprobs with {k} others each do not fit one step's answer; ask for fewer."

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
"""ids, values, ranks"""


class PromptGroup(NamedTuple):
    """Logprobs of prompt tokens that want as many others each: those of ``spans``, one after another."""

    spans: list[Span]
    ids: torch.Tensor  # int32 [N, k + 1]
    values: torch.Tensor  # float32 [N, k + 1]
    ranks: torch.Tensor  # int32 [N]


class Outcome:
    """One launched step. ``failed``: the slots that cannot draw, and why. ``marked``: tokens may be marks
    (``kernels.marks``), which say so too."""

    def __init__(
        self,
        download: Download,
        tokens: torch.Tensor,
        groups: Sequence[LogprobGroup] = (),
        prompts: Sequence[PromptGroup] = (),
        failed: dict[int, Failure] | None = None,
        beside: Sequence[torch.Tensor] = (),
        marked: bool = False,
    ):
        self._groups = [(group.slots.tolist(), group.k) for group in groups]
        self._prompts = [group.spans for group in prompts]
        self._failed, self._marked = failed or {}, marked
        tensors = [tensor for group in groups for tensor in (group.ids, group.values, group.ranks)]
        tensors += [tensor for group in prompts for tensor in (group.ids, group.values, group.ranks)]
        self.arrival: Arrival = download(tokens, [*tensors, *beside])

    def result(self, lease: Lease, step: int) -> StepResult:
        """All of it, packed; sleeps until it is there. Call once, before the ring's buffer comes round again."""
        tokens = self.arrival.wait()
        if self._marked:
            tokens = self._without_marks(tokens)
        if not (self._groups or self._prompts or self._failed):
            return StepResult(lease, step, tokens)
        extras = self.arrival.extras()
        triples = list(zip(extras[::3], extras[1::3], extras[2::3], strict=True))
        of_slots = dict(self._of_slots(triples))
        slots = sorted(of_slots.keys() - self._failed.keys())
        return StepResult(
            lease, step, tokens,
            logprob_slots=i32(slots),
            logprobs=[of_slots[slot] for slot in slots],
            prompts=list(self._of_prompts(triples[len(self._groups) :])),
            failed=[SlotFailed(slot, *self._failed[slot]) for slot in sorted(self._failed)],
        )  # fmt: skip

    def _without_marks(self, tokens: bytes) -> bytes:
        """Slots with a mark fail; what stands in the place of their token means nothing."""
        ids = np.frombuffer(tokens, np.int32)
        bad = np.flatnonzero(ids < 0).tolist()
        for slot in bad:
            self._failed.setdefault(slot, MARKS[int(ids[slot])])
        return np.maximum(ids, 0).tobytes() if bad else tokens

    def _of_slots(self, triples: list[Triple]) -> Iterator[tuple[int, Logprobs]]:
        room = ROOM
        for (slots, k), (ids, values, ranks) in zip(self._groups, triples, strict=False):
            for at, slot in enumerate(slots):
                room -= logprob_bytes(1, k)
                if room < 0:
                    self._failed.setdefault(slot, Failure(503, NO_ROOM.format(k=k), "logprobs"))
                else:
                    yield slot, _pack(ids[at], values[at], ranks[at : at + 1])

    def _of_prompts(self, triples: list[Triple]) -> Iterator[PromptChunk]:
        for spans, (ids, values, ranks) in zip(self._prompts, triples, strict=True):
            start = 0
            for span in spans:
                end = start + span.count
                yield PromptChunk(span.at, span.first, _pack(ids[start:end], values[start:end], ranks[start:end]))
                start = end


def _pack(ids: np.ndarray, values: np.ndarray, ranks: np.ndarray) -> Logprobs:
    return Logprobs(ids.tobytes(), values.tobytes(), ranks.tobytes())
