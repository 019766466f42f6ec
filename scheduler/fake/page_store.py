"""Rows and pages of a worker without a model: a wrong block becomes a wrong token.

Each token is written through the row's block table, and the token drawn for position p is a hash of the seed, p and
everything read back through the table, and so are logprobs; so whatever the scheduler does wrong with blocks shows.
``fake_model`` computes what must come out.
"""

from __future__ import annotations

from array import array
from typing import Any

from ...proto.codec import from_i8, from_i32, from_u64, i32
from ...proto.hashing import HASH_SIZE
from ...proto.messages import (
    Admit,
    Logprobs,
    Move,
    Moved,
    PromptChunk,
    SlotFailed,
    SlotPooled,
    SpeculativePlan,
    SpeculativeResult,
    StepPlan,
    StepResult,
)
from ...proto.params import SamplingParams
from ...proto.work import Generate, Pool, child_seed
from .fake_model import cell, distribution, draw, join, pooled, record

UNWRITTEN = -1
ORDINARY = 10
"""Ids below are special tokens in many vocabularies: such a token has no text, or ends a sequence."""
PROMPT_SLICE = 16
"""Prompt logprobs in one piece, at most; a longer chunk's come in several."""


MOST_FILES = 40


class PlanError(ValueError):
    """A plan that no worker can run."""


class Row:
    """One persistent row: what it was admitted with, and all tokens so far."""

    def __init__(self, admit: Admit, tokens: list[int], seed: int, adapter: int = 0):
        self.admit, self.tokens, self.seed, self.adapter = admit, tokens, seed, adapter
        self.table: list[int] = []
        self.computed = -1  # positions written; -1 until the first chunk says what was found in the cache


