"""Sequences are drafted for where they go on faster with drafts, as measured by the scheduler."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from drafting_rig import Drafting, verifies
from scheduler_rig import Rig

from quire.proto.messages import SpeculativePlan, StepPlan
from quire.scheduler.draft_worth import LEAST_STAY, MOST_STAY, SKIP, SOON, SURE, TRY, Bursts, DraftWorth, Trial
from quire.scheduler.step import Step

FIRST = TRY + SKIP
"""Steps with drafts before it is first tried without."""


def ways(trial: Trial, steps: int, speed: float, first_s: float = 1.0) -> list[bool]:
    """Which way each of so many steps went, where drafts give ``speed`` times what steps without give in a second, and
    twice as many tokens in a step. The first of a way takes ``first_s``."""
    went: list[bool] = []
    for _ in range(steps):
        went.append(trial.drafts)
        seconds = first_s if len(went) > 1 and went[-2] is not went[-1] else 1.0
        trial.ended(*((True, 2.0, seconds * 2.0 / speed) if trial.drafts else (False, 1.0, seconds)))
    return went


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_the_quicker_way_is_taken_and_the_other_tried_ever_less(speed: float) -> None:
    went = ways(Trial(), 30_000, speed, first_s=1000.0)
    assert went[: FIRST + TRY] == [True] * FIRST + [False] * TRY
    quicker = speed > 1
    tried = [at for at in range(FIRST + TRY, len(went)) if went[at - 1] is quicker is not went[at]]
    stays = [tried[0] - FIRST - TRY, *(after - before - TRY for before, after in pairwise(tried))]
    # Plain decodes have won a trial, and are taken until that is sure. Drafts were what there was.
    first = LEAST_STAY // 8 if quicker else LEAST_STAY
    wanted = [first << doubled for doubled in range(6) if first << doubled <= MOST_STAY]
    assert stays[0] == first + (not quicker) * SURE and stays[1 : len(wanted)] == wanted[1:]
    assert {*stays[len(wanted) :]} <= {MOST_STAY}
    assert went[FIRST + TRY :].count(not quicker) == TRY * len(tried)


def test_what_was_quicker_once_need_not_stay_so() -> None:
    trial = Trial()
    ways(trial, 20_000, 0.9)
    assert not trial.drafts
    went = ways(trial, 3 * (MOST_STAY + TRY), 1.5)
    since = went.index(True)
    assert since <= MOST_STAY and went[since:].count(False) <= 4 * TRY  # it is tried without


@pytest.mark.parametrize("speed", [0.5, 0.9])
def test_drafts_that_were_good_for_long_are_given_up_at_the_second_trial_at_the_latest(speed: float) -> None:
    trial = Trial()
    ways(trial, 40_000, 1.5)
    went = ways(trial, 3 * MOST_STAY + TRY, speed)
    assert went[2 * MOST_STAY + TRY :].count(True) <= 4 * TRY


def go(trial: Trial, steps: int, plain: float, drafts: float) -> None:
    """So many steps of these speeds, that give twice as many tokens with drafts."""
    for _ in range(steps):
        trial.ended(*((True, 2.0, 2.0 / drafts) if trial.drafts else (False, 1.0, 1.0 / plain)))


def test_the_last_steps_of_a_way_are_what_it_gives() -> None:
    trial = Trial()
    go(trial, FIRST + TRY, 1.0, 1.5)
    assert trial.drafts
    go(trial, LEAST_STAY - 400, 1.0, 3.0)
    go(trial, 400 + TRY, 1.0, 0.5)
    assert not trial.drafts


def test_what_a_way_gave_when_it_was_last_taken_does_not_outweigh_its_trial() -> None:
    trial = Trial()
    go(trial, FIRST + TRY + SURE + LEAST_STAY - 1, 1.0, 0.5)
    go(trial, 1 + TRY + SURE, 1.0, 3.0)
    assert trial.drafts
    go(trial, LEAST_STAY + TRY, 2.0, 1.5)
    assert not trial.drafts


def test_who_wins_a_trial_by_chance_is_not_taken_for_long() -> None:
    trial = Trial()
    go(trial, FIRST + TRY + SURE + LEAST_STAY, 1.0, 0.8)
    assert trial.drafts
    go(trial, TRY, 1.0, 1.2)
    assert trial.drafts
    go(trial, SURE, 1.0, 0.8)
    assert not trial.drafts
    ways(trial, 2 * LEAST_STAY - 1, 0.8)
    assert not trial.drafts  # the other way's stay is as if that trial had been lost at once
    ways(trial, 1, 0.8)
    assert trial.drafts


def test_more_rows_than_are_ever_drafted_for_say_nothing_of_fewer() -> None:
    worth = DraftWorth(5)
    trial = worth._of(5)
    ways(trial, FIRST, 0.9)
    many: Any = SimpleNamespace(verifications=[], decodes=SimpleNamespace(count=7), chunks=[], searches=[])
    for _ in range(TRY):
        worth.ended(many, 7, 1.0, 1.0)
    assert ways(trial, TRY, 0.9) == [False] * TRY and not trial.drafts


def test_a_little_faster_is_not_worth_it() -> None:
    little, more = Trial(), Trial()
    ways(little, FIRST + TRY, 1.04)
    ways(more, FIRST + TRY, 1.06)
    assert (little.drafts, more.drafts) == (False, True)
    went = ways(little, SURE + LEAST_STAY + TRY, 1.04)
    assert went[-TRY:] == [True] * TRY and not little.drafts


def test_a_few_steps_that_a_core_was_lacking_in_say_nothing() -> None:
    for late in (False, True):  # the way that some steps of take twenty times as long, though it is the quicker one
        trial, drafts_s = Trial(), 1.5 if late else 2.4
        for number in range(FIRST + TRY):
            seconds = (drafts_s if trial.drafts else 1.0) * (20.0 if trial.drafts is late and number % 13 == 0 else 1.0)
            trial.ended(trial.drafts, 1.0 + trial.drafts, seconds)
        assert trial.drafts is late


@pytest.mark.parametrize("tokens", [1.0, 1.04])
def test_drafts_that_give_nobody_more_are_soon_given_up_however_quick_they_seem(tokens: float) -> None:
    trial, went = Trial(), []
    for _ in range(FIRST + TRY + SURE + LEAST_STAY + 3 * TRY):
        went.append(trial.drafts)
        trial.ended(trial.drafts, tokens if trial.drafts else 1.0, 0.5 if trial.drafts else 1.0)
    first = FIRST - TRY // 2
    assert went == [*[True] * first, *[False] * (TRY + SURE + LEAST_STAY), *[True] * (TRY // 2), *[False] * 3 * TRY]


def test_steps_that_a_clock_sees_no_time_in_are_compared_all_the_same() -> None:
    trial = Trial()
    for _ in range(FIRST + TRY):
        trial.ended(trial.drafts, 1.0, 0.0)
    assert not trial.drafts


def test_a_step_planned_before_the_way_was_changed_says_nothing() -> None:
    trial = Trial()
    ways(trial, FIRST, 0.9)
    assert not trial.drafts
    for _ in range(1000):
        trial.ended(True, 100.0, 1.0)
    went = ways(trial, TRY + LEAST_STAY, 0.9)
    assert not any(went)


def run(rig: Rig, speculative_s: float, plain_s: float) -> list[bool]:
    """Run two sequences to their ends; whether each step of decodes was speculative. Each kind takes its time."""
    for _ in range(2):
        rig.submit(9, max_tokens=1500)
    went = []
    while rig.core.requests:
        while (plan := rig.plan()) is not None:
            if not plan.admits:
                went.append(verifies(plan))
        rig.now += speculative_s if verifies(rig.plans[0][0]) else plain_s
        rig.work()
    return went


def long(**flags: object) -> Drafting:
    return Drafting(blocks=600, max_model_len=2000, **flags)


def test_a_worker_whose_verifications_take_long_is_given_plain_decodes() -> None:
    slow, quick, always = run(long(measured=True), 0.05, 0.01), run(long(measured=True), 0.01, 0.01), run(long(), 9, 1)
    assert sum(slow) < FIRST + 1.5 * TRY and 1300 < len(slow) < 1500
    assert quick.count(False) < 4.5 * TRY
    assert all(always)


def verification() -> Step:
    """A step that verifies drafts of one row."""
    rig = Drafting()
    rig.submit(9, max_tokens=90)
    rig.step()
    rig.plan()
    step = rig.replica.in_flight[-1]
    assert len(step.verifications) == 1
    return step


def test_of_each_number_of_rows_it_is_known_by_itself() -> None:
    worth, step = DraftWorth(8), verification()
    for _ in range(2 * TRY):
        worth.ended(step, 1, 1.0, 1.0)
    assert [worth.drafts(rows) for rows in (1, 2, 4, 8)] == [False, True, True, True]


def test_a_wait_for_something_else_is_not_the_step_s() -> None:
    worth, step = DraftWorth(1), verification()
    for _ in range(2 * TRY):
        worth.ended(step, 3, 1.0, 1e9)  # a sequence came from elsewhere, an hour after the step before
    (trial,) = worth._trials
    ways(trial, TRY, 1.0)  # one token a second
    assert trial.drafts


def test_a_worker_is_told_whether_drafts_are_likely_to_follow() -> None:
    rig = Drafting(draft_rows=2)
    rig.submit(40, max_tokens=90)
    kinds = [type(rig.step()) for _ in range(2)]
    assert kinds == [SpeculativePlan] * 2  # the prompt's, and a verification
    assert kinds[0] is type(rig.plan())
    for _ in range(2):
        rig.submit(9, max_tokens=90)  # of three nobody is drafted for
    began = rig.plan()
    assert type(began) is StepPlan and len(began.admits) == 2  # nor is the first, from the step of their prompts on
    while rig.plans[0]:
        rig.work()
    assert type(rig.plan()) is StepPlan


def test_those_in_line_count_where_drafts_may_follow() -> None:
    """Of three, the last finds no room in the step of the others' prompts."""
    for draft_rows, kind in ((2, StepPlan), (3, SpeculativePlan)):
        rig = Drafting(draft_rows=draft_rows, max_num_batched_tokens=16)
        for _ in range(3):
            rig.submit(12, max_tokens=9)
        plan = rig.plan()
        assert type(plan) is kind and len(plan.admits) == 2 and rig.core.queue


