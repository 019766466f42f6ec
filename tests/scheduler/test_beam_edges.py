"""A beam search's own rules, one at a time: what it may hold, what it reads, how candidates rank and who ends."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import BadFrame, f32, from_i32, i32
from quire.proto.messages import BeamStopped, BeamTokens, Failed, Finish, Logprobs, StepResult, TokenBatch
from quire.scheduler.beam_group import BeamGroup, read_scores, score
from quire.scheduler.beams import plan_beams
from quire.scheduler.draft import Draft

INF = math.inf


def search(rig: Rig, length: int, width: int = 2, **params: Any) -> BeamGroup:
    uid = rig.submit(length, n=width, use_beam_search=True, temperature=0.0, **params)
    (group,) = rig.core.requests[uid].live
    assert isinstance(group, BeamGroup)
    return group


def test_a_search_takes_a_row_that_another_had() -> None:
    rig = Rig()
    rig.submit(20)
    rig.run()
    group = search(rig, 60)
    rig.plan()  # which looks at every counter
    assert group.prefilling and group.row == 0 and group.horizon == 0
    rig.run()


# ---------------------------------------------------------------- what it may hold


@pytest.mark.parametrize(
    ("length", "max_tokens", "blocks"),
    [(12, 1, 2), (12, 2, 3), (12, 5, 3), (12, 6, 5), (8, 1, 1), (8, 2, 3), (8, 9, 3), (8, 10, 5), (7, 2, 2), (7, 3, 4)],
)
def test_the_most_blocks_of_a_search(length: int, max_tokens: int, blocks: int) -> None:
    """Two beams share the full blocks of the prompt alone, and the last token is never computed."""
    assert search(Rig(), length, max_tokens=max_tokens).most_blocks(8) == blocks


def test_blocks_to_spare_are_those_of_a_step_after_as_much_as_it_held() -> None:
    rig = Rig()
    group = search(rig, 12, width=3, max_tokens=30)  # two blocks of prompt, at most 1 + 3 x 5
    assert group.spare_blocks(8) == 3
    for reached, spare in ((2, 3), (3, 4), (9, 10), (13, 14), (14, 14), (99, 14)):
        group.reached = reached
        assert group.spare_blocks(8) == spare
    assert search(rig, 12, width=3, max_tokens=1).spare_blocks(8) == 0


def test_what_a_search_held_is_counted_when_it_gives_it_back() -> None:
    rig = Rig()
    group = search(rig, 12, width=3, max_tokens=30)
    while rig.replica.pool.used < 5:
        rig.step()
    held = rig.replica.pool.used
    rig.core.preempt(group)
    assert group.reached == held and rig.replica.pool.used == 0
    assert (group.spare, group.beams, group.grown, group.step, group.filled) == ([], [], 0, 0, [])
    rig.run()


# ---------------------------------------------------------------- what it reads


def record(ids: list[int], values: list[float]) -> Logprobs:
    return Logprobs(i32(ids), f32(values), i32([1]))


@pytest.mark.parametrize(
    ("ids", "values", "sound"),
    [
        ([0, 1, 2, VOCAB - 1], [-1, -2, -2, -3], True), ([3, 2, 1, 0], [0, 0, 0, 0], True),
        ([1, 2, 3, 4], [-1, -2, -INF, -INF], True), ([1, 2, 3, 4], [-INF] * 4, True),
        ([1, 2, 3, 4], [-1, -2, math.nan, math.nan], True),
        ([1, 2, 3, VOCAB], [-1, -2, -3, -4], False), ([1, 2, 3, -1], [-1, -2, -3, -4], False),
        ([1, 2, 3, 3], [-1, -2, -3, -4], False), ([1, 2, 3, 4], [-2, -1, -3, -4], False),
        ([1, 2, 3, 4], [INF, -1, -2, -3], False), ([1, 2, 3], [-1, -2, -3], False),
        ([1, 2, 3, 4, 5], [-1, -2, -3, -4, -5], False),
    ],
)  # fmt: skip
def test_the_log_probs_of_a_beam(ids: list[int], values: list[float], sound: bool) -> None:
    """The best 2 x width after the token's own."""
    request = search(Rig(), 8).request
    given = record([9, *ids], [-9.0, *values])
    if not sound:
        with pytest.raises(BadFrame):
            read_scores(given, request, VOCAB)
        return
    found = read_scores(given, request, VOCAB)
    assert (found.ids, found.record) == (ids, given)
    assert found.values == [-INF if math.isnan(value) else value for value in values]


