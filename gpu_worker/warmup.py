"""Before Ready: every kernel that a step may launch is launched once, so that none is compiled while streams wait.

Triton compiles a kernel where it is first launched with new constants (tiles, flags), types or alignments, which takes
seconds, and every stream of the replica stands still meanwhile. Which constants there are is asked of the code that
chooses them: ``Model.choosers`` for all shapes of a step, ``sampler.variants`` for what the rows of a step may need.
The steps run here are made of padding: they read and write nothing of the cache, and their tokens are nobody's.

What depends on the numbers of a step in another way must not be specialised on (``do_not_specialize`` in the kernels);
``tests/gpu_worker/test_warmup.py`` holds that, and ``compilations.py`` tells an operator where it fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..proto.codec import i32
from ..proto.messages import Admit, Lease, StepPlan
from ..proto.params import SamplingParams
from ..proto.process import shows_bars
from ..proto.work import Generate, Work
from .batch import StepShape, idle_batch
from .kernels import marks, sampling
from .kernels.attention_flash import flash_in_use
from .lora.card import CardSlots
from .runner import PROMPT_SLICE, Runner
from .sampling.sample_batch import SampleBatch
from .sampling.sampler import sample, sample_share, variants
from .sampling.sampling_state import PLAIN, SamplingNeeds
from .speculation.head_model import Head

if TYPE_CHECKING:
    from .kv_cache import KVCache
    from .models.model import Model
    from .parallel.parallel import Group
    from .state import RowState

log = logging.getLogger(__name__)


def every_stage(logprobs: int) -> Generate:
    """Work with every stage of sampling on; ``logprobs`` others are told beside each prompt token and drawn one."""
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1,
        repetition_penalty=1.1, logit_bias={0: 1.0}, allowed_token_ids=[0, 1, 2], min_tokens=1,
        logprobs=logprobs, prompt_logprobs=logprobs,
    )  # fmt: skip
    return Generate(params, 0, suppressed_ids=i32([1]), bad_words=[[2], [0, 1]])


BEAM = Generate(SamplingParams(n=2, use_beam_search=True, temperature=0.0), 0)


@torch.inference_mode()
def warm_up(runner: Runner, progress: bool) -> None:
    """Launch every kernel that a step of ``runner`` may launch. The processes of a replica do so together."""
    began = time.monotonic()
    from tqdm import tqdm

    shapes = chosen_shapes(runner)
    jobs: list[Callable[[], None]] = [partial(_forward, runner, shape) for shape in shapes]
    if isinstance(runner.slots, CardSlots):
        jobs += [partial(_adapted, runner, runner.slots, shape) for shape in shapes]
    for model, kv in runner.beside:
        jobs += [partial(_pass, runner, model, kv, shape) for shape in chosen_shapes(runner, model=model)]
    if runner.group.shard.last and runner.pooler is None:
        jobs += _drawing(runner)
    for job in tqdm(jobs, desc="Compiling kernels", unit="step", disable=not (progress and shows_bars())):
        job()
    if (flash := flash_in_use()) is not None:
        flash.warm = True
    log.info(
        "ran %d steps of padding in %.1f s, so that no kernel is compiled later", len(jobs), time.monotonic() - began
    )


@torch.inference_mode()
def warm_up_pieces(runner: Runner) -> None:
    """Launch every attention that may run between recorded pieces: queries lie otherwise there than in other steps."""
    if runner.pieces is not None and runner.pieces.sizes:
        for shape in chosen_shapes(runner, runner.pieces.sizes[-1]):
            runner.pieces.run(idle_batch(shape, runner.state.block_size, runner.state.device))


def step_shapes(max_rows: int, max_tokens: int, max_len: int) -> Iterator[StepShape]:
    """Shapes of steps of at most ``max_rows`` rows, ``max_tokens`` tokens and ``max_len`` tokens of context.

    Every number of decodes, every number of prompt tokens, and mixtures of powers of two; contexts are powers of two.
    """
    contexts = [*_powers(max_len), max_len]
    for rows in range(1, max_rows + 1):
        for context in contexts:
            yield StepShape(rows, rows, rows, 1, context)
    for tokens in range(2, max_tokens + 1):
        longest = min(tokens, max_len)
        if (rows := -(-tokens // longest)) <= max_rows:
            yield StepShape(rows, 0, tokens, longest, longest)
    for decodes in _powers(max_rows - 1):
        for tokens in _powers(min(max_tokens - decodes, max_len)):
            for context in contexts:
                if 1 < tokens <= context:
                    yield StepShape(decodes + 1, decodes, decodes + tokens, tokens, context)


def chosen_shapes(runner: Runner, most: int | None = None, model: Model | None = None) -> list[StepShape]:
    """Of the shapes that a step (of at most ``most`` tokens) may have: few, for which all is chosen that can be.

    Tensor ranks run the same ones, as they add up what they compute: those that any of them needs. ``model``: one that
    runs beside the runner's, on this rank alone.
    """
    state, alone = runner.state, model is not None
    model = model or runner.model
    choosers, seen = sorted(model.choosers(), key=repr), set[tuple[int, Hashable]]()
    shapes = list(step_shapes(state.max_rows, min(runner.max_tokens, most or runner.max_tokens), state.max_model_len))
    wanted = np.zeros(len(shapes), np.float32)
    for at, shape in enumerate(shapes):
        new = {(which, value) for which, chooser in enumerate(choosers) for value in chooser(shape)} - seen
        wanted[at] = bool(new) or not at
        seen |= new
    if alone:
        return [shapes[at] for at in np.flatnonzero(wanted).tolist()]
    return _of_any_rank(shapes, wanted, runner.group, state.device)


def _of_any_rank(shapes: list[StepShape], wanted: np.ndarray, group: Group, device: torch.device) -> list[StepShape]:
    if group.shard.size > 1:
        wanted = group.all_reduce(torch.from_numpy(wanted).to(device)).cpu().numpy()
    return [shapes[at] for at in np.flatnonzero(wanted).tolist()]


def _forward(runner: Runner, shape: StepShape) -> None:
    """A step of ``shape`` through this process's layers, and its logits."""
    model, group, device = runner.model, runner.group, runner.state.device
    batch, before = idle_batch(shape, runner.state.block_size, device), None
    if not group.shard.first:
        before = torch.zeros((shape.tokens, model.spec.hidden_size), dtype=model.dtype, device=device)
    hidden = model.forward(batch, runner.kv, before)
    if group.shard.last and runner.pooler is None:
        drawn = hidden[: max(runner.state.max_rows, PROMPT_SLICE)]
        if runner.slots is not None:
            runner.slots.to_outputs(slice(0, len(drawn)))
        model.logits(drawn)
    elif runner.pooler is not None and runner.pooler.config.convert == "classify":
        model.logits(hidden)  # of every token, where all are asked for


