"""The step of a worker that speculates: drafts, one run over them, and what of them is kept.

Where a row is depends on how much of its draft the step before kept, so a plan says only from where to where it may be,
and this process knows the place. On a GPU a step with drafts waits for its tokens, once, a draft model once for its
drafts, and a head for each token that it drafts; no other step waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from ...proto.codec import from_i32, i32
from ...proto.messages import SpeculativePlan, StepPlan
from ..device import LongSteps
from ..kernels.columns import BY_MIN_P, BY_TOP_K, BY_TOP_P, LOGPROBS, PENALTIES, RANDOM, USES
from ..kv_cache import KVCache
from ..models.program import Program
from ..outcome import ROOM, Outcome, PromptGroup
from ..parallel.parallel import Group
from ..runner import Runner, outputs_of
from ..sampling.sample_batch import SampleBatch
from ..sampling.sampler import Sampled, chooser
from ..state import PlanError, RowState, Run, Span, column
from ..transfer import Arrival
from .lengths import STEP_S, TOKEN_COST, Costs, Lengths, even_costs, least_seconds, measured_costs
from .native import Verifier
from .proposer import Proposer
from .shared import share_drafts, share_failures
from .verify import Drafted, Draws, SpeculativeOutcome, Verified, Wide, wide_run, widen

if TYPE_CHECKING:
    from ..models.model import Model

MANY_LOGPROBS = 1024
"""A row that asks for more of each token is not drafted for: an answer has room for so much."""
DRAWS = RANDOM | BY_TOP_K | BY_TOP_P | BY_MIN_P
"""Bits of USES of a row whose draws are a function of its logits and parameters alone."""


class SpeculativeRunner(Runner):
    """A Runner whose rows speculate where a plan says so.

    ``proposer`` makes what drafts, given the native program of this model, where there is one. ``drafts``: tokens for a
    row at most. ``cost``: what one more token adds to a step of one, as a share of it; None: it is measured.
    """

    def __init__(
        self, model: Model, state: RowState, kv: KVCache, max_tokens: int, *,
        proposer: Callable[[Program | None], Proposer], drafts: int, draft_rows: int, adapt: bool = True,
        cost: float | None = None, group: Group | None = None, long: LongSteps | None = None,
        taps: tuple[int, ...] = (),
    ):  # fmt: skip
        super().__init__(model, state, kv, max_tokens, None, group, long, drafts * draft_rows, taps)
        self.proposer, self.drafts = proposer(self.program), drafts
        self.few_rows, self.beside = draft_rows, list(self.proposer.beside)
        self._expected = False  # that rows of this step are drafted for
        self._told: set[int] = set()  # rows that the proposer knows to go on without it
        self._last: np.ndarray | None = None  # rows of the last step, where all of them are such
        self._verifier: Verifier | None = None
        if self.program is not None and (native := chooser()) is not None:
            self._verifier = Verifier(self.program, native, state, draft_rows, draft_rows * (1 + drafts))
        self._lengths: Lengths | None = None
        if adapt:
            lags = 1 + drafts if self.proposer.lags else 0
            self._lengths = Lengths(state.max_rows, self._costs(cost), lags)

    @torch.inference_mode()
    def _costs(self, cost: float | None) -> Costs:
        """What steps take: where C verifies, that is measured, of one row and of as many as may speculate."""
        verifier, drafts, rows = self._verifier, min(self.drafts, self.state.max_model_len - 1), self.few_rows
        if cost is not None or verifier is None or not drafts:
            cost = TOKEN_COST[self.state.device.type] if cost is None else cost
            return even_costs(cost, rows * (1 + self.drafts))
        points = {}
        for count, each in ((1, 1), (1, 1 + drafts), (rows, 1), (rows, 1 + drafts)):
            told = list(range(count)), [0] * count, [each] * count
            points[count * each] = least_seconds(partial(verifier.verify, *told))
        draft = self.proposer.seconds(drafts)
        self.state.tokens_host[:rows] = 0
        return measured_costs(points, STEP_S, draft)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Outcome:
        state = self.state
        state.apply(plan, self.kv)
        self._tell(plan)
        self._expected = isinstance(plan, SpeculativePlan)
        if self._expected:
            self._told.clear()
            self._last = None
        if isinstance(plan, SpeculativePlan) and plan.draft_rows:
            outcome: Outcome = self._speculate(plan)
        else:
            run = state.checked_run(plan, self.max_tokens)
            outcome = self._run(run) if len(run.rows) else Outcome(self._download, self._nothing)
        self._end_step()
        return outcome

    def _tell(self, plan: StepPlan) -> None:
        """The proposer learns what the plan does to rows, which was checked."""
        proposer, rows = self.proposer, self.state.max_rows
        if plan.drops:
            proposer.drop(column("drops", plan.drops, rows).tolist())
        if plan.fork_src:
            src, dst = (column("forks", data, rows).tolist() for data in (plan.fork_src, plan.fork_dst))
            proposer.fork(src, dst)
            self._forget(dst)
            if self._lengths is not None:
                self._lengths.copy(src, dst)
        if plan.copy_src:
            blocks = (column("copies", data, self.kv.num_blocks) for data in (plan.copy_src, plan.copy_dst))
            proposer.copy_blocks(*blocks)
        if plan.admits:
            admitted = [admit.row for admit in plan.admits]
            proposer.admit(admitted)
            self._forget(admitted)
            if self._lengths is not None:
                for row in admitted:
                    self._lengths.forget(row, self.state.prompt_len.item(row))
        if plan.delta_rows:
            proposer.given(*self.state.last_change)

    def _forget(self, rows: list[int]) -> None:
        """The proposer does not know of ``rows`` how they go on."""
        self._told.difference_update(rows)
        self._last = None

    def _go_on(self, run: Run) -> None:
        """The rows of ``run`` go on without drafts, which the proposer is told once of each."""
        if run.rows is self._last:  # while the same ones decode
            return
        self._last, rows = run.rows, {*run.rows.tolist(), *run.sample_rows.tolist()}
        if not rows <= self._told:
            self._told |= rows
            self.proposer.ran(run, None)

    # -- drafts

    def _speculate(self, plan: SpeculativePlan) -> Outcome:
        state = self.state
        drafted = self._draft(plan)
        alone = len(drafted.rows) * 4 == len(plan.rows) == len(plan.sample_rows)
        if alone and (tokens := len(drafted.rows) + sum(drafted.counts)) > self.max_tokens:
            raise PlanError(f"drafts make {tokens} tokens, over {self.max_tokens}")
        if alone and self._verifier is not None and self._plain(drafted.rows):
            verified = self._verify(self._verifier, drafted)
            if verified is not None:
                return verified
            drafted = self._without(drafted)
        if state.on_host:
            drafted = drafted._replace(drafts=self._in_rows(drafted.rows, drafted.starts, drafted.counts))
        wide = self._wide(plan, drafted, alone)
        spans = state.prompt_spans(wide.run, ROOM) if state.asking else []
        logits, slots, prompts = self._forward(wide.run, spans)
        if any(drafted.counts) and self._spoilt(logits):
            wide = self._wide(plan, drafted := self._without(drafted), alone)
            logits, slots, prompts = self._forward(wide.run, spans)
        draws = self._draw_all(logits, slots, wide, drafted)
        return self._answer(draws, wide, drafted, prompts)

    def _wide(self, plan: SpeculativePlan, drafted: Drafted, alone: bool) -> Wide:
        """The run of the plan; ``alone``: it has nothing but the rows that speculate."""
        if alone:
            return wide_run(drafted.rows, drafted.starts, [1 + count for count in drafted.counts])
        return widen(self.state.checked_run(self._exact(plan, drafted), self.max_tokens), drafted)

    def _spoilt(self, logits: torch.Tensor) -> bool:
        """Whether some logits are not numbers, as far as that is known without a wait or an exchange."""
        return self.state.on_host and self.group.shard.size == 1 and bool(logits.sum(-1).isnan().any())

    def _without(self, drafted: Drafted) -> Drafted:
        """The same rows without drafts: a draft's keys and values that are not numbers reach the positions before it in
        a chunk, so the step is run once more."""
        nothing = [0] * len(drafted.rows)
        self.proposer.kept(drafted.rows, drafted.counts, nothing)
        return drafted._replace(counts=nothing, drafts=[[]] * len(drafted.rows))

    def _draft(self, plan: SpeculativePlan) -> Drafted:
        """What is drafted for the rows that speculate. Raises PlanError where the plan does not cover where they are.

        They are few, and so looked at one by one.
        """
        state, marked, at = self.state, from_i32(plan.draft_rows), 0
        columns = [from_i32(column) for column in (plan.rows, plan.starts, plan.counts)]
        sources, targets = from_i32(plan.sample_src), from_i32(plan.sample_rows)
        if marked:
            at = marked[0]
        if not marked or at < 0 or marked != list(range(at, at + len(marked))):
            raise PlanError(f"draft_rows {marked[:8]} do not follow each other")
        part = slice(at, at + len(marked))
        rows, firsts, counts = (column[part] for column in columns)
        if not len(rows) == len(firsts) == len(counts) == len(marked):
            raise PlanError(f"{len(marked)} of {[len(column) for column in columns]} compute rows speculate")
        if sources[part] != marked or targets[part] != rows or len(set(rows)) != len(rows):
            raise PlanError(f"slots {at} to {at + len(marked)} are not those of the rows that speculate")
        starts, limits = [], []
        for row, first, count in zip(rows, firsts, counts, strict=True):
            if not 0 <= row < state.max_rows:
                raise PlanError(f"row {row} of {state.max_rows} speculates")
            start = state.known.item(row) - 1
            stop = min(first + count, state.blocks_set.item(row) * state.block_size, state.max_model_len)
            if not 0 <= first <= start < stop:
                raise PlanError(f"row {row} speculates at {start}, which its plan or its blocks do not cover")
            starts.append(start)
            limits.append(stop - start - 1)
        return Drafted(at, rows, starts, *self._propose(rows, starts, limits))

    def _propose(self, rows: list[int], starts: list[int], limits: list[int]) -> tuple[list[int], list[list[int]]]:
        """Drafts of ``rows``, ``limits`` tokens at most, into the rows: how many, and on a GPU or in a group which."""
        group, own = self.group, None
        if group.shard.size == 1:
            return self._own_drafts(rows, starts, limits)
        if group.leader:
            counts, own = self._own_drafts(rows, starts, limits)
            own = self._in_rows(rows, starts, counts) if self.state.on_host else own
        drafts = share_drafts(group, own, len(rows), self.drafts, self.state.device)
        if not group.leader:
            for row, start, draft in zip(rows, starts, drafts, strict=True):
                at = np.arange(start + 1, start + 1 + len(draft))
                self._set_tokens(np.full(len(draft), row), at, draft)
        return [len(draft) for draft in drafts], drafts

    def _in_rows(self, rows: list[int], starts: list[int], counts: list[int]) -> list[list[int]]:
        """Drafts that ``rows`` hold, on a CPU."""
        tokens, of = self.state.tokens_host, zip(rows, starts, counts, strict=True)
        return [tokens[row, start + 1 : start + 1 + count].tolist() for row, start, count in of]

    def _own_drafts(self, rows: list[int], starts: list[int], limits: list[int]) -> tuple[list[int], list[list[int]]]:
        """What this process drafts, likewise."""
        state, params = self.state, self.state.sampling.packed_host
        most = [min(limit, self.drafts) for limit in limits]
        if self._lengths is not None:
            most = self._lengths.most(rows, most, [start + 1 for start in starts])
        for at, row in enumerate(rows):
            if params.item(row, LOGPROBS) > MANY_LOGPROBS or row in state.failed:
                most[at] = 0
        if not any(most):
            return most, [[]] * len(rows)
        if state.on_host:
            return self.proposer.draft(state, rows, most), []
        found, counts = self.proposer.propose(np.array(rows), np.array(most))
        drafts = [draft[: min(count, limit)] for draft, count, limit in
                  zip(found.tolist(), counts.tolist(), most, strict=True)]  # fmt: skip
        for row, start, draft in zip(rows, starts, drafts, strict=True):
            if draft:
                (tokens,) = state.upload(np.array(draft, np.int32))
                state.tokens[row, start + 1 : start + 1 + len(draft)] = tokens
        return [len(draft) for draft in drafts], drafts

    # -- steps of nothing but rows that speculate, whose draws take no more than a threshold and noise

    def _plain(self, rows: list[int]) -> bool:
        """Whether the draws of ``rows`` are so, and their model is the plain one."""
        state, params = self.state, self.state.sampling.packed_host
        if state.failed or state.asking or any(params.item(row, USES) & ~DRAWS for row in rows):
            return False
        if self.slots is not None:
            self.slots.active = bool((state.adapters[rows] >= 0).any())
            if self.slots.active:
                return False
        return all(follower.rows.isdisjoint(rows) for follower in state.followers)

    def _verify(self, verifier: Verifier, drafted: Drafted) -> Outcome | None:
        """The step as one call; None, with nothing changed, where some token cannot be drawn."""
        state, proposer, (_, rows, starts, drafts, _) = self.state, self.proposer, drafted
        counts = [1 + count for count in drafts]
        rights = verifier.verify(rows, starts, counts)
        if rights is None:
            return None
        hidden = None
        if proposer.wants_hidden:
            hidden = self._tapped() if self.taps else verifier.hidden(sum(counts))
        proposer.verified(rows, starts, counts, hidden)
        tokens = []
        for row, start, right in zip(rows, starts, rights, strict=True):
            end = state.known[row] = start + 2 + right
            tokens.append(state.tokens_host[row, start + 1 : end].tobytes())
        self._learn(drafted, rights)
        return Verified(b"".join(tokens), [1 + right for right in rights], drafts)

    def _learn(self, drafted: Drafted, rights: list[int]) -> None:
        """So many drafts of each row were right."""
        if self._lengths is not None:
            for row, count, right in zip(drafted.rows, drafted.counts, rights, strict=True):
                if count:
                    self._lengths.learn(row, count, right)
        self.proposer.kept(drafted.rows, drafted.counts, rights)

    # -- other steps

    def _exact(self, plan: SpeculativePlan, drafted: Drafted) -> StepPlan:
        """The plan with where its rows are. They count as so long as their drafts make them, until it is known what is
        kept."""
        starts, counts = from_i32(plan.starts), from_i32(plan.counts)
        for at, (row, start, count) in enumerate(
            zip(drafted.rows, drafted.starts, drafted.counts, strict=True), drafted.at
        ):
            starts[at], counts[at] = start, 1 + count
            self.state.known[row] = start + 1 + count
        return msgspec.structs.replace(plan, starts=i32(starts), counts=i32(counts))

    # -- draws

    def _draw_all(self, logits: torch.Tensor, slots: SampleBatch, wide: Wide, drafted: Drafted) -> Draws:
        """Draw at every position whose draft may be right."""
        draws, every = Draws(len(logits)), list(range(len(logits)))
        ordered = self._ordered(slots, wide, drafted)
        if not ordered:
            self._draw_some(logits, slots, every, draws)
            return draws
        apart = {slot for first, draft in ordered for slot in range(first, first + len(draft) + 1)}
        if rest := [slot for slot in every if slot not in apart]:
            self._draw_some(logits[rest], self._batch_of(wide.run, rest), rest, draws)
        place = 0
        while ordered:
            now = [first + place for first, _ in ordered]
            tokens = self._draw_some(logits[now], self._batch_of(wide.run, now), now, draws)
            ordered = [
                (first, draft)
                for (first, draft), token in zip(ordered, tokens, strict=True)
                if place < len(draft) and token == draft[place] and first + place not in draws.failed
            ]
            place += 1
        return draws

    def _ordered(self, slots: SampleBatch, wide: Wide, drafted: Drafted) -> list[tuple[int, list[int]]]:
        """Of the rows that must be drawn for position by position, the first slot and the draft."""
        followed = set().union(*(follower.rows for follower in self.state.followers))
        if not followed and not slots.needs.penalties:
            return []
        uses, firsts = self.state.sampling.packed_host[:, USES], wide.firsts[drafted.at :]
        rows = zip(drafted.rows, firsts, drafted.drafts, strict=False)
        return [(first, draft) for row, first, draft in rows
                if draft and (row in followed or uses.item(row) & PENALTIES)]  # fmt: skip

    def _batch_of(self, run: Run, slots: list[int]) -> SampleBatch:
        """Some slots of the run."""
        part = Run(
            run.rows, run.starts, run.counts, run.ends, run.sample_src[slots], run.sample_rows[slots],
            run.positions[slots], False,
        )  # fmt: skip
        return self.state.sample_batch(part, *self.state.upload(part.sample_rows, part.positions))

    def _draw_some(self, logits: torch.Tensor, batch: SampleBatch, slots: list[int], draws: Draws) -> list[int]:
        """Draw for these slots of the run, and have what follows rows follow. Returns the tokens."""
        state = self.state
        sampled: Sampled = self._sample(logits, batch)
        tokens = draws.take(sampled, batch.failed, slots)
        if self.group.shard.size > 1:
            share_failures(self.group, draws, slots, state.device)
        if any(follower.rows for follower in state.followers):
            rows = batch.host_rows.tolist()
            kept = [row if state.grows[row] and at not in batch.failed else -1 for at, row in enumerate(rows)]
            arrival = Arrival(torch.tensor(tokens, dtype=torch.int32), [], None)
            for follower in state.followers:
                follower.drawn(kept, arrival)
        return tokens

    # -- what is kept

    def _answer(self, draws: Draws, wide: Wide, drafted: Drafted, prompts: list[PromptGroup]) -> SpeculativeOutcome:
        state, firsts, at = self.state, wide.firsts, drafted.at
        kept = [1] * len(firsts)
        if len(firsts) > len(drafted.rows):  # others drew beside them
            others = [slot for slot in range(len(firsts)) if not at <= slot < at + len(drafted.rows)]
            wides = np.array([firsts[slot] for slot in others])
            rows, positions = wide.run.sample_rows[wides], wide.run.positions[wides]
            self._set_tokens(rows, positions, [draws.tokens[slot] for slot in wides.tolist()])
            state.known[rows] = positions + state.grows[rows]
        rights = []
        for number, (row, start, draft) in enumerate(
            zip(drafted.rows, drafted.starts, drafted.drafts, strict=True), at
        ):
            right = draws.right(firsts[number], draft)
            kept[number] += right
            state.known[row] = start + 2 + right
            rights.append(right)
        lasts = [draws.tokens[first + right] for first, right in zip(firsts[at:], rights, strict=False)]
        self._set_tokens(np.array(drafted.rows), np.array(drafted.starts) + 1 + rights, lasts)
        for slot, why in draws.failed.items():
            if slot in firsts:
                state.failed[wide.run.sample_rows.item(slot)] = why
        self._learn(drafted, rights)
        return SpeculativeOutcome(self._download, state.device, draws, wide, kept, drafted, prompts)

    def _set_tokens(self, rows: np.ndarray, positions: np.ndarray, tokens: list[int]) -> None:
        state = self.state
        if state.on_host:
            state.tokens_host[rows, positions] = tokens
        else:
            rows_d, positions_d, tokens_d = state.upload(rows, positions, np.array(tokens, np.int32))
            state.tokens.index_put_((rows_d, positions_d), tokens_d)

    def _forward(self, run: Run, spans: list[Span]) -> tuple[torch.Tensor, SampleBatch, list[PromptGroup]]:
        if not self._expected or not self.proposer.wants_hidden or len(run.rows) > self.few_rows:
            found = super()._forward(run, spans)
            self._go_on(run)
            return found
        self._look_up(run)
        program = self._program
        if program is None:
            batch, slots = self._batch(run, spans)
            batch.outputs = None
            hidden = self._hidden(batch)
        else:
            slots = self.state.sample_batch(run, *self.state.upload(run.sample_rows, run.positions))
            hidden = program.hidden(run.rows, run.starts, run.counts, np.arange(run.counts.sum()))
        head = self._head(program, run, spans)
        self.proposer.ran(run, self._tapped() if self.taps else hidden)
        chosen = hidden[self.state.upload(outputs_of(run, spans))[0]]
        prompts = self._prompts(chosen, len(slots), run, spans, head) if spans else []
        return head(chosen[: len(slots)], 0) if len(slots) else chosen, slots, prompts

    def _tapped(self) -> torch.Tensor:
        """The hidden states between layers of all tokens of the run, those of several layers side by side."""
        if (program := self._program) is not None:
            return program.tapped()
        tapped = getattr(self.model, "tapped", None)
        if tapped is None:
            raise RuntimeError("nothing was tapped: drafts by layers' hidden states are of decoders alone.")
        found: torch.Tensor = tapped
        return found
