"""What a row's next token may be, by its tokens so far: grammars of structured outputs, and thoughts that are held to a
budget (`thoughts.py`). Each row that has one is advanced by every token drawn, and says before each draw which tokens
may come next (a bit mask). Kept by the process that samples.

The token table is built in a thread while the weights load; a request's grammar is compiled and its earlier output
replayed in a thread while its prompt runs, outside the interpreter's lock. Whoever needs the matcher first waits for
it. Requests without a grammar touch nothing here.

EOS is allowed exactly where the grammar is complete, and is all that is allowed where nothing can follow, also with
``ignore_eos``: such an output is the grammar's text and then EOS tokens up to ``max_tokens``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ...proto.checkpoint.model_config import ModelConfig, tokenizer_folder
from ...proto.codec import from_i32
from ...proto.config import ConfigError, EngineArgs
from ...proto.grammars.grammar import GrammarError, fault, grammar_of, spec_key, spelled, start_matcher, token_table
from ...proto.structured import StructuredOutputsParams
from ...proto.work import Generate, ThinkingGenerate
from .followers import Histories
from .thoughts import Thought

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MAX_KEPT = 32
"""Compiled grammars that are kept. Their lexers are warm: a first mask costs milliseconds, a later one microseconds."""

_REJECTED = "doesn't satisfy the grammar"


class Grammars(Histories):
    """Matchers by row. Every method may be called from any thread."""

    def __init__(self, config: ModelConfig, args: EngineArgs):
        """Starts building the token table (not with ``skip_tokenizer_init``); what is wrong with it fails requests."""
        self.words = -(-config.vocab_size // 32)
        self._rows: dict[int, _Row] = {}
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.RLock()
        self._kept_lock = threading.Lock()
        threads = max(1, min(8, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._executor: LLExecutor | None = None
        self._parallel = threads if threads > 1 else 0
        self._table: Future[LLTokenizer] = self._pool.submit(_load_table, config, args)

    def admit(self, row: int, work: Generate, prompt_len: int, ids: np.ndarray) -> None:
        """Start what ``work`` asks for in ``row``, a grammar or a budget of thoughts; replay the outputs of ``ids``."""
        params = work.params
        spec = params.structured_outputs
        thinking = work.thinking if isinstance(work, ThinkingGenerate) else None
        if spec is None and thinking is None:
            raise ValueError(f"row {row} was admitted to a grammar and has none")
        allowed = None if params.allowed_token_ids is None else _bits(self.words, params.allowed_token_ids)
        new = _Row(spec, ids[prompt_len:].tolist(), allowed)
        if thinking is not None:
            new.thought = Thought(thinking, self._piece)
        if params.min_tokens:
            new.min_tokens, new.unsuppressed = params.min_tokens, ~_bits(self.words, from_i32(work.suppressed_ids))
        new.starting = self._pool.submit(self._start, new, True)
        with self._lock:
            self._rows[row] = new

    def copy(self, src: Iterable[int], dst: Iterable[int]) -> None:
        """Rows ``dst`` become copies of ``src``; all are read before any is written."""
        with self._lock:
            copies = [(to, self._ready(self._rows[at]).copy() if at in self._rows else None)
                      for at, to in zip(src, dst, strict=True)]  # fmt: skip
            for to, new in copies:
                if new is None:
                    self._rows.pop(to, None)
                else:
                    self._rows[to] = new

    def drop(self, rows: Iterable[int]) -> None:
        """Forget these rows' grammars."""
        with self._lock:
            for row in rows:
                self._rows.pop(row, None)

    def reset(self) -> None:
        """Forget all rows; compiled grammars are kept."""
        with self._lock:
            self._rows.clear()

    def advance(self, rows: Iterable[int], tokens: Iterable[int]) -> None:
        """Each row's next token. One that its grammar does not allow fails the row at its next ``fill``."""
        with self._lock:
            for at, token in zip(rows, tokens, strict=True):
                row = self._rows.get(at)
                if row is None:
                    continue
                self._ready(row)
                row.tokens.append(token)
                if row.thought is not None:
                    row.thought.take(token)
                if row.matcher is not None and row.error is None and not row.matcher.consume_token(token):
                    self._failed(row)

    def fill(self, rows: list[int]) -> tuple[np.ndarray, list[tuple[int, int, str]]]:
        """Masks of the next tokens: int32 [len(rows), ceil(vocabulary / 32)], a set bit for a token that is allowed.

        Rows without a grammar have all bits set. Also the slots that can draw nothing: (slot, HTTP status, message).
        """
        with self._lock:
            mine = [(slot, self._ready(self._rows[at])) for slot, at in enumerate(rows) if at in self._rows]
            table = self._table.result() if any(row.error is None for _, row in mine) else None
            words = self.words if table is None else max(self.words, -(-table.vocab_size // 32))
            mask = np.full((len(rows), words), -1, np.int32)
            self._compute(
                [(row.matcher, slot) for slot, row in mine if row.matcher is not None and row.error is None], mask
            )
            failed = []
            for slot, row in mine:
                if row.matcher is not None and row.error is None and row.matcher.is_error():
                    self._failed(row)
                    if row.error is None and row.matcher is not None:
                        self._compute([(row.matcher, slot)], mask)
                        if row.matcher.is_error():  # it is stuck with a lexer of its own too
                            self._failed(row)
                if row.thought is not None and (end := row.thought.forced) is not None:
                    _keep(mask[slot], end)
                error = row.error or row.conflict(mask[slot, : self.words])
                if error is not None:
                    mask[slot] = -1
                    failed.append((slot, 400, error))
        return (mask if words == self.words else np.ascontiguousarray(mask[:, : self.words])), failed

    # ------------------------------------------------------------ matchers

    def _ready(self, row: _Row) -> _Row:
        """The row, once its matcher has been made."""
        if row.starting is not None:
            error = row.starting.exception()
            if error is not None:  # not the grammar's fault; the row must fail alone all the same
                log.error("a grammar could not be started", exc_info=error)
                row.error = f"structured_outputs failed ({type(error).__name__}); the server's log says more."
            row.starting = None
        return row

    def _start(self, row: _Row, kept: bool) -> None:
        """Make the row's matcher and replay its tokens. ``kept``: from the grammars that are kept, if it is there."""
        try:
            self._table.result()  # its words are a thought's too
            row.matcher = self._fresh(row.spec, kept) if row.spec is not None else None
        except (GrammarError, ConfigError) as error:
            row.error = f"structured_outputs cannot be honoured: {error}"
            return
        if row.thought is not None and kept:
            for token in row.tokens:
                row.thought.take(token)
        if row.matcher is not None and row.tokens and not row.matcher.consume_tokens(row.tokens):
            row.error = _why(row.matcher)

    def _piece(self, token: int) -> bytes:
        return self._table.result().decode_bytes([token])

    def _fresh(self, spec: StructuredOutputsParams, kept: bool) -> LLMatcher:
        key = spec_key(spec)
        with self._kept_lock:
            found = self._kept.get(key) if kept else self._kept.pop(key, None)
            if found is not None and kept:
                self._kept.move_to_end(key)
                return found.deep_copy()
        table = self._table.result()
        made = start_matcher(table, grammar_of(spec, table))
        if not kept:
            return made
        with self._kept_lock:
            self._kept[key] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def _failed(self, row: _Row) -> None:
        """A row's matcher is in its error state: start again alone, or keep the error.

        A grammar's copies share one lexer, whose limits are then shared by all its requests. A row that fails there
        gets a lexer of its own once, so that requests cannot use up each other's limits.
        """
        if row.matcher is None:
            return
        row.error = _why(row.matcher)
        if _REJECTED not in row.matcher.get_error() and not row.alone:
            row.alone, row.error = True, None
            self._start(row, False)

    def _compute(self, jobs: list[tuple[LLMatcher, int]], mask: np.ndarray) -> None:
        """Fill the masks of these (matcher, slot). The interpreter's lock is free meanwhile."""
        size = mask.shape[1] * mask.itemsize
        if self._parallel and len(jobs) > 1:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._parallel)
            self._executor.unsafe_compute_mask_ptr(jobs, mask.ctypes.data, size, len(mask))
        else:
            for matcher, slot in jobs:
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data + slot * size, size)
        for matcher, slot in jobs:
            only = _only(mask[slot])
            if only is not None and (token := spelled(self._table.result(), matcher, only)) != only:
                mask[slot] = _bits(mask.shape[1], [] if token is None else [token])


