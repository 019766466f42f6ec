"""Who is in the next step, at the edge of each rule."""

from __future__ import annotations

from typing import Any

import pytest
from adapter_rig import AdapterRig, adapter
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import from_i32
from quire.proto.messages import StepPlan, Stopped
from quire.scheduler import planner
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.planner import LOOKAHEAD, MOST_PASSED, TOGETHER
from quire.scheduler.replica import Landing, Replica
from quire.scheduler.request import Sequence


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(row, start, tokens) of each that runs."""
    assert plan is not None
    return list(zip(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), strict=True))


def uids(rig: Rig, number: int = 0) -> list[int]:
    return sorted(seq.uid for seq in rig.core.replicas[number].sequences())


# ---------------------------------------------------------------- quarantine


def suspect(rig: Rig, length: int, **params: Any) -> int:
    """A request that two workers were lost with."""
    return rig.submit(length, attempt=1, losses=2, **params)


def test_of_two_suspects_the_second_begins_when_the_first_is_cleared() -> None:
    rig = Rig()
    first, second = suspect(rig, 60, max_tokens=3), suspect(rig, 10, max_tokens=3)
    plain = rig.submit(10, max_tokens=3)
    began = []
    while rig.core.requests:
        plan = rig.plan()
        suspects = [seq.uid for seq in rig.replica.quarantined]
        assert len(suspects) <= 1
        if suspects:
            assert {seq.uid for step in rig.replica.in_flight for seq in step.sequences()} <= {*suspects}
        began += [admit.uid for admit in plan.admits] if plan is not None else []
        if rig.plans[0]:
            rig.work()
    assert began == [first, second, plain]
    for uid, length in ((first, 60), (second, 10), (plain, 10)):
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(length, uid), uid, 3, VOCAB)


def test_a_suspect_begins_when_nothing_else_is_in_flight() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=30)
    rig.step()
    rig.plan()
    uid = suspect(rig, 40)
    # What runs has gone before, but the line's first waits for the steps in flight, and nobody starts another.
    assert rig.plan() is None
    rig.work()
    plan = rig.plan()
    assert rows(plan) == [(1, 0, 32)] and uids(rig) == [1, uid]
    plan = rig.plan()  # a second step of its own may follow
    assert rows(plan) == [(1, 32, 8)]
    rig.run()


def test_a_suspect_for_which_there_is_no_room_holds_nobody_up() -> None:
    rig = Rig(blocks=8, max_num_seqs=2)
    first = rig.submit(40, max_tokens=20)
    rig.step()
    rig.step()
    uid = suspect(rig, 40, max_tokens=3)
    assert rows(rig.plan()) == [(0, 40, 1)]
    assert rows(rig.plan()) == [(0, 41, 1)]
    rig.run()
    for one, count in ((first, 20), (uid, 3)):
        assert rig.tokens[one, 0] == expected_tokens(rig.prompt(40, one), one, count, VOCAB)


def test_a_suspect_that_leaves_holds_nobody_up() -> None:
    rig = Rig()
    uid, other = suspect(rig, 60), rig.submit(8, max_tokens=2)
    rig.plan()
    assert [seq.uid for seq in rig.replica.quarantined] == [uid]
    rig.core.abort(uid, 1)
    assert rig.replica.quarantined == []
    rig.plan()
    assert uids(rig) == [other]
    rig.run()


def test_a_worker_that_drains_takes_no_suspect_either() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=30)
    rig.step()
    uid = suspect(rig, 8)
    rig.replica.drain()
    assert rows(rig.plan()) == [(0, 8, 1)] and rows(rig.plan()) == [(0, 9, 1)]
    assert uid not in uids(rig)


def test_somebody_behind_a_suspect_waits_for_it() -> None:
    rig = Rig()
    uid = suspect(rig, 8, max_tokens=30)
    later = rig.submit(8)
    rig.plan()
    assert uids(rig) == [uid]
    rig.work()  # it has got past where the others ended
    rig.plan()
    assert uids(rig) == [uid, later]
    rig.run()


def test_somebody_before_a_suspect_does_not_begin_beside_it() -> None:
    rig = Rig()
    first, uid, later = rig.submit(8, max_tokens=3), suspect(rig, 8, max_tokens=3), rig.submit(8, max_tokens=3)
    rig.plan()
    assert uids(rig) == [first]
    rig.run()
    for each in (first, uid, later):
        assert rig.tokens[each, 0] == expected_tokens(rig.prompt(8, each), each, 3, VOCAB)


def test_children_of_a_suspect_wait_for_the_step_that_all_of_them_are_in() -> None:
    rig = Rig()
    uid = suspect(rig, 12, n=2, max_tokens=3)
    assert rows(rig.plan()) == [(0, 0, 12)] and uids(rig) == [uid, uid]
    assert len(rig.replica.quarantined) == 2 and rig.plan() is None
    rig.run()
    for index in range(2):
        assert rig.tokens[uid, index] == expected_tokens(rig.prompt(12, uid), uid + index, 3, VOCAB)


def test_beams_take_their_share_of_a_step() -> None:
    rig = Rig(blocks=200, max_num_batched_tokens=10)
    rig.submit(8, n=3, use_beam_search=True, temperature=0.0, max_tokens=9)
    rig.step()
    rig.submit(30, max_tokens=1)
    assert [tokens for _, _, tokens in rows(rig.plan())] == [1, 1, 1, 7]


# ---------------------------------------------------------------- draining


def test_a_worker_that_drains_goes_on_with_what_it_has() -> None:
    rig = Rig()
    decodes, prompt = rig.submit(8, max_tokens=9), rig.submit(60)
    rig.step()
    rig.replica.drain()
    rig.submit(8)
    assert rows(rig.step()) == [(0, 8, 1), (1, 24, 31)]
    assert rows(rig.step()) == [(0, 9, 1), (1, 55, 5)]
    assert uids(rig) == [decodes, prompt]


def test_nobody_begins_while_the_workers_are_to_sleep() -> None:
    rig = Rig()
    rig.submit(8, max_tokens=9)
    rig.step()
    rig.submit(8)
    rig.core.pause(True)
    assert rows(rig.step()) == [(0, 8, 1)]
    rig.core.pause(False)
    assert rows(rig.step()) == [(0, 9, 1), (1, 0, 8)]


# ---------------------------------------------------------------- whole prompts


@pytest.mark.parametrize(("length", "waits"), [(31, False), (32, True)])
def test_decodes_wait_only_for_a_prompt_that_they_leave_no_room_for(length: int, waits: bool) -> None:
    """A step has 32 tokens, and one decodes."""
    rig = Rig(enable_chunked_prefill=False)
    rig.submit(5, max_tokens=20)
    rig.step()
    rig.submit(length, max_tokens=20)
    prompt = [(1, 0, length)]
    assert rows(rig.step()) == (prompt if waits else [(0, 5, 1), *prompt])


def test_of_steps_with_whole_prompts_every_second_is_for_decodes() -> None:
    rig = Rig(enable_chunked_prefill=False)
    rig.submit(5, max_tokens=20)
    rig.step()
    for _ in range(2):
        rig.submit(32, max_tokens=20)
    assert [rows(rig.step()) for _ in range(4)] == [
        [(1, 0, 32)], [(0, 5, 1), (1, 32, 1)], [(2, 0, 32)], [(0, 6, 1), (1, 33, 1), (2, 32, 1)]
    ]  # fmt: skip


def test_a_step_in_which_nobody_decoded_is_none_that_decodes_waited_for() -> None:
    rig = Rig(enable_chunked_prefill=False)
    rig.submit(30, max_tokens=40)
    for _ in range(12):
        rig.step()
    rig.core.preempt(rig.replica.decoding[0])  # it has outgrown a step, and most of it is cached
    rig.submit(32, max_tokens=2)
    assert rows(rig.step()) == [(0, 40, 2)]
    assert rows(rig.step()) == [(1, 0, 32)]
    rig.run()


def test_decodes_do_not_wait_for_a_prompt_that_finds_no_room() -> None:
    rig = Rig(blocks=5, enable_chunked_prefill=False)
    rig.submit(16, max_tokens=20)
    rig.step()
    rig.submit(32, max_tokens=2)
    assert rows(rig.step()) == [(0, 16, 1)]
    rig.run()


def test_a_preempted_sequence_that_outgrew_a_step_is_split_even_so() -> None:
    rig = Rig(blocks=12, enable_chunked_prefill=False, enable_prefix_caching=False)
    uid = rig.submit(30, max_tokens=40)
    for _ in range(12):
        rig.step()
    rig.core.preempt(rig.replica.decoding[0])
    assert rows(rig.step()) == [(0, 0, 32)]
    assert rows(rig.step()) == [(0, 32, 10)]
    rig.run()
    assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(30, uid), uid, 40, VOCAB)


def test_what_the_cache_has_of_a_whole_prompt_takes_nothing_of_the_step() -> None:
    rig = Rig(enable_chunked_prefill=False)
    prompt = rig.prompt(32, 1)
    rig.submit(prompt, max_tokens=1)
    rig.run()
    rig.submit(8, max_tokens=20)
    rig.submit(prompt, max_tokens=1)  # 8 of its tokens are to run: 16 in this step, and one prompt more of 16
    rig.submit(16, max_tokens=1)
    rig.submit(1, max_tokens=1)
    assert [tokens for _, _, tokens in rows(rig.step())] == [8, 8, 16]


# ---------------------------------------------------------------- room


def test_a_prompt_begins_only_with_a_block_to_spare_for_each_row() -> None:
    rig = Rig(blocks=7)
    rig.submit(8, max_tokens=30)
    rig.submit(8, max_tokens=30)
    rig.step()
    waits = rig.submit(32, max_tokens=2)
    assert rows(rig.plan()) == [(0, 8, 1), (1, 8, 1)] and waits not in uids(rig)  # 5 blocks are free: 4 and one of two
    rig = Rig(blocks=8)
    rig.submit(8, max_tokens=30)
    rig.submit(8, max_tokens=30)
    begins = rig.submit(32, max_tokens=2)
    rig.plan()
    assert begins in uids(rig)


def test_nobody_begins_in_a_step_that_is_full() -> None:
    rig = Rig()
    rig.submit(100)
    rig.step()
    rig.submit(8)
    plan = rig.step()
    assert rows(plan) == [(0, 32, 32)] and plan is not None and not plan.admits


def test_nobody_is_looked_at_where_no_row_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_num_seqs=2)
    for _ in range(2):
        rig.submit(8, max_tokens=9)
    rig.step()
    rig.submit(8)
    looked: list[int] = []
    monkeypatch.setattr(planner, "cached_prefix", lambda replica, seq: looked.append(seq.uid) or [])
    assert rows(rig.step()) == [(0, 8, 1), (1, 8, 1)] and not looked


def test_time_in_which_nobody_waited_says_nothing_of_how_soon_a_place_is_free() -> None:
    rig = Rig(max_num_queued_reqs=1)
    rig.submit(8, max_tokens=1)
    rig.plan()
    rig.now = 50.0
    rig.work()
    assert rig.core.queue.retry_after(8, rig.now) == 1.0


@pytest.mark.parametrize(("blocks", "forked"), [(3, 2), (4, 3), (5, 4)])
def test_a_fork_leaves_a_block_for_each_row(blocks: int, forked: int) -> None:
    """Two blocks hold the prompt; each row that copies the second needs one."""
    rig = Rig(blocks=blocks)
    uid = rig.submit(12, n=6, max_tokens=2)
    rig.plan()
    assert len(uids(rig)) == forked
    rig.core.check_integrity()
    rig.plan()
    assert rig.core.preemptions == 0
    rig.run()
    assert all(len(rig.tokens[uid, index]) == 2 for index in range(6))


def test_a_decode_that_finds_no_block_sends_who_came_last_back() -> None:
    rig = Rig(blocks=5, max_num_seqs=2)
    first, last = rig.submit(8, max_tokens=24), rig.submit(8, max_tokens=24)
    plan = rig.step_until_preempted()
    assert uids(rig) == [first] and len(rows(plan)) == 1
    assert [seq.uid for seq in rig.core.queue] == [last]
    rig.run()
    assert [rig.tokens[uid, 0] for uid in (first, last)] == [
        expected_tokens(rig.prompt(8, uid), uid, 24, VOCAB) for uid in (first, last)
    ]


@pytest.mark.parametrize(("blocks", "stay"), [(16, 4), (15, 3), (14, 3), (13, 3)])
def test_decodes_that_need_a_block_in_one_step_get_it_as_far_as_there_are_any(blocks: int, stay: int) -> None:
    """Four of 8 tokens with 24 each to come: all of them need a fourth block at once."""
    rig = Rig(blocks=blocks, enable_prefix_caching=False)
    uids_all = [rig.submit(8, max_tokens=24) for _ in range(4)]
    while len(rig.replica.pool.refs) - rig.replica.pool.free_count < 12:
        rig.step()
    while rig.replica.pool.used == 12 and not rig.core.preemptions:
        plan = rig.plan()
        rig.work()
    assert len(rows(plan)) == len(uids(rig)) == stay and rig.core.preemptions == 4 - stay
    # One block more in a row's table, at the place that it writes.
    assert (len(from_i32(plan.delta_rows)), set(from_i32(plan.delta_slots))) == (stay, {3})
    assert len(set(from_i32(plan.delta_blocks))) == stay
    rig.run()
    for uid in uids_all:
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(8, uid), uid, 24, VOCAB)


# ---------------------------------------------------------------- children and siblings


def test_children_that_begin_together_are_as_many_as_the_constant_says() -> None:
    rig = Rig(blocks=256, max_num_seqs=32, max_num_batched_tokens=64)
    uid, other = rig.submit(60, n=TOGETHER + 3, max_tokens=3), rig.submit(60, max_tokens=3)
    rig.step()
    assert uids(rig) == [uid] * TOGETHER + [other]
    rig.run()


def test_where_nobody_else_waits_all_children_begin_together() -> None:
    rig = Rig(blocks=256, max_num_seqs=32, max_num_batched_tokens=64)
    uid = rig.submit(60, n=TOGETHER + 3, max_tokens=3)
    rig.plan()
    assert uids(rig) == [uid] * (TOGETHER + 3)
    rig.run()


def test_a_child_that_ends_while_it_waits_for_a_siblings_prefill_is_no_more() -> None:
    rig = Rig()
    uid = rig.submit(40, n=4, max_tokens=3)
    rig.step()
    rig.core.stopped(Stopped(uid, 0, 3, 0))
    (parent,) = rig.replica.prefilling
    assert [seq.index for seq in parent.siblings] == [1, 2]
    rig.core.stopped(Stopped(uid, 1, 2, 0))  # of another attempt
    assert [seq.index for seq in parent.siblings] == [1, 2]
    rig.run()
    assert sorted(rig.tokens) == [(uid, 0), (uid, 1), (uid, 2)]


def test_children_whose_parent_ends_go_on_with_one_of_them_as_parent() -> None:
    rig = Rig()
    uid = rig.submit(40, n=4, max_tokens=3)
    rig.step()
    rig.core.stopped(Stopped(uid, 0, 0, 0))
    assert [seq.index for seq in rig.core.queue] == [1]  # the others wait for its prefill
    (heir,) = rig.core.queue
    assert [seq.index for seq in heir.siblings] == [2, 3]
    rig.run()
    assert sorted(rig.tokens) == [(uid, 1), (uid, 2), (uid, 3)]


# ---------------------------------------------------------------- several workers


def test_so_many_in_line_are_left_to_others_in_one_plan() -> None:
    rig = Rig(blocks=[64, 64], max_num_seqs=64, max_num_batched_tokens=64)
    prompt = rig.prompt(64, 1)
    rig.submit(prompt, max_tokens=100)
    rig.step(0)
    assert uids(rig, 0) == [1]
    alike = [rig.submit([*prompt, 5], max_tokens=1) for _ in range(LOOKAHEAD)]  # better off there, for its cache
    small = rig.submit(8, max_tokens=1)
    assert rig.plan(1) is None  # it looked no further
    rig.core.abort(alike[0], 0)
    rig.plan(1)
    assert uids(rig, 1) == [small]
    rig.run()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_looks_at_few_of_many_adapters(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker is the better place for all of them."""
    rig = AdapterRig(adapter_slots=2, blocks=[64] * workers, max_num_queued_reqs=5000)
    for number in range(600):
        rig.ask(adapter(f"other{number}"))
    seen, fits = 0, planner.can_ever_hold

    def counted(replica: Replica, seq: Sequence) -> bool:
        nonlocal seen
        seen += 1
        return fits(replica, seq)

    monkeypatch.setattr(planner, "can_ever_hold", counted)
    assert rig.plan(workers - 1) is None
    assert seen <= (8 if workers == 1 else MOST_PASSED)


