"""Requests and what comes of them: between Engine, the detokenizer and the scheduler."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from ..hashing import ROOT
from ..work import Text, Work
from .base import Logprobs, Message


class Finish(IntEnum):
    """Why a sequence ended (int8 in columns)."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


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
    work: Work | Text  # as asked for
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
    cache_salt: str = ""  # cached blocks are shared only with requests of the same


class TracedTokenize(Tokenize):
    """A Tokenize of a request that is traced. ``trace`` is the context of its span in the frontend."""

    trace: bytes = b""  # as in spans.py


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
    root: bytes = ROOT  # of the chain of ``hashes``; see ``root_of``


class TracedSubmit(Submit):
    """A Submit of a request that is traced. ``trace`` is as in TracedTokenize."""

    trace: bytes = b""


class Abort(Message):
    """Along the path: the client no longer wants the request. Unknown uids are ignored."""

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
    """detokenizer -> frontend, before Submit is sent: what Engine needs in order to resubmit. Of a Text it is all."""

    uid: int
    attempt: int
    ids: bytes  # i32, the prompt as run
    prompt: str | None  # the prompt's text (rendered, for a chat; None when ids were given)
    work: Work | Text  # resolved


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


class Quarantined(Message):
    """detokenizer -> its frontends: this request was lost so often that it is prepared alone, and it is the next.

    Its own frontend sends this back, and it is not begun before. From then on a death of the detokenizer is held
    against this request and no other, until a uid of 0 says that it is over.
    """

    uid: int
    attempt: int


class Unknown(Message):
    """Answer to Reconcile: the receiver does not have these."""

    uids: bytes  # i64
    attempts: bytes  # i32