class _Row:
    """One row's grammar: where it stands, and what else restricts its tokens."""

    __slots__ = ("allowed", "alone", "error", "matcher", "min_tokens", "spec", "starting", "thought", "tokens",
                 "unsuppressed")  # fmt: skip

    def __init__(self, spec: StructuredOutputsParams | None, tokens: list[int], allowed: np.ndarray | None):
        self.spec, self.tokens, self.allowed = spec, tokens, allowed
        self.matcher: LLMatcher | None = None
        self.thought: Thought | None = None
        self.starting: Future[None] | None = None
        self.error: str | None = None
        self.alone = False
        self.min_tokens = 0
        self.unsuppressed: np.ndarray | None = None  # bits of what may come before min_tokens

    def copy(self) -> _Row:
        """An independent row in the same state."""
        new = _Row(self.spec, self.tokens.copy(), self.allowed)
        new.error, new.alone = self.error, self.alone
        new.min_tokens, new.unsuppressed = self.min_tokens, self.unsuppressed
        new.thought = self.thought.copy() if self.thought is not None else None
        if self.error is None and self.matcher is not None:
            new.matcher = self.matcher.deep_copy()
        return new

    def conflict(self, mask: np.ndarray) -> str | None:
        """Why other parameters leave none of the tokens of ``mask``, where they do."""
        if self.allowed is not None:
            mask = mask & self.allowed
            if not mask.any():
                ends = self.thought is not None and self.thought.forced is not None
                by = "thinking_token_budget demands" if ends else "the grammar allows"
                return f"allowed_token_ids has no token that {by} after {len(self.tokens)} tokens."
        early = self.unsuppressed if len(self.tokens) < self.min_tokens else None
        if early is not None and not (mask & early).any():
            return (
                f"min_tokens={self.min_tokens} cannot be met by this grammar, which is complete after "
                f"{len(self.tokens)} tokens; lower min_tokens."
            )
        return None


