"""Requests, their sequences, and the one state machine: waiting -> running -> finished, and back by ``requeue``.

A request is what a client asked for; its n children are sequences, each with its own row, blocks and finish. What is
known of a sequence's positions, and who owns which interval::

    0            computed         known        planned            limit
    |----------------|--------------|-------------|-----------------|
     keys and values    tokens whose   in flight:      not asked for
     are committed      turn will come or is in flight yet

``known`` counts tokens (prompt and outputs committed). ``planned`` counts positions whose keys and values were asked
for; in a decode it runs ahead of ``known``, because the worker reads the token it just drew from its own row.
Position p yields token p + 1, so ``planned`` never passes ``limit - 1``.

``generation`` rises whenever a sequence gives up its row and blocks. A step remembers the generation it planned with,
and a result counts only where it still matches; so nothing has to be undone when a sequence leaves in mid-flight.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from ..proto.hashing import ROOT, hash_block
from ..proto.messages import Admit, Finish, Logprobs
from ..proto.params import SamplingParams
from ..proto.pooling import PoolingParams
from .block_pool import blocks_for

if TYPE_CHECKING:
    from .replica import Replica

MAX_LOSSES = 3
"""Losses without progress after which a request is taken for the cause and failed."""


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """What one Submit asked for. ``owner`` is the detokenizer that submitted it and gets its tokens."""

    __slots__ = (
        "account", "arrival", "attempt", "bad_words", "eos", "hashes", "live", "masked", "max_tokens", "owner",
        "params", "pooling", "priority", "prompt", "prompt_done", "prompt_len", "second", "seed", "started", "stops",
        "uid",
    )  # fmt: skip

    def __init__(
        self, uid: int, attempt: int, owner: str, prompt: bytes, hashes: list[bytes], params: SamplingParams,
        eos: list[int], seed: int, arrival: float, priority: int = 0, masked: bytes = b"",
        bad_words: list[list[int]] | None = None, prompt_done: int = 0, account: str = "",
        pooling: PoolingParams | None = None, second: int = -1,
    ):  # fmt: skip
        self.uid, self.attempt, self.owner = uid, attempt, owner
        self.prompt, self.prompt_len = prompt, len(prompt) // 4
        self.hashes = hashes
        self.params, self.max_tokens = params, params.max_tokens or 1
        self.pooling, self.second = pooling, second  # it ends with its prompt, and draws nothing
        self.eos = frozenset(eos)
        self.stops = self.eos.union(params.stop_token_ids or ())
        self.masked, self.bad_words = masked, bad_words or []
        # Leading prompt tokens whose logprobs nobody needs from here on: they were sent, or were never asked for.
        self.prompt_done = self.prompt_len if params.prompt_logprobs is None else max(1, prompt_done)
        self.seed, self.arrival, self.priority = seed, arrival, priority
        self.account = account  # the API key it came with, "" for none
        self.live: list[Sequence] = []
        self.started = False

    def finish_of(self, token: int, count: int) -> tuple[Finish, int]:
        """Does ``token``, the last of ``count``, end a sequence? The finish, and the stop id to report (-1: none)."""
        if count < self.params.min_tokens:
            return Finish.NONE, -1
        if token in self.eos:
            return Finish.STOP, -1
        if token in self.stops:
            return Finish.STOP, token
        return Finish.NONE, -1

    @property
    def asks_prompt(self) -> bool:
        """Logprobs of prompt tokens are still to be computed; one sequence at a time does that, and the rest wait."""
        return self.prompt_done < self.prompt_len

    def carried(self) -> bool:
        """A running sequence computes the prompt's logprobs."""
        return any(seq.prompt_from >= 0 for seq in self.live)