@pytest.mark.parametrize("role", ["both", "decode"])
def test_who_waits_for_another_worker_is_no_reason_to_draft_for_nobody(role: str) -> None:
    rig = Drafting(draft_rows=2)
    rig.submit(9, max_tokens=90)
    rig.step()
    rig.replica.role = role
    for _ in range(2):
        rig.submit(9, max_tokens=90)
    rig.core.paused = role == "both"
    assert verifies(rig.plan())


def test_those_in_line_are_shared_out_over_the_workers() -> None:
    rig = Drafting(draft_rows=2)
    rig.submit(9, max_tokens=90)
    rig.step()
    for _ in range(2):
        rig.submit(9, max_tokens=90)
    rig.add(1, 64)
    assert verifies(rig.plan())


def test_who_finds_no_row_or_no_block_is_no_reason_either() -> None:
    rows = Drafting(draft_rows=2, max_num_seqs=2)
    for _ in range(9):
        rows.submit(9, max_tokens=90)
    blocks = Drafting(draft_rows=2, blocks=12)
    for prompt in (9, 9, 60):
        blocks.submit(prompt, max_tokens=30)
    for rig in (rows, blocks):
        for _ in range(3):
            rig.step()
        assert rig.core.queue and len(rig.replica.decoding) == 2
        assert verifies(rig.plan())
        rig.run()


