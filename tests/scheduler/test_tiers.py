"""Blocks outside of the device's cache: what is stored when, what is loaded for whom, and who waits meanwhile."""

from __future__ import annotations

from array import array

import pytest
from scheduler_rig import VOCAB, Rig
from tiered_rig import TieredRig, loads, small

from quire.proto.codec import BadFrame, from_i8, from_i32, i32
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Lease, Moved, TierStats
from quire.scheduler import planner
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.fake.fake_model import expected_tokens
from quire.scheduler.placement import cached_prefix
from quire.scheduler.replica import Replica
from quire.scheduler.request import Sequence
from quire.scheduler.tiers import MAX_LOADS, MEASURED_AGAIN, SURE, Sizes, Tier


def test_what_left_the_cache_is_loaded_and_tokens_are_the_same():
    rig = small()
    prompt = rig.prompt(36, 77)
    first = rig.whole(prompt)
    rig.crowd()
    again = [*prompt, *first, 5, 6, 7]
    found = rig.whole(again)
    uid = rig.last_uid
    assert found == expected_tokens(again, uid, 4, VOCAB)
    assert rig.started[uid] == 32  # four full blocks; the fifth is of outputs, and its last token was never computed
    assert len(from_i32(loads(rig)[-1].load_blocks)) == 4
    counts = rig.core.stats().tiers
    assert counts is not None and (counts.host_hits, counts.host_load_bytes) == (32, 4 * 64)


def test_each_block_is_stored_once():
    rig = small()
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.crowd()
    rig.whole(prompt)
    rig.crowd()
    columns = [move.store_hashes for move in rig.moves]
    stored = [column[at : at + 16] for column in columns for at in range(0, len(column), 16)]
    assert len(stored) == len(set(stored))
    assert set(hash_blocks(i32(prompt), 8)) <= set(stored)


def test_nobody_behind_a_load_waits_for_it():
    rig = small(blocks=16)
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.crowd(4)
    rig.hold = True
    loading = rig.submit(prompt, max_tokens=2)
    behind = rig.submit(12, max_tokens=2)
    for _ in range(10):
        rig.step()
    assert (loading, 0) not in rig.ends and (behind, 0) in rig.ends
    rig.hold = False
    rig.arrive()
    rig.run()
    assert rig.started[loading] == 32


def test_a_load_that_fails_is_computed_and_not_tried_again():
    rig = small(slots=0, disk=True)
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.crowd()
    assert rig.disk is not None
    third = hash_blocks(i32(prompt), 8)[2]
    del rig.disk[third]
    found = rig.whole(prompt)
    assert found == expected_tokens(prompt, rig.last_uid, 4, VOCAB)
    assert rig.started[rig.last_uid] == 16  # the two before it
    rig.plan()
    assert len(loads(rig)) == 1 and third in rig.disk  # it was computed, and written again
    counts = rig.core.stats().tiers
    assert counts is not None and counts.failed_loads == 1


def test_blocks_behind_the_first_that_was_not_loaded_are_free_again():
    rig = small(slots=0, disk=True, blocks=7)
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.crowd(2)
    assert rig.disk is not None
    del rig.disk[hash_blocks(i32(prompt), 8)[0]]
    found = rig.whole(prompt)  # which needs five blocks; four were to be loaded
    assert found == expected_tokens(prompt, rig.last_uid, 4, VOCAB)
    assert rig.started[rig.last_uid] == 0


@pytest.mark.parametrize("there", [False, True])
def test_blocks_of_one_who_left_meanwhile_are_given_back(there):
    rig = small()
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.crowd()
    rig.hold = True
    rig.submit(20, max_tokens=30, ignore_eos=True)
    rig.step()
    uid = rig.submit(prompt)
    rig.step()
    assert rig.tier.loads
    if there:
        rig.arrive(release=True)
    rig.core.abort(uid, 0)
    rig.hold = False
    rig.run()
    assert not rig.tier.held and not rig.tier.loads and rig.replica.pool.used == 0


def test_a_preempted_sequence_comes_back_from_the_tier():
    rig = small(blocks=9, max_num_seqs=2)
    a, b = (rig.submit(rig.prompt(24, salt), max_tokens=30, ignore_eos=True) for salt in (1, 2))
    rig.run()
    assert rig.core.preemptions and loads(rig)
    for uid, salt in ((a, 1), (b, 2)):
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(24, salt), uid, 30, VOCAB)


