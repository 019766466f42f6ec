"""One step of a process that is one of several (``parallel.py``).

All of them apply the same plan to the same rows. Hidden states go from stage to stage; the last one has logits, each
tensor rank those of its share of the vocabulary. Where every row of a step takes the most likely token, or draws by
temperature alone, a rank finds the best of its share and only (value, token) pairs are exchanged: noise depends on the
token's number in the whole vocabulary, so the winner is the one that a single process finds. For anything more the
leader gathers the logits and samples. Either way every process learns the tokens, for its rows' next step.

One step is done after another: while a stage computes, the others wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..batch import StepBatch
from ..kernels import sampling
from ..kv_cache import KVCache
from ..outcome import Outcome
from ..runner import Runner, refuse
from ..sampling.sampler import Sampled, SamplingNeeds, greedy
from ..state import Failure, RowState, Run
from .parallel import Ranks

if TYPE_CHECKING:
    from ..models.model import Model
    from ..pooling import Pooler

_GREEDY, _RANDOM = SamplingNeeds(), SamplingNeeds(random=True)


class GroupRunner(Runner):
    """The step of one process of ``group``."""

    def __init__(
        self, model: Model, state: RowState, kv: KVCache, max_tokens: int, group: Ranks,
        pooler: Pooler | None = None,
    ):  # fmt: skip
        super().__init__(model, state, kv, max_tokens, pooler)
        self._group = group

    def _run(self, run: Run) -> Outcome:
        if self._group.shard.last:
            return super()._run(run)
        batch, outputs, rows, positions, _ = self._batch(run, [])
        self._group.send_hidden(self._hidden(batch, outputs))
        if len(rows) and self.pooler is None:
            tokens = torch.empty(len(rows), dtype=torch.int32, device=self.state.device)
            self._write(run, rows, positions, self._group.share_tokens(tokens))
        return Outcome(self._download, self._nothing)

    def _hidden(self, batch: StepBatch, outputs: torch.Tensor) -> torch.Tensor:
        if self._group.shard.first:
            return super()._hidden(batch, outputs)
        model = self.model
        before = self._group.receive_hidden(len(batch.token_ids), model.spec.hidden_size, model.dtype)
        batch.outputs = outputs
        return model.forward(batch, self.kv, before)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._group.gather_logits(self.model.logits(hidden), self.state.vocab_size)

    def _sample(
        self,
        hidden: torch.Tensor,
        run: Run,
        rows: torch.Tensor,
        positions: torch.Tensor,
        failed: dict[int, Failure],
    ) -> Sampled:
        group, state = self._group, self.state
        needs = state.sampling.needs(run.sample_rows, run.positions)
        guided = any(not follower.rows.isdisjoint(run.sample_rows.tolist()) for follower in state.followers)
        if group.shard.size > 1 and needs in (_GREEDY, _RANDOM) and not guided:
            sampled = self._best(self.model.logits(hidden), run, rows, positions, needs, failed)
            if group.shard.stages == 1:
                return sampled
        elif (logits := self._logits(hidden)) is not None:
            sampled = self._draw(logits, run, rows, positions, failed)
        else:
            sampled = Sampled(torch.empty(len(rows), dtype=torch.int64, device=state.device), None)
        return Sampled(group.share_tokens(sampled.tokens.to(torch.int32)), sampled.logprobs)

    def _follow(self, run: Run, outcome: Outcome, failed: dict[int, Failure]) -> None:
        if self._group.leader:  # which alone answers, and keeps what follows the tokens
            super()._follow(run, outcome, failed)

    def _best(
        self,
        logits: torch.Tensor,
        run: Run,
        rows: torch.Tensor,
        positions: torch.Tensor,
        needs: SamplingNeeds,
        failed: dict[int, Failure],
    ) -> Sampled:
        """The best of all shares, in every tensor rank."""
        state, first = self.state, self.model.vocabulary.start
        if needs.random:
            draw = sampling.draw_part if logits.is_cuda else sampling.draw_part_torch
            values, tokens = draw(logits, state.sampling.of(rows), positions, first)
        else:
            tokens = greedy(logits)
            values = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
            tokens = tokens + first
        values, tokens = self._group.best(values, tokens)
        if state.doomed:
            failed.update((slot, state.doomed[row]) for slot, row in enumerate(run.sample_rows.tolist())
                          if row in state.doomed)  # fmt: skip
        if self._on_host:
            refuse(values.numpy(), failed)
        return Sampled(tokens, None)
