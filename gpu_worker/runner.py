"""One step: a plan in, sampled tokens out.

``launch`` applies a plan to the rows, runs the model and the sampler, and writes each token into its row on the
device, so that the next plan can be launched before anybody has seen the tokens. ``Outcome`` hands them over.

A process that is one of several (``parallel/parallel.py``) applies the same plan to the same rows as the others, and
exchanges with them through its ``group``. Hidden states go from stage to stage; the last stage has logits, each tensor
rank those of its share of the vocabulary. Where every row of a step takes the most likely token, or draws by
temperature alone, a rank finds the winner of its share and only (value, token) pairs are exchanged: noise depends on
the token's number in the whole vocabulary, so the best of them is the token that a single process draws. For anything
more the leader gathers the logits and samples. One step is done after another: while a stage computes, the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..proto.messages import StepPlan
from .batch import StepBatch, longest_first
from .device import LongSteps
from .graphs import CudaRecorder, DecodeGraphs, Graphs, PieceGraphs, Recorder, capture, graph_bytes
from .kernels import marks
from .kv_cache import KVCache
from .lora.card import CardSlots
from .models.decoder import Decoder
from .models.program import Program, program_of, runs_natively
from .models.program_adapters import AdaptedProgram
from .outcome import FORBIDDEN, NAN, ROOM, Outcome, PromptGroup
from .parallel.parallel import Group
from .recorded import kinds_of
from .sampling.followers import Follower
from .sampling.logprobs import token_logprobs
from .sampling.processors import Processors, SlotError
from .sampling.sample_batch import Failure, SampleBatch
from .sampling.sampler import Sampled, sample, sample_share
from .state import RowState, Run, Span
from .transfer import Download

if TYPE_CHECKING:
    from .models.model import Model
    from .pooling import Pooler

PROMPT_SLICE = 128
"""Prompt positions whose logits are computed at a time, so that a long prompt's need no more memory than so many."""


Head = Callable[[torch.Tensor, int], torch.Tensor]
"""(hidden states of outputs of a step, the number of the first) -> logits."""


