"""Persistent rows: what the device remembers of each running sequence between steps, and how a plan changes it.

A row holds its token ids, its block table and its sampling parameters; followers keep what more some rows need on the
host. A plan is applied in the order that ``StepPlan`` gives: drops, forks, block copies, admits, deltas, appends, then
the run. Everything in a plan is checked before it is used, because an index out of range would read or write another
sequence's memory, not fail.

The tables and lengths are kept on the host as well: slots are computed there, and checks cost no wait for a GPU. On a
CPU device both are the same memory, and so are the tokens.

While the same rows decode, plans differ in little: what was checked of the last one is not checked again where the
same bytes come. The arrays here are short, so what a step costs is the number of calls: numpy's take about a
microsecond each, torch's five.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..proto.messages import Admit, StepPlan
from ..proto.work import Embeds, Generate, Pool, ThinkingGenerate, child_seed, embeds_of, thought_end
from .kv_cache import KVCache
from .sampling.followers import Follower
from .sampling.sample_batch import Failure, SampleBatch
from .sampling.sampling_state import SamplingState
from .transfer import PLAN_BYTES, Upload

if TYPE_CHECKING:
    from .lora.slots import Slots
    from .models.given import Given
    from .sampling.grammar import Grammars
    from .sampling.processors import Processors


class PlanError(ValueError):
    """A plan that cannot be carried out; it names the column, the value and the limit."""


def logprob_bytes(tokens: int, k: int) -> int:
    """Bytes of the logprobs of ``tokens`` tokens with ``k`` others each, as they are sent."""
    return tokens * (8 * (k + 1) + 4)


_TOO_MUCH = (
    "the prompt's logprobs do not fit one answer of a worker: {count} tokens of this step with {k} others each; ask "
    "for a smaller prompt_logprobs, or start with a smaller --max-num-batched-tokens."
)


class Composition(NamedTuple):
    """What stays the same in the run part of a plan while the same rows decode, as int64 arrays, checked."""

    rows: np.ndarray
    counts: np.ndarray
    sample_src: np.ndarray
    sample_rows: np.ndarray
    pure_decode: bool  # every row runs one token


@dataclass(slots=True)
class Run:
    """The run part of a plan as int64 arrays, checked. Those of its ``Composition`` are the same objects from step to
    step while that lasts, and are not written to."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray  # starts + counts
    sample_src: np.ndarray
    sample_rows: np.ndarray
    positions: np.ndarray  # where each sample slot's token goes
    pure_decode: bool
    outputs: np.ndarray | None = None  # the token of the step that each slot draws from; None: its row's last


@dataclass(slots=True)
class Span:
    """``count`` prompt tokens from position ``first`` on, of compute row ``at``, whose logprobs this step can tell."""

    at: int
    row: int
    first: int
    count: int
    k: int


def column(name: str, data: bytes, limit: int, low: int = 0) -> np.ndarray:
    """An int32 column as int64. Raises PlanError unless every item is in [low, limit)."""
    if len(data) % 4:
        raise PlanError(f"{name} has {len(data)} bytes, which is not a whole number of int32 items")
    values = np.frombuffer(data, np.int32).astype(np.int64)
    outside = (values < low) | (values >= limit)
    if np.count_nonzero(outside):
        raise PlanError(f"{name} holds {values[outside][0]}, which is not in [{low}, {limit})")
    return values


def _same_length(**columns: np.ndarray) -> None:
    if len({len(values) for values in columns.values()}) > 1:
        raise PlanError("columns differ in length: " + ", ".join(f"{k} {len(v)}" for k, v in columns.items()))


def _distinct(name: str, values: np.ndarray) -> None:
    if len(values) > 1 and len(np.unique(values)) < len(values):
        raise PlanError(f"{name} names an item twice")


def _there(follower: Follower[Any] | None, kind: str, row: int) -> Follower[Any]:
    if follower is None:
        raise PlanError(f"row {row} needs {kind}, which these rows were made without")
    return follower