def test_what_was_loaded_for_those_in_line_makes_room():
    """Each of two holds what the other waits for; the first of them gets it."""
    rig = small(blocks=10, max_num_seqs=4)
    prompts = [rig.prompt(40, salt) for salt in (77, 78)]
    for prompt in prompts:
        rig.whole(prompt)
    rig.crowd()
    rig.hold = True
    uids = [rig.submit([*prompt, 1, 2, 3], max_tokens=2) for prompt in prompts]
    rig.plan()
    rig.plan()
    rig.arrive(release=True)
    rig.hold = False
    rig.run()
    for uid, prompt in zip(uids, prompts, strict=True):
        assert rig.tokens[uid, 0] == expected_tokens([*prompt, 1, 2, 3], uid, 2, VOCAB)


def test_what_a_load_takes_beside_its_blocks_counts():
    """Four blocks of eight tokens that are computed in 32 ms."""
    rig = small()
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)

    def again(answered_after: float) -> int:
        """How many of its tokens were loaded."""
        rig.crowd()
        rig.hold = True
        uid = rig.submit(prompt, max_tokens=1)
        rig.step()
        rig.now += answered_after
        rig.arrive(release=True)
        rig.hold = False
        rig.run()
        return rig.started[uid]

    assert [again(0.040) for _ in range(SURE)] == [32] * SURE
    rig.tier.moved(rig.replica.pool, Moved(rig.replica.lease, load_s=0.001, token_s=0.001))
    assert again(0.040) == 0
    rig.tier._waits.append(0.020)  # the shortest counts: others had to wait for steps
    assert again(0.040) == 32


def test_a_preempted_sequence_is_computed_where_that_is_sooner():
    rig = small(blocks=9, max_num_seqs=2)
    rig.tier.moved(rig.replica.pool, Moved(rig.replica.lease, load_s=1.0, token_s=0.001))
    a, b = (rig.submit(rig.prompt(24, salt), max_tokens=30, ignore_eos=True) for salt in (1, 2))
    rig.run()
    assert rig.core.preemptions and not loads(rig)
    for uid, salt in ((a, 1), (b, 2)):
        assert rig.tokens[uid, 0] == expected_tokens(rig.prompt(24, salt), uid, 30, VOCAB)


def test_what_many_begin_with_is_loaded_once_and_a_plan_does_not_look_through_their_line(monkeypatch):
    rig = TieredRig(slots=0, disk=True, blocks=200, max_num_seqs=8)
    prompt = rig.prompt(120, 500)
    rig.keep(prompt)
    looked: list[int] = []

    def look(replica: Replica, seq: Sequence) -> list[int]:
        looked.append(seq.uid)
        return cached_prefix(replica, seq)

    monkeypatch.setattr(planner, "cached_prefix", look)
    rig.hold = True
    for _ in range(4 * planner.LOADING_LOOKAHEAD):
        rig.submit(prompt, max_tokens=1)
    rig.plan()
    assert len(rig.tier.loads) == 1 and len(looked) == planner.LOADING_LOOKAHEAD and not rig.replica.sequences()
    rig.hold = False
    rig.arrive()
    rig.run()
    assert len(rig.ends) == rig.last_uid and len(loads(rig)) == 1


def test_only_so_many_loads_are_under_way():
    rig = TieredRig(slots=0, disk=True, blocks=200, max_num_seqs=MAX_LOADS + 4)
    prompts = [rig.prompt(12, salt) for salt in range(500, 500 + MAX_LOADS + 2)]
    rig.keep(*prompts)
    rig.hold = True
    for prompt in prompts:
        rig.submit(prompt, max_tokens=1)
    rig.plan()
    assert len(rig.tier.loads) == MAX_LOADS
    rig.hold = False
    rig.arrive()
    rig.run()
    assert len(rig.ends) == rig.last_uid


def tier_of(slots: int = 2, disk: bool = False) -> Tier:
    return Tier(Sizes(slots, disk, 64, 8), TierStats(), lambda: 0.0)


def test_the_oldest_makes_room_and_one_that_is_used_stays():
    tier, lease = tier_of(), Lease(1, 0, 1)
    pool = BlockPool(10)
    for block, name in enumerate((b"a" * 16, b"b" * 16)):
        tier.offer(block, name)
    assert from_i32(tier.take(lease)[0].store_slots) == [0, 1]
    tier.moved(pool, Moved(lease, 1))
    tier.offer(0, b"a" * 16)  # it is there: used again, and not stored
    assert tier.take(lease) == []
    tier.offer(2, b"c" * 16)
    assert list(tier.host) == [b"a" * 16] and from_i32(tier.take(lease)[0].store_slots) == [1]
    assert not tier.check_integrity() and tier.counts.host_evictions == 1