@pytest.mark.parametrize(
    ("logprobs", "vocab", "given"),
    [(None, 99, 4), (3, 99, 4), (4, 99, 4), (5, 99, 5), (9, 99, 9), (-1, 6, 6), (5, 3, 3), (None, 3, 3)],
)
def test_how_many_log_probs_a_beam_is_given(logprobs: int | None, vocab: int, given: int) -> None:
    request = search(Rig(), 8, logprobs=logprobs).request
    for count in (given - 1, given, given + 1):
        some = record([0, *range(count)], [-1.0] * (count + 1))
        if count == given:
            found = read_scores(some, request, vocab)
            assert found.ids == [*range(min(given, 4))] and len(found.values) == len(found.ids)
        else:
            with pytest.raises(BadFrame):
                read_scores(some, request, vocab)
    with pytest.raises(BadFrame, match="has none"):
        read_scores(None, request, vocab)


@pytest.mark.parametrize(
    ("cumulative", "length", "penalty", "expected"),
    [(-6.0, 3, 1.0, -2.0), (-6.0, 3, 0.0, -6.0), (-6.0, 2, -1.0, -12.0), (-6.0, 4, 0.5, -3.0), (0.0, 5, 2.0, 0.0),
     (-6.0, 9, 1e6, 0.0), (-6.0, 9, -1e6, -INF), (0.0, 9, -1e6, 0.0)],
)  # fmt: skip
def test_scores(cumulative: float, length: int, penalty: float, expected: float) -> None:
    assert score(cumulative, length, penalty) == expected


# ---------------------------------------------------------------- candidates


def step(rig: Rig, *slots: list[tuple[int, float]]) -> None:
    """A step in which these are the best tokens of each slot."""
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    records = [record([9, *(token for token, _ in slot)], [-9.0, *(value for _, value in slot)]) for slot in slots]
    result = StepResult(plan.lease, plan.step, i32([9] * len(slots)), b"", i32(range(len(slots))), records)
    rig.core.commit(rig.replica, result)
    rig.core.check_integrity()


def tokens(group: BeamGroup) -> list[int]:
    return [candidate.token for candidate in group.candidates]


def told(rig: Rig, kind: type) -> list[Any]:
    return [message for _, message in rig.core.outbox.take() if isinstance(message, kind)]


def test_candidates_rank_by_sum_then_parent_then_token() -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, stop=["x"])
    step(rig, [(5, -1.0), (3, -1.0), (8, -2.0), (7, -2.0)])
    assert tokens(group) == [3, 5, 7, 8]  # those of one sum: the lower token
    (question,) = told(rig, BeamTokens)
    assert (question.step, from_i32(question.parents), from_i32(question.tokens)) == (1, [0] * 4, [3, 5, 7, 8])
    rig.core.beam_stopped(BeamStopped(group.uid, 0, 1, i32([])))
    # Both beams have -1 so far. Of the first no token but one may come.
    step(rig, [(20, -2.0), (21, -INF), (22, -INF), (23, -INF)], [(30, -1.0), (10, -2.0), (11, -2.5), (12, -3.0)])
    assert [(candidate.parent, candidate.token) for candidate in group.candidates] == [
        (1, 30),
        (0, 20),
        (1, 10),
        (1, 11),
    ]
    assert [candidate.minus for candidate in group.candidates] == [2.0, 3.0, 3.0, 3.5]
    (question,) = told(rig, BeamTokens)
    assert (question.step, from_i32(question.parents), from_i32(question.tokens)) == (2, [1, 0, 1, 1], [30, 20, 10, 11])


