"""Requests, their sequences, and the one state machine: waiting -> running -> finished, and back by ``requeue``.

A request is what a client asked for; its n children are sequences, each with its own row, blocks and finish. Three
counters of tokens say how far a sequence is::

    prefill   0 --------------- computed ---------- scheduled --------- total ------------- limit
              |  KV committed   |  KV in flight     |  KV to ask for    |  not drawn yet    |

    decode    0 --------------- computed ---------- total ------------- scheduled --------- limit
              |  KV committed   |  KV in flight     |  token in flight  |  not drawn yet    |

``computed`` counts the tokens whose keys and values are committed, ``scheduled`` those whose keys and values were asked
for, and ``total`` the tokens that exist: the prompt and the committed outputs. In a decode ``scheduled`` may run one
past ``total``, because the worker reads the token it has just drawn from its own row. Position p yields token p + 1, so
``scheduled`` never passes ``limit - 1``. While verifications of drafts are in flight (``loose``), it is the furthest
that the row can be, and comes back to what is known with each result.

While a sequence runs, its counters are in the columns of its replica (``columns.py``), where a step of many decodes
changes all of them at once. They are read and written here one by one, for all that is not such a step.

``generation`` rises whenever a sequence gives up its row and blocks. A step remembers the generation it was planned
with, and a result counts only where it still matches; so nothing has to be undone when a sequence leaves in mid-flight.
(For a step's decodes, the columns say the same: when a sequence last left the row.)

This file is the lowest room but the columns and the block pool: a sequence knows its request, the number of its replica
and its entries of the columns, and nobody above it.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import NamedTuple

from ..proto.hashing import hash_block
from ..proto.losses import Losses
from ..proto.messages import Admit, Finish, Submit
from ..proto.work import Pool, adapter_of, child_seed, since, with_adapter
from .block_pool import BlockPool, PoolError, blocks_for
from .columns import Columns

NOWHERE = Columns(0, 1, 0)
"""The columns of a sequence that does not run: there is no row in them."""


class Holdings(NamedTuple):
    """What a running sequence holds of its replica."""

    rows: list[int]
    filled: list[int]  # those of the rows that exist at the worker
    tables: list[list[int]]  # block tables


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """What one Submit asked for. ``owner`` is the detokenizer that submitted it and gets its tokens."""

    __slots__ = (
        "account", "adapter", "arrival", "attempt", "eos", "hashes", "live", "max_tokens", "owner", "params", "pools",
        "priority", "prompt", "prompt_done", "prompt_len", "reads_cache", "root", "seed", "sink", "started", "stops",
        "turn", "uid", "work",
    )  # fmt: skip

    def __init__(self, owner: str, message: Submit, hashes: list[bytes], priority: int):
        self.uid, self.attempt, self.owner = message.uid, message.attempt, owner
        self.prompt, self.prompt_len = message.ids, len(message.ids) // 4
        self.hashes, self.root = hashes, message.root
        self.arrival, self.priority = message.arrival, priority
        self.account = message.key  # the API key it came with, "" for none
        self.live: list[Sequence] = []
        self.started, self.sink = False, -1  # number of the owner's sink in the outbox, once it is taken in
        self.turn: tuple | None = None
        # Leading prompt tokens whose logprobs nobody needs from here on: they were sent, or were never asked for.
        self.prompt_done = self.prompt_len
        work = self.work = message.work
        self.adapter = adapter_of(work)
        self.pools = isinstance(work, Pool)
        if isinstance(work, Pool):  # it draws nothing and ends with its prompt, and has no ``params``
            self.max_tokens = self.seed = 0
            self.eos = self.stops = frozenset[int]()
            self.reads_cache = work.params.pooling == "LAST" and not work.params.skip_reading_prefix_cache
            return
        params, self.seed = work.params, work.seed
        self.params = params
        self.max_tokens = params.max_tokens or 1
        self.eos = frozenset(work.eos)
        self.stops = self.eos.union(params.stop_token_ids or ())
        self.reads_cache = not params.skip_reading_prefix_cache
        if params.prompt_logprobs is not None:
            self.prompt_done = max(1, message.prompt_logprobs_from)

    def enter(self, sink: int) -> None:
        """It was found sound; its tokens go into this sink of the outbox."""
        self.sink = sink

    def set_turn(self, turn: tuple) -> None:
        """Its next child to leave the line comes where a sequence of key ``turn`` would."""
        self.turn = turn

    def finish_of(self, token: int, count: int) -> tuple[Finish, int]:
        """Does ``token``, the last of ``count``, end a sequence? The finish, and the stop id to report (-1: none)."""
        if count < self.params.min_tokens:
            return Finish.NONE, -1
        if token in self.eos:
            return Finish.STOP, -1
        if token in self.stops:
            return Finish.STOP, token
        return Finish.NONE, -1

    def start(self) -> None:
        """Its first sequence has a row."""
        self.started = True

    def set_limit(self, max_model_len: int) -> int:
        """Fix how many tokens each sequence may grow to, and return it."""
        limit = min(self.prompt_len + self.max_tokens, max_model_len)
        for seq in self.live:
            seq.limit = limit
        return limit

    def prompt_logprobs_sent(self, stop: int) -> None:
        """The logprobs of the prompt's first ``stop`` tokens are on their way to the client."""
        self.prompt_done = stop

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
        "_outputs", "adapter_slot", "attempt", "columns", "drew", "generation", "hashes", "index", "key", "limit",
        "loose", "losses", "owner", "prefilling", "prompt_from", "prompt_len", "replica", "request", "row", "siblings",
        "state", "stops", "uid",
    )  # fmt: skip

    width = 1  # rows it runs in

    def __init__(self, request: Request, index: int, outputs: array[int], key: tuple, losses: int):
        self.request, self.index, self.key = request, index, key
        self.uid, self.attempt, self.owner, self.stops = request.uid, request.attempt, request.owner, request.stops
        self.prompt_len = request.prompt_len
        self._outputs = outputs  # but for those that the columns still have
        self.generation = 0
        self.state = State.WAITING
        self.limit = request.prompt_len + request.max_tokens
        self.siblings: list[Sequence] = []  # children that wait for this one's prefill, to be forked from its row
        # While running:
        self.replica = -1  # its number
        self.columns = NOWHERE  # the replica's
        self.row = -1
        self.adapter_slot = -1  # the replica's slot with its adapter, -1: none
        self.prefilling = False  # tokens that exist are still to be scheduled before it draws
        self.drew = False  # its first token here has come: from then on exactly the last token is not computed
        self.hashes: list[bytes] = []  # of its leading full blocks; more are made when somebody asks
        self.prompt_from = -1  # first prompt token whose logprobs this row computes, -1: none
        self.loose = 0  # verifications in flight: with any, ``scheduled`` is the furthest that it can be
        # Workers lost, at points of ``computed``. What the loss before this attempt found is not known exactly.
        self.losses = Losses(losses, self.total - 1 if losses else -1)

    # -- the state machine

    def start(self, replica: int, columns: Columns, rows: list[int], blocks: list[int], computed: int) -> None:
        """waiting -> running, with rows, blocks for all its tokens, and ``computed`` tokens found in the cache."""
        self._run(replica, columns, rows[0], blocks, computed, computed)
        self.prefilling = True
        if self.request.asks_prompt:
            self.prompt_from = self.request.prompt_done

    def fork(self, parent: Sequence, row: int) -> None:
        """waiting -> running, where ``parent`` is, with the same blocks and everything scheduled."""
        self._run(parent.replica, parent.columns, row, parent.blocks, parent.computed, parent.scheduled)
        for seq in (parent, self):  # the last block is shared: a look is due before it is written
            self.columns.look_at(seq.row, parent.scheduled)

    def _run(self, replica: int, columns: Columns, row: int, blocks: list[int], computed: int, scheduled: int) -> None:
        columns.name(row, self.uid, self.attempt, self.index, self.request.sink, self.prompt_len)
        columns.enter(row, computed, scheduled, self.end, blocks)
        self.state, self.replica, self.columns, self.row = State.RUNNING, replica, columns, row
        self.losses.begin(computed)
        full = computed // columns.block_size
        self._chain(full)
        self._expect_full_block(full)

    def requeue(self) -> None:
        """running -> waiting: the one way back, whether preempted, drained, or its worker is gone."""
        self.keep_drawn(self.total)
        self.losses.leave(self.computed)
        self._leave()
        self.state = State.WAITING

    def finish(self) -> None:
        """Any state -> finished. Nobody asks for its outputs any more."""
        if self.state is State.RUNNING:
            self._leave()
        self.generation += 1
        self.state = State.FINISHED

    def _leave(self) -> None:
        self.columns.leave(self.row)
        self.generation += 1
        self.replica, self.columns, self.row = -1, NOWHERE, -1
        self.adapter_slot = -1
        self.prefilling = self.drew = False
        self.prompt_from, self.loose = -1, 0

    def use_adapter(self, slot: int) -> None:
        """Its rows run with what is in this slot of the replica."""
        self.adapter_slot = slot

    def take_siblings(self) -> list[Sequence]:
        """Those who waited for this one's prefill; they wait no more."""
        siblings, self.siblings = self.siblings, []
        return siblings

    def heir(self) -> Sequence | None:
        """Of those who waited for this one's prefill, the one that prefills now; the others wait for that one."""
        siblings = self.take_siblings()
        if not siblings:
            return None
        siblings[0].siblings = siblings[1:]
        return siblings[0]

    # -- what it holds

    def holdings(self) -> Holdings:
        """While running: rows and blocks."""
        return Holdings([self.row], [self.row], [self.blocks])

    @property
    def blocks(self) -> list[int]:
        """Its block table."""
        return self.columns.table(self.row) if self.row >= 0 else []

    def most_blocks(self, block_size: int) -> int:
        """Blocks it holds at its longest."""
        return blocks_for(max(self.limit - 1, self.total), block_size)

    @property
    def end(self) -> int:
        """The position at which nothing is left to schedule for its row."""
        return self.limit - 1

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that must be free for its first step beyond those of the tokens it has."""
        return 0

    # -- counters

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are committed."""
        return self.columns.computed[self.row] if self.row >= 0 else 0

    @computed.setter
    def computed(self, value: int) -> None:
        self.columns.computed[self.row] = value

    @property
    def scheduled(self) -> int:
        """Tokens whose keys and values were asked for."""
        return self.columns.scheduled[self.row] if self.row >= 0 else 0

    @scheduled.setter
    def scheduled(self, value: int) -> None:
        self.columns.scheduled[self.row] = value

    @property
    def total(self) -> int:
        """Tokens that exist."""
        return self.computed + 1 if self.drew else self.prompt_len + len(self._outputs)

    @property
    def output_len(self) -> int:
        """Committed outputs."""
        return self.total - self.prompt_len

    @property
    def outputs(self) -> array[int]:
        """The committed outputs."""
        if self.drew:
            self.keep_drawn(self.total)
        return self._outputs

    def keep_drawn(self, total: int) -> None:
        """Take over outputs that only the columns have, those of its first ``total`` tokens."""
        if self.drew and (missing := total - self.prompt_len - len(self._outputs)) > 0:
            self._outputs.frombytes(self.columns.fetch_drawn(self.row, total, missing))

    def schedule(self, count: int) -> bool:
        """Ask for the next ``count`` tokens of a prefill. True where they are the last."""
        scheduled = self.scheduled = self.scheduled + count
        return scheduled == self.total

    def begin_decoding(self) -> None:
        """All tokens that exist are scheduled: from here on it decodes."""
        self.prefilling = False
        self.columns.expect_end_of_room(self.row, self.scheduled)

    def commit(self, computed: int) -> None:
        """Keys and values of so many tokens are there."""
        self.computed = computed

    def begin_output(self, token: int) -> None:
        """The first token that it draws in this row, which all before it yield. Those of decodes go to the columns."""
        total, size = self.total, self.columns.block_size
        self._outputs.append(token)
        self.columns.begin_drawn(self.row, total, self._tokens(total // size, size))
        self.drew = True

    # -- speculation

    def speculate(self, stop: int) -> None:
        """A verification is planned that ends at ``stop`` at the furthest. Nobody decodes it until that is answered."""
        self.loose += 1
        self.scheduled = stop
        self.columns.horizon.interrupt()

    def verified(self, tokens: list[int], drafts: int) -> None:
        """A verification gave these, one or more. What was scheduled and not kept is taken back; blocks stay."""
        columns, row, size = self.columns, self.row, self.columns.block_size
        before = columns.computed[row]
        self.keep_drawn(before + 1)
        self._outputs.extend(tokens)
        self.loose -= 1
        computed = columns.computed[row] = before + len(tokens)
        if computed // size == before // size:
            columns.draw_more(row, computed, tokens)
        else:
            columns.begin_drawn(row, computed, self._tokens(computed // size, size))
        scheduled = columns.scheduled[row] = min(columns.scheduled[row], computed + self.loose * (1 + drafts))
        if not self.loose:
            columns.expect_end_of_room(row, scheduled)

    # -- look-ahead

    @property
    def horizon(self) -> int:
        """Scheduling at or past this position needs a look: a new block, a copy, or the end."""
        return self.columns.horizon.at.item(self.row)

    @property
    def milestone(self) -> int:
        """Computing this many tokens needs a look: a full block, or the end."""
        return self.columns.milestone.at.item(self.row)

    def _expect_full_block(self, full: int) -> None:
        """So many blocks are full: look again when the next is, at the end, or, in quarantine, at every token."""
        self.columns.expect_full_block(self.row, -1 if self.quarantined else full)

    def _chain(self, full: int) -> None:
        """So many blocks are full: the next one's hash is made from the last one's."""
        last = self.hash_blocks(full, self.columns.block_size)[full - 1] if full else self.request.root
        self.columns.continue_chain(self.row, last)

    def check_look_ahead(self, block_size: int, refs: array[int]) -> None:
        """PoolError where ``horizon`` or ``milestone`` would let a look that is due go by, or come too soon. ``refs``
        counts the holders of each block."""
        milestone = 0 if self.quarantined else min(self.limit - 1, (self.computed // block_size + 1) * block_size)
        if self.milestone != milestone:
            raise PoolError(f"milestone {self.milestone} where {milestone} is right")
        if self.prefilling or self.loose or self.horizon == self.scheduled:
            return  # it is looked at before its next decode
        blocks, slot = self.blocks, self.scheduled // block_size
        shared = slot < len(blocks) and refs[blocks[slot]] > 1
        horizon = min(len(blocks) * block_size, self.limit - 1)
        if self.horizon != horizon or horizon < self.scheduled or shared:
            held = "shared" if shared else "its own"
            raise PoolError(f"horizon {self.horizon} of {horizon}, {self.scheduled} scheduled, and the block is {held}")

    # -- losses

    @property
    def quarantined(self) -> bool:
        """True for a sequence that may be what ends workers: it runs alone until it gets past where they ended."""
        return self.losses.count > 0 and self.losses.in_quarantine(self.computed)

    def note_loss(self) -> bool:
        """The worker died with this sequence in a step. True where the sequence is taken for the cause."""
        self.losses.lost(self.computed)
        return self.losses.exhausted

    # -- tokens

    def seed(self) -> int:
        """This child's own seed."""
        return child_seed(self.request.seed, self.index)

    def admit(self) -> Admit:
        """What the worker must know of the row's new owner."""
        request, outputs = self.request, self.outputs
        ids = request.prompt + outputs.tobytes() if outputs else request.prompt
        work = since(request.work, self.computed)
        if request.adapter is not None:  # the worker knows it by its slot
            work = with_adapter(work, None, self.adapter_slot)
        return Admit(self.row, self.uid, self.index, ids, request.prompt_len, work, self.prompt_from)

    def reusable(self) -> int:
        """Leading tokens that may come from the prefix cache. The last one is always run, to draw from it; where the
        logprobs of prompt token p are wanted, so is p - 1; and where more is pooled than the last, all are."""
        request = self.request
        if not request.reads_cache:
            return 0
        return min(self.total, request.prompt_done) - 1 if request.asks_prompt else self.total - 1

    def register(self, pool: BlockPool, block_size: int, before: int, computed: int) -> None:
        """Offer the blocks to the prefix cache that have become full since so much was computed ``before``."""
        first, full = before // block_size, computed // block_size
        if full > first:
            if self.drew:
                self.keep_drawn(full * block_size)
            if pool.caching:
                hashes = self.hash_blocks(full, block_size)
                pool.register_many(self.columns.table(self.row, first, full), hashes[first:full])
                self.columns.continue_chain(self.row, hashes[full - 1])
        if full > first or self.losses.count:
            self._expect_full_block(full)

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of this sequence's blocks, at least the first ``count`` full ones."""
        hashes = self.hashes
        if not hashes:
            hashes.extend(self.request.hashes)
        while len(hashes) < count:
            parent = hashes[-1] if hashes else self.request.root
            hashes.append(hash_block(parent, self._tokens(len(hashes), block_size)))
        return hashes

    def _tokens(self, slot: int, block_size: int) -> bytes:
        """The int32 bytes of the tokens in a block whose outputs are fetched."""
        prompt_len = self.prompt_len
        start, stop = slot * block_size, (slot + 1) * block_size
        if start >= prompt_len:
            return self._outputs[start - prompt_len : stop - prompt_len].tobytes()
        outputs = self._outputs[: max(0, stop - prompt_len)].tobytes()
        return self.request.prompt[4 * start : 4 * stop] + outputs