def test_one_that_decodes_takes_the_prompts_that_no_other_could_hold() -> None:
    rig = Rig(blocks=[4, 8, 64])
    for number, role in enumerate(("prefill", "prefill", "decode")):
        rig.core.replicas[number].set_place(role, f"ipc://{number}", "kv", 1)
    for number in range(2):  # so that it is the better place for all who come
        rig.submit(8, max_tokens=9)
        rig.step(number)
    rig.submit(20), rig.submit(40)
    large = rig.submit(100)
    rig.plan(2)
    assert uids(rig, 2) == [large]


def moved(beside: int = 0) -> tuple[Rig, Sequence, Replica]:
    """A sequence that decodes at one worker, and another, to which its blocks have moved, and where a prompt is under
    way that is so long."""
    rig = Rig(blocks=[64, 64])
    rig.submit(10, max_tokens=20)
    rig.step()
    (seq,) = rig.replica.decoding
    if beside:
        rig.submit(beside, arrival=0.0)
        rig.step(1)
    taker = rig.core.replicas[1]
    taker.reserve(1, [], 2)
    taker.land(Landing(1, seq, seq.generation, 0.0))
    return rig, seq, taker


def test_who_comes_from_another_worker_waits_for_a_prompt_that_takes_the_whole_step() -> None:
    rig, seq, taker = moved(beside=100)
    assert rows(rig.plan(1)) == [(0, 32, 32)]
    assert seq in taker.prefilling and (seq.computed, seq.scheduled) == (10, 10)
    assert seq not in taker.in_flight[-1].sequences()  # were the worker lost, it would not be why


def test_nothing_is_held_for_one_that_was_gone_before_its_move_was_done() -> None:
    rig, seq, taker = moved()
    rig.core.abort(seq.uid, 0)
    assert rig.plan(1) is None
    assert not taker.reserved and not taker.pool.used and not taker.running
