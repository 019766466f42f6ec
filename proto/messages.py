"""Every message of every socket, in closed unions, one packed frame each.

Two numbers keep histories apart. ``lease`` is in every message on a worker link: a result of any other lease than
the current one is dropped. ``attempt`` is in every message about a request: a higher attempt replaces a lower one
everywhere, and lower ones are dropped everywhere. The first is 0; a later one is never refused for load. A request
has a ``uid`` (int64, chosen by Engine, never reused); its n children are (uid, index).

Columns are little-endian arrays as bytes; the comment beside each says its item. Columns of one group have one
length unless said otherwise.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from .work import Work

PROTOCOL = 6
"""Raised on any change of a message; a Hello of another version is answered with Bye."""


class Finish(IntEnum):
    """Why a sequence ended (int8 in columns)."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Base of all that is sent."""


class Lease(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One period in which one scheduler owns one worker's state. ``epoch`` is the scheduler's start in ms."""

    epoch: int
    replica: int
    counter: int


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of n tokens: for each the token itself, then the k most likely ones, best first.

    ``ranks`` are of the tokens themselves: 1 + the number of tokens strictly more likely. ``texts`` is filled by the
    detokenizer, one for each id (empty where nothing is to be detokenized); ``raw`` has the bytes of those tokens that
    are no whole characters, by place in ``ids``.
    """

    ids: bytes  # i32, n * (k + 1)
    values: bytes  # f32, n * (k + 1)
    ranks: bytes  # i32, n
    texts: list[str] = []
    raw: dict[int, bytes] = {}


# ---------------------------------------------------------------- requests, towards the model


class Resume(msgspec.Struct, array_like=True, gc=False):
    """What Engine already has of one live child: ``ids`` (int32 output tokens) and characters of text received."""

    index: int
    ids: bytes
    text_sent: int


class Tokenize(Message):
    """frontend -> detokenizer. Exactly one of ``prompt``, ``ids`` and ``messages`` is set.

    ``ids`` is int32. ``messages`` are chat messages as JSON objects, rendered with the model's chat template.
    ``resume`` lists the live children of an earlier attempt; empty means all n children from the start.
    """

    uid: int
    attempt: int
    work: Work  # as asked for
    arrival: float
    prompt: str | None = None
    ids: bytes | None = None
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] | None = None  # add_generation_prompt, continue_final_message, chat_template_kwargs, tools
    add_special_tokens: bool = True
    key: str = ""
    priority: int = 0
    resume: list[Resume] = []
    losses: int = 0
    echo: bool = False  # the client wants the prompt's text: decode it where ids alone were given
    prompt_logprobs_from: int = 0  # on a resubmission: leading prompt tokens whose logprobs Engine has


class Child(msgspec.Struct, array_like=True, gc=False):
    """One child to run: its index and the output tokens (int32) it already has."""

    index: int
    ids: bytes


class Submit(Message):
    """detokenizer -> scheduler. ``ids`` int32 prompt; ``hashes`` 16 bytes for each full block of the prompt."""

    uid: int
    attempt: int
    ids: bytes
    hashes: bytes
    work: Work  # resolved
    arrival: float
    children: list[Child] = []  # empty: children 0..n-1 from the start
    key: str = ""
    priority: int = 0
    losses: int = 0
    prompt_logprobs_from: int = 0  # leading prompt tokens whose logprobs the client has


class Abort(Message):
    """Along the path: the client no longer wants it. Unknown uids are ignored."""

    uid: int
    attempt: int


class Stopped(Message):
    """detokenizer -> scheduler: a stop string ended (uid, index) after ``length`` output tokens."""

    uid: int
    attempt: int
    index: int
    length: int


class BeamStopped(Message):
    """detokenizer -> scheduler, answering BeamTokens: the candidates that a stop string ends."""

    uid: int
    attempt: int
    step: int
    stopped: bytes  # i32, indexes of candidates


class Reconcile(Message):
    """Every 2 s downstream: what the sender believes is open. The receiver answers Unknown for those it lacks."""

    uids: bytes  # i64
    attempts: bytes  # i32


# ---------------------------------------------------------------- requests, towards the client


