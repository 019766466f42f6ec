"""SamplingState: the sampling parameters of every persistent row, on the host and on the device; and SamplingNeeds:
which stages of the pipeline the rows of one step use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...proto.params import SamplingParams
from ...proto.work import Generate, embeds_of
from ..kernels import columns as c
from ..kernels.masks import Words
from ..transfer import to_device
from .sampling_tables import Counts, RowEdits, Table, allowed_bits, joined_bias, joined_words, row_edits

_PENALTY_LIMITS = 1e-30, 1e30
"""A repetition penalty outside is held there: 0 or infinity in float32 would turn logits into NaN."""


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which stages some row of a step needs; known on the host, so nothing waits for the device."""

    random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    allowed: bool = False
    edits: bool = False
    words: bool = False
    penalties: bool = False
    logprobs: bool = False

    @property
    def threshold(self) -> bool:
        """Some row may not draw every token."""
        return self.top_k or self.top_p or self.min_p

    @property
    def changes(self) -> bool:
        """Some row's logits are changed."""
        return self.allowed or self.edits or self.words or self.penalties

    @property
    def shareable(self) -> bool:
        """Every row takes its most likely token or draws by temperature alone, so a share of the logits has its own
        winner, and the best of all shares' winners is the token."""
        return not (self.changes or self.threshold or self.logprobs)


PLAIN = SamplingNeeds()
"""Every row takes the most likely token, and that is all."""


