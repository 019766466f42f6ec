"""Beam search in the scheduler: against an oracle that shares nothing with it but the fake worker's log-probs."""

from __future__ import annotations

import math
import random
from array import array
from itertools import product

import pytest
from scheduler_rig import Rig

from quire.proto.codec import BadFrame, f32, from_f32, from_i32, i32
from quire.proto.messages import (
    BeamStopped,
    BeamTokens,
    Child,
    Finish,
    Logprobs,
    SlotFailed,
    StepPlan,
    StepResult,
    Stopped,
)
from quire.proto.params import SamplingParams
from quire.scheduler.beam_group import score
from quire.scheduler.fake.fake_model import expected_beams, expected_logprobs, expected_tokens, join

VOCAB = 40
EOS = 3

pytestmark = pytest.mark.slow


class Search(Rig):
    """A rig of a small vocabulary, where beams end now and then."""

    def __init__(self, blocks: int | list[int] = 200, **flags: object):
        super().__init__(blocks, **{"vocab": VOCAB, "max_num_seqs": 20, "max_num_batched_tokens": 64, **flags})

    def search(self, prompt: list[int] | int, width: int, *, n: int = 0, **fields: object) -> int:
        given = {"eos": (EOS,), "max_tokens": 10, "logprobs": 0, **fields}
        n = n or width
        return self.submit(
            prompt, n=n, best_of=None if n == width else width, use_beam_search=True, temperature=0.0, **given
        )

    def check(self, uid: int, prompt: list[int] | int, width: int, *, n: int = 0, **fields: object) -> None:
        """What came is the oracle's, and so are the logprobs."""
        prompt = self.prompt(prompt, uid) if isinstance(prompt, int) else prompt
        fields = {"max_tokens": 10, "logprobs": 0, **fields}
        eos = list(fields.pop("eos", (EOS,)))
        n = n or width
        params = SamplingParams(
            n=n, best_of=None if n == width else width, use_beam_search=True, temperature=0.0, **fields
        )
        room = min(params.max_tokens, self.max_model_len - len(prompt))
        expected = expected_beams(prompt, params, eos, room, self.max_model_len, self.vocab, self.stop)
        assert len(expected) == n
        for index, (tokens, finish, stop_id) in enumerate(expected):
            assert self.tokens[uid, index] == tokens, (uid, index)
            assert self.ends[uid, index] == (finish, stop_id)
            if params.logprobs is not None:
                (record,) = self.logprobs[uid, index]
                assert record == expected_logprobs(prompt + tokens, len(prompt), params.logprobs, self.vocab)
        assert (uid, n) not in self.tokens


def appends(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(from_i32(plan.append_rows), from_i32(plan.append_tokens), strict=True))


# ---------------------------------------------------------------- what comes out


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_outputs_are_the_oracles(width: int, early_stopping: bool | str) -> None:
    for penalty, length in product((-1.5, 0.0, 1.0, 2.5), (1, 13, 70)):
        rig = Search()
        fields = {"length_penalty": penalty, "early_stopping": early_stopping, "max_tokens": 14}
        uid = rig.search(length, width, **fields)
        rig.run()
        rig.check(uid, length, width, **fields)
        assert rig.started == {uid: 0}
        assert rig.core.generation_tokens == sum(len(tokens) for tokens in rig.tokens.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": 3, "logprobs": 5},
        {"eos": ()},
        {"eos": (EOS, 5, 9)},
        {"stop_token_ids": [1, 2, 20, 21, 22]},
        {"stop_token_ids": [1, 2, EOS], "min_tokens": 6, "max_tokens": 12},
        {"logprobs": 20},
        {"logprobs": -1},
        {"logprobs": None},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 60, "eos": ()},
    ],
)
def test_every_field_of_a_search(fields: dict) -> None:
    rig = Search(max_model_len=70)
    uids = [rig.search(length, 4, **fields) for length in (5, 16, 33)]
    rig.run()
    for uid, length in zip(uids, (5, 16, 33), strict=True):
        rig.check(uid, length, 4, **fields)


