"""The worker link: leases, what a step is to do, and what came of it."""

from __future__ import annotations

import msgspec

from ..work import Work
from .base import Logprobs, Message


class Lease(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One period in which one scheduler owns one worker's state. ``epoch`` is the scheduler's start in ms."""

    epoch: int
    replica: int
    counter: int


class Assign(Message):
    """scheduler -> worker: opens a lease. The worker drops all rows and forgets its cache map."""

    lease: Lease
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Loaded(Message):
    """worker -> scheduler: weights are in, a worst-case step was profiled, this many blocks fit."""

    lease: Lease
    num_blocks: int
    max_model_len: int
    vocab_size: int
    pools: bool = False  # it answers prompts with vectors and generates nothing
    whole: bool = False  # every token sees all others: a prompt is neither split over steps nor cached
    adapter_slots: int = 0  # adapters that it can have ready at once (--max-loras); 0: it takes none
    drafts: int = 0  # tokens that it drafts for a row in one step, at most; 0: it does not speculate
    draft_rows: int = 0  # rows that it speculates for in one step, at most
    kv_format: str = ""  # workers of one format may send each other pages; "": this one's stay
    block_bytes: int = 0  # of one block's pages
    drafts_always: bool = False  # it speculates wherever it may, whether that is quicker or not


class Configure(Message):
    """scheduler -> worker: allocate this many blocks (the least of the group's ranks)."""

    lease: Lease
    num_blocks: int


class Rest(Message):
    """scheduler -> worker, in place of Assign: opens a lease without plans. The worker gives its KV cache back, and at
    ``level`` 1 moves its weights to the host's memory, at 2 drops them; at 0 it has its weights. Assign ends it."""

    lease: Lease
    level: int


class Rested(Message):
    """worker -> scheduler: it is as Rest said, and the memory is given back."""

    lease: Lease


class Profile(Message):
    """scheduler -> worker, and from a leader to the others of its replica: have torch's profiler record what steps do,
    or (not ``on``) end that and write the trace."""

    lease: Lease
    on: bool


class Profiled(Message):
    """worker -> scheduler: it is as Profile said, or ``error`` says why not."""

    lease: Lease
    error: str = ""


class Ready(Message):
    """worker -> scheduler: the cache is allocated and graphs are captured; plans may come."""

    lease: Lease


class Admit(msgspec.Struct, array_like=True, gc=False):
    """A row's new owner. ``ids`` (int32) are all tokens known now: the prompt, then outputs it resumes from."""

    row: int
    uid: int
    index: int
    ids: bytes
    prompt_len: int
    work: Work  # resolved
    prompt_logprobs_from: int = -1  # first prompt token whose logprobs are wanted from this row; -1: none

    @property
    def adapter_slot(self) -> int:
        """The worker's slot whose adapter this row runs with; -1: none. Forks of the row run with it too."""
        return getattr(self.work, "slot", -1)


class StepPlan(Message):
    """scheduler -> the group's leader. Applied in this order: drops, forks, copies, admits, deltas, appends, run.

    Forks and copies are gathered in full before any is written: a source may be another's destination.
    Every value is an index: rows are persistent rows, blocks physical blocks. ``starts[i]`` is the position of the
    first token that compute row i runs, ``counts[i]`` how many; token ids are read from the row itself, where the
    worker wrote its own samples, so a decode needs no value from the previous step's result.
    Slot k draws from the logits of the last token of compute row ``sample_src[k]`` with the parameters of row
    ``sample_rows[k]``, for position starts + counts of that compute row, and writes the token into that row.
    A row of a beam search (``use_beam_search``) draws nothing and nothing is written there: its slot answers
    with the logprobs of the best max(2 * width, logprobs) tokens, and a later plan appends the token that was chosen.
    """

    lease: Lease
    step: int  # last + 1, from 1
    drops: bytes = b""  # i32 rows
    fork_src: bytes = b""  # i32 rows: tokens, block table, parameters and sampler state are copied
    fork_dst: bytes = b""  # i32 rows
    fork_seeds: bytes = b""  # u64, the destination's seed
    copy_src: bytes = b""  # i32 blocks
    copy_dst: bytes = b""  # i32 blocks
    admits: list[Admit] = []
    delta_rows: bytes = b""  # i32: block table entries to set
    delta_slots: bytes = b""  # i32, index within the row's table
    delta_blocks: bytes = b""  # i32
    append_rows: bytes = b""  # i32 rows (each at most once) that get a next token the scheduler chose
    append_tokens: bytes = b""  # i32
    rows: bytes = b""  # i32 compute rows: prefill chunks and decodes mixed, decodes first
    starts: bytes = b""  # i32
    counts: bytes = b""  # i32
    sample_src: bytes = b""  # i32 sample slots: index into compute rows
    sample_rows: bytes = b""  # i32, destination rows


class SpeculativePlan(StepPlan):
    """A StepPlan in which some rows speculate: the worker drafts tokens after those they have, and verifies them.

    Such a compute row is run from wherever its row is, which is ``starts`` or later, over the last token it has and at
    most ``drafts`` drafted ones, and never to or past position ``starts + counts``: there are blocks up to that. Its
    slot, of the same number, answers with the drafts that are just what would have been drawn, and one token more.

    Without such rows it is answered as a StepPlan. It says that those who run are likely to be drafted for: a head that
    drafts from hidden states keeps them.
    """

    draft_rows: bytes = b""  # i32, rising: the compute rows that speculate


class TraceRows(Message):
    """scheduler -> the group's leader, before the plan of this step, where steps are traced: rows that it admits for
    requests that are traced."""

    lease: Lease
    step: int
    rows: bytes  # i32
    contexts: list[bytes]  # one for each, as in spans.py


class PromptChunk(msgspec.Struct, array_like=True, gc=False):
    """Logprobs of prompt tokens ``start``, ... of compute row ``at``."""

    at: int
    start: int
    logprobs: Logprobs


class SlotFailed(msgspec.Struct, array_like=True, gc=False):
    """No token can be drawn for a slot: a logits processor raised, or a grammar ran into its limits."""

    slot: int
    status: int
    message: str
    param: str | None = None  # the field at fault
    corrupted: bool = False  # what the model gave are not numbers


class SlotPooled(msgspec.Struct, array_like=True, gc=False):
    """What a slot of a pooling request answers with, as in Pooled."""

    slot: int
    rows: int
    data: bytes  # f32


class StepResult(Message):
    """sampling rank -> scheduler, one a plan even when it samples nothing: tokens in sample-slot order.

    The token of a failed slot means nothing. That of a beam search's is the most likely one.
    """

    lease: Lease
    step: int
    tokens: bytes  # i32
    counts: bytes = b""  # i32 tokens of each slot; empty: one each
    logprob_slots: bytes = b""  # i32, rising: slots whose rows ask for logprobs
    logprobs: list[Logprobs] = []  # one for each of logprob_slots, of the tokens of its slot
    prompts: list[PromptChunk] = []
    failed: list[SlotFailed] = []
    pooled: list[SlotPooled] = []  # one for each slot of a pooling request, but for the failed; its token means nothing


class SpeculativeResult(StepResult):
    """The result of a SpeculativePlan; ``counts`` and logprobs are of the tokens that were kept."""

    drafted: bytes = b""  # i32 for each of ``draft_rows``: how many tokens were drafted, kept or not


class Compiled(Message):
    """worker -> scheduler: a kernel was compiled while requests were served, which held up all of them. Rare, so it is
    a message of its own."""

    lease: Lease


class StepFailed(Message):
    """any rank -> scheduler: an exception in this step. It ends the lease."""

    lease: Lease
    step: int
    error: str
