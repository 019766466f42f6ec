"""One step: a plan in, sampled tokens out.

``launch`` applies a plan to the rows, runs the model and the sampler, and writes each token into its row on the
device, so that the next plan can be launched before anybody has seen the tokens. ``Outcome`` hands them over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..proto.messages import StepPlan
from .batch import StepBatch
from .graphs import CudaRecorder, DecodeGraphs, capture_sizes
from .kv_cache import KVCache
from .outcome import FORBIDDEN, NAN, ROOM, Outcome, PromptGroup
from .sampling.processors import SlotError
from .sampling.sampler import Sampled, sample, token_logprobs
from .state import Failure, RowState, Run, Span
from .transfer import Download

if TYPE_CHECKING:
    from .models.model import Model
    from .pooling import Pooler

PROMPT_SLICE = 128
"""Prompt positions whose logits are computed at a time, so that a long prompt's need no more memory than so many."""


class Runner:
    """Owns the step of one device. Not thread-safe: one compute thread, one compute stream."""

    def __init__(self, model: Model, state: RowState, kv: KVCache, max_tokens: int, pooler: Pooler | None = None):
        """With a ``pooler`` nothing is generated."""
        self.model, self.state, self.kv = model, state, kv
        self.max_tokens = max_tokens
        self.graphs: DecodeGraphs | None = None
        self.pooler = pooler
        self._on_host = state.device.type == "cpu"
        self._download = Download(state.max_rows, state.device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=state.device)

    @torch.inference_mode()
    def capture(self, max_context: int, progress: bool) -> None:
        """Record CUDA graphs for decode batches whose longest context is at most ``max_context``."""
        state = self.state
        graphs = DecodeGraphs(
            capture_sizes(state.max_rows), min(max_context, state.max_model_len), state.block_size, state.device
        )
        graphs.capture(lambda batch: self.model.forward(batch, self.kv), CudaRecorder(), progress)
        self.graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Outcome:
        """Carry out a plan. Raises PlanError on one that cannot be; any exception leaves the rows undefined."""
        state = self.state
        state.apply(plan, self.kv)
        run = state.checked_run(plan, self.max_tokens)
        outcome = self._run(run) if len(run.rows) else Outcome(self._download, self._nothing)
        for follower in state.followers:
            follower.settle(wait=False)
        return outcome

    def _run(self, run: Run) -> Outcome:
        if self.pooler is not None:
            return self._pool(self.pooler, run)
        state, drawn = self.state, len(run.sample_src)
        spans = state.prompt_spans(run, ROOM) if state.asking else []
        batch, outputs, rows, positions, prompt_tokens = self._batch(run, spans)
        hidden = self._hidden(batch, outputs)
        prompts = self._prompts(hidden[drawn:], prompt_tokens, spans) if spans else []
        if not drawn:
            return Outcome(self._download, self._nothing, prompts=prompts)
        failed: dict[int, Failure] = {}
        sampled = self._sample(hidden[:drawn] if spans else hidden, run, rows, positions, failed)
        tokens = sampled.tokens.to(torch.int32)
        self._write(run, rows, positions, tokens)
        outcome = Outcome(self._download, tokens, sampled.logprobs or (), prompts, failed)
        self._follow(run, outcome, failed)
        return outcome

    def _pool(self, pooler: Pooler, run: Run) -> Outcome:
        """A step of prompts that are pooled: hidden states in place of tokens."""
        state = self.state
        pieces = pooler.pieces(run, state.pooling)
        batch = self._batch(run, [])[0]
        batch.host_query_starts = [0, *run.counts.cumsum().tolist()]
        wanted = [np.arange(piece.first, piece.first + piece.count) for piece in pieces]
        seconds = np.array([state.pooling[row].second for row in run.rows.tolist()])
        if (seconds >= 0).any():
            at = np.arange(run.counts.sum()) - np.repeat(run.counts.cumsum() - run.counts - run.starts, run.counts)
            first = np.repeat(np.where(seconds < 0, state.max_model_len, seconds), run.counts)
            (batch.types,) = state.upload((at >= first).astype(np.int64))
        (outputs,) = state.upload(np.concatenate([*wanted, np.empty(0, np.int64)]))
        return pooler.outcome(self._download, pieces, self._hidden(batch, outputs), len(run.sample_src))

    def _hidden(self, batch: StepBatch, outputs: torch.Tensor) -> torch.Tensor:
        """The forward pass: hidden states of the tokens ``outputs``."""
        if self.graphs is not None and self.graphs.covers(batch):
            return self.graphs.run(batch).index_select(0, outputs)
        batch.outputs = outputs
        return self.model.forward(batch, self.kv)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits of the whole vocabulary; None where another process draws."""
        return self.model.logits(hidden)

    def _write(self, run: Run, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens that were drawn, to their rows."""
        # A beam's token lands beyond those its row has, where nothing reads it before an append replaces it.
        self.state.tokens.index_put_((rows, positions), tokens)
        self.state.known[run.sample_rows] = run.positions + self.state.grows[run.sample_rows]

    def _sample(
        self,
        hidden: torch.Tensor,
        run: Run,
        rows: torch.Tensor,
        positions: torch.Tensor,
        failed: dict[int, Failure],
    ) -> Sampled:
        """Draw; slots that cannot are added to ``failed``, and their tokens mean nothing."""
        return self._draw(self.model.logits(hidden), run, rows, positions, failed)

    def _draw(
        self,
        logits: torch.Tensor,
        run: Run,
        rows: torch.Tensor,
        positions: torch.Tensor,
        failed: dict[int, Failure],
    ) -> Sampled:
        state, mask, edit = self.state, None, None
        if state.doomed or any(follower.rows for follower in state.followers):
            drawing = run.sample_rows.tolist()
            failed.update((slot, state.doomed[row]) for slot, row in enumerate(drawing) if row in state.doomed)
            mask, edit = self._mask(drawing, failed), self._edit(drawing, failed)
        needs = state.sampling.needs(run.sample_rows, run.positions)
        sampled = sample(
            logits, state.sampling, rows, positions, needs, run.sample_rows, run.positions, state.tokens, mask, edit
        )
        if self._on_host:  # on a GPU the look would cost each step; there NaN shows where logprobs are asked for
            refuse(logits.numpy()[np.arange(len(logits)), sampled.tokens.numpy()], failed)
        return sampled

    def _mask(self, drawing: list[int], failed: dict[int, Failure]) -> torch.Tensor | None:
        """The grammars' mask of the rows that draw; waits for the last step's tokens while this one's run."""
        grammars = self.state.grammars
        if grammars is None or grammars.rows.isdisjoint(drawing):
            return None
        grammars.settle(wait=True)
        mask, bad = grammars.histories.fill(drawing)
        for slot, status, message in bad:
            failed.setdefault(slot, Failure(status, message, "structured_outputs"))
        return self.state.upload(mask)[0]

    def _edit(self, drawing: list[int], failed: dict[int, Failure]) -> Callable[[torch.Tensor], None] | None:
        """What calls the users' functions for the rows that draw."""
        processors = self.state.processors
        if processors is None or processors.rows.isdisjoint(drawing):
            return None
        processors.settle(wait=True)

        def edit(logits: torch.Tensor) -> None:
            for slot, row in enumerate(drawing):
                if row in processors.rows and slot not in failed:
                    try:
                        processors.histories.apply(row, logits[slot])
                    except SlotError as error:
                        failed[slot] = Failure(error.status, str(error), "logits_processors")

        return edit

    def _follow(self, run: Run, outcome: Outcome, failed: dict[int, Failure]) -> None:
        """Doom the rows that failed; the others' followers take their tokens when these arrive."""
        state = self.state
        for slot, why in failed.items():
            state.doomed[int(run.sample_rows[slot])] = why
        if any(follower.rows for follower in state.followers):
            kept = [row if state.grows[row] and row not in state.doomed else -1 for row in run.sample_rows.tolist()]
            for follower in state.followers:
                follower.drawn(kept, outcome.arrival)

    def _prompts(self, hidden: torch.Tensor, tokens: torch.Tensor, spans: list[Span]) -> list[PromptGroup]:
        """Logprobs of prompt tokens [N] from the hidden states [N, hidden] before them, a slice at a time."""
        raw = "raw_logits" if self.state.sampling.logprobs_mode.endswith("logits") else "raw_logprobs"
        groups, start = [], 0
        for k, same in groupby(spans, key=lambda span: span.k):
            members = list(same)
            end = start + sum(span.count for span in members)
            parts = []
            for low in range(start, end, PROMPT_SLICE):
                at = slice(low, min(low + PROMPT_SLICE, end))
                if (logits := self._logits(hidden[at])) is not None:
                    parts.append(token_logprobs(logits, tokens[at], k, raw))
            if parts:
                groups.append(PromptGroup(members, *(torch.cat(column) for column in zip(*parts, strict=True))))
            start = end
        return groups

    def _batch(
        self, run: Run, spans: list[Span]
    ) -> tuple[StepBatch, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The batch; the tokens whose hidden states are wanted: of each sample slot, then of ``spans``; for each slot
        the destination row and the position to write; and the prompt tokens that ``spans`` describe.
        """
        state, size = self.state, self.state.block_size
        ends = run.starts + run.counts
        query_starts = np.zeros(len(run.rows) + 1, np.int64)
        np.cumsum(run.counts, out=query_starts[1:])
        longest = int(run.counts.max())
        if longest == 1:
            num_decodes, token_rows, positions = len(run.rows), run.rows, run.starts
        else:
            num_decodes = int((run.counts != 1).argmax())
            token_rows = np.repeat(run.rows, run.counts)
            positions = np.arange(query_starts[-1]) + np.repeat(run.starts - query_starts[:-1], run.counts)
        slots = state.tables_host[token_rows, positions // size].astype(np.int64) * size + positions % size
        outputs = query_starts[1:][run.sample_src] - 1
        longest_context = int(ends.max())
        prompt_tokens = self._nothing
        if spans:
            at = np.repeat([span.at for span in spans], [span.count for span in spans])
            told = np.concatenate([np.arange(span.first, span.first + span.count) for span in spans])
            outputs = np.concatenate([outputs, query_starts[at] + told - 1 - run.starts[at]])
            prompt_tokens = state.tokens[tuple(state.upload(run.rows[at], told))].long()
        uploaded = state.upload(
            run.rows, token_rows, positions, slots, outputs, run.sample_rows, run.positions,
            query_starts.astype(np.int32), ends.astype(np.int32),
        )  # fmt: skip
        rows_d, token_rows_d, positions_d, slots_d, outputs_d, sample_rows_d, sample_positions_d, starts_d, ends_d = (
            uploaded
        )
        batch = StepBatch(
            token_ids=state.tokens[token_rows_d, positions_d].long(),
            positions=positions_d,
            slots=slots_d,
            query_starts=starts_d,
            context_lens=ends_d,
            block_tables=state.tables[:, : -(-longest_context // size)].index_select(0, rows_d),
            num_decodes=num_decodes,
            max_query_len=longest,
            max_context_len=longest_context,
            block_size=size,
            host_query_starts=query_starts.tolist() if self._on_host else [],
            host_context_lens=ends.tolist() if self._on_host else [],
        )
        return batch, outputs_d, sample_rows_d, sample_positions_d, prompt_tokens


def refuse(chosen: np.ndarray, failed: dict[int, Failure]) -> None:
    """The slots whose chosen token has a logit that cannot be drawn are added to ``failed``."""
    for slot in np.flatnonzero(~(chosen > -np.inf)).tolist():
        failed.setdefault(slot, NAN if np.isnan(chosen[slot]) else FORBIDDEN)