class SamplingState:
    """Sampling parameters by persistent row.

    ``packed_host``, int32 [max_rows, COLUMNS], is the truth; ``packed``, on the device, follows it at the next
    ``sample``. ``kernels.columns`` describes both. ``counts`` and ``allowed`` are tables by row. A process that never
    calls ``sample`` (``draws`` False) has neither; it knows what its rows need, their seeds and temperatures.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu", logprobs_mode: str = "raw_logprobs",
        draws: bool = True,
    ):  # fmt: skip
        self.device, self.vocab_size, self.logprobs_mode = torch.device(device), vocab_size, logprobs_mode
        self._draws = draws
        self.packed_host = np.zeros((max_rows, c.COLUMNS), dtype=np.int32)
        self._floats = self.packed_host.view(np.float32)
        self._dirty = False
        on_host = self.device.type == "cpu"
        self.packed = torch.from_numpy(self.packed_host) if on_host else torch.zeros(
            (max_rows, c.COLUMNS), dtype=torch.int32, device=self.device
        )  # fmt: skip
        self.counts = Counts(max_rows, vocab_size, self.device)
        self.allowed = Table(max_rows, -(-vocab_size // 32), self.device)
        self._edits: dict[int, RowEdits] = {}
        self._listed: dict[int, np.ndarray] = {}  # rows whose logprobs are of these ids, int64
        self._changes = 0  # raised when a row may have other edits
        self._last_needs: tuple[np.ndarray, SamplingNeeds] | None = None
        self._spare: torch.Tensor | None = None
        self._joined_bias: tuple[object, tuple[torch.Tensor, ...]] | None = None
        self._joined_words: tuple[object, Words] | None = None

    def admit(self, row: int, work: Generate, seed: int, prompt_len: int, ids: np.ndarray) -> None:
        """``row`` draws as ``work`` asks, with its child's ``seed``. ``ids`` int32: the prompt, then outputs it resumes
        from."""
        self._last_needs = None
        params = work.params
        listed = params.logit_bias or params.min_tokens or work.bad_words
        edits = row_edits(work, self.vocab_size) if listed else None
        uses = _uses(params, edits)
        floats, ints = self._floats[row], self.packed_host[row]
        floats[c.INV_T] = 0.0 if params.greedy else 1.0 / params.temperature
        floats[c.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[c.TOP_P] = params.top_p
        ints[c.TOP_K] = max(params.top_k, 0)
        floats[c.REPETITION] = min(max(params.repetition_penalty, _PENALTY_LIMITS[0]), _PENALTY_LIMITS[1])
        floats[c.FREQUENCY], floats[c.PRESENCE] = params.frequency_penalty, params.presence_penalty
        ints[c.USES], ints[c.PROMPT_LEN], ints[c.MIN_TOKENS] = uses, prompt_len, params.min_tokens
        ints[c.LOGPROBS] = self._logprobs(params)
        self._set_seed(row, seed)
        if not self._draws:
            return
        self._hold(row, edits)
        self._list(row, params.logprob_token_ids)
        if uses & c.ALLOWED:
            self.allowed.tensor[row].copy_(to_device(allowed_bits(params, self.vocab_size), self.device))
        if uses & c.PENALTIES:
            self.counts.rebuild(row, ids[_told_nothing(work) : prompt_len], ids[prompt_len:])

    def copy(self, src_rows: Sequence[int], dst_rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Fork: all that ``src_rows`` have to ``dst_rows``, with new seeds; all is read before any is written."""
        src, dst = list(src_rows), list(dst_rows)
        self._last_needs = None
        self.packed_host[dst] = self.packed_host[src]
        held = [(self._edits.get(row), self._listed.get(row)) for row in src]
        for row, (edits, listed), seed in zip(dst, held, seeds, strict=True):
            self._set_seed(row, seed)
            self._hold(row, edits)
            self._list(row, listed)
        for bit, table in ((c.ALLOWED, self.allowed), (c.PENALTIES, self.counts)) if self._draws else ():
            pairs = [(s, d) for s, d in zip(src, dst, strict=True) if self.packed_host[d, c.USES] & bit]
            if pairs:
                table.copy([s for s, _ in pairs], [d for _, d in pairs])

    def drop(self, rows: Sequence[int] | np.ndarray) -> None:
        """Release what the rows hold."""
        self._last_needs = None
        for row in rows:
            self._hold(int(row), None)
            self._listed.pop(int(row), None)
            self.packed_host[row, c.USES] = 0

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Count tokens that the scheduler chose (beams), rows all different; int64 [N] each, on the host."""
        counted = self.packed_host[rows, c.USES] & c.PENALTIES != 0
        if self._draws and counted.any():
            self.counts.append(rows[counted], tokens[counted])

    def needs(self, rows: np.ndarray, positions: np.ndarray) -> SamplingNeeds:
        """What these rows ask for when they draw the tokens of ``positions``; int64 [S] each, on the host.

        Asked again with the same array, which is not written to, it says the same until a row changes.
        """
        if self._last_needs is not None and self._last_needs[0] is rows:
            return self._last_needs[1]
        uses = self.packed_host[rows, c.USES]
        any_uses = int(np.bitwise_or.reduce(uses)) if len(uses) else 0
        needs = PLAIN if not any_uses else self._needs(any_uses, rows, positions, uses)
        # min_tokens is a matter of the positions.
        self._last_needs = None if any_uses & c.WAITS else (rows, needs)
        return needs

    def _needs(self, any_uses: int, rows: np.ndarray, positions: np.ndarray, uses: np.ndarray) -> SamplingNeeds:
        waits = bool(any_uses & c.WAITS) and bool(self._waiting(rows, positions, uses).any())
        return SamplingNeeds(
            random=bool(any_uses & c.RANDOM),
            top_k=bool(any_uses & c.BY_TOP_K),
            top_p=bool(any_uses & c.BY_TOP_P),
            min_p=bool(any_uses & c.BY_MIN_P),
            allowed=bool(any_uses & c.ALLOWED),
            edits=bool(any_uses & c.EDITS) or waits,
            words=bool(any_uses & c.WORDS),
            penalties=bool(any_uses & c.PENALTIES),
            logprobs=bool(any_uses & c.WITH_LOGPROBS),
        )

    def step_bias(self, rows: np.ndarray, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Slots, ids and values of all that is added to single logits of these rows; ``needs.edits`` holds."""
        uses = self.packed_host[rows, c.USES]
        waits = self._waiting(rows, positions, uses)
        slots = np.flatnonzero((uses & c.EDITS != 0) | waits)
        key = self._changes, slots.tobytes(), rows[slots].tobytes(), waits[slots].tobytes()
        if self._joined_bias is None or self._joined_bias[0] != key:
            held = [(self._edits[row], wait) for row, wait in zip(rows[slots].tolist(), waits[slots], strict=True)]
            parts = [edits.waiting if wait else edits.always for edits, wait in held]
            self._joined_bias = key, joined_bias(parts, slots, self.device)
        return self._joined_bias[1]

    def step_words(self, rows: np.ndarray) -> Words:
        """Bad words of several tokens of these rows; ``needs.words`` holds."""
        slots = np.flatnonzero(self.packed_host[rows, c.USES] & c.WORDS)
        key = self._changes, slots.tobytes(), rows[slots].tobytes()
        if self._joined_words is None or self._joined_words[0] != key:
            parts = [self._edits[row] for row in rows[slots].tolist()]
            self._joined_words = key, joined_words(parts, slots, self.device)
        return self._joined_words[1]

    def step_logprobs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots int64 that want logprobs, how many each, and which of them are beams."""
        uses = self.packed_host[rows, c.USES]
        slots = np.flatnonzero(uses & c.WITH_LOGPROBS)
        return slots, self.packed_host[rows[slots], c.LOGPROBS], uses[slots] & c.BEAM != 0

    def listed(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """By place in ``rows``: the ids, int64, of those whose logprobs are of ids that the request named."""
        if not self._listed:
            return {}
        return {at: self._listed[row] for at, row in enumerate(rows.tolist()) if row in self._listed}

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Parameters of ``rows`` (int64 [S] on the device), int32 [S, COLUMNS], after the device's copy is brought up
        to date, without waiting for it.

        The pinned copy is fresh each time, and torch keeps it until the stream has read it: the host may change rows
        again at once, while steps that used their old values are still queued.
        """
        if self._dirty and self.device.type != "cpu":
            self.packed.copy_(torch.from_numpy(self.packed_host).pin_memory(), non_blocking=True)
        self._dirty = False
        return self.packed[rows]

    def spare(self, count: int) -> torch.Tensor:
        """float32 [count, V] on the host, one piece of memory that each step uses again.

        An allocation of this size would be pages that the system has to clear in every step.
        """
        if self._spare is None or len(self._spare) < count:
            self._spare = torch.empty((count, self.vocab_size))
        return self._spare[:count]

    def _waiting(self, rows: np.ndarray, positions: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """bool [S]: rows that have fewer than min_tokens outputs."""
        ints = self.packed_host
        return (uses & c.WAITS != 0) & (positions - ints[rows, c.PROMPT_LEN] < ints[rows, c.MIN_TOKENS])

    def _logprobs(self, params: SamplingParams) -> int:
        wanted = params.logprobs
        if wanted == -1:
            return self.vocab_size
        if params.use_beam_search:
            wanted = max(2 * params.width, wanted or 0)
        return -1 if wanted is None else min(int(wanted), self.vocab_size)

    def _hold(self, row: int, edits: RowEdits | None) -> None:
        if edits is not None or row in self._edits:
            self._changes += 1
            self._edits.pop(row, None)
        if edits is not None:
            self._edits[row] = edits

    def _list(self, row: int, ids: list[int] | np.ndarray | None) -> None:
        self._listed.pop(row, None)
        if ids is not None and len(ids):
            self._listed[row] = np.array(ids, np.int64)

    def _set_seed(self, row: int, seed: int) -> None:
        self.packed_host[row, c.SEED_LOW : c.SEED_HIGH + 1] = np.array([seed % 2**64], dtype="<u8").view("<i4")
        self._dirty = True


def _uses(params: SamplingParams, edits: RowEdits | None) -> int:
    """The bits of USES."""
    draws, beam = not params.greedy, params.use_beam_search
    penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
    bits = {
        c.RANDOM: draws,
        c.BY_TOP_K: draws and params.top_k > 0,
        c.BY_TOP_P: draws and params.top_p < 1,
        c.BY_MIN_P: draws and params.min_p > 0,
        c.ALLOWED: params.allowed_token_ids is not None,
        c.EDITS: edits is not None and len(edits.always.ids) > 0,
        c.WAITS: edits is not None and not np.array_equal(edits.always.values, edits.waiting.values),
        c.WORDS: edits is not None and len(edits.lasts) > 0,
        c.PENALTIES: penalised,
        c.COUNTED: penalised and not beam,
        c.WITH_LOGPROBS: params.logprobs is not None or beam,
        c.BEAM: beam,
    }
    return sum(bit for bit, used in bits.items() if used)


def _told_nothing(work: Generate) -> int:
    """The prompt's ids that stand for embeddings, and of which no penalty may be."""
    embeds = embeds_of(work)
    return 0 if embeds is None else embeds.count
