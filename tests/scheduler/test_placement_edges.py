"""Which worker takes somebody who waits: the last that tips the scales, and what does not."""

from __future__ import annotations

import pytest
from adapter_rig import AdapterRig, adapter
from scheduler_rig import VOCAB, Rig

from quire.proto.messages import Lease
from quire.scheduler.placement import (
    HELD,
    TOKENS_PER_ROW,
    belongs_elsewhere,
    cached_prefix,
    can_ever_hold,
    elsewhere,
    has_room,
)
from quire.scheduler.replica import STALL_S, Replica
from quire.scheduler.request import Sequence


def one(rig: Rig, prompt: list[int] | int, **params: object) -> Sequence:
    """It waits, and nobody plans for it."""
    uid = rig.submit(prompt, **params)
    return rig.core.requests[uid].live[0]


def add(rig: Rig, number: int, blocks: int = 64, length: int = 256, pools: bool = False) -> Replica:
    replica = Replica(number, Lease(1, number, 9), f"w{number}", 8, blocks, 8, length, VOCAB, pools=pools)
    rig.core.replicas[number] = replica
    return replica


@pytest.mark.parametrize(
    ("blocks", "length", "pools", "holds"),
    [(4, 33, False, True), (3, 33, False, False), (4, 32, False, False), (9, 99, False, True), (9, 99, True, False)],
)
def test_what_an_empty_worker_can_hold(blocks: int, length: int, pools: bool, holds: bool) -> None:
    """20 tokens and 13 more, of which the last is never computed: 32 tokens, 4 blocks."""
    rig = Rig()
    assert can_ever_hold(add(rig, 1, blocks, length, pools), one(rig, 20, max_tokens=13)) == holds


def test_there_is_room_with_a_block_to_spare_for_each_row_that_runs() -> None:
    rig = Rig(blocks=6)
    seq = one(rig, 20)
    assert has_room(rig.replica, seq, [])
    taken = rig.replica.pool.allocate_many(3)
    assert has_room(rig.replica, seq, [])  # nobody runs
    taken += rig.replica.pool.allocate_many(1)
    assert not has_room(rig.replica, seq, [])
    assert has_room(rig.replica, seq, taken[:1])  # a block of the cache that somebody holds costs nothing
    rig.replica.pool.release(taken[0])
    assert has_room(rig.replica, seq, taken[:1])  # and a free one costs itself
    rig.replica.pool.release_table(taken[1:])
    other = one(rig, 8)
    rig.replica.start(other, [])
    rig.replica.pool.allocate_many(1)
    assert has_room(rig.replica, seq, [])  # 4 are free: 3 and one to spare
    rig.replica.pool.allocate_many(1)
    assert not has_room(rig.replica, seq, [])


@pytest.mark.parametrize(("rows", "room"), [(3, True), (2, False)])
def test_a_search_needs_a_row_for_each_beam(rows: int, room: bool) -> None:
    rig = Rig()
    seq = one(rig, 8, n=3, use_beam_search=True, temperature=0.0)
    del rig.replica.free_rows[rows:]
    assert has_room(rig.replica, seq, []) == room


def test_a_cached_prefix_is_of_whole_blocks_before_the_last_token() -> None:
    rig = Rig()
    prompt = rig.prompt(24, 1)
    rig.submit(prompt, max_tokens=1)
    rig.run()
    assert [len(cached_prefix(rig.replica, one(rig, [*prompt, *more]))) for more in ([], [1], [1] * 9)] == [2, 3, 3]
    assert cached_prefix(rig.replica, one(rig, prompt, skip_reading_prefix_cache=True)) == []
    rig.replica.pool.caching = False
    assert cached_prefix(rig.replica, one(rig, prompt)) == []


def test_others_that_would_take_somebody_at_their_next_step() -> None:
    rig = Rig(blocks=[])
    hangs = rig.add(4, 64)
    rig.now = 1.0
    rig.submit(8)
    rig.plan(4)
    here, free, drains, suspects = (rig.add(number, 64) for number in range(4))
    replicas = [here, free, drains, suspects, hangs]
    drains.drain()
    seq = one(rig, 8, attempt=1, losses=2)
    rig.core.queue.remove(seq)
    suspects.start(seq, [])
    for since, there in ((STALL_S, [free, hangs]), (STALL_S + 0.01, [free])):
        assert elsewhere(here, replicas, 1.0 + since) == there
    assert elsewhere(free, replicas, 9.0) == [here]