def test_many_ends_at_once_leave_fewer_beams_than_the_width() -> None:
    """With most tokens ending a beam, hardly any go on, and rows that no beam needs are dropped."""
    seen = set()
    for salt in range(30):
        rig = Search()
        stops = [token for token in range(VOCAB) if token % 7]
        uid = rig.search(rig.prompt(6, salt), 4, stop_token_ids=stops, early_stopping="never", length_penalty=9.0)
        while rig.core.requests:
            plan = rig.step()
            if plan is not None and plan.append_rows:
                seen.add(len(appends(plan)))
        rig.check(uid, rig.prompt(6, salt), 4, stop_token_ids=stops, early_stopping="never", length_penalty=9.0)
    assert {1, 2, 3} & seen


def test_scores_that_overflow_are_ranked_and_not_raised() -> None:
    assert score(-5.0, 100, 1e6) == 0.0
    assert score(-5.0, 100, -1e6) == -math.inf
    assert score(0.0, 100, -1e6) == 0.0
    for penalty in (1e300, -1e300):
        rig = Search()
        uid = rig.search(9, 4, length_penalty=penalty)
        rig.run()
        assert len(rig.ends) == 4
        assert {key[0] for key in rig.ends} == {uid}


# ---------------------------------------------------------------- company


@pytest.mark.slow
def test_searches_and_ordinary_requests_share_steps_and_tiny_pools() -> None:
    """In pools so small that somebody is preempted all the time, with one plan after another in flight."""
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        rig = Search(blocks=rng.choice([18, 20, 24]), max_num_seqs=rng.choice([8, 9, 14]))
        rig.stop = rng.choice([lambda outputs: False, lambda outputs: sum(outputs[-2:]) % 9 == 0])
        searches, plain = {}, {}
        for _ in range(rng.randint(2, 5)):
            length, width = rng.randint(1, 24), rng.choice([2, 4])
            fields = {"max_tokens": rng.randint(1, 24), "early_stopping": rng.choice([True, False, "never"])}
            if rig.stop([0]):
                fields["stop"] = ["x"]
            searches[rig.search(length, width, **fields)] = (length, width, fields)
            length = rng.randint(1, 60)
            plain[rig.submit(length, max_tokens=30)] = length
        rig.run(3000)
        preemptions += rig.core.preemptions
        for uid, (length, width, fields) in searches.items():
            rig.check(uid, length, width, **fields)
        for uid, length in plain.items():
            assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(length, uid), uid, 30, VOCAB)
    assert preemptions > 40


def test_others_overlap_while_a_search_has_one_plan_in_flight() -> None:
    rig = Search()
    plain, uid = rig.submit(5, max_tokens=20), rig.search(5, 2)
    rig.step()
    assert [len(from_i32(rig.plan().rows)), len(from_i32(rig.plan().rows))] == [3, 1]
    rig.work()
    assert rig.plan().append_rows  # its log-probs have come
    rig.run()
    rig.check(uid, 5, 2)
    assert rig.tokens[plain, 0] == expected_tokens(rig.prompt(5, plain), plain, 20, VOCAB)


def test_rows_are_reserved_and_a_search_waits_until_they_are_free() -> None:
    rig = Search(max_num_seqs=5)
    first = [rig.submit(5, max_tokens=length) for length in (3, 9)]
    uid = rig.search(7, 4)
    later = rig.submit(5)
    plan = rig.step()
    assert [admit.uid for admit in plan.admits] == first
    while not plan.admits or plan.admits[0].uid != uid:
        assert later not in {seq.uid for seq in rig.replica.decoding}  # strictly in line
        plan = rig.step()
    assert (rig.replica.running, len(rig.replica.free_rows)) == (5, 0)
    stats = rig.core.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    rig.run()
    rig.check(uid, 7, 4)
    assert sorted(rig.replica.free_rows) == [0, 1, 2, 3, 4]


def test_a_search_that_can_never_run_is_refused_with_the_numbers() -> None:
    rig = Search(blocks=20, max_num_seqs=6)
    rig.search(5, 7)
    failed = rig.failed()
    assert (failed.status, failed.param) == (400, "best_of")
    assert "width 7" in failed.message
    assert "max_num_seqs is 6" in failed.message
    rig.search(16, 4, max_tokens=40)  # two full blocks, and four times five
    failed = rig.failed()
    assert failed.status == 400
    assert "in each of 4 beams need 22 KV blocks" in failed.message
    assert "has 20" in failed.message
    uid = rig.search(16, 4, max_tokens=33)  # four times four: it fits to the block
    rig.run()
    rig.check(uid, 16, 4, max_tokens=33)
    Search(blocks=[], max_num_seqs=2).search(5, 3)
    rig = Search(blocks=[], max_num_seqs=2)
    rig.search(5, 3)
    assert rig.failed().param == "best_of"


