"""A beam search's own state: its live beams, what they may become, and who ended. One sequence, several rows.

A group is admitted when ``width`` rows are free and prefills its prompt like any sequence, in the first of them. From
then on each of its steps goes through four stations::

    candidates   the step's log-probs have come: the best 2 * width (parent, token) of all live beams
    asked        with stop strings only: the detokenizer is asked which of them a stop string ends
    decided      those that end compete with the ones that ended before; the best ``width`` others live on
    scheduled    rows and blocks of the new beams, one decode of each; in flight until its log-probs come

so at most one plan in flight contains it. Beams share blocks by reference count; before a step writes into a shared
block, all but the last of its sharers copy it. The first child of a beam keeps its row, further ones are forked from
there into rows of beams that died. A group that loses its rows starts again whole, which is why it gives its tokens
only at the end.

This file is a room below the books, beside ``request.py``; ``beams.py`` has what a group does to plans and messages.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ..proto.codec import BadFrame, from_f32, from_i32, i8, i32, i64
from ..proto.messages import BeamTokens, Finish, Logprobs, TokenBatch
from .block_pool import BlockPool, PoolError, blocks_for
from .columns import Columns
from .request import Holdings, Request, Sequence


class Scores(NamedTuple):
    """A slot's most likely tokens that may become candidates, best first, and the record they came in."""

    ids: list[int]
    values: list[float]
    record: Logprobs


class Node(NamedTuple):
    """One output token of a beam, and what came before it: beams that part share their past."""

    parent: Node | None
    token: int
    ids: bytes  # of its logprobs, as in a record: the token's own, then as many as were asked for
    values: bytes
    rank: int


class Candidate(NamedTuple):
    """A child that may live. Compares as they rank: higher sum, then lower parent, then lower token."""

    minus: float  # minus its cumulative log-prob
    parent: int  # index of its beam
    token: int
    place: int  # in its parent's scores


class Beam:
    """A live beam. ``row`` is where its tokens are; until its next step is planned, where its parent's are."""

    __slots__ = ("blocks", "candidate", "cumulative", "node", "row")

    def __init__(self, node: Node | None, cumulative: float, candidate: int, blocks: list[int], row: int):
        self.node, self.cumulative, self.blocks, self.row = node, cumulative, blocks, row
        self.candidate = candidate  # its index among the candidates it was one of


class Ended(NamedTuple):
    """A child that ended."""

    score: float
    node: Node
    finish: Finish
    stop_id: int