def test_a_longer_prefix_makes_up_for_rows_and_the_lower_number_wins() -> None:
    rig = Rig(blocks=[400, 400], max_model_len=2000)
    here, there = rig.core.replicas[0], rig.core.replicas[1]
    seq = one(rig, 200)
    assert not belongs_elsewhere(seq, here, [], [there]) and belongs_elsewhere(seq, there, [], [here])
    rows = [one(rig, 8) for _ in range(2)]
    here.start(rows[0], [])
    here.prefilled(rows[0])  # its 8 tokens are no backlog any more
    assert belongs_elsewhere(seq, here, [], [there]) and not belongs_elsewhere(seq, there, [], [here])
    blocks = list(range(200, 200 + TOKENS_PER_ROW // 8))
    assert not belongs_elsewhere(seq, here, blocks, [there])  # as good again, and its number is lower
    assert belongs_elsewhere(seq, here, blocks[1:], [there])
    there.start(rows[1], [])  # as many rows there, and 8 tokens to be computed before
    assert not belongs_elsewhere(seq, here, [], [there]) and belongs_elsewhere(seq, there, [], [here])
    assert belongs_elsewhere(seq, there, [0], [here])  # 8 tokens of the cache: the tie is the lower number's
    assert not belongs_elsewhere(seq, there, [0, 1], [here])


def test_of_a_prompt_under_way_only_what_is_not_asked_for_yet_is_a_backlog() -> None:
    rig = Rig(blocks=[64, 64])
    here, there = rig.core.replicas[0], rig.core.replicas[1]
    seq = one(rig, 60)
    for replica, length, scheduled in ((here, 40, 32), (there, 24, 0)):
        begun = one(rig, length)
        replica.start(begun, [])
        begun.schedule(scheduled)
    assert belongs_elsewhere(seq, there, [], [here]) and not belongs_elsewhere(seq, here, [], [there])


def test_a_stalled_worker_leaves_its_own_to_whoever_has_room() -> None:
    rig = Rig(blocks=[64, 64, 4])
    here, there, small = rig.core.replicas.values()
    seq = one(rig, 60)
    assert not belongs_elsewhere(seq, here, [], [there, small])
    assert belongs_elsewhere(seq, here, [], [there], stalled=True)
    assert belongs_elsewhere(seq, here, [], [small, there], stalled=True)
    assert not belongs_elsewhere(seq, here, [], [small], stalled=True)  # it can never hold it
    there.pool.allocate_many(60)
    assert not belongs_elsewhere(seq, here, [], [small, there], stalled=True)


# ---------------------------------------------------------------- adapters


def test_who_needs_an_adapter_goes_where_it_is_and_nobody_else_does() -> None:
    rig = AdapterRig(blocks=[400, 400])
    here, there = rig.core.replicas[0], rig.core.replicas[1]
    wanted = adapter("a")
    seq, plain = one(rig, 60, adapter=wanted), one(rig, 60)
    assert not belongs_elsewhere(seq, here, [], [there])
    assert there.adapters is not None
    there.adapters.begin_turn(wanted)
    there.adapters.end_turn(0.0)  # it is on its way
    assert belongs_elsewhere(seq, here, [], [there]) and not belongs_elsewhere(seq, there, [], [here])
    assert not belongs_elsewhere(plain, here, [], [there]) and belongs_elsewhere(plain, there, [], [here])
    blocks = list(range(HELD // 8))
    assert not belongs_elsewhere(seq, here, blocks, [there])  # so long a prefix is worth as much
    assert belongs_elsewhere(seq, here, blocks[1:], [there])


def test_a_worker_without_a_slot_for_it_is_no_place_for_who_needs_an_adapter() -> None:
    rig = AdapterRig(adapter_slots=1, blocks=[64, 64])
    here, there = rig.core.replicas[0], rig.core.replicas[1]
    seq, plain = one(rig, 60, adapter=adapter("a")), one(rig, 60)
    none = add(rig, 2)
    assert can_ever_hold(none, plain) and not can_ever_hold(none, seq)
    assert belongs_elsewhere(plain, here, [], [none], stalled=True)
    assert not belongs_elsewhere(seq, here, [], [none], stalled=True)
    assert belongs_elsewhere(seq, none, [], [here])
    assert belongs_elsewhere(seq, here, [], [there], stalled=True)
    assert there.adapters is not None
    there.adapters.begin_turn(adapter("b"))
    there.adapters.end_turn(0.0)  # another takes its only slot
    assert not belongs_elsewhere(seq, here, [], [there], stalled=True)
    assert belongs_elsewhere(plain, here, [], [there], stalled=True)