class Sequence:
    """One child of a request: the unit that is queued, given a row and planned. (A beam search is one, with rows.)"""

    __slots__ = (
        "attempt", "blocks", "computed", "generation", "hashes", "horizon", "index", "key", "known", "limit",
        "losses", "mark", "milestone", "outputs", "planned", "prefilling", "prompt_from", "registered", "replica",
        "request", "row", "siblings", "sink", "state", "stops", "uid",
    )  # fmt: skip

    width = 1  # rows it runs in

    def __init__(self, request: Request, index: int, outputs: array[int], key: tuple, losses: int = 0):
        self.request, self.index, self.key = request, index, key
        self.uid, self.attempt, self.stops = request.uid, request.attempt, request.stops
        self.outputs = outputs
        self.known = request.prompt_len + len(outputs)
        self.computed = self.planned = 0
        self.generation = 0
        self.state = State.WAITING
        self.limit = request.prompt_len + request.max_tokens
        self.siblings: list[Sequence] = []  # children that wait for this one's prefill, to be forked from its row
        self.sink: TokenSink  # where its tokens go; set when it is queued
        # While running:
        self.replica: Replica | None = None
        self.row = -1
        self.prefilling = False  # known tokens are still to be planned before it draws
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.registered = 0  # leading blocks offered to the prefix cache
        self.prompt_from = -1  # first prompt token whose logprobs this row computes, -1: none
        self.horizon = 0  # planning at or past this position needs a look: a new block, a copy, or the end
        self.milestone = 0  # committing this many known tokens needs a look: a full block, or the end
        # Lost leases, to tell a poisonous sequence from an innocent one:
        self.losses = losses
        self.mark = self.known - 1 if losses else -1  # furthest ``computed`` before the last loss

    # -- the state machine

    def start(self, replica: Replica, row: int, blocks: list[int], computed: int) -> None:
        """waiting -> running, with a row, blocks for all known tokens, and ``computed`` tokens found in the cache."""
        self.state, self.replica = State.RUNNING, replica
        self.row, self.blocks, self.prefilling = row, blocks, computed < self.known
        self.computed = self.planned = computed
        self.registered = computed // replica.block_size
        self.set_horizon(computed)
        self.milestone = 0
        replica.join(self)

    def requeue(self) -> None:
        """running -> waiting: the one way back, whether preempted, drained, or its worker is gone."""
        self._leave()
        self.state = State.WAITING

    def finish(self) -> None:
        """Any state -> finished."""
        if self.state is State.RUNNING:
            self._leave()
        self.generation += 1
        self.state = State.FINISHED

    def _leave(self) -> None:
        assert self.replica is not None
        self.replica.leave(self)
        self.generation += 1
        self.replica, self.row, self.blocks = None, -1, []
        self.computed = self.planned = self.registered = 0
        self.prompt_from = -1

    def holdings(self) -> tuple[list[int], list[int], list[list[int]]]:
        """While running: rows held, those of them that exist at the worker, and block tables."""
        return [self.row], [self.row], [self.blocks]

    def most_blocks(self, block_size: int) -> int:
        """Blocks it holds at its longest."""
        return blocks_for(max(self.limit - 1, self.known), block_size)

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that must be free for its first step beyond those of its known tokens."""
        return 0

    # -- tokens

    @property
    def suspect(self) -> bool:
        """True for a sequence that may be what kills workers: it runs alone until it passes its mark."""
        return self.losses >= MAX_LOSSES - 1 and self.computed <= self.mark

    def seed(self) -> int:
        """This child's own seed."""
        return (self.request.seed + self.index) % 2**64

    def admit(self) -> Admit:
        """What the worker must know of the row's new owner."""
        request = self.request
        ids = request.prompt + self.outputs.tobytes()
        return Admit(
            self.row, self.uid, self.index, ids, request.prompt_len, request.params, self.seed(), request.masked,
            request.bad_words, self.prompt_from, request.pooling, request.second,
        )  # fmt: skip

    def reusable(self) -> int:
        """Leading tokens that may come from the prefix cache. The last known one is always run, to draw from it; where
        the logprobs of prompt token p are wanted, so is p - 1; and where more is pooled than the last, all are."""
        request, pooling = self.request, self.request.pooling
        if request.params.skip_reading_prefix_cache:
            return 0
        if pooling is not None and (pooling.pooling != "LAST" or pooling.skip_reading_prefix_cache):
            return 0
        return min(self.known, request.prompt_done) - 1 if request.asks_prompt else self.known - 1

    def set_horizon(self, planned: int) -> None:
        """Look again at the first position past the table, or at ``limit - 1``, where nothing is left to plan."""
        assert self.replica is not None
        self.horizon = max(planned, min(len(self.blocks) * self.replica.block_size, self.limit - 1))

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of this sequence's blocks, at least the first ``count`` full ones."""
        hashes = self.hashes
        if not hashes:
            hashes.extend(self.request.hashes)
        while len(hashes) < count:
            hashes.append(hash_block(hashes[-1] if hashes else ROOT, self._tokens(len(hashes), block_size)))
        return hashes

    def _tokens(self, slot: int, block_size: int) -> bytes:
        """The int32 bytes of a block's known tokens."""
        start, stop, prompt_len = slot * block_size, (slot + 1) * block_size, self.request.prompt_len
        if start >= prompt_len:
            return self.outputs[start - prompt_len : stop - prompt_len].tobytes()
        outputs = self.outputs[: max(0, stop - prompt_len)].tobytes()
        return self.request.prompt[4 * start : 4 * stop] + outputs


class TokenSink:
    """New tokens of one detokenizer's sequences, gathered while a step is committed; see ``outbox.py``."""

    __slots__ = ("finishes", "logprobs", "seqs", "started", "tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next batch."""
        self.seqs: list[Sequence] = []
        self.tokens: list[int] = []
        self.finishes: list[tuple[int, Finish, int, bool]] = []  # (place in seqs, finish, stop id, has a token)
        self.logprobs: dict[Sequence, Logprobs] = {}  # of the tokens of those who ask for them
        self.started: list[tuple[int, int]] = []  # (uid, cached prompt tokens)
