"""When the second plan in flight is made: late enough for who comes meanwhile, and before the worker needs it."""

import math

import pytest
from scheduler_rig import Rig

from quire.proto.codec import from_i32
from quire.scheduler.pace import LEAST_S, REST_S, SHARE, Pace
from quire.scheduler.step import Step

STEP_S = 0.01


def decoding(rows: int = 2, step_s: float = STEP_S, **flags: object) -> Rig:
    """A rig of ``rows`` sequences that decode, in steps of which two were run, with one in flight."""
    rig = Rig(**flags)
    for _ in range(rows):
        rig.submit(4, max_tokens=50)
    rig.plan()
    for _ in range(3):
        rig.plan()
        end(rig, step_s)
    assert len(rig.core.replicas[0].in_flight) == 1
    return rig


def end(rig: Rig, seconds: float = STEP_S) -> None:
    """The step that runs ends after so long."""
    rig.now += seconds
    rig.work()


def last_step(rig: Rig) -> Step:
    return rig.core.replicas[0].in_flight[-1]


def test_who_comes_while_a_step_runs_is_in_the_next() -> None:
    rig = decoding()
    assert rig.plan() is None
    assert rig.core.planning_at(rig.now) == pytest.approx(rig.now + SHARE * STEP_S)
    rig.now += 0.3 * STEP_S
    rig.submit(3, max_tokens=2)
    assert rig.plan() is None  # it comes for nothing
    rig.now += 0.51 * STEP_S
    assert rig.core.planning_at(rig.now) == math.inf
    plan = rig.plan()
    assert plan is not None and from_i32(plan.counts) == [1, 1, 3]
    assert rig.plan() is None  # two are in flight
    end(rig, 0.19 * STEP_S)
    end(rig)
    assert len(rig.tokens[3, 0]) == 1


def test_a_worker_that_has_nothing_is_not_kept_waiting() -> None:
    rig = decoding()
    end(rig, 0.2 * STEP_S)  # sooner than all before
    assert not rig.core.replicas[0].in_flight and rig.plan() is not None


def test_behind_the_first_prompt_and_short_steps_the_next_is_planned_at_once() -> None:
    rig = decoding()
    rig.submit(20, max_tokens=2)
    rig.now += STEP_S
    plan = rig.plan()
    assert plan is not None and 20 in from_i32(plan.counts)
    end(rig, 0.0)
    assert rig.plan() is not None  # nobody knows how long that prompt takes
    short = decoding(step_s=0.9 * LEAST_S)
    assert short.core.planning_at(short.now) == math.inf and short.plan() is not None


def prompts(tokens: int = 200, budget: int = 20) -> Rig:
    """A rig with a long prompt in chunks of which two were run, with one in flight."""
    rig = Rig(max_num_batched_tokens=budget, max_num_seqs=4)
    rig.submit(tokens, max_tokens=2)
    for _ in range(3):
        rig.plan()
    for _ in range(2):
        end(rig, 3 * STEP_S)
        rig.plan()
    return rig


def test_a_prompt_takes_as_long_as_those_before_it() -> None:
    rig = prompts()
    assert [step.tokens for step in rig.core.replicas[0].in_flight] == [20]
    assert rig.core.planning_at(rig.now) == pytest.approx(rig.now + SHARE * 3 * STEP_S)
    rig.now += 2.3 * STEP_S
    assert rig.plan() is None
    rig.now += 0.2 * STEP_S
    assert rig.plan() is not None


def test_fewer_tokens_of_a_prompt_take_less() -> None:
    pace, (long, short) = Pace(), (last_step(prompts(budget=20)), last_step(prompts(budget=5)))
    assert (long.tokens, short.tokens) == (20, 5)
    pace.ended(long, 8 * STEP_S)
    pace.begins(long, 7.0)
    assert pace.until == 0.0  # there was one alone
    pace.ended(long, 12 * STEP_S)
    pace.begins(short, 7.0)
    assert pace.until == pytest.approx(7.0 + SHARE * 2 * STEP_S)
    pace.ended(short, 3 * STEP_S)
    pace.begins(long, 8.0)
    assert pace.until == pytest.approx(8.0 + SHARE * 3 * STEP_S)  # more takes as long at least
    pace.begins(last_step(decoding()), 9.0)
    assert pace.until == 0.0  # what prompts took says nothing of decodes


def test_where_nobody_could_be_let_in_nothing_is_waited_for() -> None:
    rig = decoding(2, max_num_seqs=2)
    assert rig.plan() is not None


def test_one_slow_step_delays_none_of_those_after_it() -> None:
    rig, waits = decoding(), 1.01 * SHARE * STEP_S
    for seconds in (50 * STEP_S, STEP_S, STEP_S):
        rig.now += waits
        assert rig.plan() is not None
        end(rig, seconds - waits)
        assert rig.core.planning_at(rig.now) == pytest.approx(rig.now + SHARE * STEP_S)


def test_a_replica_waits_for_nothing_until_two_steps_of_decodes_were_run() -> None:
    step, pace = last_step(decoding()), Pace()
    assert pace.until == 0.0
    for seconds in (0.0, STEP_S):
        pace.ended(step, seconds)
        pace.begins(step, 7.0)
        assert pace.until == 0.0
    pace.ended(step, STEP_S)
    pace.begins(step, 7.0)
    assert pace.until == pytest.approx(7.0 + SHARE * STEP_S)


def test_a_step_of_the_least_time_is_worth_waiting_for() -> None:
    step, pace = last_step(decoding()), Pace()
    for _ in range(2):
        pace.ended(step, LEAST_S)
    pace.begins(step, 7.0)
    assert pace.until == pytest.approx(7.0 + LEAST_S - REST_S)  # a part of it would be too late