def _load_table(config: ModelConfig, args: EngineArgs) -> LLTokenizer:
    if args.skip_tokenizer_init:
        raise ConfigError("structured outputs need the tokenizer; start without --skip-tokenizer-init.")
    return token_table(tokenizer_folder(args, config.path), config)


def _why(matcher: LLMatcher) -> str:
    """What is told to the client whose matcher is in its error state."""
    text = fault(matcher)
    if _REJECTED in text:
        return (
            f"a token was drawn that the grammar does not allow ({text}); bad_words, logit_bias or a logits processor "
            "left none that it does."
        )
    return f"structured_outputs cannot be honoured: {text}"


def _only(mask: np.ndarray) -> int | None:
    """The token of a mask that has but one."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(np.flatnonzero(mask)[0])
    bits = int(mask[word]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else word * 32 + bits.bit_length() - 1


def _keep(mask: np.ndarray, token: int) -> None:
    """Leave ``token`` alone in a mask that has it. One that has not, in the midst of a character, stays as it is."""
    word, bit = token >> 5, np.uint32(1 << (token & 31)).view(np.int32)
    if mask[word] & bit:
        mask[:] = 0
        mask[word] = bit


def _bits(words: int, ids: Iterable[int]) -> np.ndarray:
    """A mask of these token ids: int32 [words]."""
    flags = np.zeros(words * 32, np.uint8)
    flags[[i for i in ids if i < len(flags)]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