def test_an_answer_counts_once_and_for_its_own_step() -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, stop=["x"])
    rig.core.beam_stopped(BeamStopped(group.uid, 0, 1, i32([])))  # nobody asked
    step(rig, [(5, -1.0), (3, -1.5), (8, -2.0), (7, -2.0)])
    assert group.asked == 1
    rig.core.beam_stopped(BeamStopped(group.uid, 1, 1, i32([])))  # of another attempt
    assert group.asked == 1 and not group.beams[0].node
    rig.core.beam_stopped(BeamStopped(group.uid, 0, 1, i32([3])))
    assert group.asked == 0 and group.ready and group.candidates == []
    assert [ended.finish for ended in group.ended] == [Finish.STOP]
    rig.core.beam_stopped(BeamStopped(group.uid, 0, 1, i32([0])))
    assert len(group.ended) == 1


@pytest.mark.parametrize(("stopped", "sound"), [([0], True), ([3], True), ([4], False), ([-1], False)])
def test_a_stop_string_ends_a_candidate_that_was_asked_about(stopped: list[int], sound: bool) -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, stop=["x"])
    step(rig, [(5, -1.0), (3, -1.5), (8, -2.0), (7, -2.0)])
    message = BeamStopped(group.uid, 0, 1, i32(stopped))
    if sound:
        rig.core.beam_stopped(message)
        assert len(group.ended) == 1 and group.ready
        return
    with pytest.raises(BadFrame):
        rig.core.beam_stopped(message)
    (failed,) = told(rig, Failed)
    assert failed.status == 500 and not rig.core.requests and rig.replica.pool.used == 0


# ---------------------------------------------------------------- ends


def test_ends_are_scored_without_their_end_of_sequence_and_the_best_are_kept() -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, eos=(3,), stop_token_ids=[5], early_stopping=False)
    step(rig, [(3, -1.0), (5, -1.0), (8, -2.0), (7, -2.5)])
    # 8 tokens with the prompt where the last is the end of the sequence, 9 where it is a stop id.
    assert [(ended.score, ended.stop_id) for ended in group.ended] == [(-1 / 9, 5), (-1 / 8, -1)] or not group.ended
    assert not rig.core.requests  # no live beam could do better: -2 at 9 tokens
    rig.receive()
    assert rig.ends == {(1, 0): (Finish.STOP, 5), (1, 1): (Finish.STOP, -1)}
    assert rig.tokens == {(1, 0): [5], (1, 1): [3]}
    assert rig.core.stats().generation_tokens == 2


@pytest.mark.parametrize(
    ("early_stopping", "live", "goes_on"),
    [(True, -0.1, False), (False, -2.0, False), (False, -1.9, True), ("never", -2.0, True)],
)
def test_when_a_search_with_enough_ends_is_over(early_stopping: bool | str, live: float, goes_on: bool) -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, stop_token_ids=[5, 6], early_stopping=early_stopping)
    ends = [(5, -1.0), (6, -2.0)]
    step(rig, sorted([*ends, (8, live), (7, -9.0)], key=lambda one: -one[1]))
    assert bool(rig.core.requests) == goes_on
    if goes_on:
        assert [ended.stop_id for ended in group.ended] == [5, 6] and group.ready


def test_the_longest_that_a_beam_could_become_is_what_was_asked_for() -> None:
    """Where that is more than the model has, as vLLM counts it."""
    rig = Rig(max_model_len=20)
    search(rig, 8, max_tokens=100, stop_token_ids=[5, 6], early_stopping="never")
    step(rig, [(5, -1.0), (6, -2.0), (8, -8.0), (7, -9.0)])
    assert rig.core.requests  # -8 at 108 tokens is better than -2 at 9


def crowded(free: int) -> tuple[Rig, BeamGroup]:
    """Two beams that need a block each, with so many free; another decodes beside them."""
    rig = Rig()
    group = search(rig, 8, max_tokens=20)
    rig.submit(9, max_tokens=20)
    rig.step()
    rig.replica.reserve(1, [], rig.replica.pool.free_count - free)
    return rig, group


@pytest.mark.parametrize(("free", "preempted"), [(1, 1), (2, 0)])
def test_beams_that_need_blocks_send_who_came_last_back(free: int, preempted: int) -> None:
    rig, group = crowded(free)
    rig.plan()
    assert rig.core.preemptions == preempted and [len(beam.blocks) for beam in group.beams] == [2, 2]
    rig.replica.give_up(1)
    rig.run()


