"""Beam search: one sequence in the queue, several rows while it runs.

A group is admitted when ``width`` rows are free and prefills its prompt like any sequence, in the first of them. From
then on each of its steps goes through four stations::

    candidates   the step's log-probs have come: the best 2 * width (parent, token) of all live beams
    asked        with stop strings only: the detokenizer is asked which of them a stop string ends
    settled      those that end compete with the ones that ended before; the best ``width`` others live on
    planned      rows and blocks of the new beams, one decode of each; in flight until its log-probs come

so at most one plan in flight contains it. Beams share blocks by reference count; before a step writes into a shared
block, all but the last of its sharers copy it. The first child of a beam keeps its row, further ones are forked from
there into rows of beams that died. A group that loses its rows starts again whole, which is why it gives its tokens
only at the end.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..proto.codec import BadFrame, from_f32, from_i32, i8, i32, i64
from ..proto.messages import BeamTokens, Finish, Logprobs, TokenBatch
from .block_pool import blocks_for
from .replica import Replica
from .request import Request, Sequence

if TYPE_CHECKING:
    from .core import Scheduler
    from .planner import Draft


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
        "asked", "beams", "candidates", "ended", "filled", "reached", "ready", "scores", "spare", "step", "width",
    )  # fmt: skip

    def __init__(self, request: Request, key: tuple, losses: int = 0):
        self.width = request.params.width
        self.asked = 0  # questions to the detokenizer that it has not answered
        self.reached = 0  # blocks it held when it last had to give them back
        self.spare: list[int] = []  # rows held besides ``row``
        self._begin()
        super().__init__(request, 0, array("i"), key, losses)

    def _begin(self) -> None:
        self.step = 0  # output tokens of every candidate, or else of every beam
        self.beams: list[Beam] = []  # empty until the prompt's log-probs have come
        self.scores: list[Scores] = []  # of each beam
        self.candidates: list[Candidate] = []
        self.ended: list[Ended] = []  # best first, ``width`` at most
        self.filled: list[int] = []  # rows that exist at the worker
        self.ready = False  # the beams are settled, and their next step is not planned yet

    # -- what it holds

    def start(self, replica: Replica, row: int, blocks: list[int], computed: int) -> None:
        """As for any sequence, with rows for all beams to come."""
        self.spare = [replica.free_rows.pop() for _ in range(self.width - 1)]
        self.filled = [row]
        super().start(replica, row, blocks, computed)

    def holdings(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Rows held, those of them that exist at the worker, and block tables."""
        return [self.row, *self.spare], self.filled, [self.blocks, *(beam.blocks for beam in self.beams)]

    def requeue(self) -> None:
        """As for any sequence. It will come to the same point again, so it waits until it could get past it."""
        self.reached = len({block for table in self.holdings()[2] for block in table})
        super().requeue()

    def _leave(self) -> None:
        super()._leave()
        self.known, self.spare = self.request.prompt_len, []
        self._begin()

    def set_horizon(self, planned: int) -> None:
        """The planner always has to look."""
        self.horizon = 0

    def most_blocks(self, block_size: int) -> int:
        """Blocks when no two beams share more than the prompt's full blocks."""
        prompt_len = self.request.prompt_len
        if self.limit - 1 <= prompt_len:
            return blocks_for(prompt_len, block_size)
        shared = prompt_len // block_size
        return shared + self.width * (blocks_for(self.limit - 1, block_size) - shared)

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that must be free beside the prompt's: for a step of all beams, after as much as it once held."""
        prompt = blocks_for(self.known, block_size)
        return min(max(self.reached - prompt, 0) + self.width, self.most_blocks(block_size) - prompt)


# ---------------------------------------------------------------- candidates


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


def advance(core: Scheduler, group: BeamGroup, scores: list[Scores]) -> None:
    """A step's log-probs have come, one of each beam: choose the candidates, and settle them unless text decides."""
    request = group.request
    if not group.beams:
        group.beams = [Beam(None, 0.0, 0, group.blocks, group.row)]
        group.blocks = []
    group.scores = scores
    streams = map(_children, group.beams, range(len(scores)), scores)
    group.candidates = list(islice(heapq.merge(*streams), 2 * group.width))
    group.step += 1
    if request.params.stop and group.candidates:
        group.asked += 1
        parents = [group.beams[candidate.parent].candidate for candidate in group.candidates]
        tokens = i32([candidate.token for candidate in group.candidates])
        core.outbox.put(request.owner, BeamTokens(request.uid, request.attempt, group.step, i32(parents), tokens))
    else:
        settle(core, group, ())


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


def _node(group: BeamGroup, candidate: Candidate) -> Node:
    found, at = group.scores[candidate.parent], 4 * (1 + candidate.place)
    ids, values, asked = found.record.ids, found.record.values, group.request.params.logprobs
    end = len(ids) if asked is not None and asked < 0 else 4 * (1 + (asked or 0))
    return Node(
        group.beams[candidate.parent].node,
        candidate.token,
        ids[at : at + 4] + ids[4:end],
        values[at : at + 4] + values[4:end],
        1 + found.values.index(found.values[candidate.place]),
    )


def answered(core: Scheduler, group: BeamGroup, step: int, stopped: list[int]) -> None:
    """The detokenizer has answered. Only the answer to the last question counts: an earlier one may have been asked
    before the group lost its rows. BadFrame where the answer names what was not asked about."""
    group.asked = max(0, group.asked - 1)
    if group.asked or step != group.step or not group.candidates:
        return
    if any(not 0 <= index < len(group.candidates) for index in stopped):
        raise BadFrame(f"stop strings end the candidates {stopped[:8]} of {len(group.candidates)}")
    settle(core, group, stopped)


