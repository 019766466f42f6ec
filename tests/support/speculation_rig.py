"""The scheduler's core and one real runner, plan by plan, two in flight: with a proposer, or without."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.program import Program
from quire.gpu_worker.outcome import Outcome
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.sampling.followers import Follower, Histories
from quire.gpu_worker.sampling.processors import Processors
from quire.gpu_worker.speculation.loading import Drafting
from quire.gpu_worker.speculation.methods import speculative_runner
from quire.gpu_worker.speculation.proposer import Proposer
from quire.gpu_worker.speculation.runner import SpeculativeRunner
from quire.gpu_worker.state import RowState
from quire.proto.codec import from_i8, from_i32, from_i64, i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Failed, Finish, Lease, StepPlan, Submit, TokenBatch
from quire.proto.params import SamplingParams
from quire.proto.speculation import SpeculativeConfig
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.draft_worth import DraftWorth
from quire.scheduler.replica import Replica

BLOCK = 8
LEASE = Lease(1, 0, 1)
Make = Callable[[RowState], Proposer]


class Driven:
    """``proposer`` of the rows makes what drafts, or ``drafting``'s does; None: nothing does."""

    def __init__(
        self, model: Any, vocab: int, proposer: Make | None = None, drafts: int = 4, draft_rows: int = 8, rows: int = 8,
        length: int = 256, blocks: int = 128, budget: int = 128, grammars: Any = None, functions: Any = None,
        adapt: bool = False, drafting: Drafting | None = None, config: SpeculativeConfig | None = None,
    ):  # fmt: skip
        """``config``: as a worker makes its runner by it, ``drafting`` loaded, of a model that a group may share."""
        device, group = getattr(model, "device", torch.device("cpu")), getattr(model, "group", Group())
        self.vocab, self.length = vocab, length
        self.core = Scheduler(
            EngineArgs(block_size=BLOCK, max_num_seqs=rows, max_num_batched_tokens=budget), clock=lambda: 0.0
        )
        self.replica = Replica(0, LEASE, "w", rows, blocks, BLOCK, length, vocab, device="cpu")
        self.state = RowState(
            rows, length, BLOCK, vocab, device, "raw_logprobs", grammars and Follower(grammars),
            Follower(Processors(functions or {}) if group.leader else Histories()), group.leader,
        )  # fmt: skip
        self.kv = KVCache(model.spec, blocks, BLOCK, model.cache_dtype, device)
        self.runner: Runner
        if config is not None:
            self._drafts(config.drafts, draft_rows)
            self.runner = speculative_runner(config, model, self.state, self.kv, budget, drafting, group)
        elif proposer is None and drafting is None:
            self.runner = Runner(model, self.state, self.kv, budget, group=group)
        else:
            self._drafts(drafts, draft_rows)

            def make(program: Program | None) -> Proposer:
                if drafting is not None:
                    return drafting.proposer(self.state, self.kv, budget, None, program)
                assert proposer is not None
                return proposer(self.state)

            self.runner = SpeculativeRunner(
                model, self.state, self.kv, budget, proposer=make, drafts=drafts, draft_rows=draft_rows, adapt=adapt,
                cost=0.12, taps=drafting.taps if drafting else (),
            )  # fmt: skip
        self.core.add_replica(self.replica)
        self.flying: deque[tuple[StepPlan, Outcome]] = deque()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], list[tuple[bytes, bytes, bytes]]] = {}
        self.prompts: dict[int, list[bytes]] = {}
        self.ends: dict[tuple[int, int], tuple[Finish, int]] = {}
        self.failed: dict[int, Failed] = {}
        self.steps = 0

    def _drafts(self, drafts: int, rows: int) -> None:
        """So many tokens are drafted, always, for at most ``rows`` rows."""
        self.replica.drafts, self.replica.draft_rows = drafts, rows
        self.replica.draft_worth = DraftWorth(rows, always=True)

    def submit(self, uid: int, prompt: list[int], seed: int = 0, eos: tuple[int, ...] = (), **params: Any) -> None:
        """A request; ``more`` of Generate are told as such."""
        told = {name: params.pop(name) for name in ("suppressed_ids", "bad_words") if name in params}
        ids = i32(prompt)
        work = Generate(SamplingParams(**params), seed or uid, list(eos), **told)
        hashes = b"".join(hash_blocks(ids, BLOCK))
        self.core.submit("d", Submit(uid, 1, ids, hashes, work, float(uid), prompt_logprobs_from=0))

    def run(self) -> Driven:
        """Until nothing is left."""
        for _ in range(5000):
            while (plan := self.core.plan(self.replica)) is not None:
                self.flying.append((plan, self.runner.launch(plan)))
            if not self.flying:
                break
            plan, outcome = self.flying.popleft()
            self.core.commit(self.replica, outcome.result(LEASE, plan.step))
            self.core.check_integrity()
            self.steps += 1
            self._receive()
        self._receive()
        assert not self.core.requests and not self.replica.pool.used
        return self

    def _receive(self) -> None:
        for _, message in self.core.outbox.take():
            if isinstance(message, Failed):
                self.failed[message.uid] = message
            if not isinstance(message, TokenBatch):
                continue
            flat, at = from_i32(message.tokens), 0
            uids, indexes = from_i64(message.uids), from_i32(message.indexes)
            for row, record in zip(from_i32(message.logprob_rows), message.logprobs, strict=True):
                size = len(record.ids) // (len(record.ranks) // 4)
                found = self.logprobs.setdefault((uids[row], indexes[row]), [])
                found += [
                    (record.ids[n * size :][:size], record.values[n * size :][:size], record.ranks[4 * n :][:4])
                    for n in range(len(record.ranks) // 4)
                ]
            columns = (from_i32(message.counts), from_i8(message.finishes), from_i32(message.stop_ids))
            for uid, index, count, finish, stop in zip(uids, indexes, *columns, strict=True):
                self.tokens.setdefault((uid, index), []).extend(flat[at : at + count])
                at += count
                if finish:
                    self.ends[uid, index] = Finish(finish), stop

    def outcome(self) -> tuple[Any, ...]:
        """All that a client would see."""
        return self.tokens, self.logprobs, self.ends, {uid: (f.status, f.message) for uid, f in self.failed.items()}


class Guess(Proposer):
    """Drafts what is right with some likelihood, as ``known`` outputs tell, and else anything."""

    def __init__(self, state: RowState, truth: dict[tuple[int, ...], list[int]], right: float, seed: int = 0):
        self._state, self._right = state, right
        self._truth = {prompt: [*prompt, *outputs] for prompt, outputs in truth.items()}
        self._rng = np.random.default_rng(seed)

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        drafts = self._rng.integers(0, self._state.vocab_size, (len(rows), int(most.max()))).astype(np.int32)
        found = np.minimum(most, self._rng.integers(0, drafts.shape[1] + 1, len(rows)) + 1)
        for at, row in enumerate(rows.tolist()):
            have = self._state.tokens_host[row, : self._state.known[row]].tolist()
            for tokens in self._truth.values():
                if tokens[: len(have)] == have:
                    ahead = tokens[len(have) : len(have) + drafts.shape[1]]
                    mine = self._rng.random(len(ahead)) < self._right
                    drafts[at, : len(ahead)][mine] = np.array(ahead, np.int32)[mine]
        return drafts, found
