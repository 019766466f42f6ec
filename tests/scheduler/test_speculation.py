"""Sequences that speculate: the same tokens as without, whatever else happens, and books that balance."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from drafting_rig import Drafting, K, verifies
from scheduler_rig import Rig

from quire.proto.codec import BadFrame, encode, from_i32, i32
from quire.proto.messages import Finish, SpeculativeResult, StepPlan
from quire.scheduler.fake.fake_model import expected_logprobs, expected_tokens
from quire.scheduler.request import Sequence


def expect(rig: Rig, uid: int, prompt: int, count: int, index: int = 0) -> list[int]:
    return expected_tokens(rig.prompt(prompt, uid), uid + index, count, rig.vocab)


def test_the_same_tokens_in_fewer_steps() -> None:
    rig, plain = Drafting(), Rig()
    for each in (rig, plain):
        each.submit(13, max_tokens=60)
        each.run()
        assert each.tokens[1, 0] == expect(each, 1, 13, 60)
        assert each.ends[1, 0] == (Finish.LENGTH, -1)
    assert rig.core.steps < 0.75 * plain.core.steps
    stats = rig.core.stats()
    assert stats.generation_tokens == 60 and 0 < sum(stats.accepted) < stats.draft_tokens and stats.drafts


def test_blocks_of_what_was_not_kept_stay() -> None:
    rig = Drafting(draft_rows=1)
    rig.submit(13, max_tokens=200)
    held, spare = 0, False
    while rig.core.requests:
        rig.step()
        for seq in rig.replica.decoding:
            assert len(seq.blocks) * 8 <= seq.scheduled + 8 + 2 * (K + 1)
            assert len(seq.blocks) >= held
            held, spare = len(seq.blocks), spare or len(seq.blocks) > seq.scheduled // 8 + 1
    assert spare
    rig.run()
    assert rig.tokens[1, 0] == expect(rig, 1, 13, 200)


def test_an_end_within_a_draft() -> None:
    tokens = expect(Rig(), 1, 9, 40)
    for at, stop in enumerate(tokens[:30]):
        rig = Drafting()
        rig.submit(9, uid=1, max_tokens=40, stop_token_ids=[stop], min_tokens=5)
        rig.run()
        first = next(n for n, token in enumerate(tokens) if token == stop and n >= 4) if stop in tokens[4:] else None
        if first is not None:
            assert rig.tokens[1, 0] == tokens[: first + 1], at
            assert rig.ends[1, 0] == (Finish.STOP, stop)


def test_logprobs_are_of_what_is_kept() -> None:
    rig = Drafting(vocab=20)
    tokens = expect(rig, 1, 9, 30)
    rig.submit(9, uid=1, max_tokens=30, logprobs=2, prompt_logprobs=1, stop_token_ids=[tokens[20]], min_tokens=17)
    rig.run()
    kept = rig.tokens[1, 0]
    want = expected_logprobs(rig.prompt(9, 1) + kept, 9, 2, 20)
    found = rig.logprobs[1, 0]
    assert b"".join(record.ids for record in found) == want.ids
    assert b"".join(record.values for record in found) == want.values
    assert any(len(record.ranks) > 4 for record in found)


def test_children_share_their_prompt() -> None:
    rig = Drafting()
    rig.submit(21, max_tokens=50, n=3)
    rig.run()
    for index in range(3):
        assert rig.tokens[1, index] == expect(rig, 1, 21, 50, index)


def test_preemption_and_few_blocks() -> None:
    for seed in range(8):
        rig = Drafting(blocks=17, max_model_len=100)
        for _ in range(4):
            rig.submit(6 + seed, max_tokens=60)
        rig.run()
        for uid in range(1, 5):
            assert rig.tokens[uid, 0] == expect(rig, uid, 6 + seed, 60)
        assert rig.core.preemptions


@pytest.mark.parametrize("drafts", [K, 20])
def test_nobody_is_preempted_for_blocks_that_drafts_hold(drafts: int) -> None:
    for seed in range(6):
        rig = Drafting(blocks=24, max_model_len=100, drafts=drafts, max_num_batched_tokens=512)
        preempt = rig.core.preempt

        def checked(victim: Sequence, rig: Rig = rig, preempt: Callable[[Sequence], None] = preempt) -> None:
            for seq in rig.replica.decoding:  # what each will write next, at the least, in its last block
                assert len(seq.blocks) <= (seq.computed + seq.loose) // 8 + 1
            preempt(victim)

        rig.core.preempt = checked  # type: ignore[method-assign]
        for uid in range(1, 6):
            rig.submit(6 + seed + 3 * uid, max_tokens=60)
        rig.run()
        assert rig.core.preemptions and sum(rig.core.stats().accepted)
        for uid in range(1, 6):
            assert rig.tokens[uid, 0] == expect(rig, uid, 6 + seed + 3 * uid, 60)


def test_nobody_waits_for_blocks_that_drafts_hold() -> None:
    rig = Drafting(blocks=14, max_model_len=100, drafts=30, max_num_batched_tokens=256)
    rig.submit(9, max_tokens=80)
    while len(rig.replica.decoding[0].blocks if rig.replica.decoding else ()) < 6:
        rig.step()
    assert rig.plan() is not None
    rig.submit(64, max_tokens=8)
    (first,) = rig.core.requests[1].live
    for _ in range(3):  # results of what was under way, and the plan behind them
        while rig.plan() is not None:
            pass
        rig.work()
    assert rig.core.requests[2].live[0].row >= 0 and first.row >= 0
    rig.run()
    assert rig.core.preemptions == 0
    assert rig.tokens[1, 0] == expect(rig, 1, 9, 80) and rig.tokens[2, 0] == expect(rig, 2, 64, 8)


def test_many_rows_decode_plainly_and_few_speculate_again() -> None:
    rig = Drafting(blocks=200, draft_rows=2)
    kinds = set()
    for uid in range(1, 6):
        rig.submit(7, max_tokens=20 * uid)
    while rig.core.requests:
        while (plan := rig.plan()) is not None:
            kinds.add((verifies(plan), len(plan.rows) // 4))
        rig.work()
        if len(rig.replica.decoding) == 1 and len(rig.tokens) == 5:
            rig.submit(7, max_tokens=40, uid=9)
            rig.submit(7, max_tokens=40, uid=8)
    rig.run()
    for uid in range(1, 6):
        assert rig.tokens[uid, 0] == expect(rig, uid, 7, 20 * uid)
    for uid in (8, 9):
        assert rig.tokens[uid, 0] == expect(rig, uid, 7, 40)
    assert (True, 2) in kinds and (False, 3) in kinds
    assert not any(few and rows > 3 for few, rows in kinds)


def test_a_preempted_row_is_not_in_the_plan_beside_verifications_in_flight() -> None:
    rig = Drafting(draft_rows=3)
    rig.submit(9, max_tokens=60)  # whose drafts stay within the block of its next token
    rig.step()
    rig.submit(8, max_tokens=20)
    rig.submit(8, max_tokens=20)
    assert verifies(rig.plan())  # both prompts end in it
    rig.submit(8, max_tokens=20)  # of four nobody is drafted for
    second, third = (rig.core.requests[uid].live[0] for uid in (2, 3))
    rig.replica.reserve(1, [], rig.replica.pool.free_count)  # the last blocks are for one that moves here
    plan = rig.plan()
    assert rig.core.preemptions == 1 and third.row < 0
    assert plan is not None and from_i32(plan.rows) == [second.row]
    rig.replica.give_up(1)
    rig.run()
    for uid, (prompt, count) in enumerate(((9, 60), (8, 20), (8, 20), (8, 20)), 1):
        assert rig.tokens[uid, 0] == expect(rig, uid, prompt, count)


def test_a_whole_prompt_gets_its_turn_beside_verifications() -> None:
    rig = Drafting(max_num_batched_tokens=32, enable_chunked_prefill=False)
    for _ in range(3):
        rig.submit(6, max_tokens=200)
    for _ in range(2):
        rig.step()
    assert verifies(rig.step())
    rig.submit(24, max_tokens=40)
    for _ in range(4):
        rig.step()
    assert len(rig.replica.decoding) == 4
    rig.run()
    assert rig.tokens[4, 0] == expect(rig, 4, 24, 40)


def test_a_verification_takes_no_more_of_the_budget_than_it_can_run() -> None:
    rig = Drafting(max_num_batched_tokens=32)
    rig.submit(9, max_tokens=100)
    rig.step()
    rig.submit(200, max_tokens=4)
    plans = rig.plan(), rig.plan()  # the second does not know where the first leaves the row
    assert [from_i32(plan.counts) for plan in plans if plan] == [[1 + K, 32 - (1 + K)], [2 * (1 + K), 32 - (1 + K)]]
    rig.run()
    assert rig.tokens[2, 0] == expect(rig, 2, 200, 4)


def test_one_that_does_not_move_after_all_goes_on() -> None:
    rig = Drafting()
    rig.submit(9, max_tokens=2 + K)
    rig.step()
    assert rig.plan() is not None
    (seq,) = rig.replica.decoding
    assert seq.loose and seq.scheduled == seq.end  # it may be there; most often it is not
    rig.replica.hold(seq)
    rig.replica.let_go_on(seq)
    rig.run()
    assert rig.tokens[1, 0] == expect(rig, 1, 9, 2 + K)


def test_beams_among_them() -> None:
    rig = Drafting(vocab=30)
    rig.submit(7, max_tokens=60)
    rig.submit(7, max_tokens=6, n=2, best_of=2, use_beam_search=True, temperature=0)
    rig.run()
    assert rig.tokens[1, 0] == expect(rig, 1, 7, 60)


@pytest.mark.parametrize("seed", range(12))
def test_a_lost_worker(seed: int) -> None:
    rig, rng = Drafting(blocks=[60, 60]), random.Random(seed)
    for _ in range(4):
        rig.submit(rng.randint(1, 40), max_tokens=rng.randint(1, 80), n=rng.randint(1, 2))
    asked = {request.uid: (request.prompt_len, request.max_tokens) for request in rig.core.requests.values()}
    for turn in range(60):
        for number in list(rig.core.replicas):
            while rig.plan(number) is not None:
                pass
            if rig.plans[number] and rng.random() < 0.8:
                rig.work(number)
        if turn % 20 == 10:
            lost = rng.choice(list(rig.core.replicas))
            rig.core.end_lease(rig.core.replicas[lost], blame=False)
            rig.add(lost, 60)
    rig.run()
    for (uid, index), tokens in rig.tokens.items():
        prompt, count = asked[uid]
        assert tokens == expect(rig, uid, prompt, count, index)


def test_without_speculation_no_byte_of_a_plan_differs() -> None:
    """What a worker that does not draft is sent is a StepPlan of the fields it always had."""
    rig = Rig()
    rig.submit(13, max_tokens=10)
    plans = []
    while rig.core.requests:
        plans.append(rig.step())
    assert {type(plan) for plan in plans} <= {StepPlan, type(None)}
    names = StepPlan.__struct_fields__
    assert not [name for name in names if "draft" in name]
    few, _ = Drafting(draft_rows=0), None
    few.submit(13, uid=1, max_tokens=10)
    again = []
    while few.core.requests:
        again.append(few.step())
    assert [encode(plan) for plan in again if plan] == [encode(plan) for plan in plans if plan]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: setattr(r, "counts", b""), "counts"),
        (lambda r: setattr(r, "counts", i32([9])), "counts"),
        (lambda r: setattr(r, "drafted", b""), "drafted"),
        (lambda r: setattr(r, "drafted", i32([K + 1])), "drafted"),
        (lambda r: (setattr(r, "counts", i32([K + 2])), setattr(r, "tokens", i32([1] * (K + 2)))), "draws 6 tokens"),
        (lambda r: (setattr(r, "counts", i32([0])), setattr(r, "tokens", b"")), "draws 0 tokens"),
    ],
)
def test_a_result_that_cannot_be(change, words: str) -> None:
    rig = Drafting()
    rig.submit(9, max_tokens=40)
    rig.step()
    plan = rig.plan()
    assert verifies(plan)
    result = rig.stores[0].run(plan)
    assert isinstance(result, SpeculativeResult) and from_i32(result.counts)
    change(result)
    with pytest.raises(BadFrame, match=words):
        rig.core.commit(rig.replica, result)


def test_drafts_in_the_result_of_a_step_without_any() -> None:
    rig = Drafting()
    rig.submit(9, max_tokens=40)
    plan = rig.plan()
    assert plan is not None and not verifies(plan)
    plain = rig.stores[0].run(plan)
    result = SpeculativeResult(plain.lease, plain.step, plain.tokens, drafted=i32([1]))
    with pytest.raises(BadFrame, match="step 1 verifies nothing"):
        rig.core.commit(rig.replica, result)


def test_a_loss_counts_for_those_whose_drafts_were_being_verified() -> None:
    rig = Drafting()
    rig.submit(9, max_tokens=40)
    rig.step()
    rig.submit(9, max_tokens=40)
    assert verifies(rig.plan())
    (seq,) = rig.core.requests[1].live
    rig.core.end_lease(rig.replica)
    assert seq.losses.count == 1
    rig.plans[0].clear()
    rig.add(0, 64)
    rig.run()
    for uid in (1, 2):
        assert rig.tokens[uid, 0] == expect(rig, uid, 9, 40)