def test_a_search_is_admitted_only_with_blocks_for_its_first_step() -> None:
    rig = Search(blocks=10)
    rig.submit(40, max_tokens=1)
    uid = rig.search(8, 4, max_tokens=9)  # one block, then four, and one for the row that runs
    assert [admit.uid for admit in rig.plan().admits] == [1]
    rig.work()
    assert [admit.uid for admit in rig.plan().admits] == [uid]
    rig.run()
    rig.check(uid, 8, 4, max_tokens=9)
    assert rig.core.preemptions == 0


def test_a_search_that_finds_no_block_gives_all_of_its_own_back() -> None:
    preempted = []
    for blocks, length in product(range(14, 18), (44, 50)):
        rig = Search(blocks=blocks)
        plain, uid = rig.submit(length, max_tokens=60), rig.search(8, 4, max_tokens=20, eos=())
        while rig.core.requests:
            before = rig.core.preemptions
            plan = rig.step()
            if rig.core.preemptions > before:
                assert plan is not None
                assert (from_i32(plan.rows), len(from_i32(plan.drops))) == ([0], 4)
        preempted.append(rig.core.preemptions)
        rig.check(uid, 8, 4, max_tokens=20, eos=())
        assert rig.tokens[plain, 0] == expected_tokens(rig.prompt(length, plain), plain, 60, VOCAB)
    assert 1 <= max(preempted) <= 3  # it comes back when there is more room than it had, not to fail again at once


def test_a_search_may_hope_for_longer_where_the_model_has_more_room() -> None:
    """With "never" what could still be reached is scored at the model's longest length."""
    longer = 0
    for salt in range(12):
        steps = []
        for room in (44, 4000):
            rig = Search(max_model_len=room)
            fields = {"early_stopping": "never", "max_tokens": 40, "eos": (3, 7, 9), "length_penalty": 0.5}
            uid = rig.search(rig.prompt(4, salt), 3, **fields)
            rig.run()
            rig.check(uid, rig.prompt(4, salt), 3, **fields)
            steps.append(rig.core.steps)
        assert steps[0] <= steps[1]
        longer += steps[0] < steps[1]
    assert longer


@pytest.mark.parametrize("penalty", [-2.0, -0.5])
def test_no_search_hopes_for_longer_where_longer_is_worse(penalty: float) -> None:
    """Then "never" scores what could still be reached at the length it has now, however much room the model has."""
    on = 0
    for salt in range(8):
        steps = []
        for early_stopping, room in (("never", 104), ("never", 4000), (True, 104)):
            rig = Search(max_model_len=room)
            fields = {"early_stopping": early_stopping, "max_tokens": 40, "eos": (3, 7, 9), "length_penalty": penalty}
            uid = rig.search(rig.prompt(60, salt), 4, **fields)
            rig.run()
            rig.check(uid, rig.prompt(60, salt), 4, **fields)
            steps.append(rig.core.steps)
        assert steps[0] == steps[1]
        on += steps[0] > steps[2]
    assert on


# ---------------------------------------------------------------- rows and blocks


def test_beams_share_all_blocks_but_the_one_they_write() -> None:
    rig = Search()
    uid = rig.search(20, 4, max_tokens=20, eos=())  # two full blocks and half of one
    rig.step()
    pool = rig.replica.pool
    assert pool.used == 3
    plan = rig.plan()
    assert pool.used == 2 + 4
    assert len(from_i32(plan.fork_src)) == 3
    assert len(from_i32(plan.copy_src)) == 3  # the last sharer writes in place
    assert len(set(from_i32(plan.copy_src))) == 1
    shared = alone = 0
    rig.work()
    while rig.core.requests:
        rig.step()
        (group,) = rig.replica.decoding or [None]
        if group is not None:
            tables = [beam.blocks for beam in group.beams]
            assert pool.used == len({block for table in tables for block in table})
            assert all(table[:2] == tables[0][:2] for table in tables)
            shared, alone = shared + pool.used, alone + sum(map(len, tables))
    assert shared < 0.75 * alone
    rig.check(uid, 20, 4, max_tokens=20, eos=())