class Accepted(Message):
    """detokenizer -> frontend, before Submit is sent: what Engine needs in order to resubmit."""

    uid: int
    attempt: int
    ids: bytes  # i32, the prompt as run
    prompt: str | None  # the prompt's text (rendered, for a chat; None when ids were given)
    work: Work  # resolved


class TokenBatch(Message):
    """scheduler -> detokenizer, once a step: new tokens of this detokenizer's sequences."""

    uids: bytes  # i64
    attempts: bytes  # i32
    indexes: bytes  # i32
    offsets: bytes  # i32, output tokens of the sequence before these
    counts: bytes  # i32, new tokens of each
    tokens: bytes  # i32, flat: sum(counts) items
    finishes: bytes  # i8, Finish
    stop_ids: bytes  # i32, the stop token id that ended it, -1 otherwise (EOS included)
    started_uids: bytes = b""  # i64: requests put into their first step since the last batch
    started_cached: bytes = b""  # i32: prompt tokens each found in the prefix cache
    logprob_rows: bytes = b""  # i32, rising: rows of these columns whose tokens have logprobs
    logprobs: list[Logprobs] = []  # one for each of logprob_rows, of its ``counts`` tokens


class PromptLogprobs(Message):
    """scheduler -> detokenizer -> frontend: logprobs of prompt tokens ``start``, ... The first copy of each wins.

    ``logprobs.ids`` begins each group with the prompt's own token. Token 0 has none: ``start`` is at least 1. All of
    a prompt's are sent before its first output token.
    """

    uid: int
    attempt: int
    start: int
    logprobs: Logprobs


class BeamTokens(Message):
    """scheduler -> detokenizer: one step's candidates of a beam search that has stop strings.

    ``parents`` index the candidates of the step before (all 0 in step 1: the empty output). The group goes on when
    BeamStopped has come. The texts of what is returned travel in a TokenBatch at the end, each child's tokens at once.
    """

    uid: int
    attempt: int
    step: int  # from 1: output tokens of every candidate
    parents: bytes  # i32
    tokens: bytes  # i32


class TextBatch(Message):
    """detokenizer -> frontend: one frame for each frontend a step."""

    uids: bytes  # i64
    attempts: bytes  # i32
    indexes: bytes  # i32
    offsets: bytes  # i32, output tokens before these
    counts: bytes  # i32
    tokens: bytes  # i32, flat
    texts: list[str]  # new text of each; may be "" while characters are held back
    finishes: bytes  # i8, Finish
    stop_reasons: list[int | str | None]
    lengths: bytes  # i32, output tokens that count (a stop string cuts there); -1 until finished
    started_uids: bytes = b""  # i64
    started_cached: bytes = b""  # i32
    logprob_rows: bytes = b""  # i32, as in TokenBatch
    logprobs: list[Logprobs] = []  # with texts; of exactly the row's ``counts`` tokens


class Pooled(Message):
    """scheduler -> detokenizer -> frontend: a pooling request's answer, and its end.

    ``data`` is float32: one vector where ``rows`` is 0, else [rows, dim], a row for each token of the prompt.
    """

    uid: int
    attempt: int
    rows: int
    data: bytes


class Failed(Message):
    """Along the path back: the request ends here with an HTTP status. ``param`` names the field at fault."""

    uid: int
    attempt: int
    status: int
    message: str
    param: str | None = None
    retry_after: float | None = None


class Unknown(Message):
    """Answer to Reconcile: the receiver does not have these."""

    uids: bytes  # i64
    attempts: bytes  # i32


# ---------------------------------------------------------------- membership


class Hello(Message):
    """Any process -> scheduler, first on a connection. ``endpoint`` is where this process listens, if it does."""

    kind: str  # "frontend", "detokenizer", "gpu_worker"; "operator" asks and tells about workers, and is not announced
    incarnation: str
    protocol: int
    pid: int
    endpoint: str = ""
    device: str = ""
    loaded: bool = False  # a worker that kept its weights through a lost lease


class Peer(msgspec.Struct, array_like=True, gc=False):
    """One live process."""

    kind: str
    incarnation: str
    endpoint: str