class PageStore:
    """Rows and pages of one lease. ``pages=False`` keeps none and draws ids in turn, for benches. ``whole`` prompts
    must come in one piece. Where a plan has it speculate, it drafts up to ``drafts`` tokens, of which some are wrong.

    Slots of requests in ``failing`` (uids) draw nothing and are reported as failed. ``slots`` pages are kept in host
    memory, and others in ``disk``, which outlives the store: by hash, at most ``MOST_FILES``; each
    load from there of a number that ``rotten`` divides fails.
    """

    def __init__(
        self, num_rows: int, num_blocks: int, block_size: int, vocab_size: int, pages: bool = True,
        whole: bool = False, drafts: int = 0,
        slots: int = 0, disk: dict[bytes, array] | None = None, rotten: int = 0,
    ):  # fmt: skip
        self.num_rows, self.num_blocks, self.block_size = num_rows, num_blocks, block_size
        self.vocab_size, self.whole, self.drafts = vocab_size, whole, drafts
        self.rows: dict[int, Row] = {}
        self.pages = [array("q", [UNWRITTEN] * block_size) for _ in range(num_blocks if pages else 0)]
        self._in_turn = b"" if pages else _ids_in_turn(vocab_size, num_rows)
        self.host: list[array | None] = [None] * slots
        self.disk, self.rotten, self._loads = disk, rotten, 0
        self.last_step = 0
        self.failing: set[int] = set()
        self.adapters: dict[int, int] = {}  # the tag of what is in each slot

    def run(self, plan: StepPlan) -> StepResult:
        """Apply a plan in the documented order. Raises PlanError."""
        if plan.step != self.last_step + 1:
            raise PlanError(f"step {plan.step} after step {self.last_step}")
        self.last_step = plan.step
        if not self.pages:
            first = 4 * (plan.step % self.vocab_size)
            return StepResult(plan.lease, plan.step, self._in_turn[first : first + len(plan.sample_rows)])
        for row in from_i32(plan.drops):
            if self.rows.pop(row, None) is None:
                raise PlanError(f"dropped row {row} is empty")
        self._fork(from_i32(plan.fork_src), from_i32(plan.fork_dst), from_u64(plan.fork_seeds))
        self._copy(from_i32(plan.copy_src), from_i32(plan.copy_dst))
        for admit in plan.admits:
            self._admit(admit)
        self._set_tables(from_i32(plan.delta_rows), from_i32(plan.delta_slots), from_i32(plan.delta_blocks))
        self._append(from_i32(plan.append_rows), from_i32(plan.append_tokens))
        if isinstance(plan, SpeculativePlan) and plan.draft_rows:
            return self._speculate(plan)
        result = StepResult(plan.lease, plan.step, b"")
        ends = self._compute(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), result)
        self._sample(ends, from_i32(plan.sample_src), from_i32(plan.sample_rows), result)
        return result

    def _speculate(self, plan: SpeculativePlan) -> SpeculativeResult:
        """The rows that speculate run first, so that the others' part is that of a plan without them."""
        result = SpeculativeResult(plan.lease, plan.step, b"")
        columns = list(zip(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), strict=True))
        marked, targets = from_i32(plan.draft_rows), from_i32(plan.sample_rows)
        if marked != list(range(marked[0], marked[0] + len(marked))) or not marked[-1] < len(columns):
            raise PlanError(f"rows {marked} of {len(columns)} speculate")
        verified = []
        for at in marked:
            row, first, count = columns[at]
            if targets[at] != row or from_i32(plan.sample_src)[at] != at:
                raise PlanError(f"slot {at} is not that of row {row}, which speculates")
            verified.append(self._verify(self._row(row), first, first + count))
        rest = StepResult(plan.lease, plan.step, b"")
        others = [column for at, column in enumerate(columns) if at not in marked]
        kept = [slot for slot in range(len(targets)) if slot not in marked]
        sources = [src - len(marked) * (src > marked[-1]) for src in (from_i32(plan.sample_src)[slot] for slot in kept)]
        if others:
            rows, starts, counts = ([column[n] for column in others] for n in range(3))
            ends = self._compute(rows, starts, counts, rest)
            self._sample(ends, sources, [targets[slot] for slot in kept], rest)
        return self._join(result, rest, marked, verified, kept)

    def _join(
        self, result: SpeculativeResult, rest: StepResult, marked: list[int],
        verified: list[tuple[list[int], Logprobs | None, int]], kept: list[int],
    ) -> SpeculativeResult:  # fmt: skip
        """The answers of rows that speculated and of the others, by the plan's slots."""
        tokens = dict(zip(kept, ([token] for token in from_i32(rest.tokens)), strict=True))
        found = dict(zip((kept[slot] for slot in from_i32(rest.logprob_slots)), rest.logprobs, strict=True))
        for failed in rest.failed:
            result.failed.append(SlotFailed(kept[failed.slot], failed.status, failed.message))
        for slot, (drawn, logprobs, _) in zip(marked, verified, strict=True):
            tokens[slot] = drawn or [-1]
            if not drawn:
                result.failed.append(SlotFailed(slot, 503, "the request fails"))
            elif logprobs is not None:
                found[slot] = logprobs
        before = marked[0]  # compute rows of prompts come behind those that speculate
        result.prompts = [PromptChunk(p.at + len(marked) * (p.at >= before), p.start, p.logprobs) for p in rest.prompts]
        result.tokens = i32(token for slot in sorted(tokens) for token in tokens[slot])
        result.counts = i32(len(tokens[slot]) for slot in sorted(tokens))
        result.logprob_slots, result.logprobs = i32(sorted(found)), [found[slot] for slot in sorted(found)]
        result.drafted = i32(tried for _, _, tried in verified)
        return result

    def _verify(self, row: Row, first: int, stop: int) -> tuple[list[int], Logprobs | None, int]:
        """Draw as long as what is drafted is right; then there is one wrong token, whose cell is to be written over.
        Returns tokens (none: it fails), logprobs, and how many were drafted."""
        start, work = row.computed, row.admit.work
        if not first <= start < stop or start != len(row.tokens) - 1 or not isinstance(work, Generate):
            raise PlanError(f"a row at {start} of {len(row.tokens)} tokens speculates from {first} to {stop}")
        if row.admit.uid in self.failing:
            return [], None, 0
        drawn: list[int] = []
        records = []
        tried = row.tokens[start] % (1 + min(self.drafts, stop - start - 1))
        while len(drawn) <= tried:
            position = start + len(drawn)
            self._page(self._block(row, position))[position % self.block_size] = cell(
                position, row.tokens[position], row.adapter
            )
            context = self._context(row, position + 1)
            token = draw(row.seed, position + 1, context, self.vocab_size)
            if work.params.logprobs is not None:
                records.append(self._score(work.params, context, token)[1])
            drawn.append(token)
            row.tokens.append(token)
            if token % 4 == 0:  # something else was drafted
                break
        row.computed = start + len(drawn)
        for position in range(row.computed, start + 1 + tried):
            self._page(self._block(row, position))[position % self.block_size] = cell(position, self.vocab_size)
        return drawn, join(records) if records else None, tried

    def read_blocks(self, blocks: list[int]) -> bytes:
        """The pages of these, as they go to another worker."""
        return b"".join(self._page(block).tobytes() for block in blocks)

    def write_blocks(self, blocks: list[int], data: bytes) -> None:
        """Pages that came from another worker. PlanError where they are not of these blocks' size."""
        size = 8 * self.block_size
        if len(data) != size * len(blocks):
            raise PlanError(f"{len(data)} bytes for {len(blocks)} pages")
        for at, block in enumerate(blocks):
            self._page(block)[:] = array("q", data[size * at : size * (at + 1)])

    def move(self, move: Move) -> list[Moved]:
        """Store and load pages: what is done at once, and what becomes of files. Raises PlanError."""
        written, lost, failed = [], [], []
        hashes = _hashes(move.store_hashes)
        columns = from_i32(move.store_blocks), from_i32(move.store_slots), from_i8(move.store_files), hashes
        _same_length(*columns)
        for block, slot, to_disk, block_hash in zip(*columns, strict=True):
            page = self._page(block)[:]
            if UNWRITTEN in page:
                raise PlanError(f"block {block} is stored, and is not full")
            if slot >= 0:
                self.host[self._slot(slot)] = page
            if to_disk:
                lost += self._keep(block_hash, page)
                written.append(block_hash)
        loads = from_i32(move.load_blocks), from_i32(move.load_slots), _hashes(move.load_hashes)
        _same_length(*loads)
        for place, (block, slot, block_hash) in enumerate(zip(*loads, strict=True)):
            found = self._file(block_hash) if slot < 0 else self.host[self._slot(slot)]
            if found is None:
                failed.append(place)
            self._page(block)[:] = found if found is not None else array("q", [UNWRITTEN] * self.block_size)
        answers = [Moved(move.lease, move.number, i32(failed))]
        if written or lost:
            answers.append(Moved(move.lease, 0, b"", b"".join(written), b"".join(lost)))
        return answers

    def _file(self, block_hash: bytes) -> array | None:
        self._loads += 1
        if self.disk is None or (self.rotten and self._loads % self.rotten == 0):
            return None
        return self.disk.get(block_hash)

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < len(self.host):
            raise PlanError(f"slot {slot} of {len(self.host)}")
        return slot

    def _keep(self, block_hash: bytes, page: array) -> list[bytes]:
        """Write a file. The hashes of those that made room."""
        if self.disk is None:
            raise PlanError("a page is to go to disk, where nothing is kept")
        lost = [next(iter(self.disk))] if len(self.disk) >= MOST_FILES and block_hash not in self.disk else []
        for each in lost:
            del self.disk[each]
        self.disk[block_hash] = page
        return lost

    def _row(self, row: int) -> Row:
        if row not in self.rows:
            raise PlanError(f"row {row} is empty")
        return self.rows[row]

    def _new_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise PlanError(f"row {row} of {self.num_rows}")
        if row in self.rows:
            raise PlanError(f"row {row} is taken")

    def _fork(self, sources: list[int], targets: list[int], seeds: list[int]) -> None:
        _same_length(sources, targets, seeds)
        copies = []
        for src, seed in zip(sources, seeds, strict=True):
            old = self._row(src)
            new = Row(old.admit, old.tokens[:], seed, old.adapter)
            new.table, new.computed = old.table[:], old.computed
            copies.append(new)
        for dst, new in zip(targets, copies, strict=True):
            self._new_row(dst)
            self.rows[dst] = new

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        _same_length(sources, targets)
        contents = [self._page(src)[:] for src in sources]
        for dst, content in zip(targets, contents, strict=True):
            self._page(dst)[:] = content

    def _admit(self, admit: Admit) -> None:
        self._new_row(admit.row)
        tokens = from_i32(admit.ids)
        if not 0 < admit.prompt_len <= len(tokens):
            raise PlanError(f"prompt of {admit.prompt_len} in {len(tokens)} tokens")
        seed = child_seed(admit.work.seed, admit.index) if isinstance(admit.work, Generate) else 0
        if admit.adapter_slot >= 0 and admit.adapter_slot not in self.adapters:
            raise PlanError(f"row {admit.row} is to run with slot {admit.adapter_slot}, and no adapter is there")
        adapter = self.adapters[admit.adapter_slot] if admit.adapter_slot >= 0 else 0
        self.rows[admit.row] = Row(admit, tokens, seed, adapter)

    def _set_tables(self, rows: list[int], slots: list[int], blocks: list[int]) -> None:
        _same_length(rows, slots, blocks)
        for row, slot, block in zip(rows, slots, blocks, strict=True):
            table = self._row(row).table
            self._page(block)
            if not 0 <= slot <= len(table):
                raise PlanError(f"slot {slot} of a table of {len(table)}")
            table[slot : slot + 1] = [block]

    def _append(self, rows: list[int], tokens: list[int]) -> None:
        _same_length(rows, tokens)
        if len(set(rows)) != len(rows):
            raise PlanError(f"tokens are appended to rows {rows}")
        for number, token in zip(rows, tokens, strict=True):
            row = self._row(number)
            if row.computed != len(row.tokens) or not 0 <= token < self.vocab_size:
                raise PlanError(f"token {token} for row {number}, {row.computed} of {len(row.tokens)} done")
            row.tokens.append(token)

    def _compute(
        self, rows: list[int], starts: list[int], counts: list[int], result: StepResult
    ) -> list[tuple[Row, int]]:
        """Write every row's new tokens into its pages: (row, position after the last) of each compute row."""
        _same_length(rows, starts, counts)
        if not rows or len(set(rows)) != len(rows):
            raise PlanError(f"compute rows {rows}")
        ends = []
        for number, start, count in zip(rows, starts, counts, strict=True):
            row = self._row(number)
            if count < 1 or (row.computed not in (-1, start)) or start + count > len(row.tokens):
                raise PlanError(f"row {number}: {count} from {start}, {row.computed} of {len(row.tokens)} done")
            if self.whole and (start, count) != (0, len(row.tokens)):
                raise PlanError(f"row {number}: {count} from {start} of a prompt of {len(row.tokens)} that runs whole")
            for position in range(start, start + count):
                page = self._page(self._block(row, position))
                page[position % self.block_size] = cell(position, row.tokens[position], row.adapter)
            row.computed = start + count
            ends.append((row, start + count))
        for at, ((row, end), start) in enumerate(zip(ends, starts, strict=True)):
            if row.admit.prompt_logprobs_from >= 0 and isinstance(row.admit.work, Generate):
                first, k = max(row.admit.prompt_logprobs_from, start + 1), row.admit.work.params.prompt_logprobs
                self._score_prompt(row, at, first, min(end + 1, row.admit.prompt_len), self._others(k), result)
        return ends

    def _score_prompt(self, row: Row, at: int, first: int, end: int, k: int, result: StepResult) -> None:
        for start in range(first, end, PROMPT_SLICE):
            found = []
            for position in range(start, min(start + PROMPT_SLICE, end)):
                values = distribution(self._context(row, position), self.vocab_size)
                found.append(record(values, row.tokens[position], k))
            result.prompts.append(PromptChunk(at, start, join(found)))

    def _sample(self, ends: list[tuple[Row, int]], sources: list[int], targets: list[int], result: StepResult) -> None:
        _same_length(sources, targets)
        tokens, slots = [], []
        for slot, (src, dst) in enumerate(zip(sources, targets, strict=True)):
            if not 0 <= src < len(ends):
                raise PlanError(f"sample from compute row {src} of {len(ends)}")
            (source, end), target = ends[src], self._row(dst)
            if len(target.tokens) != end:
                raise PlanError(f"row {dst} has {len(target.tokens)} tokens and draws one for position {end}")
            target.computed = end
            if target.admit.uid in self.failing:
                tokens.append(-1)
                result.failed.append(SlotFailed(slot, 503, f"request {target.admit.uid} fails"))
                continue
            context = self._context(source, end)
            work = target.admit.work
            if isinstance(work, Pool):
                tokens.append(0)
                result.pooled.append(SlotPooled(slot, *pooled(context, work.params)))
                continue
            tokens.append(draw(target.seed, end, context, self.vocab_size))
            if work.params.logprobs is not None or work.params.use_beam_search:
                slots.append(slot)
                tokens[-1], found = self._score(work.params, context, tokens[-1])
                result.logprobs.append(found)
        for dst, token in zip(targets, tokens, strict=True):
            work = self.rows[dst].admit.work
            if isinstance(work, Generate) and not work.params.use_beam_search:
                self.rows[dst].tokens.append(token)
        result.tokens, result.logprob_slots = i32(tokens), i32(slots)

    def _score(self, params: SamplingParams, context: bytes, token: int) -> tuple[int, Logprobs]:
        """The logprobs of a row's drawn token, or of a beam's most likely ones."""
        values = distribution(context, self.vocab_size)
        k = self._others(params.logprobs)
        if params.use_beam_search:
            k, token = self._others(max(2 * params.width, k)), values.index(max(values))
        return token, record(values, token, k, params.logprob_token_ids)

    def _others(self, asked: int | None) -> int:
        return self.vocab_size if asked == -1 else min(asked or 0, self.vocab_size)

    def _context(self, row: Row, end: int) -> bytes:
        """What the pages hold of a row's positions before ``end``."""
        blocks = row.table[: -(-end // self.block_size)]
        return b"".join(self._page(block).tobytes() for block in blocks)[: 8 * end]

    def _block(self, row: Row, position: int) -> int:
        slot = position // self.block_size
        if slot >= len(row.table):
            raise PlanError(f"position {position} is past a table of {len(row.table)} blocks")
        return row.table[slot]

    def _page(self, block: int) -> array:
        if not 0 <= block < self.num_blocks:
            raise PlanError(f"block {block} of {self.num_blocks}")
        return self.pages[block]


def _ids_in_turn(vocab_size: int, num_rows: int) -> bytes:
    """Ids (int32) from which each step's are cut; none of the first few of a vocabulary."""
    return i32([ORDINARY + at % (vocab_size - ORDINARY) for at in range(vocab_size + num_rows)])


def _hashes(column: bytes) -> list[bytes]:
    return [column[at : at + HASH_SIZE] for at in range(0, len(column), HASH_SIZE)]


def _same_length(*columns: list[Any]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise PlanError(f"columns of {[len(column) for column in columns]}")
