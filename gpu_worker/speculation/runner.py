"""The step of a worker that speculates: drafts, one run over them, and what of them is kept.

Where a row is depends on how much of its draft the step before kept, so a plan says only from where to where it may be,
and this process knows the place. On a GPU a step with drafts waits for its tokens, once; no other step does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from ...proto.codec import i32
from ...proto.messages import SpeculativePlan, StepPlan
from ..device import LongSteps
from ..kernels.columns import LOGPROBS, PENALTIES, USES
from ..kv_cache import KVCache
from ..outcome import ROOM, Outcome, PromptGroup
from ..parallel.parallel import Group
from ..runner import Runner, outputs_of
from ..sampling.sample_batch import SampleBatch
from ..sampling.sampler import Sampled
from ..state import PlanError, RowState, Run, Span, column
from ..transfer import Arrival
from .lengths import TOKEN_COST, Lengths
from .proposer import Proposer
from .verify import Drafted, Draws, SpeculativeOutcome, Wide, widen

if TYPE_CHECKING:
    from ..models.model import Model

MANY_LOGPROBS = 1024
"""A row that asks for more of each token is not drafted for: an answer has room for so much."""


class SpeculativeRunner(Runner):
    """A Runner whose rows speculate where a plan says so. ``drafts``: tokens for a row at most."""

    def __init__(
        self, model: Model, state: RowState, kv: KVCache, max_tokens: int, *, proposer: Proposer, drafts: int,
        draft_rows: int, adapt: bool = True, group: Group | None = None, long: LongSteps | None = None,
    ):  # fmt: skip
        super().__init__(model, state, kv, max_tokens, None, group, long, drafts * draft_rows)
        self.proposer, self.drafts = proposer, drafts
        self._lengths = Lengths(self.state.max_rows, TOKEN_COST[self.state.device.type]) if adapt else None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Outcome:
        state = self.state
        state.apply(plan, self.kv)
        self._tell(plan)
        if isinstance(plan, SpeculativePlan):
            outcome: Outcome = self._speculate(plan)
        else:
            run = state.checked_run(plan, self.max_tokens)
            outcome = self._run(run) if len(run.rows) else Outcome(self._download, self._nothing)
        for follower in state.followers:
            follower.catch_up(wait=False)
        return outcome

    def _tell(self, plan: StepPlan) -> None:
        """The proposer learns what the plan does to rows, which was checked."""
        proposer, rows = self.proposer, self.state.max_rows
        if plan.drops:
            proposer.drop(column("drops", plan.drops, rows).tolist())
        if plan.fork_src:
            src, dst = (column("forks", data, rows).tolist() for data in (plan.fork_src, plan.fork_dst))
            proposer.fork(src, dst)
            if self._lengths is not None:
                self._lengths.copy(src, dst)
        if plan.copy_src:
            blocks = (column("copies", data, self.kv.num_blocks) for data in (plan.copy_src, plan.copy_dst))
            proposer.copy_blocks(*blocks)
        for admit in plan.admits:
            proposer.admit(admit.row)
        if plan.admits and self._lengths is not None:
            self._lengths.forget([admit.row for admit in plan.admits])

    # -- drafts

    def _speculate(self, plan: SpeculativePlan) -> SpeculativeOutcome:
        state = self.state
        exact, drafted = self._draft(plan)
        run = state.checked_run(exact, self.max_tokens)
        wide = widen(run, drafted)
        spans = state.prompt_spans(wide.run, ROOM) if state.asking else []
        logits, slots, prompts = self._forward(wide.run, spans)
        draws = self._draw_all(logits, slots, wide, drafted)
        return self._answer(draws, wide, drafted, prompts)

    def _draft(self, plan: SpeculativePlan) -> tuple[StepPlan, Drafted]:
        """The plan with where its rows are, and drafted tokens in them."""
        state = self.state
        rows, starts, counts = (
            column(name, data, limit)
            for name, data, limit in (
                ("rows", plan.rows, state.max_rows), ("starts", plan.starts, state.max_model_len),
                ("counts", plan.counts, self.max_tokens + 1),
            )
        )  # fmt: skip
        marked = column("draft_rows", plan.draft_rows, min(len(rows), len(starts), len(counts)))
        if not len(marked) or (np.diff(marked) != 1).any():
            raise PlanError(f"draft_rows {marked[:8].tolist()} do not follow each other")
        at, drawn = marked.item(0), rows[marked]
        slots = slice(at, at + len(marked))
        sources, targets = np.frombuffer(plan.sample_src, np.int32), np.frombuffer(plan.sample_rows, np.int32)
        if not (np.array_equal(sources[slots], marked) and np.array_equal(targets[slots], drawn)):
            raise PlanError(f"slots {at} to {at + len(marked)} are not those of the rows that speculate")
        where = state.known[drawn] - 1
        stops = np.minimum(starts[marked] + counts[marked], state.blocks_set[drawn] * state.block_size)
        wrong = (where < starts[marked]) | (where >= stops)
        if wrong.any():
            row, position = drawn[wrong][0], where[wrong][0]
            raise PlanError(f"row {row} speculates at {position}, which its plan or its blocks do not cover")
        drafted = Drafted(at, drawn, where, *self._propose(drawn, stops - where - 1))
        starts[marked], counts[marked] = where, 1 + drafted.found
        self._put(drafted)
        exact = msgspec.structs.replace(plan, starts=i32(starts.tolist()), counts=i32(counts.tolist()))
        return exact, drafted

    def _propose(self, rows: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drafts of ``rows``, int32 [R, K], and how many tokens of each count, int64 [R], ``limits`` at most."""
        state, params = self.state, self.state.sampling.packed_host
        most = np.minimum(limits, self.drafts)
        if self._lengths is not None:
            most = self._lengths.most(rows, most)
        most[params[rows, LOGPROBS] > MANY_LOGPROBS] = 0
        if state.failed:
            most[[row in state.failed for row in rows.tolist()]] = 0
        if not most.any():
            return np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int64)
        drafts, found = self.proposer.propose(rows, most)
        return drafts, np.minimum(found, most)

    def _put(self, drafted: Drafted) -> None:
        """Write drafts behind the tokens that their rows have. Rows count as so long until it is known what is kept."""
        state, found = self.state, drafted.found
        at = np.repeat(np.arange(len(found)), found)
        place = np.arange(len(at)) - np.repeat(found.cumsum() - found, found)
        self._set_tokens(drafted.rows[at], (drafted.starts + 1)[at] + place, drafted.drafts[at, place])
        state.known[drafted.rows] += found

    def _set_tokens(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        state = self.state
        if state.on_host:
            state.tokens_host[rows, positions] = tokens
        elif len(rows):
            rows_d, positions_d, tokens_d = state.upload(rows, positions, np.ascontiguousarray(tokens, np.int32))
            state.tokens.index_put_((rows_d, positions_d), tokens_d)

    # -- draws

    def _draw_all(self, logits: torch.Tensor, slots: SampleBatch, wide: Wide, drafted: Drafted) -> Draws:
        """Draw at every position whose draft may be right."""
        draws, every = Draws(len(logits)), np.arange(len(logits))
        ordered = self._ordered(drafted)
        if not len(ordered):
            self._draw_some(logits, slots, every, draws)
            return draws
        apart = np.zeros(len(logits), bool)
        firsts = wide.slots[drafted.at + ordered]
        for first, found in zip(firsts.tolist(), drafted.found[ordered].tolist(), strict=True):
            apart[first : first + found + 1] = True
        rest = every[~apart]
        if len(rest):
            self._draw_some(logits[rest], self._batch_of(wide.run, rest), rest, draws)
        place = 0
        while len(ordered):
            now = firsts + place
            tokens = self._draw_some(logits[now], self._batch_of(wide.run, now), now, draws)
            going = place < drafted.found[ordered]
            if going.any():
                going &= tokens == drafted.drafts[ordered, place]
            going &= [slot not in draws.failed for slot in now.tolist()]
            ordered, firsts, place = ordered[going], firsts[going], place + 1
        return draws

    def _ordered(self, drafted: Drafted) -> np.ndarray:
        """Which of the rows that speculate must be drawn for position by position."""
        state, rows = self.state, drafted.rows
        ordered = state.sampling.packed_host[rows, USES] & PENALTIES != 0
        if any(follower.rows for follower in state.followers):
            ordered |= [any(row in follower.rows for follower in state.followers) for row in rows.tolist()]
        return np.flatnonzero(ordered & (drafted.found > 0))

    def _batch_of(self, run: Run, slots: np.ndarray) -> SampleBatch:
        """Some slots of the run."""
        part = Run(
            run.rows, run.starts, run.counts, run.ends, run.sample_src[slots], run.sample_rows[slots],
            run.positions[slots], False,
        )  # fmt: skip
        return self.state.sample_batch(part, *self.state.upload(part.sample_rows, part.positions))

    def _draw_some(self, logits: torch.Tensor, batch: SampleBatch, slots: np.ndarray, draws: Draws) -> np.ndarray:
        """Draw for these slots of the run, and have what follows rows follow. Returns the tokens."""
        state = self.state
        sampled: Sampled = self._sample(logits, batch)
        tokens = draws.take(sampled, batch.failed, slots)
        if any(follower.rows for follower in state.followers):
            rows = batch.host_rows.tolist()
            kept = [row if state.grows[row] and at not in batch.failed else -1 for at, row in enumerate(rows)]
            for follower in state.followers:
                follower.drawn(kept, Arrival(torch.from_numpy(tokens), [], None))
        return tokens

    # -- what is kept

    def _answer(self, draws: Draws, wide: Wide, drafted: Drafted, prompts: list[PromptGroup]) -> SpeculativeOutcome:
        state, run = self.state, wide.run
        kept = draws.keep(wide, drafted)
        slots = draws.kept_slots(wide, kept)
        rows, positions, tokens = run.sample_rows[slots], run.positions[slots], draws.tokens[slots]
        self._set_tokens(rows, positions, tokens)
        lasts = kept.cumsum() - 1
        state.known[rows[lasts]] = positions[lasts] + state.grows[rows[lasts]]
        for slot, why in draws.failed.items():
            if slot in wide.slots[:-1]:
                state.failed[run.sample_rows.item(slot)] = why
        right = kept[drafted.at : drafted.at + len(drafted.rows)] - 1
        if self._lengths is not None:
            self._lengths.learn(drafted.rows, drafted.found, right)
        self.proposer.kept(drafted.rows, drafted.found, right)
        on_device = torch.from_numpy(tokens).to(state.device)
        return SpeculativeOutcome(self._download, on_device, draws, wide, kept, drafted, prompts)

    def _forward(self, run: Run, spans: list[Span]) -> tuple[torch.Tensor, SampleBatch, list[PromptGroup]]:
        if not self.proposer.wants_hidden:
            found = super()._forward(run, spans)
            self.proposer.ran(run, None)
            return found
        if self.program is None:
            batch, slots = self._batch(run, [])
            batch.outputs = None
            hidden, head = self._hidden(batch), self.model.logits
        else:
            slots = self.state.sample_batch(run, *self.state.upload(run.sample_rows, run.positions))
            hidden = self.program.hidden(run.rows, run.starts, run.counts, np.arange(run.counts.sum()))
            head = self.program.head
        self.proposer.ran(run, hidden)
        chosen = hidden[self.state.upload(outputs_of(run, spans))[0]]
        prompts = self._prompts(chosen[len(slots) :], run, spans, head) if spans else []
        return head(chosen[: len(slots)]) if len(slots) else chosen, slots, prompts