def test_a_kept_beam_stays_in_its_row() -> None:
    rig = Search()
    uid = rig.search(9, 4, max_tokens=12, eos=())
    while rig.core.requests:
        plan = rig.step()
        forks, drops = from_i32(plan.fork_src), from_i32(plan.drops)
        assert not set(forks) & set(drops)
        assert set(from_i32(plan.fork_dst)) <= set(range(20)) - set(forks)
        if plan.append_rows:
            rows = [row for row, _ in appends(plan)]
            assert len(set(rows)) == 4
            assert rows == from_i32(plan.rows) == from_i32(plan.sample_rows)
            assert len(forks) < 4  # some parent's child is always at home
    rig.check(uid, 9, 4, max_tokens=12, eos=())


def test_the_prompt_comes_from_the_prefix_cache() -> None:
    rig = Search()
    prompt = rig.prompt(30, 1)
    rig.search(prompt, 2)
    rig.run()
    uid = rig.search(prompt, 4, n=2)
    rig.run()
    assert rig.started[uid] == 24
    rig.check(uid, prompt, 4, n=2)


# ---------------------------------------------------------------- losses


@pytest.mark.slow
def test_a_search_survives_whatever_happens_at_any_moment() -> None:
    """Preemption, a lost lease, drain or abort after each number of steps, with and without a plan in flight."""
    for moment, in_flight in product(range(9), (False, True)):
        for event in ("preempt", "lease", "drain", "abort", "resubmit", "stopped"):
            rig = Search()
            uid, plain = rig.search(9, 3, max_tokens=7, eos=()), rig.submit(4, max_tokens=12)
            for _ in range(moment):
                rig.step()
            if in_flight:
                rig.plan()
            groups = [seq for seq in rig.replica.sequences() if seq.uid == uid]
            if event == "preempt" and groups:
                rig.core.preempt(groups[0])
            elif event == "lease":
                rig.core.end_lease(rig.replica)
                rig.add(0, 200)
            elif event == "drain":
                rig.replica.drain()
                for seq in rig.replica.sequences():
                    rig.core.requeue(seq)
                rig.add(1, 100)
            elif event == "abort":
                rig.core.abort(uid, 0)
            elif event == "resubmit" and uid in rig.core.requests:
                children = [Child(index, b"") for index in range(3)]
                rig.search(rig.prompt(9, uid), 3, uid=uid, attempt=1, max_tokens=7, eos=(), children=children)
            elif event == "stopped":
                rig.core.stopped(Stopped(uid, 0, 0, 0))  # of no child of a search
            rig.core.check_integrity()
            rig.run()
            if event == "abort":
                assert ((uid, 0) in rig.tokens) == (moment >= 7)
            else:
                rig.check(uid, 9, 3, max_tokens=7, eos=())
            assert rig.tokens[plain, 0] == expected_tokens(rig.prompt(4, plain), plain, 12, VOCAB)


def test_a_poisonous_search_is_found() -> None:
    rig = Search()
    innocent, poison = rig.submit(5, max_tokens=30), rig.search(5, 2)
    for life in range(3):
        for _ in range(30):
            rig.plan()
            if any(seq.uid == poison for seq in rig.replica.in_flight[-1].sequences()):
                break
            rig.work()
        alone = {seq.uid for seq in rig.replica.in_flight[-1].sequences()} == {poison}
        assert alone == (life == 2)
        rig.core.end_lease(rig.replica)
        rig.add(0, 100)
    assert (rig.failed().uid, rig.failed) and not [r for r in rig.core.requests if r == poison]
    rig.run()
    assert rig.tokens[innocent, 0] == expected_tokens(rig.prompt(5, innocent), innocent, 30, VOCAB)


