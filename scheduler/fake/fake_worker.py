"""A worker without a model: the real protocol, and a store of pages that turns a wrong block into a wrong token.

Each token is written through the row's block table, and the token drawn for position p is a hash of the seed, p and
everything read back through the table, and so are logprobs; so whatever the scheduler does wrong with blocks shows.
``fake_model`` computes what must come out. ``python -m quire.scheduler.fake.fake_worker`` runs it as a process.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from array import array

import zmq

from ...proto.codec import BadFrame, from_i32, from_u64, i32
from ...proto.messages import (
    PROTOCOL,
    Admit,
    Assign,
    Bye,
    Configure,
    Drain,
    FromSchedulerWorkers,
    Heartbeat,
    Hello,
    Lease,
    Loaded,
    Logprobs,
    PromptChunk,
    Ready,
    SlotFailed,
    SlotPooled,
    StepFailed,
    StepPlan,
    StepResult,
)  # fmt: skip
from ...proto.params import SamplingParams
from ...proto.process import die, new_incarnation, setup_logging, watch_parent
from ...proto.wire.sockets import DISCONNECTED, Dealer, worker_endpoint
from ...proto.work import Generate, Pool, child_seed
from .fake_model import cell, distribution, draw, join, pooled, record

HEARTBEAT_S = 1.0
UNWRITTEN = -1
ORDINARY = 10
"""Ids below are special tokens in many vocabularies: such a token has no text, or ends a sequence."""
PROMPT_SLICE = 16
"""Prompt logprobs in one piece, at most; a longer chunk's come in several."""


class PlanError(ValueError):
    """A plan that no worker can run."""


class Row:
    """One persistent row: what it was admitted with, and all tokens so far."""

    def __init__(self, admit: Admit, tokens: list[int], seed: int):
        self.admit, self.tokens, self.seed = admit, tokens, seed
        self.table: list[int] = []
        self.computed = -1  # positions written; -1 until the first chunk says what was found in the cache


class PageStore:
    """Rows and pages of one lease. ``pages=False`` keeps none and draws ids in turn, for benches. ``whole`` prompts
    must come in one piece.

    Slots of requests in ``failing`` (uids) draw nothing and are reported as failed.
    """

    def __init__(
        self, num_rows: int, num_blocks: int, block_size: int, vocab_size: int, pages: bool = True, whole: bool = False
    ):
        self.num_rows, self.num_blocks, self.block_size = num_rows, num_blocks, block_size
        self.vocab_size, self.whole = vocab_size, whole
        self.rows: dict[int, Row] = {}
        self.pages = [array("q", [UNWRITTEN] * block_size) for _ in range(num_blocks if pages else 0)]
        self._in_turn = b"" if pages else _ids_in_turn(vocab_size, num_rows)
        self.last_step = 0
        self.failing: set[int] = set()

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
        result = StepResult(plan.lease, plan.step, b"")
        ends = self._compute(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), result)
        self._sample(ends, from_i32(plan.sample_src), from_i32(plan.sample_rows), result)
        return result

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
            new = Row(old.admit, old.tokens[:], seed)
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
        self.rows[admit.row] = Row(admit, tokens, seed)

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
                page[position % self.block_size] = cell(position, row.tokens[position])
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
        return token, record(values, token, k)

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