class RowState:
    """``max_rows`` rows of up to ``max_model_len`` tokens.

    ``tokens`` [max_rows, max_model_len + 1] int32 (one more for the token sampled past the end) and ``tables``
    [max_rows, max_blocks] int32 are on the device; ``tables_host`` and ``known`` (tokens of each row) on the host.
    ``tokens_host`` is ``tokens`` as an array, of no rows where the device is not the host. Neither array moves.
    ``failed`` rows cannot draw any more: their slots answer with the status and message given here. ``draws`` is
    False in a process of a replica whose tokens another one draws. ``adapters`` [max_rows] says which of the
    adapters in ``slots`` each row has; it does not move, and has no rows where there are no ``slots``.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        grammars: Follower[Grammars] | None = None,
        processors: Follower[Processors] | None = None,
        draws: bool = True,
        slots: Slots | None = None,
        given: Given | None = None,
    ):
        self.max_rows, self.max_model_len, self.block_size = max_rows, max_model_len, block_size
        self.vocab_size, self.device = vocab_size, device
        self.max_blocks = -(-max_model_len // block_size)
        self.tables_host = np.zeros((max_rows, self.max_blocks), np.int32)
        self.known = np.zeros(max_rows, np.int64)  # 0: the row is nobody's
        self.blocks_set = np.zeros(max_rows, np.int64)  # leading entries of each table that are set
        self.last_change = (np.zeros(0, np.int64),) * 2  # of tables, by a plan: rows, and blocks set in them
        self.prompt_len = np.zeros(max_rows, np.int64)
        self.grows = np.ones(max_rows, np.int64)  # tokens a draw adds: none to a beam, which waits for an append
        self.asking: dict[int, tuple[int, int]] = {}  # rows that want prompt logprobs: from which position, how many
        self.failed: dict[int, Failure] = {}
        self.pooled: dict[int, Pool] = {}  # rows that draw nothing
        self.slots = slots  # of adapters, where rows may have any
        self.adapters = np.full(max_rows if slots is not None else 0, -1, np.int32)  # the slot of each row's, -1: none
        self.grammars, self.processors, self.given = grammars, processors, given
        self.followers: list[Follower[Any]] = [each for each in (grammars, processors) if each is not None]
        self.on_host = device.type == "cpu"
        self.tokens_host = np.zeros((max_rows if self.on_host else 0, max_model_len + 1), np.int32)
        if self.on_host:
            self.tables, self.tokens = torch.from_numpy(self.tables_host), torch.from_numpy(self.tokens_host)
        else:
            self.tables = torch.zeros(self.tables_host.shape, dtype=torch.int32, device=device)
            self.tokens = torch.zeros((max_rows, max_model_len + 1), dtype=torch.int32, device=device)
        self._composition: tuple[tuple[object, ...], Composition] | None = None  # the last one, and what it was made of
        self.sampling = SamplingState(max_rows, vocab_size, device, logprobs_mode, draws)
        # So large that no step of the usual kind makes it grow, which would hold up the device: a plan's columns, a
        # prompt of any length, and a grammar's mask of every row.
        masks = 4 * max_rows * -(-vocab_size // 32) if grammars is not None and draws else 0
        self.upload = Upload(device, PLAN_BYTES + 4 * max_model_len + masks)

    @staticmethod
    def device_bytes(max_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> int:
        """Bytes of the tensors above, and of the sampler's counts of each row's tokens."""
        return 4 * max_rows * (max_model_len + 1 + -(-max_model_len // block_size) + vocab_size)

    def reset(self) -> None:
        """Forget every row."""
        self._drop(np.flatnonzero(self.known))
        self.blocks_set[:] = 0
        for follower in self.followers:
            follower.reset()

    def apply(self, plan: StepPlan, kv: KVCache) -> None:
        """Carry out all but the run. Raises PlanError."""
        self.upload.begin()
        if plan.drops:
            self._drop(column("drops", plan.drops, self.max_rows))
        if plan.fork_src or plan.fork_dst:
            self._fork(plan)
        if plan.copy_src or plan.copy_dst:
            self._copy_blocks(plan, kv)
        if plan.admits:
            self._admit(plan.admits)
        if plan.delta_rows or plan.delta_slots or plan.delta_blocks:
            self._set_tables(plan, kv.num_blocks)
            if plan.admits:  # decodes take few blocks, and not many until somebody comes
                kv.reach(int(self.last_change[1].max()))
        if plan.append_rows or plan.append_tokens:
            self._append(plan)

    def _drop(self, rows: np.ndarray) -> None:
        self.known[rows] = 0
        gone = rows.tolist()
        for row in gone:
            self.asking.pop(row, None)
            self.failed.pop(row, None)
            self.pooled.pop(row, None)
        if self.slots is not None:
            self.adapters[rows] = -1
        self.sampling.drop(gone)
        if self.given is not None:
            self.given.drop(gone)
        for follower in self.followers:
            follower.drop(gone)

    def _fork(self, plan: StepPlan) -> None:
        src = column("fork_src", plan.fork_src, self.max_rows)
        dst = column("fork_dst", plan.fork_dst, self.max_rows)
        if len(plan.fork_seeds) % 8:
            raise PlanError(f"fork_seeds has {len(plan.fork_seeds)} bytes, not a whole number of uint64 items")
        seeds = np.frombuffer(plan.fork_seeds, np.uint64)
        _same_length(fork_src=src, fork_dst=dst, fork_seeds=seeds)
        _distinct("fork_dst", dst)
        if not self.known[src].all():
            raise PlanError(f"fork_src names row {src[self.known[src] == 0][0]}, which has no owner")
        length = int(self.known[src].max(initial=0))
        # A right-hand side is gathered in full before anything is written, so a source may be a destination too.
        for array in (self.known, self.blocks_set, self.prompt_len, self.grows, self.tables_host):
            array[dst] = array[src]
        if self.slots is not None:
            self.adapters[dst] = self.adapters[src]
        from_rows, to_rows = self.upload(src, dst)
        self.tokens[to_rows, :length] = self.tokens[from_rows, :length]
        if not self.on_host:
            self.tables.index_copy_(0, to_rows, self.tables.index_select(0, from_rows))
        sources, copies = src.tolist(), dst.tolist()
        self.sampling.copy(sources, copies, seeds.tolist())
        failures = [self.failed.get(row) for row in sources]
        for row, failure in zip(copies, failures, strict=True):
            self.asking.pop(row, None)  # one child of a request tells its prompt's logprobs
            self.failed.pop(row, None)
            if failure is not None:
                self.failed[row] = failure
        for follower in self.followers:
            follower.copy(sources, copies)

    def _copy_blocks(self, plan: StepPlan, kv: KVCache) -> None:
        src = column("copy_src", plan.copy_src, kv.num_blocks)
        dst = column("copy_dst", plan.copy_dst, kv.num_blocks)
        _same_length(copy_src=src, copy_dst=dst)
        _distinct("copy_dst", dst)
        kv.copy_blocks(*self.upload(src, dst))

    def _admit(self, admits: list[Admit]) -> None:
        checked = [self._checked_ids(admit) for admit in admits]
        for admit, ids, tokens in zip(admits, checked, self.upload(*checked), strict=True):
            row, length, work = admit.row, len(ids), admit.work
            if self.known[row]:
                self._drop(np.array([row]))
            self.known[row], self.prompt_len[row], self.blocks_set[row] = length, admit.prompt_len, 0
            self.tokens[row, :length] = tokens
            if self.slots is not None:
                self.adapters[row] = admit.adapter_slot
            if isinstance(work, Generate):
                self._admit_drawing(admit, work, ids)
                if (embeds := embeds_of(work)) is not None:
                    self._give(row, embeds)
            else:
                self.pooled[row] = work

    def _admit_drawing(self, admit: Admit, work: Generate, ids: np.ndarray) -> None:
        row, prompt_len, params = admit.row, admit.prompt_len, work.params
        self.grows[row] = not params.use_beam_search
        self.sampling.admit(row, work, child_seed(work.seed, admit.index), prompt_len, ids)
        if admit.prompt_logprobs_from >= 0 and params.prompt_logprobs is not None:
            k = params.prompt_logprobs
            self.asking[row] = (admit.prompt_logprobs_from, self.vocab_size if k < 0 else min(k, self.vocab_size))
        if params.structured_outputs is not None or isinstance(work, ThinkingGenerate):
            _there(self.grammars, "grammars", row).admit(row, work, prompt_len, ids)
        if params.logits_processors:
            _there(self.processors, "logits processors", row).admit(row, work, prompt_len, ids)

    def _give(self, row: int, embeds: Embeds) -> None:
        """The prompt of ``row`` is made of embeddings; where it cannot be, nothing is drawn for it."""
        try:
            if self.given is None:
                raise ValueError("this worker takes no prompt_embeds; start it with --enable-prompt-embeds.")
            self.given.admit(row, embeds)
        except (ValueError, RuntimeError) as error:
            self.failed[row] = Failure(400, str(error), "prompt_embeds")

    def _checked_ids(self, admit: Admit) -> np.ndarray:
        if not 0 <= admit.row < self.max_rows:
            raise PlanError(f"admits holds row {admit.row}, which is not in [0, {self.max_rows})")
        ids = column("admits.ids", admit.ids, self.vocab_size)
        if not 0 < len(ids) <= self.max_model_len:
            raise PlanError(f"admits holds {len(ids)} ids, which is not in [1, {self.max_model_len}]")
        if not 0 <= admit.prompt_len <= len(ids):
            raise PlanError(f"admits holds prompt_len {admit.prompt_len} for {len(ids)} ids")
        if admit.prompt_logprobs_from < -1:
            raise PlanError(f"admits holds prompt_logprobs_from {admit.prompt_logprobs_from}, which is below -1")
        if (slot := admit.adapter_slot) != -1 and not (self.slots is not None and self.slots.holds(slot)):
            raise PlanError(f"admits holds adapter slot {slot}, which is empty, or not there")
        if isinstance(work := admit.work, Generate):
            column("admits.suppressed_ids", work.suppressed_ids, self.vocab_size)
            if (end := thought_end(work)) is None:
                raise PlanError("admits.thinking has no marks")
            self._check_ids("thinking", end)
            self._check_ids("bad_words", [token for word in work.bad_words for token in word])
            self._check_ids("allowed_token_ids", work.params.allowed_token_ids or [])
            self._check_ids("logit_bias", list(work.params.logit_bias or ()))
            if not all(work.bad_words):
                raise PlanError("admits.bad_words holds a word of no tokens")
        return ids.astype(np.int32)

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise PlanError(f"admits.{name} holds {bad}, which is not in [0, {self.vocab_size})")

    def _set_tables(self, plan: StepPlan, num_blocks: int) -> None:
        rows = column("delta_rows", plan.delta_rows, self.max_rows)
        slots = column("delta_slots", plan.delta_slots, self.max_blocks)
        blocks = column("delta_blocks", plan.delta_blocks, num_blocks)
        _same_length(delta_rows=rows, delta_slots=slots, delta_blocks=blocks)
        if np.count_nonzero(slots != self.blocks_set[rows]):
            self.blocks_set = self._grown(rows, slots)
        else:  # a decode's: each slot is the next one of its row
            self.blocks_set[rows] = slots + 1
        self.last_change = rows, blocks
        self.tables_host[rows, slots] = blocks  # a slot set twice takes the later value
        if not self.on_host:
            # Those that the host took, as the device's order of writes is not defined.
            r, s, b = self.upload(rows, slots, self.tables_host[rows, slots])
            self.tables.index_put_((r, s), b)

    def _grown(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """``blocks_set`` after ``slots`` of ``rows`` are set in any order. Raises PlanError where a slot is left
        out."""
        rows, slots = np.divmod(np.unique(rows * self.max_blocks + slots), self.max_blocks)
        new = slots >= self.blocks_set[rows]
        end = self.blocks_set.copy()
        np.maximum.at(end, rows, slots + 1)
        grown = self.blocks_set + np.bincount(rows[new], minlength=self.max_rows)
        if (end != grown).any():
            row = int(np.flatnonzero(end != grown)[0])
            raise PlanError(f"delta_slots leaves a hole in row {row}'s table of {self.blocks_set[row]} blocks")
        return grown

    def _append(self, plan: StepPlan) -> None:
        rows = column("append_rows", plan.append_rows, self.max_rows)
        tokens = column("append_tokens", plan.append_tokens, self.vocab_size)
        _same_length(append_rows=rows, append_tokens=tokens)
        _distinct("append_rows", rows)
        known = self.known[rows]
        if not known.all():
            raise PlanError(f"append_rows names row {rows[known == 0][0]}, which has no owner")
        if (known > self.max_model_len).any():
            row = rows[known > self.max_model_len][0]
            raise PlanError(f"append_rows names row {row}, which is full with {self.known[row]} tokens")
        r, at, values = self.upload(rows, known, tokens.astype(np.int32))
        self.tokens.index_put_((r, at), values)
        self.known[rows] += 1
        self.sampling.append(rows, tokens)
        for follower in self.followers:
            follower.append(rows.tolist(), tokens.tolist())

    def checked_run(self, plan: StepPlan, max_tokens: int) -> Run:
        """The run part; call after ``apply``. Raises PlanError where it asks for tokens or blocks a row lacks."""
        columns = (plan.rows, plan.counts, plan.sample_src, plan.sample_rows, max_tokens)
        if self._composition is None or self._composition[0] != columns:
            self._composition = columns, self._checked_composition(plan, max_tokens)
        rows, counts, src, dst, pure_decode = self._composition[1]
        starts = column("starts", plan.starts, self.max_model_len)
        _same_length(rows=rows, starts=starts)
        ends = starts + counts
        self._check_ends(rows, ends)
        positions = ends[src]
        wrong = self.known[dst] != positions
        if np.count_nonzero(wrong):
            row, position = dst[wrong][0], positions[wrong][0]
            raise PlanError(f"sample_rows draws position {position} of row {row}, which has {self.known[row]} tokens")
        return Run(rows, starts, counts, ends, src, dst, positions, pure_decode)

    def _checked_composition(self, plan: StepPlan, max_tokens: int) -> Composition:
        """What can be said of a run without the rows' lengths. Raises PlanError."""
        rows = column("rows", plan.rows, self.max_rows)
        counts = column("counts", plan.counts, max_tokens + 1, low=1)
        _same_length(rows=rows, counts=counts)
        _distinct("rows", rows)
        if (tokens := int(counts.sum())) > max_tokens:
            raise PlanError(f"counts sum to {tokens} tokens, over max_num_batched_tokens {max_tokens}")
        src = column("sample_src", plan.sample_src, len(rows))
        dst = column("sample_rows", plan.sample_rows, self.max_rows)
        _same_length(sample_src=src, sample_rows=dst)
        _distinct("sample_rows", dst)
        return Composition(rows, counts, src, dst, tokens == len(rows))

    def _check_ends(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """Raises PlanError where a row has no tokens, or no blocks for them, up to its end."""
        limits = {
            "tokens": np.minimum(self.known[rows], self.max_model_len),
            "tokens' blocks": self.blocks_set[rows] * self.block_size,
        }
        for of, limit in limits.items():
            over = ends > limit
            if np.count_nonzero(over):
                at = int(over.argmax())
                raise PlanError(f"starts + counts reaches {ends[at]} in row {rows[at]}, which has {limit[at]} {of}")

    def sample_batch(self, run: Run, rows: torch.Tensor, positions: torch.Tensor) -> SampleBatch:
        """The sample slots of ``run``; ``rows`` and ``positions`` are theirs on the device."""
        needs = self.sampling.needs(run.sample_rows, run.positions)
        slots = SampleBatch(rows, positions, run.sample_rows, run.positions, self.tokens, needs)
        if self.failed:
            failed = ((slot, self.failed.get(row)) for slot, row in enumerate(run.sample_rows.tolist()))
            slots.failed.update((slot, why) for slot, why in failed if why is not None)
        return slots

    def prompt_spans(self, run: Run, room: int) -> list[Span]:
        """The prompt tokens that this run can tell the logprobs of, those with as many others each side by side.

        A token's logprob comes of the logits at the position before it. Rows whose logprobs would take more than
        ``room`` bytes of the answer are marked as failed: they fail when they first draw.
        """
        spans = []
        for at, row in enumerate(run.rows.tolist()):
            if row not in self.asking:
                continue
            (wanted, k), end = self.asking[row], int(self.prompt_len[row])
            first = max(wanted, int(run.starts[at]) + 1)
            count = min(int(run.starts[at] + run.counts[at]) + 1, end) - first
            if count <= 0:
                continue
            size = logprob_bytes(count, k)
            if size > room:
                self.failed[row] = Failure(400, _TOO_MUCH.format(count=count, k=k), "prompt_logprobs")
                del self.asking[row]
                continue
            room -= size
            spans.append(Span(at, row, first, count, k))
            if first + count == end:
                del self.asking[row]
        return sorted(spans, key=lambda span: span.k)