def test_an_innocent_search_runs_alone_only_up_to_its_mark() -> None:
    rig = Search()
    uid = rig.search(5, 2, max_tokens=12, eos=())
    for _ in range(2):  # lost at the same place twice
        for _ in range(5):
            rig.step()
        rig.plan()
        rig.core.end_lease(rig.replica)
        rig.add(0, 100)
    plain = rig.submit(5, max_tokens=12)
    together = []
    while rig.core.requests:
        rig.step()
        together.append(len(rig.replica.decoding) == 2)
    assert together.index(True) == 6
    rig.check(uid, 5, 2, max_tokens=12, eos=())
    assert rig.tokens[plain, 0] == expected_tokens(rig.prompt(5, plain), plain, 12, VOCAB)


def test_a_suspect_that_gets_past_its_mark_is_cleared() -> None:
    rig = Search()
    uid = rig.search(5, 2, losses=2, attempt=3)
    assert rig.step() is not None
    rig.run()
    assert not rig.replica.quarantined
    rig.check(uid, 5, 2)


# ---------------------------------------------------------------- stop strings


def test_the_detokenizer_says_which_candidates_end() -> None:
    rig = Search()
    rig.stop = lambda outputs: sum(outputs[-3:]) % 5 == 0 and len(outputs) > 2
    uids = [rig.search(length, 4, stop=["x"], max_tokens=15) for length in (5, 14)]
    plain = rig.submit(5, max_tokens=30)
    rig.run()
    for uid, length in zip(uids, (5, 14), strict=True):
        rig.check(uid, length, 4, max_tokens=15)
        assert {rig.ends[uid, index] for index in range(4)} == {(Finish.STOP, -1)}
    assert rig.tokens[plain, 0] == expected_tokens(rig.prompt(5, plain), plain, 30, VOCAB)


def test_a_search_waits_for_its_answer_and_ignores_stale_ones() -> None:
    rig = Search()
    uid = rig.search(5, 2, stop=["x"])
    rig.step()
    (question,) = rig.questions
    assert (question.step, from_i32(question.parents), len(from_i32(question.tokens))) == (1, [0] * 4, 4)
    assert rig.plan() is None
    for stale in (BeamStopped(uid, 1, 1, b""), BeamStopped(uid, 0, 2, b""), BeamStopped(99, 0, 1, b"")):
        rig.core.beam_stopped(stale)
        assert rig.plan() is None
    rig.answer_all()
    assert rig.plan() is not None
    rig.work()
    assert rig.questions[0].step == 2
    rig.core.preempt(rig.replica.decoding[0])  # it begins anew, and the old answer comes late
    rig.step()
    assert [question.step for question in rig.questions] == [2, 1]
    rig.core.beam_stopped(BeamStopped(uid, 0, 2, i32([0, 1, 2, 3])))
    assert rig.plan() is None
    rig.questions.pop(0)
    rig.answer_all()
    rig.run()
    rig.check(uid, 5, 2)


def test_an_answer_to_the_same_step_of_an_earlier_life_does_not_count() -> None:
    rig = Search()
    uid = rig.search(5, 2, stop=["x"])
    rig.step()
    rig.core.preempt(rig.replica.decoding[0])
    rig.step()
    assert [question.step for question in rig.questions] == [1, 1]
    rig.core.beam_stopped(BeamStopped(uid, 0, 1, i32([0, 1, 2, 3])))  # of the first
    assert rig.plan() is None
    rig.questions.pop(0)
    rig.answer_all()
    rig.run()
    rig.check(uid, 5, 2)


def test_an_answer_that_makes_no_sense_fails_the_search_alone() -> None:
    rig = Search()
    plain, uid = rig.submit(5, max_tokens=9), rig.search(5, 2, stop=["x"])
    rig.step()
    with pytest.raises(BadFrame):
        rig.core.beam_stopped(BeamStopped(uid, 0, 1, i32([4])))
    failed = rig.failed()
    assert (failed.uid, failed.status) == (uid, 500)
    rig.run()
    assert len(rig.tokens[plain, 0]) == 9