class Peers(Message):
    """scheduler -> front side, after Hello and on every change. ``ready``: some replica can run a request."""

    epoch: int
    peers: list[Peer]
    block_size: int
    ready: bool
    max_model_len: int  # 0 until a replica is ready
    blamed: int | None = None  # the request whose submission ended the scheduler before this one: nobody else's fault


class Heartbeat(Message):
    """Both ways, every second: alive. ``last_step`` is the last finished step of a worker."""

    last_step: int = 0
    memory: int = 0  # resident bytes
    bad_frames: int = 0


class Bye(Message):
    """Both ways: the sender leaves, or the receiver must (``reason`` says why)."""

    reason: str = ""
    again: bool = False  # scheduler -> worker: only the lease is over; keep the weights and say Hello again


class Drain(Message):
    """worker -> scheduler: I must leave; take nothing new to me, and let me know when I am free.

    scheduler -> worker: you are free: finish what is planned, then Bye.
    """

    reason: str = ""


class Manage(Message):
    """operator -> scheduler. ``action`` is "list", "drain" or "remove" (drain with no patience)."""

    token: int
    action: str
    worker: str = ""  # its incarnation, a unique beginning of it, or its replica's number
    timeout: float = -1.0  # seconds that a drain may take; negative: --drain-timeout


class WorkerInfo(msgspec.Struct, array_like=True, gc=False):
    """One worker as the scheduler sees it. ``state``: loading, configuring, ready, draining."""

    worker: str
    replica: int
    state: str
    device: str
    pid: int
    running: int
    blocks: int
    blocks_used: int
    last_step: int


class Managed(Message):
    """scheduler -> operator, answering Manage: every worker after it, and what was wrong with it ("" for nothing)."""

    token: int
    workers: list[WorkerInfo]
    error: str = ""


class GetStats(Message):
    """frontend -> scheduler."""

    token: int = 0


class ReplicaStats(msgspec.Struct, array_like=True, gc=False):
    """One replica as the scheduler sees it."""

    replica: int
    state: str
    device: str
    running: int
    blocks: int
    blocks_used: int
    last_step: int


class Stats(Message):
    """scheduler -> frontend, answering GetStats. Counters count since the scheduler started."""

    token: int
    running: int
    waiting: int
    blocks: int
    blocks_used: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of these, found
    prompt_tokens: int
    generation_tokens: int
    steps: int
    bad_frames: int
    replicas: list[ReplicaStats]


# ---------------------------------------------------------------- worker link


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


class Configure(Message):
    """scheduler -> worker: allocate this many blocks (the least of the group's ranks)."""

    lease: Lease
    num_blocks: int


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
    logprobs: list[Logprobs] = []  # one for each of logprob_slots, of one token
    prompts: list[PromptChunk] = []
    failed: list[SlotFailed] = []
    pooled: list[SlotPooled] = []  # one for each slot of a pooling request, but for the failed; its token means nothing


class StepFailed(Message):
    """any rank -> scheduler: an exception in this step. It ends the lease."""

    lease: Lease
    step: int
    error: str


# ---------------------------------------------------------------- the closed unions, one a direction

ToDetokenizer = Tokenize | Abort | Reconcile | Heartbeat | Bye
"""Engine -> detokenizer."""

FromDetokenizer = Accepted | TextBatch | PromptLogprobs | Pooled | Failed | Unknown | Heartbeat | Bye
"""detokenizer -> Engine."""

ToSchedulerFront = Hello | Submit | Abort | Stopped | BeamStopped | Reconcile | GetStats | Manage | Heartbeat | Bye
"""detokenizer, Engine, operator -> the scheduler's front socket."""

FromSchedulerFront = (
    Peers | TokenBatch | PromptLogprobs | BeamTokens | Pooled | Failed | Unknown | Stats | Managed | Heartbeat | Bye
)
"""the scheduler's front socket -> detokenizer, Engine, operator."""

ToSchedulerWorkers = Hello | Loaded | Ready | StepResult | StepFailed | Drain | Heartbeat | Bye
"""worker -> the scheduler's worker socket."""

FromSchedulerWorkers = Assign | Configure | StepPlan | Drain | Heartbeat | Bye
"""the scheduler's worker socket -> worker."""