def test_what_is_kept_for_those_in_line_goes_before_anybody_who_runs() -> None:
    rig, group = crowded(1)

    def make_room(pool: object) -> bool:
        rig.replica.give_up(1)
        return True

    rig.replica.tier = SimpleNamespace(make_room=make_room)
    plan_beams(rig.core, rig.replica, Draft(32), group)
    assert not rig.core.preemptions and [len(beam.blocks) for beam in group.beams] == [2, 2]


def test_the_last_token_that_it_may_have_ends_every_candidate() -> None:
    rig = Rig()
    search(rig, 8, max_tokens=1)
    step(rig, [(5, -1.0), (6, -2.0), (8, -3.0), (7, -9.0)])
    rig.receive()
    assert rig.ends == {(1, 0): (Finish.LENGTH, -1), (1, 1): (Finish.LENGTH, -1)}
    assert rig.tokens == {(1, 0): [5], (1, 1): [6]}


@pytest.mark.parametrize("stop", [None, ["x"]])
def test_where_nothing_may_come_the_search_ends_with_what_it_has_or_fails(stop: list[str] | None) -> None:
    rig = Rig()
    search(rig, 8, max_tokens=9, stop=stop)  # the detokenizer is not asked about nothing
    step(rig, [(1, -INF), (2, -INF), (3, -INF), (4, -INF)])
    (failed,) = told(rig, Failed)
    assert (failed.status, failed.message) == (400, "Masks and bad words left no token that a beam could go on with.")
    search(rig, 8, max_tokens=9, stop_token_ids=[1], logprobs=0)
    step(rig, [(1, -1.0), (2, -INF), (3, -INF), (4, -INF)])
    (batch,) = [batch for batch in told(rig, TokenBatch) if batch.counts]
    assert (from_i32(batch.indexes), from_i32(batch.counts), from_i32(batch.tokens)) == ([0, 1], [1, 0], [1])
    assert (batch.finishes, from_i32(batch.stop_ids)) == (bytes([Finish.STOP.value, Finish.ABORT.value]), [1, -1])
    assert (from_i32(batch.logprob_rows), len(batch.logprobs), from_i32(batch.offsets)) == ([0], 1, [0, 0])


def test_a_stop_string_does_not_hide_a_stop_id() -> None:
    rig = Rig()
    group = search(rig, 8, max_tokens=9, stop=["x"], stop_token_ids=[5])
    step(rig, [(5, -1.0), (3, -1.5), (8, -2.0), (7, -2.0)])
    rig.core.beam_stopped(BeamStopped(group.uid, 0, 1, i32([0, 1])))
    rig.receive()
    assert rig.ends == {(1, 0): (Finish.STOP, 5), (1, 1): (Finish.STOP, -1)}


# ---------------------------------------------------------------- rows


def test_the_first_child_stays_in_its_parents_row_and_rows_without_a_child_are_given_up() -> None:
    rig = Rig()
    group = search(rig, 8, width=3, max_tokens=9)
    step(rig, [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0), (6, -6.0)])
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    rows = [beam.row for beam in group.beams]
    assert rows[0] == group.row and sorted(rows) == sorted([group.row, *group.spare])
    assert from_i32(plan.fork_src) == [group.row] * 2 and from_i32(plan.fork_dst) == rows[1:]
    assert (from_i32(plan.append_rows), from_i32(plan.append_tokens)) == (rows, [1, 2, 3])
    assert rig.core.plan(rig.replica) is None  # one plan in flight
    good = [(token, -0.1 * token) for token in range(1, 7)]
    bad = [(token, -90.0 - token) for token in range(1, 7)]
    records = [record([9, *(t for t, _ in slot)], [-9.0, *(v for _, v in slot)]) for slot in (bad, good, bad)]
    result = StepResult(plan.lease, plan.step, i32([9] * 3), b"", i32(range(3)), records)
    rig.core.commit(rig.replica, result)
    plan = rig.core.plan(rig.replica)
    assert plan is not None
    assert group.beams[0].row == rows[1]  # all three are the second's children
    assert sorted(from_i32(plan.drops)) == sorted([rows[0], rows[2]])
    assert from_i32(plan.fork_src) == [rows[1]] * 2 and sorted(from_i32(plan.fork_dst)) == sorted([rows[0], rows[2]])
    rig.core.check_integrity()