def test_where_drafts_are_not_worth_it_a_worker_keeps_nothing_ready() -> None:
    rig = Drafting(measured=True)
    (trial, *_) = rig.replica.draft_worth._trials
    ways(trial, 3 * TRY, 0.5)
    rig.submit(9, max_tokens=9)
    while rig.core.requests:
        assert type(rig.step()) is StepPlan


def test_the_first_steps_of_all_are_slow_and_say_nothing() -> None:
    trial = Trial()
    for _ in range(2 * SKIP):
        trial.ended(True, 1.2, 1000.0)
    ways(trial, 2 * TRY, 1.2)
    assert trial.drafts


def test_where_a_burst_came_the_last_time_it_is_seen_first_whether_one_comes() -> None:
    bursts = Bursts(2)

    def expected(*rows: int) -> list[bool]:
        """After each plan; the first begins where nobody ran."""
        found = []
        for at, each in enumerate(rows):
            bursts.planned(each, at == 0)
            found.append(bursts.expected)
        return found

    assert not any(expected(9, 9, 2, 1)) and not any(expected(1, 1))  # all came at once
    assert not any(expected(1, 2, 9, 9, 2, 1))  # the first burst
    assert expected(1, 2, 9, 2, 1) == [True, True, False, False, False]
    assert not any(expected(9, 9, 2, 1))  # which says nothing of the next
    assert all(expected(1, 1))
    assert not any(expected(1, 1))  # there was none the last time
    assert not any(expected(1, 9, 1))
    assert expected(*[1] * (SOON + 3)) == [*[True] * SOON, False, False, False]
    assert not any(expected(1, 1))


def test_where_nothing_is_tried_a_burst_is_drafted_for_too() -> None:
    for always in (True, False):
        worth = DraftWorth(2, always)
        told = [worth.planned(rows, first) for rows, first in ((1, True), (9, False), (1, True), (1, False))]
        assert told == [True, False, always, always]


def test_a_worker_drafts_for_nobody_until_it_is_known_whether_a_burst_has_begun() -> None:
    rig = Drafting(draft_rows=2, measured=True)

    def begin(more: int) -> list[bool]:
        """One request, and ``more`` of them a step later: which of the first plans verify or have drafts follow."""
        rig.submit(9, max_tokens=40)
        followed = [type(rig.step()) is SpeculativePlan]
        for _ in range(more):
            rig.submit(9, max_tokens=40)
        while rig.core.requests:
            followed.append(type(rig.step()) is SpeculativePlan)
        return followed[: SOON + 2]

    assert all(begin(0)) and all(begin(0))
    assert begin(5)[0] is True
    assert begin(5)[0] is False
    assert begin(0)[:SOON] == [False] * SOON
    assert begin(0)[0] is True