def _same_length(*columns: list[int]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise PlanError(f"columns of {[len(column) for column in columns]}")


class FakeWorker:
    """The worker's side of the protocol. ``handle`` takes what the scheduler sent and returns what to answer."""

    def __init__(
        self, num_blocks: int = 512, max_model_len: int = 2048, vocab_size: int = 1000, pages: bool = True,
        pools: bool = False, whole: bool = False,
    ):  # fmt: skip
        self.num_blocks, self.max_model_len, self.vocab_size, self.pages = num_blocks, max_model_len, vocab_size, pages
        self.pools, self.whole = pools, whole
        self.store: PageStore | None = None
        self.poison: int | None = None  # the first token of prompts that kill this process
        self._assign: Assign | None = None

    def hello(self, incarnation: str, loaded: bool = False) -> Hello:
        """The first message of a connection."""
        return Hello("gpu_worker", incarnation, PROTOCOL, os.getpid(), device="fake", loaded=loaded)

    def handle(self, message: Assign | Configure | StepPlan | Drain | Heartbeat | Bye) -> list:
        """The answers to one message; messages of another lease than the last are ignored."""
        if isinstance(message, Assign):
            self._assign, self.store = message, None
            sizes = (self.num_blocks, self.max_model_len, self.vocab_size)
            return [Loaded(message.lease, *sizes, self.pools, self.whole)]
        if isinstance(message, Drain):
            return [Bye("drained")]
        if isinstance(message, Configure) and self._current(message.lease):
            assert self._assign is not None
            rows, size = self._assign.max_num_seqs, self._assign.block_size
            self.store = PageStore(rows, message.num_blocks, size, self.vocab_size, self.pages, self.whole)
            return [Ready(message.lease)]
        if isinstance(message, StepPlan) and self._current(message.lease) and self.store is not None:
            if self.poison is not None and any(from_i32(admit.ids)[0] == self.poison for admit in message.admits):
                os._exit(70)
            try:
                return [self.store.run(message)]
            except (PlanError, BadFrame) as error:
                return [StepFailed(message.lease, message.step, f"{type(error).__name__}: {error}")]
        return []

    def _current(self, lease: Lease) -> bool:
        return self._assign is not None and lease == self._assign.lease

    @property
    def last_step(self) -> int:
        """The last finished step of this lease."""
        return self.store.last_step if self.store else 0


def main(argv: list[str] | None = None) -> None:
    """Serve until the scheduler says Bye or a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m quire.scheduler.fake.fake_worker")
    parser.add_argument("--scheduler", required=True, help="the scheduler's address")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--page-store", choices=("on", "off"), default="on", help="off: ids in turn")
    parser.add_argument("--pools", choices=("no", "chunks", "whole"), default="no", help="pool prompts; whole: uncut")
    parser.add_argument("--delay-ms", type=float, nargs=2, default=(0.0, 0.0), metavar=("LOW", "HIGH"))
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--poison", type=int, help="a prompt that begins with this token kills the worker")
    args = parser.parse_args(argv)
    setup_logging("fake_worker")
    watch_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    worker = FakeWorker(
        args.num_blocks, args.max_model_len, args.vocab_size, args.page_store == "on", args.pools != "no",
        args.pools == "whole",
    )  # fmt: skip
    worker.poison = args.poison
    _serve(worker, args.scheduler, tuple(args.delay_ms), random.Random(args.seed))


_leaving: list[int] = []  # signals that came


def _leave(number: int, frame: object) -> None:
    """The first asks to drain, the second ends it."""
    if _leaving:
        sys.exit(0)
    _leaving.append(number)


def _serve(worker: FakeWorker, address: str, delay_ms: tuple[float, float], rng: random.Random) -> None:
    loaded = False
    while True:
        incarnation = new_incarnation("gpu_worker")
        wire: Dealer = Dealer(FromSchedulerWorkers, worker_endpoint(address), incarnation)
        wire.send(worker.hello(incarnation, loaded))
        loaded = True
        try:
            _run_lease(worker, wire, delay_ms, rng)
        finally:
            wire.close()
        if _leaving:
            sys.exit(0)


def _run_lease(worker: FakeWorker, wire: Dealer, delay_ms: tuple[float, float], rng: random.Random) -> None:
    """Answer until the connection breaks or a step fails; then the caller says Hello under a fresh identity."""
    monitor, poller = wire.monitor(), zmq.Poller()
    poller.register(wire.socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    next_heartbeat, asked = time.monotonic() + HEARTBEAT_S, False
    while True:
        readable = dict(poller.poll(min(100, max(0, int((next_heartbeat - time.monotonic()) * 1000)))))
        if _leaving and not asked:
            asked = True
            wire.send(Drain("it was asked to end"))
        if time.monotonic() >= next_heartbeat:
            next_heartbeat = time.monotonic() + HEARTBEAT_S
            wire.send(Heartbeat(worker.last_step))
        while (event := wire.next_event()) is not None:
            if event == DISCONNECTED:
                return
        # One at a time: behind a slow plan the next one always waits; heartbeats and signals cannot wait for a gap.
        if wire.socket in readable and (message := wire.recv()) is not None:
            if isinstance(message, Bye):
                if message.again:
                    return
                die("fake_worker", message.reason)
            if isinstance(message, StepPlan) and delay_ms[1]:
                time.sleep(rng.uniform(*delay_ms) / 1000)
            for answer in worker.handle(message):
                wire.send(answer)
                if isinstance(answer, StepFailed):
                    return
                if isinstance(answer, Bye):
                    sys.exit(0)


if __name__ == "__main__":
    main()
