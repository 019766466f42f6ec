"""Who is in the next step where adapters, drafts or blocks outside of the cache decide, at the edge of each rule."""

from __future__ import annotations

import pytest
from adapter_rig import AdapterRig, adapter
from drafting_rig import Drafting, K, verifies
from scheduler_rig import VOCAB, Rig
from tiered_rig import TieredRig, loads

from quire.proto.codec import from_i32, i32
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Register, SpeculativeResult, StepPlan
from quire.scheduler import planner
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.planner import GLANCE
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence
from quire.scheduler.tiers import MAX_LOADS, MEASURED_AGAIN

A = adapter("A")


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(row, start, tokens) of each that runs."""
    assert plan is not None
    return list(zip(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), strict=True))


def uids(rig: Rig) -> list[int]:
    return sorted(seq.uid for seq in rig.replica.sequences())


def check(rig: Rig, uid: int, prompt: list[int] | int, count: int) -> None:
    """It drew what it must."""
    prompt = rig.prompt(prompt, uid) if isinstance(prompt, int) else prompt
    assert rig.tokens[uid, 0] == expected_tokens(prompt, uid, count, VOCAB)


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("closed", ["drains", "pauses", "has a suspect"])
def test_a_worker_where_nobody_may_begin_loads_no_adapter(closed: str) -> None:
    rig = AdapterRig()
    if closed == "has a suspect":
        rig.submit(8, attempt=1, losses=2, max_tokens=3)
        rig.plan()
    rig.replica.draining = closed == "drains"
    rig.core.pause(closed == "pauses")
    rig.core.names.wish("frontend", Register(1, A), rig.now)
    rig.plan()
    assert not rig.loading()
    rig.replica.draining = False
    rig.core.pause(False)
    rig.run()
    rig.plan()
    assert rig.replica.adapters is not None and rig.replica.adapters.holds(A)


def test_a_suspect_waits_for_the_adapters_under_way_and_nobody_else_runs_meanwhile() -> None:
    """A load may be what ends workers too."""
    rig = AdapterRig()
    decodes = rig.submit(8, max_tokens=9)
    rig.step()
    waits = rig.ask(A)
    rig.step()
    assert rig.loading() == ["A"]
    uid = rig.submit(8, attempt=1, losses=2, arrival=0.0)
    assert rig.plan() is None and uids(rig) == [decodes]
    rig.load()
    assert rows(rig.plan()) == [(1, 0, 8)] and uids(rig) == [decodes, uid]
    rig.run()
    rig.check(waits)


def test_a_worker_without_slots_looks_at_nobody_with_an_adapter() -> None:
    rig = AdapterRig(adapter_slots=0)
    rig.adapter_slots = 1
    rig.add(1, 64)
    rig.ask(A)
    base = rig.ask(None)
    rig.plan()
    assert uids(rig) == [base]


@pytest.mark.parametrize("workers", [1, 2])
def test_of_all_who_wait_for_an_adapter_a_plan_looks_at_the_first(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = AdapterRig(blocks=[64] * workers)
    for _ in range(50):
        rig.ask(A)
    looked, fits = 0, planner.can_ever_hold

    def counted(replica: Replica, seq: Sequence) -> bool:
        nonlocal looked
        looked += 1
        return fits(replica, seq)

    monkeypatch.setattr(planner, "can_ever_hold", counted)
    assert rig.plan() is None and rig.loading() == ["A"]
    assert looked <= 4


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize(("budget", "most", "few"), [(30, 8, True), (29, 8, False), (30, 3, True), (30, 2, False)])
def test_few_rows_are_verified_and_leave_half_of_a_step_to_prompts(budget: int, most: int, few: bool) -> None:
    """Three rows of one token and four drafted ones each."""
    rig = Drafting(max_num_batched_tokens=budget, draft_rows=most)
    for _ in range(3):
        rig.submit(6, max_tokens=40)
    rig.step()
    assert verifies(rig.plan()) is few


@pytest.mark.parametrize(("count", "most", "tokens"), [(1, 8, 1 + K), (2, 1, 2), (4, 8, 4)])
def test_decodes_and_verifications_wait_only_for_a_prompt_that_they_leave_no_room_for(
    count: int, most: int, tokens: int
) -> None:
    """A step has 32 tokens: those that decode take so many ``tokens`` of them."""
    for length, waits in ((32 - tokens, False), (33 - tokens, True)):
        rig = Drafting(max_num_batched_tokens=32, draft_rows=most, enable_chunked_prefill=False)
        for _ in range(count):
            rig.submit(6, max_tokens=60)
        rig.step()
        rig.submit(length, max_tokens=2)
        plan = rows(rig.plan())
        assert plan[-1] == (count, 0, length) and len(plan) == (1 if waits else 1 + count)


@pytest.mark.parametrize(("blocks", "count"), [(3, 7), (4, 15), (5, 21)])
def test_drafts_leave_a_block_for_each_row(blocks: int, count: int) -> None:
    """Of a sequence of nine tokens, which has 16 places in two blocks."""
    rig = Drafting(blocks=blocks, drafts=20)
    rig.submit(9, max_tokens=8 * blocks - 8)
    rig.step()
    assert rows(rig.plan()) == [(0, 9, count)]
    rig.run()
    check(rig, 1, 9, 8 * blocks - 8)


def crowded(prompt: int, most: int = 8) -> Drafting:
    """A sequence verifies drafts, for which it holds blocks; the prompt of another has just been scheduled; and no
    block is free."""
    rig = Drafting(blocks=40, drafts=20, draft_rows=most)
    rig.submit(9, max_tokens=60)
    rig.step()
    if most < 2:  # where two run nobody is drafted for, so the second comes when a verification is under way
        assert verifies(rig.plan())
    rig.submit(prompt, max_tokens=20)
    assert verifies(rig.plan()) is (most > 1)
    rig.replica.reserve(1, [], rig.replica.pool.free_count)
    return rig


@pytest.mark.parametrize("most", [8, 1])
def test_who_lacks_a_block_waits_for_results_that_may_free_one(most: int) -> None:
    rig = crowded(16, most)
    plan = rig.plan()
    assert rows(plan) == [(0, 9, 23)] if most > 1 else plan is None
    assert rig.core.preemptions == 0 and uids(rig) == [1, 2]
    for _ in range(2):
        rig.work()
        assert rig.core.preemptions == 0
        plan = rig.plan()
        if plan is not None and 1 in from_i32(plan.rows):
            break
    assert plan is not None and (1, 16) in [(row, start) for row, start, _ in rows(plan)]
    rig.replica.give_up(1)
    rig.run()
    check(rig, 1, 9, 60), check(rig, 2, 16, 20)


def test_who_has_a_block_to_write_in_waits_for_none() -> None:
    rig = crowded(12)
    assert rows(rig.plan())[1:] == [(1, 12, 4)]
    rig.replica.give_up(1)
    rig.run()
    check(rig, 1, 9, 60), check(rig, 2, 12, 20)


def test_who_finds_a_free_block_waits_for_none() -> None:
    rig = crowded(16)
    rig.replica.give_up(1)
    assert rows(rig.plan())[1:] == [(1, 16, 19)]  # to its end


def answer(rig: Drafting, plan: StepPlan | None) -> None:
    """Of each verification one token is right, and of each prompt one is drawn."""
    assert verifies(plan)
    count = len(plan.sample_rows) // 4
    drafted = [0] * (len(plan.draft_rows) // 4)
    result = SpeculativeResult(plan.lease, plan.step, i32([5] * count), i32([1] * count), drafted=i32(drafted))
    rig.core.commit(rig.replica, result)
    rig.core.check_integrity()


def test_blocks_that_nothing_scheduled_needs_are_taken_back_at_once() -> None:
    rig = Drafting(blocks=40, drafts=20)
    rig.submit(9, max_tokens=60)
    rig.step()
    first = rig.plan()
    rig.submit(16, max_tokens=20, arrival=0.5)  # it goes before the other
    rig.plan()
    answer(rig, first)
    rig.replica.reserve(1, [], rig.replica.pool.free_count)
    assert (1, 16, 8) in rows(rig.plan())  # though the other's results may free more


def test_a_prompt_begins_in_the_plan_in_which_room_of_drafts_is_taken_back() -> None:
    rig = Drafting(blocks=8, drafts=30, max_num_batched_tokens=256)
    rig.submit(9, max_tokens=50)
    rig.step()
    uid = rig.submit(33, max_tokens=2)
    plan = rig.plan()
    assert rows(plan) == [(0, 9, 31)] and uids(rig) == [1]
    answer(rig, plan)
    # Where somebody lacked a block, drafts go no further than the block that they begin in.
    assert rows(rig.plan()) == [(0, 10, 6), (1, 0, 33)] and uids(rig) == [1, uid]


def test_while_somebody_lacks_blocks_drafts_go_on_in_the_block_of_the_next_token() -> None:
    rig = Drafting(blocks=6, drafts=2)
    rig.submit(9, max_tokens=30)
    rig.step()
    rig.submit(33, max_tokens=2)
    assert rows(rig.plan()) == [(0, 9, 3)]
    assert rows(rig.plan()) == [(0, 9, 6)]  # it is at 10 to 12, and may come to 15
    rig.run()
    check(rig, 1, 9, 30), check(rig, 2, 33, 2)


# ---------------------------------------------------------------- tiers


def on_disk(**flags: object) -> TieredRig:
    return TieredRig(**{"slots": 0, "disk": True, "blocks": 200, "max_model_len": 600, **flags})


def test_what_was_loaded_for_one_that_left_is_free_with_the_next_plan() -> None:
    rig = on_disk()
    prompt = rig.prompt(36, 77)
    rig.keep(prompt)
    uid = rig.submit(prompt)
    rig.plan()
    assert rig.tier.held and not rig.tier.loads
    rig.core.abort(uid, 0)
    assert rig.plan() is None
    assert not rig.tier.held and not rig.replica.pool.used


def test_a_decode_takes_the_blocks_that_were_loaded_for_somebody_in_line() -> None:
    rig = on_disk(blocks=10, max_num_seqs=1)
    prompt = rig.prompt(36, 77)
    rig.keep(prompt)
    waits = rig.submit(prompt)
    decodes = rig.submit(24, max_tokens=32)
    rig.run()
    assert rig.core.preemptions == 0
    check(rig, decodes, 24, 32), check(rig, waits, prompt, 4)


@pytest.mark.parametrize(("more", "blocks", "begins"), [(1, 11, True), (41, 16, False)])
def test_what_was_loaded_for_others_makes_room_for_who_comes_first_where_it_is_enough(
    more: int, blocks: int, begins: bool
) -> None:
    """Two have had five blocks loaded each, and one that runs has the rest."""
    rig = on_disk(blocks=blocks, max_num_seqs=3, max_num_batched_tokens=128)
    prompts = [rig.prompt(40, salt) for salt in (77, 78)]
    rig.keep(*prompts)
    asked = [[*prompts[0], *range(more)], [*prompts[1], 1]]
    first, second = (rig.submit(prompt, max_tokens=1) for prompt in asked)
    running = rig.submit(8 * (blocks - 10), max_tokens=1)
    rig.plan()
    assert uids(rig) == [running] and len(rig.tier.held) == 2 and not rig.replica.pool.free_count
    rig.plan()
    assert uids(rig) == ([first, running] if begins else [running])
    rig.run()
    check(rig, first, asked[0], 1), check(rig, second, asked[1], 1)


def test_the_block_of_the_last_token_is_computed_though_it_is_kept() -> None:
    rig = on_disk()
    prompt = rig.prompt(40, 77)
    rig.keep(prompt)
    assert rig.whole(prompt) == expected_tokens(prompt, rig.last_uid, 4, VOCAB)
    assert [len(from_i32(load.load_blocks)) for load in loads(rig)] == [4]


def test_a_suspect_has_nothing_loaded_and_nobody_passes_it_meanwhile() -> None:
    rig = on_disk()
    prompt = rig.prompt(36, 77)
    rig.keep(prompt)
    first, uid = rig.submit(8), rig.submit(prompt, attempt=1, losses=2)
    rig.submit(8)
    rig.plan()
    assert uids(rig) == [first] and not loads(rig)
    rig.run()
    assert rig.started[uid] == 0 and not loads(rig)


def test_who_begins_as_somebody_whose_blocks_are_on_their_way_waits_for_those() -> None:
    rig = on_disk()
    prompt = rig.prompt(36, 77)
    rig.keep(prompt)
    rig.hold = True
    asked = [rig.submit([*prompt, number]) for number in range(3)]
    rig.plan()
    assert not uids(rig) and len(loads(rig)) == 1
    rig.hold = False
    rig.arrive()
    rig.run()
    assert [rig.started[uid] for uid in asked] == [32] * 3


def looks(rig: TieredRig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many blocks it is asked each time whether they are kept."""
    found, find = [], rig.tier.find

    def counted(pool: object, hashes: list[bytes], first: int, limit: int) -> int:
        found.append(limit - first)
        return find(pool, hashes, first, limit)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.tier, "find", counted)
    return found