# ---------------------------------------------------------------- who lives


def score(cumulative: float, length: int, penalty: float) -> float:
    """A sequence's score, prompt included; what overflows ends up at the right end."""
    try:
        return cumulative / length**penalty
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf if cumulative < 0 else 0.0


def settle(core: Scheduler, group: BeamGroup, stopped: Collection[int]) -> None:
    """Candidates end or live on; ``stopped`` are those that a stop string ends."""
    children = []
    for index, candidate in enumerate(group.candidates):
        finish, stop_id = _finish(group, candidate.token, index in stopped)
        if finish is Finish.NONE:
            children.append((index, candidate))
        else:
            length = group.known + 1 - (candidate.token in group.request.eos)
            value = score(-candidate.minus, length, group.request.params.length_penalty)
            group.ended.append(Ended(value, _node(group, candidate), finish, stop_id))
    group.ended.sort(key=lambda end: -end.score)
    del group.ended[group.width :], children[group.width :]
    if not children or (len(group.ended) == group.width and _enough(core, group, -children[0][1].minus)):
        _end(core, group)
    else:
        _descend(group, children)
        group.candidates, group.scores = [], []


def _finish(group: BeamGroup, token: int, stopped: bool) -> tuple[Finish, int]:
    finish, stop_id = group.request.finish_of(token, group.step)
    if finish is Finish.NONE and stopped:
        finish = Finish.STOP
    if finish is Finish.NONE and group.known + 1 >= group.limit:
        finish = Finish.LENGTH
    return finish, stop_id


def _enough(core: Scheduler, group: BeamGroup, best: float) -> bool:
    """With ``width`` ended: no live beam can do better than the worst of them, by the rule asked for."""
    params, length = group.request.params, group.known + 1
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = max(group.request.prompt_len + group.request.max_tokens, core.max_model_len)
    return group.ended[-1].score >= score(best, length, params.length_penalty)


def _descend(group: BeamGroup, children: list[tuple[int, Candidate]]) -> None:
    """The children take their parents' place: each parent's first its block table, further ones share the blocks."""
    assert group.replica is not None
    pool, beams, heirs = group.replica.pool, [], set()
    for index, candidate in children:
        parent = group.beams[candidate.parent]
        blocks = parent.blocks
        if candidate.parent in heirs:
            blocks = blocks[:]
            for block in blocks:
                pool.share(block)
        heirs.add(candidate.parent)
        beams.append(Beam(_node(group, candidate), -candidate.minus, index, blocks, parent.row))
    for at, parent in enumerate(group.beams):
        if at not in heirs:
            pool.release_table(parent.blocks)
    group.beams, group.ready = beams, True
    group.known += 1


# ---------------------------------------------------------------- the next step


def plan_beams(core: Scheduler, replica: Replica, draft: Draft, group: BeamGroup) -> None:
    """One decode of each beam, where they are settled; the draft's rows are written by ``run_beams``."""
    if not group.ready:
        return
    pool, slot = replica.pool, group.planned // replica.block_size
    tables = [beam.blocks for beam in group.beams]
    held = len({table[slot] for table in tables}) if slot < len(tables[0]) else 0
    while pool.free_count < len(tables) - held:
        victim = replica.last()
        core.preempt(victim)
        if victim is group:
            return
    _place(replica, draft, group)
    for beam in group.beams:
        draft.own_block(pool, beam.row, beam.blocks, slot)
        assert beam.node is not None
        draft.append_rows.append(beam.row)
        draft.append_tokens.append(beam.node.token)
    group.planned += 1
    group.ready = False
    draft.groups.append((group, group.generation, len(group.beams)))


def _place(replica: Replica, draft: Draft, group: BeamGroup) -> None:
    """Rows: the first child stays in its parent's, the others are forked from there into rows that nobody keeps."""
    kept: set[int] = set()
    movers = []
    for beam in group.beams:
        if beam.row in kept:
            movers.append(beam)
        kept.add(beam.row)
    replica.drops += [row for row in group.filled if row not in kept]
    free = [row for row in (group.row, *group.spare) if row not in kept]
    for beam, row in zip(movers, free, strict=False):
        draft.fork_src.append(beam.row)
        draft.fork_dst.append(row)
        draft.fork_seeds.append(group.seed())
        beam.row = row
    group.filled = [beam.row for beam in group.beams]


def run_beams(draft: Draft) -> None:
    """Compute rows and sample slots of all beams planned; they stand between decodes and prompts."""
    for group, _, _ in draft.groups:
        for beam in group.beams:
            draft.sample_src.append(len(draft.rows))
            draft.sample_rows.append(beam.row)
            draft.rows.append(beam.row)
            draft.starts.append(group.planned - 1)
            draft.counts.append(1)


# ---------------------------------------------------------------- the end


def _end(core: Scheduler, group: BeamGroup) -> None:
    """Send the best n, best first. Where masks left fewer than n ways to end, the others are empty and aborted."""
    request = group.request
    if not group.ended:
        core.fail(request, 400, "Masks and bad words left no token that a beam could go on with.")
        return
    best = group.ended[: request.params.n]
    paths = [list(_path(end.node)) for end in best]
    rows, missing = request.params.n, request.params.n - len(best)
    core.outbox.put(
        request.owner,
        TokenBatch(
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
        ),
    )
    core.generation_tokens += sum(map(len, paths))
    core.leave(group)


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