def test_parents_name_candidates_of_the_step_before() -> None:
    rig = Search()
    rig.search(5, 4, stop=["x"], eos=())
    before: list[list[int]] = [[]]
    steps = 0
    while rig.core.requests:
        rig.step()
        if rig.questions:
            question: BeamTokens = rig.questions[-1]
            parents, tokens = from_i32(question.parents), from_i32(question.tokens)
            before = [[*before[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            assert len({tuple(outputs) for outputs in before}) == 8
            steps += 1
        rig.answer_all()
    assert steps == 10
    assert all(outputs in before for (_, _), outputs in rig.tokens.items())


# ---------------------------------------------------------------- workers that lie or fail


def scores_of(ids: list[int], values: list[float]) -> Logprobs:
    return Logprobs(i32([ids[0], *ids]), f32([values[0], *values]), i32([1]))


@pytest.mark.parametrize(
    "record",
    [
        None,
        scores_of([1, 2, 3], [-1, -2, -3]),
        scores_of([1, 2, 3, 4, 5], [-1, -2, -3, -4, -5]),
        scores_of([1, 2, 3, VOCAB], [-1, -2, -3, -4]),
        scores_of([1, 2, 3, -1], [-1, -2, -3, -4]),
        scores_of([1, 2, 2, 3], [-1, -2, -3, -4]),
        scores_of([1, 2, 3, 4], [-1, -3, -2, -4]),
        scores_of([1, 2, 3, 4], [math.inf, -3, -2, -4]),
        Logprobs(i32([1] * 10), f32([-1.0] * 10), i32([1, 1])),
    ],
)
def test_log_probs_that_cannot_be_right_change_nothing(record: Logprobs | None) -> None:
    rig = Search()
    uid = rig.search(5, 2)
    plan = rig.plan()
    given = {} if record is None else {"logprob_slots": i32([0]), "logprobs": [record]}
    with pytest.raises(BadFrame):
        rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([1]), **given))
    rig.core.check_integrity()
    rig.run()
    rig.check(uid, 5, 2)


def test_masked_tokens_are_no_candidates() -> None:
    """Where masks leave fewer ways to go on than sequences asked for, the rest is empty and aborted; with none at all
    the request fails, and alone."""
    rig = Search()
    uid, plain = rig.search(5, 3, max_tokens=1), rig.submit(5, max_tokens=9)
    plan = rig.plan()
    sound = rig.stores[0].run(plan)
    found = scores_of([7, 8, 1, 2, 3, 4], [-0.5, -0.9, -math.inf, -math.inf, math.nan, math.nan])
    sound.logprobs = [found]
    rig.plans[0].clear()
    rig.core.commit(rig.replica, sound)
    rig.receive()
    assert [rig.tokens[uid, index] for index in range(3)] == [[7], [8], []]
    assert [rig.ends[uid, index][0] for index in range(3)] == [Finish.LENGTH, Finish.LENGTH, Finish.ABORT]
    assert from_f32(rig.logprobs[uid, 1][0].values) == list(array("f", [-0.9]))
    other = rig.search(5, 3)
    plan = rig.plan()
    sound = rig.stores[0].run(plan)
    sound.logprobs = [scores_of([1, 2, 3, 4, 5, 6], [math.nan] * 6)]
    rig.plans[0].clear()
    rig.core.commit(rig.replica, sound)
    failed = rig.failed()
    assert (failed.uid, failed.status) == (other, 400)
    rig.run()
    assert len(rig.tokens[plain, 0]) == 9


def test_a_beam_that_fails_ends_the_search() -> None:
    rig = Search()
    plain, uid = rig.submit(5, max_tokens=9), rig.search(5, 2)
    rig.step()
    plan = rig.plan()
    result = rig.stores[0].run(plan)
    rig.plans[0].clear()
    result.failed = [SlotFailed(2, 422, "a grammar ran into its limits")]
    result.logprob_slots, result.logprobs = i32([1]), result.logprobs[:1]  # the failed one needs none
    rig.core.commit(rig.replica, result)
    failed = rig.failed()
    assert (failed.uid, failed.status, rig.replica.running) == (uid, 422, 1)
    rig.run()
    assert len(rig.tokens[plain, 0]) == 9


def test_prompt_logprobs_of_a_search() -> None:
    rig = Search(max_num_batched_tokens=20)
    uid = rig.search(50, 2, prompt_logprobs=2)
    rig.run()
    rig.check(uid, 50, 2)
    assert join([p.logprobs for p in rig.prompts[uid]]) == expected_logprobs(rig.prompt(50, uid), 1, 2, VOCAB)
