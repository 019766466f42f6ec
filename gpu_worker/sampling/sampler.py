"""From logits to tokens: one pipeline, each stage a function with its twin. This is the order of operations:

1. ``kernels.masks.mask_bits``: a grammar's bit mask.
2. Here raw logprobs and raw logits are taken (``logprobs_mode`` raw_logprobs, raw_logits).
3. ``allowed_token_ids`` (``mask_bits``); then in one addition to single logits (``add``) ``logit_bias``, the bans of
   bad words of one token, and ``min_tokens``' bans of every EOS and stop id while the row has fewer outputs; then bad
   words of several tokens (``kernels.masks.ban_words``). A ban is -inf, whatever the bias.
4. The user's logits processors (``edit``).
5. ``kernels.penalties.penalise``: repetition, frequency, presence.
6. ``greedy``: rows of temperature 0 take the largest logit. Beams stop here: nothing is drawn.
7. ``kernels.sampling.threshold``: logits / temperature; then min_p, top_k, top_p give the lowest value that may be
   drawn.
8. Here processed logprobs and logits are taken: of logits / temperature, -inf below the threshold (of the logits
   themselves in greedy rows). Beams' logprobs are always processed_logprobs.
9. ``kernels.sampling.draw``: argmax of logits / temperature + Gumbel noise of (seed, position, token id) at or above
   the threshold; then the drawn token is counted for the penalties.

A stage that no row needs costs nothing (``SamplingNeeds``), and one that some row needs leaves the others' logits as
they are: the result of a row depends on its own logits, parameters, history, seed and position alone. Masks that leave
nothing (a bad word that is the only allowed token) give token 0, NaN some token of the vocabulary; such a slot fails
alone (``chosen`` says so on a CPU, ``kernels.marks`` on a GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from ..kernels import marks, masks, penalties, sampling
from ..kernels.cpu.edits import Editor
from ..kernels.cpu.library import library
from ..kernels.cpu.sampling import Chooser
from ..kernels.logprobs import Source
from ..layers import dispatch
from ..transfer import to_device
from .logprobs import LogprobGroup, grouped, named
from .sample_batch import SampleBatch
from .sampling_state import SamplingNeeds, SamplingState


class Sampled(NamedTuple):
    """What a step draws."""

    tokens: torch.Tensor  # int32 [S]
    logprobs: list[LogprobGroup] | None  # where any row wants them, by how many
    chosen: np.ndarray | None = None  # float32 [S], the tokens' logits; None where those are not on the host
    told: torch.Tensor | None = None  # int32 [S], there: the tokens with ``kernels.marks`` for those not to be drawn


_TOGETHER = ("random", "top_k", "top_p", "min_p", "logprobs")
"""Needs that decide together which kernels run; each of the others is a stage of its own, with its own kernel."""


def variants() -> list[SamplingNeeds]:
    """Needs among which every kernel that any step's needs launch is launched: the warm-up samples with each."""
    others = [field.name for field in fields(SamplingNeeds) if field.name not in _TOGETHER]
    return [
        SamplingNeeds(**dict(zip(_TOGETHER, flags, strict=True)), **dict.fromkeys(others, changed))
        for flags in product((False, True), repeat=len(_TOGETHER))
        for changed in (False, True)
    ]


def sample(logits: torch.Tensor, state: SamplingState, batch: SampleBatch) -> Sampled:
    """Draw one token for each slot of ``batch``.

    ``logits`` [S, V], each row contiguous, may be changed in place: float32, or on a GPU as the model gave them. There
    they are widened as they are read, which is exact, and copied as float32 only where something is computed into them
    or told of them. ``state`` has the parameters of the persistent rows, on the same device. The token of a beam's slot
    is its most likely one, and is not counted.
    """
    if not len(logits):
        return Sampled(torch.empty(0, dtype=torch.int32, device=logits.device), None)
    needs, edit = batch.needs, batch.edit
    if batch.mask is not None:
        _mask_bits(logits, batch.mask)
    if needs.changes or needs.logprobs or edit is not None:
        logits = logits.float()  # float32 already on a CPU
    native = None if dispatch.use_kernels(logits) else chooser()
    gathers = needs.changes or (needs.random and (native is None or needs.logprobs))
    params = state.of(batch.rows) if gathers else None
    wants = _Wants(state, batch.host_rows, logits) if needs.logprobs else None
    if wants and (needs.changes or edit is not None):
        wants.keep_raw(logits)
    if params is not None and needs.changes:
        _restrict(logits, state, batch, params)
    if edit is not None:
        edit(logits)
    if params is not None and needs.penalties:
        _penalise(logits, state.counts.tensor, batch.rows, params)
    if native is None:
        tokens, thresholds, chosen = _choose(logits, params, batch)
    else:
        tokens, thresholds, chosen = _choose_natively(native, logits, state, batch)
    if params is not None and needs.penalties:
        state.counts.count(batch.rows, tokens, params)
    drawn_by = params if needs.random else None
    found = list(wants.logprobs(logits, tokens.long(), drawn_by, thresholds)) if wants else None
    if dispatch.use_kernels(logits):
        tokens, told = marks.marked(logits, tokens)
        return Sampled(tokens, found, told=told)
    return Sampled(tokens.to(torch.int32), found, chosen)