class Runner:
    """Owns the step of one device. Not thread-safe: one compute thread, one compute stream."""

    def __init__(
        self, model: Model, state: RowState, kv: KVCache, max_tokens: int, pooler: Pooler | None = None,
        group: Group | None = None, long: LongSteps | None = None, extra: int = 0,
        taps: tuple[int, ...] = (),
    ):  # fmt: skip
        """With a ``pooler`` nothing is generated. ``group``: the processes this one shares the model with. ``long``:
        which steps on a CPU take more threads than one; None: all take torch's number. ``extra``: slots that a step may
        have beyond one for each row. ``taps``: layers before which a step's hidden states are kept."""
        self.group = group or Group()
        self.model, self.state, self.kv = model, state, kv
        self.max_tokens = max_tokens
        slots = state.max_rows + extra
        self.taps, most = taps, max(slots, PROMPT_SLICE)
        self.program = program_of(model, kv, state.tokens, state.tables, most, long, taps)
        if taps and isinstance(model, Decoder):
            model.taps = taps
        self.slots = model.adapters
        """The adapters that rows may have, where they may."""
        self.adapted: AdaptedProgram | None = None
        """What runs the steps in which some row has one, where ``program`` runs the others."""
        if self.slots is not None and self.program is not None and runs_natively(model, kv):
            rows = self.slots, state.adapters
            self.adapted = AdaptedProgram(self.program, *rows, model, kv, state.tokens, state.tables, most, long, taps)
        self.graphs: DecodeGraphs | None = None
        self.pieces: PieceGraphs | None = None
        self.adapted_graphs: list[Graphs] = []  # of steps in which some row has an adapter
        self.pooler = pooler
        self.beside: list[tuple[Model, KVCache]] = []
        """Models that run beside this one in the same steps, on this process alone: what drafts."""
        self.few_rows, self.most_slots = 0, slots
        """Rows up to which a step does more, because they may speculate; slots of a step at most."""
        self.graph_rows: list[int] | None = None
        """Rows of decode steps that are captured as CUDA graphs, in order; None: ``capture_sizes``."""
        self._download = Download(slots, state.device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=state.device)

    @torch.inference_mode()
    def capture(self, max_context: int | None, progress: bool, recorder: Recorder | None = None) -> None:
        """Record CUDA graphs: of decode steps whose longest context is at most ``max_context`` (None: of any), and of
        what lies between the attentions of other steps of few tokens.

        Sizes that there is no memory for are left out; but not in a group, where all must pad a step alike.
        """
        makes = kinds_of(self.model, self.state, self.max_tokens, max_context, self.graph_rows)
        made: list[Any] = [make() for make in makes]
        drop = self.group.shard.size == 1
        capture(made, self._forward_eager, recorder or CudaRecorder(), progress, drop)
        self.pieces, self.graphs, *self.adapted_graphs = made

    @torch.inference_mode()
    def graph_bytes(self, max_context: int | None, used: Callable[[], int], recorder: Recorder | None = None) -> int:
        """About what ``capture`` will take; ``used`` tells the bytes of the device that are in use."""
        makes = kinds_of(self.model, self.state, self.max_tokens, max_context, self.graph_rows)
        least = self.model.spec.hidden_size * self.model.dtype.itemsize
        return graph_bytes(makes, self._forward_eager, recorder or CudaRecorder(), used, least)

    def _forward_eager(self, batch: StepBatch) -> torch.Tensor:
        return self.model.forward(batch, self.kv)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Outcome:
        """Carry out a plan. Raises PlanError on one that cannot be; any exception leaves the rows undefined."""
        state = self.state
        state.apply(plan, self.kv)
        run = state.checked_run(plan, self.max_tokens)
        outcome = self._run(run) if len(run.rows) else Outcome(self._download, self._nothing)
        self._end_step()
        return outcome

    def rehearse(self, plan: StepPlan) -> Outcome:
        """``launch``; where rows may have adapters on a GPU, as if all of them had."""
        if not isinstance(self.slots, CardSlots):
            return self.launch(plan)
        with self.slots.rehearsal():
            return self.launch(plan)

    def _end_step(self) -> None:
        """All of the step is launched: no product is of its rows from here on."""
        if self.slots is not None:
            self.slots.end()
        for follower in self.state.followers:
            follower.catch_up(wait=False)

    def _run(self, run: Run) -> Outcome:
        if not self.group.shard.last:
            return self._hand_on(run)
        if self.pooler is not None:
            return self._pool(self.pooler, run)
        state = self.state
        spans = state.prompt_spans(run, ROOM) if state.asking else []
        logits, slots, prompts = self._forward(run, spans)
        if not len(slots):
            return Outcome(self._download, self._nothing, prompts=prompts)
        sampled = self._sample(logits, slots)
        self._write(slots, sampled.tokens)
        told, marked = (sampled.tokens, False) if sampled.told is None else (sampled.told, True)
        outcome = Outcome(self._download, told, sampled.logprobs or (), prompts, slots.failed, marked=marked)
        if self.group.leader:  # which alone answers, and keeps what follows the tokens
            self._follow(slots, outcome)
        return outcome

    def _forward(self, run: Run, spans: list[Span]) -> tuple[torch.Tensor, SampleBatch, list[PromptGroup]]:
        """Logits [S, V] of the sample slots, or this process's share of them; the slots; what ``spans`` tell."""
        self._look_up(run)
        program = self._program
        if program is None:
            batch, slots = self._batch(run, spans)
            hidden = self._hidden(batch)
        else:
            slots = self.state.sample_batch(run, *self.state.upload(run.sample_rows, run.positions))
            outputs = outputs_of(run, spans)
            if not spans:
                return program.logits(run.rows, run.starts, run.counts, outputs), slots, []
            hidden = self._hidden_of(program, run, outputs)
        head = self._head(program, run, spans)
        prompts = self._prompts(hidden, len(slots), run, spans, head) if spans else []
        drawn = hidden[: len(slots)] if spans else hidden
        return head(drawn, 0) if len(slots) else drawn, slots, prompts

    @property
    def _adapts(self) -> bool:
        """Whether some row of this step has an adapter."""
        return self.slots is not None and self.slots.active

    @property
    def _program(self) -> Program | None:
        """What runs this step; None: torch does."""
        return (self._adapts and self.adapted) or self.program

    def _look_up(self, run: Run) -> None:
        """See whether some row of this step has an adapter, and which tokens have brought their embeddings."""
        if self.slots is not None:
            self.slots.look_up(self.state.adapters[run.rows])
        if self.model.given is not None:
            self.model.given.begin(run.rows, run.starts, run.counts)

    def _head(self, program: Program | None, run: Run, spans: list[Span]) -> Head:
        """Call it behind the forward pass of the step."""
        slots = self.slots
        if slots is None or not slots.active:
            plain = self.model.logits if program is None else program.head
            return lambda hidden, first: plain(hidden)
        native = self.adapted
        if native is None:
            logits = self.model.logits

            def adapted(hidden: torch.Tensor, first: int) -> torch.Tensor:
                slots.to_outputs(slice(first, first + len(hidden)))
                return logits(hidden)

            return adapted
        rows = np.repeat(self.state.adapters[run.rows], run.counts)[outputs_of(run, spans)]
        return lambda hidden, first: native.adapted_head(hidden, rows[first : first + len(hidden)])

    def _hidden_of(self, program: Program, run: Run, outputs: np.ndarray) -> torch.Tensor:
        """Hidden states float32 [S, hidden] of the tokens ``outputs`` of the step, in any order."""
        ascending, places = np.unique(outputs, return_inverse=True)
        return program.hidden(run.rows, run.starts, run.counts, ascending)[torch.from_numpy(places)]

    def _hand_on(self, run: Run) -> Outcome:
        """A step of a stage that others come after: hidden states go to the next, tokens come back from the last."""
        self._look_up(run)
        batch, slots = self._batch(run, [])
        self.group.send_hidden(self._hidden(batch))
        if len(slots) and self.pooler is None:
            tokens = torch.empty(len(slots), dtype=torch.int32, device=self.state.device)
            self._write(slots, self.group.share_tokens(tokens))
        return Outcome(self._download, self._nothing)

    def _pool(self, pooler: Pooler, run: Run) -> Outcome:
        """A step of prompts that are pooled: hidden states in place of tokens."""
        state = self.state
        self._look_up(run)
        pieces = pooler.pieces(run, state.pooled)
        wanted = np.concatenate([np.arange(each.first, each.first + each.count) for each in pieces] or [run.rows[:0]])
        if (program := self._program) is not None:
            hidden = self._hidden_of(program, run, wanted).to(self.model.dtype)
            return pooler.outcome(self._download, pieces, hidden, len(run.sample_src))
        batch = self._batch(run, [])[0]
        batch.host_query_starts = [0, *run.counts.cumsum().tolist()]
        type_starts = np.array([state.pooled[row].token_type_start for row in run.rows.tolist()])
        if (type_starts >= 0).any():
            at = np.arange(run.counts.sum()) - np.repeat(run.counts.cumsum() - run.counts - run.starts, run.counts)
            first = np.repeat(np.where(type_starts < 0, state.max_model_len, type_starts), run.counts)
            (batch.types,) = state.upload((at >= first).astype(np.int64))
        (batch.outputs,) = state.upload(wanted)
        if self.slots is not None and self.slots.active:
            self.slots.begin(np.repeat(state.adapters[run.rows], run.counts), wanted)
        return pooler.outcome(self._download, pieces, self._hidden(batch), len(run.sample_src))

    def _hidden(self, batch: StepBatch) -> torch.Tensor:
        """The forward pass: hidden states of the tokens ``batch.outputs``; of every token where a stage follows."""
        given = self.model.given is not None and self.model.given.active  # which no graph has a place for
        for graphs in self.adapted_graphs[::-1] if self._adapts else (self.graphs, self.pieces):
            if graphs is not None and not given and graphs.covers(batch):
                hidden = graphs.run(batch)
                return hidden if batch.outputs is None else hidden.index_select(0, batch.outputs)
        if self.group.shard.first:
            return self.model.forward(batch, self.kv)
        model = self.model
        before = self.group.receive_hidden(len(batch.token_ids), model.spec.hidden_size, model.dtype)
        return model.forward(batch, self.kv, before)

    def _write(self, slots: SampleBatch, tokens: torch.Tensor) -> None:
        """Tokens that were drawn, to their rows."""
        state, rows = self.state, slots.host_rows
        # A beam's token lands beyond those its row has, where nothing reads it before an append replaces it.
        if state.on_host:
            state.tokens_host[rows, slots.host_positions] = tokens.numpy()
        else:
            state.tokens.index_put_((slots.rows, slots.positions), tokens)
        state.known[rows] = slots.host_positions + state.grows[rows]

    def _sample(self, logits: torch.Tensor, slots: SampleBatch) -> Sampled:
        """Draw from ``logits`` [S, V], or this process's share of them; in a group every process learns the tokens."""
        group = self.group
        if group.shard.size > 1 and slots.needs.shareable and not self._guided(slots):
            found = group.best(*sample_share(logits, self.state.sampling, slots, self.model.vocabulary.start))
            if self.state.on_host:
                refuse(found[0].numpy(), slots.failed)
                sampled = Sampled(found[1].to(torch.int32), None)
            else:
                tokens, told = marks.marked(*found)
                sampled = Sampled(tokens, None, told=told)
            if group.shard.stages == 1:
                return sampled  # every process has seen all shares
        elif (whole := group.gather_logits(logits, self.state.vocab_size)) is not None:
            sampled = self._draw(whole, slots)
        else:
            sampled = Sampled(torch.empty(len(slots), dtype=torch.int32, device=self.state.device), None)
        return sampled._replace(tokens=group.share_tokens(sampled.tokens))

    def _guided(self, slots: SampleBatch) -> bool:
        """Whether a grammar or a user's function has a say in these slots."""
        rows = slots.host_rows.tolist()
        return any(not follower.rows.isdisjoint(rows) for follower in self.state.followers)

    def _draw(self, logits: torch.Tensor, slots: SampleBatch) -> Sampled:
        """Draw from logits [S, V] of the whole vocabulary; slots that cannot are added to ``slots.failed``."""
        if any(follower.rows for follower in self.state.followers):
            self._guide(slots)
        sampled = sample(logits, self.state.sampling, slots)
        if sampled.chosen is not None:  # a GPU's would have to be waited for: ``told`` has marks
            refuse(sampled.chosen, slots.failed)
        return sampled

    def _guide(self, slots: SampleBatch) -> None:
        """Add the grammars' mask and the users' functions of the rows that draw; waits for the last step's tokens
        while this one's are computed."""
        drawing, grammars, processors = slots.host_rows.tolist(), self.state.grammars, self.state.processors
        if grammars is not None and not grammars.rows.isdisjoint(drawing):
            grammars.catch_up(wait=True)
            mask, bad = grammars.histories.fill(drawing)
            for slot, status, message in bad:
                slots.failed.setdefault(slot, Failure(status, message, "structured_outputs"))
            (slots.mask,) = self.state.upload(mask)
        if processors is not None and not processors.rows.isdisjoint(drawing):
            processors.catch_up(wait=True)
            slots.edit = partial(_edit, processors, drawing, slots.failed)

    def _follow(self, slots: SampleBatch, outcome: Outcome) -> None:
        """Mark the rows that failed; the others' followers take their tokens when these arrive."""
        state = self.state
        for slot, why in slots.failed.items():
            state.failed[int(slots.host_rows[slot])] = why
        if any(follower.rows for follower in state.followers):
            rows = slots.host_rows.tolist()
            kept = [row if state.grows[row] and row not in state.failed else -1 for row in rows]
            for follower in state.followers:
                follower.drawn(kept, outcome.arrival)

    def _prompts(self, hidden: torch.Tensor, first: int, run: Run, spans: list[Span], head: Head) -> list[PromptGroup]:
        """Logprobs of the prompt tokens ``spans`` from the hidden states before them, a slice at a time: those of the
        outputs ``hidden`` from ``first`` on.
        """
        state = self.state
        raw = "raw_logits" if state.sampling.logprobs_mode.endswith("logits") else "raw_logprobs"
        at, positions = _places(spans)
        tokens = state.tokens[tuple(state.upload(run.rows[at], positions))].long()
        groups, start = [], first
        for k, same in groupby(spans, key=lambda span: span.k):
            members = list(same)
            end = start + sum(span.count for span in members)
            parts = []
            for low in range(start, end, PROMPT_SLICE):
                part = slice(low, min(low + PROMPT_SLICE, end))
                logits = self.group.gather_logits(head(hidden[part], low), state.vocab_size)
                if logits is not None:
                    asked = slice(part.start - first, part.stop - first)
                    parts.append(token_logprobs(logits, tokens[asked], k, raw))
            if parts:
                groups.append(PromptGroup(members, *(torch.cat(column) for column in zip(*parts, strict=True))))
            start = end
        return groups

    def _batch(self, run: Run, spans: list[Span]) -> tuple[StepBatch, SampleBatch]:
        """What the model computes and what is drawn from it. Its outputs are of each sample slot, then of the tokens
        before those of ``spans``."""
        state, size, count = self.state, self.state.block_size, len(run.rows)
        if run.pure_decode:
            query_starts, num_decodes, longest = np.arange(count + 1), count, 1
            token_rows, positions = run.rows, run.starts
        else:
            query_starts = np.zeros(count + 1, np.int64)
            np.cumsum(run.counts, out=query_starts[1:])
            num_decodes, longest = int((run.counts != 1).argmax()), int(run.counts.max())
            token_rows = np.repeat(run.rows, run.counts)
            positions = np.arange(query_starts[-1]) + np.repeat(run.starts - query_starts[:-1], run.counts)
        slots = state.tables_host[token_rows, positions // size].astype(np.int64) * size + positions % size
        longest_context = int(run.ends.max())
        orders = () if state.on_host or run.pure_decode else longest_first(run.counts, run.ends, num_decodes)
        if self.slots is not None and self.slots.active:
            self.slots.begin(state.adapters[token_rows], outputs_of(run, spans))
        (
            rows_d, token_rows_d, positions_d, slots_d, outputs_d, sample_rows_d, sample_positions_d, starts_d, ends_d,
            *orders_d,
        ) = state.upload(
            run.rows, token_rows, positions, slots, outputs_of(run, spans), run.sample_rows, run.positions,
            query_starts.astype(np.int32), run.ends.astype(np.int32), *orders,
        )  # fmt: skip
        width = -(-longest_context // size)
        if state.on_host:
            ids = state.tokens_host[token_rows, positions].astype(np.int64)
            token_ids, tables = state.upload(ids, state.tables_host[run.rows, :width])
        else:
            token_ids = state.tokens[token_rows_d, positions_d].long()
            tables = state.tables[:, :width].index_select(0, rows_d)
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions_d,
            slots=slots_d,
            query_starts=starts_d,
            context_lens=ends_d,
            block_tables=tables,
            num_decodes=num_decodes,
            max_query_len=longest,
            max_context_len=longest_context,
            block_size=size,
            outputs=outputs_d,
            host_query_starts=query_starts.tolist() if state.on_host else [],
            host_context_lens=run.ends.tolist() if state.on_host else [],
            order=orders_d[0] if orders_d else None,
            order_starts=orders_d[1] if orders_d else None,
        )
        return batch, state.sample_batch(run, sample_rows_d, sample_positions_d)


def outputs_of(run: Run, spans: list[Span]) -> np.ndarray:
    """The tokens of the step whose logits are wanted: of each sample slot the last, then those before ``spans``."""
    if run.pure_decode and not spans:
        return run.sample_src
    ends = run.counts.cumsum()
    outputs = ends[run.sample_src] - 1 if run.outputs is None else run.outputs
    if not spans:
        return outputs
    at, told = _places(spans)
    return np.concatenate([outputs, (ends - run.counts - run.starts)[at] + told - 1])


def _places(spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """The compute row and the position of every prompt token of ``spans``, one span after another."""
    counts = [span.count for span in spans]
    told = np.concatenate([np.arange(span.first, span.first + span.count) for span in spans])
    return np.repeat([span.at for span in spans], counts), told


def _edit(
    processors: Follower[Processors], drawing: list[int], failed: dict[int, Failure], logits: torch.Tensor
) -> None:
    """Call the users' functions for the rows that draw, each with its row of ``logits`` [S, V]."""
    for slot, row in enumerate(drawing):
        if row in processors.rows and slot not in failed:
            try:
                processors.histories.apply(row, logits[slot])
            except SlotError as error:
                failed[slot] = Failure(error.status, str(error), "logits_processors")


def refuse(chosen: np.ndarray, failed: dict[int, Failure]) -> None:
    """The slots whose chosen token has a logit that cannot be drawn are added to ``failed``."""
    sound = chosen > -np.inf
    if np.count_nonzero(sound) < len(sound):
        for slot in np.flatnonzero(~sound).tolist():
            failed.setdefault(slot, NAN if np.isnan(chosen[slot]) else FORBIDDEN)