def _adapted(runner: Runner, slots: CardSlots, shape: StepShape) -> None:
    """The same, of rows that have adapters."""
    with slots.rehearsal():
        slots.begin(np.zeros(shape.tokens, np.int32))
        _forward(runner, shape)


def _pass(runner: Runner, model: Model, kv: KVCache, shape: StepShape) -> None:
    """A pass of a model that drafts, and its logits. A head is given hidden states."""
    device = runner.state.device
    given = torch.zeros((shape.tokens, model.spec.hidden_size), dtype=model.dtype, device=device)
    batch = idle_batch(shape, runner.state.block_size, device)
    hidden = model.forward(batch, kv, given if isinstance(model, Head) else None)
    model.logits(hidden[: runner.state.max_rows])


@torch.inference_mode()
def run_worst_case(runner: Runner, work: Work) -> None:
    """The steps that take most memory, one after another: all rows that there are, each doing ``work``; then so few as
    speculate, draws at every position that they may have, and the largest pass of what drafts."""
    state, most = runner.state, runner.max_tokens
    runner.rehearse(worst_case(state, most, work))
    if runner.few_rows:
        state.reset()
        runner.rehearse(worst_case(state, most, work, runner.few_rows))
        _draw_at_many(runner)
    for model, kv in runner.beside:
        longest = min(most, state.max_model_len)
        _pass(runner, model, kv, StepShape(-(-most // longest), 0, most, longest, longest))


def _draw_at_many(runner: Runner) -> None:
    """What a verification draws at once: without penalties, whose rows draw position by position."""
    model, state = runner.model, runner.state
    hidden = torch.zeros((runner.most_slots, model.spec.hidden_size), dtype=model.dtype, device=state.device)
    logits = runner.group.gather_logits(model.logits(hidden), state.vocab_size)
    if logits is not None:
        needs = SamplingNeeds(True, True, True, True, True, True, True, penalties=False, logprobs=True)
        sample(logits, state.sampling, _slots(runner, runner.most_slots, needs))


def _drawing(runner: Runner) -> Iterator[Callable[[], None]]:
    """Drawing from logits, by as many rows as make a difference, each way that the rows of a step may ask for."""
    seen = set[Hashable]()
    for rows in range(1, runner.state.max_rows + 1):
        new = sampling.choices(rows) - seen
        if new or rows == 1:
            yield partial(_draw, runner, rows)
        seen |= new


def _draw(runner: Runner, rows: int) -> None:
    model, state, group = runner.model, runner.state, runner.group
    shape = StepShape(rows, rows, rows, 1, 1)
    before = (
        None
        if group.shard.first
        else torch.zeros((rows, model.spec.hidden_size), dtype=model.dtype, device=state.device)
    )
    mine = model.logits(model.forward(idle_batch(shape, state.block_size, state.device), runner.kv, before))
    logits = group.gather_logits(mine, state.vocab_size)
    if group.shard.size > 1:
        for random in (False, True):
            slots = _slots(runner, rows, SamplingNeeds(random=random))
            marks.marked(*sample_share(mine, state.sampling, slots, model.vocabulary.start))
    if logits is None:
        return
    every = range(rows)
    for work in (every_stage(1), BEAM):
        for row in every:
            state.sampling.admit(row, work, 0, 1, np.zeros(1, np.int32))
        for needs in variants():
            if work is not BEAM or not needs.changes:  # this one has no edits
                sample(logits, state.sampling, _slots(runner, rows, needs))
        state.sampling.drop(every)
    masked = _slots(runner, rows, PLAIN)
    state.upload.begin()
    (masked.mask,) = state.upload(np.full((rows, -(-state.vocab_size // 32)), -1, np.int32))
    sample(logits, state.sampling, masked)


def _slots(runner: Runner, rows: int, needs: SamplingNeeds) -> SampleBatch:
    """Slots that draw the token behind a prompt of one in each of the first ``rows`` rows, in turn if there are
    fewer."""
    state = runner.state
    at, ones = np.arange(rows) % state.max_rows, np.ones(rows, np.int64)
    state.upload.begin()
    rows_d, positions = state.upload(at, ones)
    return SampleBatch(rows_d, positions, at, ones, state.tokens, needs)


def _powers(limit: int) -> list[int]:
    """Powers of two up to ``limit``."""
    return [1 << n for n in range(max(limit, 0).bit_length())]


def worst_case(state: RowState, max_tokens: int, work: Work, most: int | None = None) -> StepPlan:
    """A plan of ``max_tokens`` tokens over all rows, or ``most`` of them, each to do ``work``; all use block 0."""
    rows = min(most or state.max_rows, state.max_rows, max_tokens)
    length = min(state.max_model_len, max_tokens // rows)
    blocks = -(-length // state.block_size)
    ids, every = i32([0] * length), i32(range(rows))
    return StepPlan(
        Lease(0, 0, 0), 0,
        admits=[Admit(row, 0, row, ids, length, work, 1) for row in range(rows)],
        delta_rows=i32(row for row in range(rows) for _ in range(blocks)),
        delta_slots=i32(list(range(blocks)) * rows), delta_blocks=i32([0] * (rows * blocks)),
        rows=every, starts=i32([0] * rows), counts=i32([length] * rows), sample_src=every, sample_rows=every,
    )  # fmt: skip