def test_while_the_most_loads_are_under_way_others_wait_for_a_turn_unless_nothing_of_theirs_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = on_disk()
    long = [rig.prompt(8 * GLANCE + 65, salt) for salt in (501, 502)]
    prompts = [long[0], *(rig.prompt(12, salt) for salt in range(600, 599 + MAX_LOADS)), long[1]]
    rig.keep(*prompts)
    found, rig.hold = looks(rig, monkeypatch), True
    for prompt in prompts:
        rig.submit(prompt, max_tokens=1)
    fresh = rig.submit(12, max_tokens=1)
    rig.plan()
    assert len(rig.tier.loads) == MAX_LOADS and uids(rig) == [fresh]
    # All blocks of the first; of the last so many as it takes to say whether it is worth to wait.
    assert len(from_i32(loads(rig)[0].load_blocks)) == GLANCE + 8 == found[0]
    assert found[-2:] == [GLANCE, 1]


@pytest.mark.parametrize(("worth", "loaded"), [(2, [2]), (0, [4])])
def test_of_loads_that_are_not_worth_it_one_in_so_many_is_made(
    worth: int, loaded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is kept is loaded then; a part that is worth it is none of those."""
    rig = on_disk()
    prompt = rig.prompt(36, 77)
    rig.keep(prompt)
    monkeypatch.setattr(rig.tier, "worth", lambda hashes, size: worth)
    monkeypatch.setattr(rig.tier, "_refused", MEASURED_AGAIN - 1)
    rig.submit(prompt)
    rig.plan()
    assert [len(from_i32(load.load_blocks)) for load in loads(rig)] == loaded


def test_who_comes_first_is_computed_where_the_room_for_its_load_took_what_was_kept() -> None:
    """Its block is in the only place in host memory; the block of another, which gives way to it, goes there."""
    rig = on_disk(slots=1, blocks=4, max_num_seqs=3)
    kept, mine = rig.prompt(9, 77), rig.prompt(9, 78)
    rig.keep(kept)
    (name,) = hash_blocks(i32(mine), 8)
    rig.submit(kept)
    running = rig.submit(8, max_tokens=1)
    rig.plan()
    assert uids(rig) == [running] and len(rig.tier.held) == 1 and rig.replica.pool.free_count == 2
    rig.tier.host[name] = rig.tier.free_slots.pop()
    first = rig.submit(mine, arrival=0.0)
    rig.plan()
    assert uids(rig) == [running, first] and name not in rig.tier.host
    rig.run()
    check(rig, first, mine, 4)


def test_what_is_asked_of_tiers_are_tokens_computed_and_tokens_loaded() -> None:
    rig = on_disk()
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.whole(prompt)
    assert rig.tier.counts.queries == 36 + 4 and not loads(rig)  # 32 were in the cache
    rig = on_disk()
    rig.keep(prompt)
    rig.whole(prompt)
    assert rig.tier.counts.queries == 32 + 4 and len(loads(rig)) == 1