class BeamGroup(Sequence):
    """A whole beam search, as the unit that is queued and given rows."""

    __slots__ = (
        "asked", "beams", "candidates", "ended", "filled", "grown", "reached", "ready", "scores", "spare", "step",
        "width",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple, losses: int):
        self.width = request.params.width
        self.asked = 0  # questions to the detokenizer that it has not answered
        self.reached = 0  # blocks it held when it last had to give them back
        self.spare: list[int] = []  # rows held besides ``row``
        self._begin()
        super().__init__(request, 0, array("i"), key, losses)

    def _begin(self) -> None:
        self.grown = 0  # output tokens of every live beam
        self.step = 0  # output tokens of every candidate, or else of every beam
        self.beams: list[Beam] = []  # empty until the prompt's log-probs have come
        self.scores: list[Scores] = []  # of each beam
        self.candidates: list[Candidate] = []
        self.ended: list[Ended] = []  # best first, ``width`` at most
        self.filled: list[int] = []  # rows that exist at the worker
        self.ready = False  # the beams are decided, and their next step is not scheduled yet

    # -- what it holds

    def start(self, replica: int, columns: Columns, rows: list[int], blocks: list[int], computed: int) -> None:
        """As for any sequence, with rows for all beams to come. Its counters are in the first."""
        self.spare, self.filled = rows[1:], rows[:1]
        super().start(replica, columns, rows, blocks, computed)

    def holdings(self) -> Holdings:
        """Rows and blocks of all beams."""
        return Holdings([self.row, *self.spare], self.filled, [self.blocks, *(beam.blocks for beam in self.beams)])

    @property
    def total(self) -> int:
        """Tokens of every live beam."""
        return self.request.prompt_len + self.grown

    @property
    def output_len(self) -> int:
        """None until the end, when all are there at once."""
        return 0

    def requeue(self) -> None:
        """As for any sequence. It will come to the same point again, so it waits until it could get past it."""
        self.reached = len({block for table in self.holdings().tables for block in table})
        super().requeue()

    def _leave(self) -> None:
        super()._leave()
        self.spare = []
        self._begin()

    def begin_decoding(self) -> None:
        """As for any sequence, but the planner always has to look."""
        self.prefilling = False  # its horizon stays 0, as when it got its rows

    def check_look_ahead(self, block_size: int, refs: array[int]) -> None:
        """PoolError where the planner would not look."""
        if self.horizon:
            raise PoolError(f"the horizon of a beam search is {self.horizon}, not 0")

    def most_blocks(self, block_size: int) -> int:
        """Blocks when no two beams share more than the prompt's full blocks."""
        prompt_len = self.request.prompt_len
        if self.limit - 1 <= prompt_len:
            return blocks_for(prompt_len, block_size)
        shared = prompt_len // block_size
        return shared + self.width * (blocks_for(self.limit - 1, block_size) - shared)

    @property
    def end(self) -> int:
        """Nothing is scheduled for its row: its beams are, one by one."""
        return 0

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that must be free beside the prompt's: for a step of all beams, after as much as it once held."""
        prompt = blocks_for(self.total, block_size)
        return min(max(self.reached - prompt, 0) + self.width, self.most_blocks(block_size) - prompt)

    # -- candidates

    def offer(self, scores: list[Scores]) -> None:
        """A step's log-probs have come, one of each beam: choose the candidates."""
        if not self.beams:
            self.beams = [Beam(None, 0.0, 0, self.blocks, self.row)]
            self.columns.forget_table(self.row)
        self.scores = scores
        streams = map(_children, self.beams, range(len(scores)), scores)
        self.candidates = list(islice(heapq.merge(*streams), 2 * self.width))
        self.step += 1

    def ask(self) -> BeamTokens:
        """The question which candidates a stop string ends."""
        self.asked += 1
        parents = [self.beams[candidate.parent].candidate for candidate in self.candidates]
        tokens = i32([candidate.token for candidate in self.candidates])
        return BeamTokens(self.uid, self.attempt, self.step, i32(parents), tokens)

    def answers(self, step: int, stopped: list[int]) -> bool:
        """The detokenizer has answered. True for the answer to the last question; an earlier one may have been asked
        before the group lost its rows. BadFrame where the answer names what was not asked about."""
        self.asked = max(0, self.asked - 1)
        if self.asked or step != self.step or not self.candidates:
            return False
        if any(not 0 <= index < len(self.candidates) for index in stopped):
            raise BadFrame(f"stop strings end the candidates {stopped[:8]} of {len(self.candidates)}")
        return True

    # -- who lives

    def decide(self, stopped: Collection[int], pool: BlockPool, max_model_len: int) -> bool:
        """Candidates end or live on; ``stopped`` are those that a stop string ends. True at the end of the search."""
        children = []
        for index, candidate in enumerate(self.candidates):
            finish, stop_id = self._finish(candidate.token, index in stopped)
            if finish is Finish.NONE:
                children.append((index, candidate))
            else:
                length = self.total + 1 - (candidate.token in self.request.eos)
                value = score(-candidate.minus, length, self.request.params.length_penalty)
                self.ended.append(Ended(value, self._node(candidate), finish, stop_id))
        self.ended.sort(key=lambda end: -end.score)
        del self.ended[self.width :], children[self.width :]
        if not children or (len(self.ended) == self.width and self._enough(-children[0][1].minus, max_model_len)):
            return True
        self._descend(children, pool)
        self.candidates, self.scores = [], []
        return False

    def _finish(self, token: int, stopped: bool) -> tuple[Finish, int]:
        finish, stop_id = self.request.finish_of(token, self.step)
        if stopped:
            finish = Finish.STOP
        if finish is Finish.NONE and self.total + 1 >= self.limit:
            finish = Finish.LENGTH
        return finish, stop_id

    def _enough(self, best: float, max_model_len: int) -> bool:
        """With ``width`` ended: no live beam can do better than the worst of them, by the rule asked for."""
        params, length = self.request.params, self.total + 1
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = max(self.request.prompt_len + self.request.max_tokens, max_model_len)
        return self.ended[-1].score >= score(best, length, params.length_penalty)

    def _node(self, candidate: Candidate) -> Node:
        found, at = self.scores[candidate.parent], 4 * (1 + candidate.place)
        ids, values, asked = found.record.ids, found.record.values, self.request.params.logprobs
        end = len(ids) if asked is not None and asked < 0 else 4 * (1 + (asked or 0))
        return Node(
            self.beams[candidate.parent].node,
            candidate.token,
            ids[at : at + 4] + ids[4:end],
            values[at : at + 4] + values[4:end],
            1 + found.values.index(found.values[candidate.place]),
        )

    def _descend(self, children: list[tuple[int, Candidate]], pool: BlockPool) -> None:
        """The children take their parents' place: each parent's first its block table, further ones share the
        blocks."""
        beams, heirs = [], set()
        for index, candidate in children:
            parent = self.beams[candidate.parent]
            blocks = parent.blocks
            if candidate.parent in heirs:
                blocks = blocks[:]
                for block in blocks:
                    pool.share(block)
            heirs.add(candidate.parent)
            beams.append(Beam(self._node(candidate), -candidate.minus, index, blocks, parent.row))
        for at, parent in enumerate(self.beams):
            if at not in heirs:
                pool.release_table(parent.blocks)
        self.beams, self.ready = beams, True
        self.grown += 1

    # -- the next step

    def place(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Rows of the beams: the first child stays in its parent's, the others are forked from there into rows that
        nobody keeps. The forks (source, destination), and the rows given up."""
        kept: set[int] = set()
        movers = []
        for beam in self.beams:
            if beam.row in kept:
                movers.append(beam)
            kept.add(beam.row)
        dropped = [row for row in self.filled if row not in kept]
        free = [row for row in (self.row, *self.spare) if row not in kept]
        forks = []
        for beam, row in zip(movers, free, strict=False):
            forks.append((beam.row, row))
            beam.row = row
        self.filled = [beam.row for beam in self.beams]
        return forks, dropped

    def schedule_decodes(self) -> None:
        """One decode of each beam is asked for."""
        self.scheduled += 1
        self.ready = False

    # -- the end

    def output(self) -> TokenBatch:
        """The best n, best first. Where masks left fewer than n ways to end, the others are empty and aborted."""
        request = self.request
        best = self.ended[: request.params.n]
        paths = [list(_path(end.node)) for end in best]
        rows, missing = request.params.n, request.params.n - len(best)
        return TokenBatch(
            uids=i64([request.uid] * rows),
            attempts=i32([request.attempt] * rows),
            indexes=i32(range(rows)),
            offsets=i32([0] * rows),
            counts=i32([len(path) for path in paths] + [0] * missing),
            tokens=i32(node.token for path in paths for node in path),
            finishes=i8([end.finish for end in best] + [Finish.ABORT] * missing),
            stop_ids=i32([end.stop_id for end in best] + [-1] * missing),
            logprob_rows=b"" if request.params.logprobs is None else i32(range(len(best))),
            logprobs=[] if request.params.logprobs is None else [_record(path) for path in paths],
        )


def read_scores(record: Logprobs | None, request: Request, vocab_size: int) -> Scores:
    """A slot's log-probs, checked. Raises BadFrame. A NaN is as good as a masked token: no candidate."""
    wanted = request.params.logprobs or 0
    width = 2 * request.params.width
    k = vocab_size if wanted < 0 else min(vocab_size, max(width, wanted))
    if record is None or len(record.ids) != 4 * (k + 1):
        raise BadFrame(f"a beam's slot needs {k} log-probs and has {len(record.ids) // 4 - 1 if record else 'none'}")
    ids, values = from_i32(record.ids[4 : 4 + 4 * width]), from_f32(record.values[4 : 4 + 4 * width])
    values = [-math.inf if math.isnan(value) else value for value in values]
    if len(set(ids)) != len(ids) or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise BadFrame(f"a beam's log-probs are of tokens {min(ids)} to {max(ids)} of {vocab_size}, or of one twice")
    if values[0] == math.inf or values != sorted(values, reverse=True):
        raise BadFrame("a beam's log-probs do not fall from best to worst")
    return Scores(ids, values, record)


def _children(beam: Beam, parent: int, scores: Scores) -> Iterator[Candidate]:
    """One beam's children as they rank, made only as far as they are looked at."""
    ids, values = scores.ids, scores.values
    order: Iterable[int] = range(len(ids))
    if len(set(values)) < len(values):
        order = sorted(order, key=lambda place: (-values[place], ids[place]))
    for place in order:
        if values[place] == -math.inf:
            return
        yield Candidate(-(beam.cumulative + values[place]), parent, ids[place], place)


def score(cumulative: float, length: int, penalty: float) -> float:
    """A sequence's score, prompt included; what overflows ends up at the right end."""
    try:
        return cumulative / length**penalty
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf if cumulative < 0 else 0.0


def _path(node: Node | None) -> Iterator[Node]:
    """The tokens of a beam, first to last."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return reversed(nodes)


def _record(path: list[Node]) -> Logprobs:
    """Logprobs of a whole output."""
    ids, values = b"".join(node.ids for node in path), b"".join(node.values for node in path)
    return Logprobs(ids, values, i32(node.rank for node in path))