def sample_share(
    logits: torch.Tensor, state: SamplingState, batch: SampleBatch, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner of each slot within a share of the vocabulary, tokens ``first`` and on; ``needs.shareable`` holds.

    ``logits`` as in ``sample``. Returns values float32 [S] and tokens int64 [S]; of all shares' winners the one of the
    largest value is drawn.
    """
    native = None if dispatch.use_kernels(logits) else chooser()
    if native is not None:
        values = np.empty(len(logits), np.float32)
        tokens = _choose_natively(native, logits, state, batch, first, values)[0]
        return torch.from_numpy(values), tokens.long()
    if batch.needs.random:
        draw = sampling.draw_part if dispatch.use_kernels(logits) else sampling.draw_part_numpy
        return draw(logits, state.of(batch.rows), batch.positions, first)
    tokens = greedy(logits)
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float(), tokens + first


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the lowest id of equals; int64 [S]."""
    if dispatch.use_kernels(logits) or not len(logits):
        return logits.argmax(-1)
    # numpy's argmax is vectorised and stays on this thread: faster than torch's at every size measured.
    return torch.from_numpy(logits.numpy().argmax(-1))


def add(logits: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add to single logits in place: int64 [N], int64 [N], float32 [N]; each (slot, id) is named once."""
    if dispatch.use_kernels(logits):
        logits[slots, ids] = logits[slots, ids] + values
    else:
        logits.numpy()[slots.numpy(), ids.numpy()] += values.numpy()


def _restrict(logits: torch.Tensor, state: SamplingState, batch: SampleBatch, params: torch.Tensor) -> None:
    """Stage 3, in place. ``params`` int32 [S, COLUMNS] are those of the batch's rows."""
    needs, rows = batch.needs, batch.rows
    if needs.allowed:
        table = state.allowed.tensor
        _mask_bits(logits, table, rows, params)
    if needs.edits:
        add(logits, *state.step_bias(batch.host_rows, batch.host_positions))
    if needs.words:
        ban = masks.ban_words if dispatch.use_kernels(logits) else masks.ban_words_numpy
        ban(logits, state.step_words(batch.host_rows), batch.history, rows, batch.positions, params)


def _mask_bits(
    logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None = None, params: torch.Tensor | None = None
) -> None:
    """``masks.mask_bits``, by native kernels or the twin where the logits are on the host."""
    if dispatch.use_kernels(logits):
        masks.mask_bits(logits, bits, rows, params)
    elif (native := _editor()) is None:
        masks.mask_bits_numpy(logits, bits, rows, params)
    elif rows is None or params is None:
        native.mask_bits(logits.numpy(), bits.numpy())
    else:
        native.mask_bits(logits.numpy(), bits.numpy(), rows.numpy(), params.numpy())


def _penalise(logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, params: torch.Tensor) -> None:
    """``penalties.penalise``, likewise."""
    if dispatch.use_kernels(logits):
        penalties.penalise(logits, counts, rows, params)
    elif (native := _editor()) is None:
        penalties.penalise_numpy(logits, counts, rows, params)
    else:
        native.penalise(logits.numpy(), counts.numpy(), rows.numpy(), params.numpy())


@functools.cache
def _editor() -> Editor | None:
    """Native kernels that change logits on the host, by as many threads as torch has; None where there are none."""
    found = library()
    return None if found is None else Editor(found, torch.get_num_threads())


@functools.cache
def chooser() -> Chooser | None:
    """Native kernels for logits on the host, by as many threads as torch has; None where there are none."""
    found = library()
    return None if found is None else Chooser(found, torch.get_num_threads())


_Choice = tuple[torch.Tensor, torch.Tensor | None, np.ndarray | None]
"""Tokens int64 or int32 [S]; thresholds float32 [S] where some row has one; the tokens' logits, on the host."""


def _choose(logits: torch.Tensor, params: torch.Tensor | None, batch: SampleBatch) -> _Choice:
    """``params`` int32 [S, COLUMNS] are those of the batch's rows; None: all are greedy."""
    needs, thresholds = batch.needs, None
    if params is None or not needs.random:
        tokens = greedy(logits)
    else:
        threshold, draw = sampling.threshold_numpy, sampling.draw_numpy
        if dispatch.use_kernels(logits):
            threshold, draw = sampling.threshold, sampling.draw
        if needs.threshold:
            thresholds = threshold(logits, params, needs.min_p, needs.top_k, needs.top_p)
        tokens = draw(logits, params, batch.positions, thresholds)
    chosen = None if dispatch.use_kernels(logits) else logits.numpy()[np.arange(len(logits)), tokens.numpy()]
    return tokens, thresholds, chosen


def _choose_natively(
    native: Chooser, logits: torch.Tensor, state: SamplingState, batch: SampleBatch, first: int = 0,
    values: np.ndarray | None = None,
) -> _Choice:  # fmt: skip
    """``first`` and ``values``: of a share of the vocabulary, as ``Chooser.choose`` has them."""
    count, needs = len(logits), batch.needs
    tokens, chosen = np.empty(count, np.int32), np.empty(count, np.float32)
    thresholds = np.empty(count, np.float32) if needs.threshold else None
    params = state.packed_host if needs.random else None
    native.choose(
        logits.numpy(), params, batch.host_rows, batch.positions.numpy(), tokens, chosen, values, thresholds, first
    )
    return torch.from_numpy(tokens), None if thresholds is None else torch.from_numpy(thresholds), chosen


class _Wants:
    """The slots of a step that want logprobs: beams, which are always processed, and the others."""

    def __init__(self, state: SamplingState, rows: np.ndarray, logits: torch.Tensor):
        self._state = state
        slots, ks, beams = state.step_logprobs(rows)
        self._raw = state.logprobs_mode.startswith("raw")
        self._softmax = state.logprobs_mode.endswith("logprobs")
        self._others, self._other_ks = slots[~beams], ks[~beams]
        self._listed = state.listed(rows[self._others])
        self._beams, self._beam_ks = slots[beams], ks[beams]
        self._slots = to_device(self._others, logits.device)
        self._kept: torch.Tensor | None = None

    def keep_raw(self, logits: torch.Tensor) -> None:
        """Called before the logits are changed."""
        if self._raw and len(self._others):
            self._kept = None if dispatch.use_kernels(logits) else self._state.spare(len(self._others))
            self._kept = torch.index_select(logits, 0, self._slots, out=self._kept)

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, params: torch.Tensor | None, thresholds: torch.Tensor | None
    ) -> Iterator[LogprobGroup]:
        """``params`` where some row draws, ``thresholds`` where some row has a filter."""
        if len(self._others):
            if self._kept is not None:
                source = Source(self._kept, torch.arange(len(self._kept), device=logits.device))
            elif self._raw:
                source = Source(logits, self._slots)
            else:
                source = Source(logits, self._slots, params, thresholds)
            yield from self._told(source, tokens[self._slots])
        if len(self._beams):
            at = to_device(self._beams, logits.device)
            yield from grouped(Source(logits, at), tokens[at], self._beams, self._beam_ks, True)

    def _told(self, source: Source, tokens: torch.Tensor) -> Iterator[LogprobGroup]:
        """Of the slots that are no beams: those with named ids one by one, the others together."""
        if not self._listed:
            yield from grouped(source, tokens, self._others, self._other_ks, self._softmax)
            return
        has = np.isin(np.arange(len(self._others)), list(self._listed))
        for at in (np.flatnonzero(has), np.flatnonzero(~has)):
            if not len(at):
                continue
            at_d = to_device(at, tokens.device)
            part, own, slots = source._replace(slots=source.slots[at_d]), tokens[at_d], self._others[at]
            if has[at[0]]:
                yield from named(part, own, slots, [self._listed[place] for place in at.tolist()], self._softmax)
            else:
                yield from grouped(part, own, slots, self._other_ks[at], self._softmax)