@pytest.mark.parametrize(
    ("load_s", "disk_s", "token_s", "count"),
    [
        (0.0, 0.0, 0.0, 4),
        (0.001, 0.5, 0.001, 2),
        (0.001, 0.007, 0.001, 4),
        (0.1, 0.1, 0.001, 0),
        (0.009, 0.0, 0.001, 4),
    ],
)
def test_what_was_measured_decides(load_s, disk_s, token_s, count):
    """Two blocks of eight tokens in host memory, then two on disk."""
    tier, names = tier_of(disk=True), [bytes([n]) * 16 for n in range(4)]
    for block in range(2):
        tier.offer(block, names[block])
    tier.take(Lease(1, 0, 1))
    tier.moved(BlockPool(1), Moved(Lease(1, 0, 1), 1, written=b"".join(names[2:])))
    tier.moved(BlockPool(1), Moved(Lease(1, 0, 1), 0, load_s=load_s, disk_s=disk_s, token_s=token_s))
    assert tier.worth(names, 8) == count


def test_a_file_is_offered_again_once_it_is_lost():
    tier, lease, name = tier_of(slots=0, disk=True), Lease(1, 0, 1), b"a" * 16
    pool = BlockPool(1)
    tier.offer(0, name)
    tier.offer(0, name)  # it is on its way
    (move,) = tier.take(lease)
    assert (from_i8(move.store_files), from_i32(move.store_slots)) == ([1], [-1])
    tier.moved(pool, Moved(lease, 1, lost=name))
    tier.offer(0, name)
    assert tier.take(lease)[0].number == 2
    tier.moved(pool, Moved(lease, 2, written=name))
    tier.offer(0, name)
    assert tier.take(lease) == [] and tier.find(pool, [name], 0, 1) == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (Moved(Lease(1, 0, 1), 5), "number 5"),
        (Moved(Lease(1, 0, 1), 1, failed=i32([0])), r"loads \[0\]"),
        (Moved(Lease(1, 0, 1), 0, written=b"short"), "hashes"),
        (Moved(Lease(1, 0, 1), 0, failed=b"abc"), "whole number"),
    ],
)
def test_what_a_worker_cannot_have_done_is_refused(message, told):
    tier = tier_of()
    tier.offer(0, b"a" * 16)
    tier.take(Lease(1, 0, 1))
    with pytest.raises(BadFrame, match=told):
        tier.moved(BlockPool(1), message)


def test_without_tiers_nothing_is_asked():
    rig = Rig(blocks=10, max_model_len=72, max_num_seqs=2)
    rig.submit(36)
    rig.run()
    assert type(rig.replica.pool) is BlockPool and rig.replica.tier is None and rig.core.stats().tiers is None


def test_files_of_before_are_found_by_a_worker_that_is_new():
    rig = small(slots=0, disk=True)
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.plan()
    other = small(slots=0, disk=True)
    other.disk.update({h: array("q", page) for h, page in rig.disk.items()})
    replica = other.replica
    other.tier.moved(replica.pool, Moved(replica.lease, written=b"".join(rig.disk)))
    assert other.whole(prompt) == expected_tokens(prompt, other.last_uid, 4, VOCAB)
    assert other.started[other.last_uid] == 32


def test_what_was_slow_is_measured_again():
    rig = small()
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.tier.moved(rig.replica.pool, Moved(rig.replica.lease, load_s=1.0, token_s=0.001))
    for _ in range(MEASURED_AGAIN - 1):
        rig.crowd()
        rig.whole(prompt)
    assert not loads(rig)
    rig.crowd()
    rig.whole(prompt)
    assert len(loads(rig)) == 1 and rig.started[rig.last_uid] == 32


def test_what_is_forgotten_in_the_cache_is_forgotten_outside_of_it():
    rig = small(slots=20, disk=True)
    prompt = rig.prompt(36, 77)
    rig.whole(prompt)
    rig.plan()
    assert rig.tier.host and rig.tier.disk
    assert rig.core.reset_prefix_cache() == ""
    assert not rig.tier.host and not rig.tier.disk and len(rig.tier.free_slots) == 20
    rig.whole(prompt)
    assert rig.started[rig.last_uid] == 0 and not loads(rig)
