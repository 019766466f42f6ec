"""Lives of KV blocks: what --kv-cache-metrics measures, and that nothing is followed without it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from scheduler_rig import Rig

from quire.proto.messages.operators import BLOCK_SECONDS, Binned
from quire.scheduler.block_lives import BlockLives, FollowedPool, FollowedTieredPool, make_pool
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.snapshot import dump, load
from quire.scheduler.tiers import TieredPool


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class NoTier:
    forgotten: int = 0
    offered: list[int] = field(default_factory=list)

    def offer(self, block: int, block_hash: bytes) -> None:
        self.offered.append(block)

    def forget_cached(self) -> None:
        self.forgotten += 1


def seen(bins: Binned) -> dict[float, int]:
    """Observations by their bucket's upper bound."""
    assert len(bins.counts) == len(BLOCK_SECONDS) + 1
    return {bound: count for bound, count in zip((*BLOCK_SECONDS, -1), bins.counts, strict=True) if count}


def test_a_block_lives_until_it_is_handed_out_again() -> None:
    lives = BlockLives(1.0, clock := Clock())
    pool = make_pool(1, True, None, lives)
    pool.allocate()
    pool.register(0, b"a" * 16)
    pool.release(0)
    for clock.now in (2.0, 5.0, 5.25, 6.0, 6.5):  # five hits, of which the last four are kept
        pool.share(0)
        pool.release(0)
    clock.now = 10.0
    assert not seen(lives.times.lifetime)  # nothing is measured before the end
    pool.allocate()
    times = lives.times
    assert (seen(times.lifetime), times.lifetime.sum) == ({10: 1}, 10.0)
    assert (seen(times.idle), times.idle.sum) == ({5: 1}, 3.5)
    assert (seen(times.reuse_gap), times.reuse_gap.sum) == ({0.5: 2, 1: 1}, 1.5)
    pool.release(0)
    clock.now = 5000.0  # above every bucket; never used since
    pool.allocate()
    assert seen(times.lifetime) == {10: 1, -1: 1} and times.idle.sum == 3.5 + 4990.0
    pool.forget_cached()  # what is followed ends for another reason than want of room
    pool.release(0)
    pool.allocate()
    assert sum(times.lifetime.counts) == 2


def test_a_sample_is_of_the_size_asked_for_and_the_same_in_every_run() -> None:
    first, second = (BlockLives(0.1, Clock()) for _ in range(2))
    alone = [at for at in range(20_000) if first.choose(1)]
    together = [at + 100 * turn for turn in range(200) for at in second.choose(100)]
    assert alone == together and 1800 < len(alone) < 2200
    assert len({at % 10 for at in alone}) == 10  # no pattern
    assert BlockLives(1.0, Clock()).choose(3) == [0, 1, 2]


def test_without_the_flag_nothing_is_followed() -> None:
    tier = NoTier()
    lives = BlockLives(0.5, Clock())
    kinds = [type(make_pool(4, True, *each)) for each in ((None, None), (tier, None), (None, lives), (tier, lives))]  # type: ignore[arg-type]
    assert kinds == [BlockPool, TieredPool, FollowedPool, FollowedTieredPool]
    rig = Rig()
    assert type(rig.replica.pool) is BlockPool and rig.core.lives is None
    work = rig.core.stats().work
    assert work is not None and work.block_times is None


def test_with_tiers_blocks_are_offered_and_followed() -> None:
    tier, clock = NoTier(), Clock()
    pool = make_pool(2, True, tier, lives := BlockLives(1.0, clock))  # type: ignore[arg-type]
    blocks = pool.allocate_many(2)
    pool.register_many(blocks, [b"a" * 16, b"b" * 16])
    pool.release_table(blocks)
    clock.now = 1.0
    pool.allocate_many(2)
    assert sorted(set(tier.offered)) == [0, 1] and lives.times.lifetime.sum == 2.0
    pool.forget_cached()
    assert tier.forgotten == 1


def test_a_scheduler_tells_what_it_measured_and_a_recording_has_it() -> None:
    rig = Rig(blocks=8, kv_cache_metrics=True, kv_cache_metrics_sample=1.0)
    prompt = rig.prompt(24, 1)
    for uid in (1, 2, 3):
        rig.submit(prompt, uid=uid)
        rig.run()
        rig.now += 3.0
    rig.submit(60, uid=4)  # takes every block
    rig.run()
    work = rig.core.stats().work
    assert work is not None and work.block_times is not None
    assert seen(work.block_times.reuse_gap) == {5: 2}  # the two full blocks that the prompt may share
    assert seen(work.block_times.lifetime)[10] == 3  # the prompt's third is computed again, in another block
    clock = rig.core.clock
    copy = load(dump(rig.core, {id(clock): "clock"}), {"clock": clock})
    assert copy.lives.times == rig.core.lives.times
    assert {at: life.born for at, life in copy.replicas[0].pool._lives.items()} == {
        at: life.born for at, life in rig.replica.pool._lives.items()
    }
    assert copy.replicas[0].pool._all is copy.lives


@pytest.mark.parametrize("sample", [0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(sample: float) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_metrics_sample must be"):
        Rig(kv_cache_metrics=True, kv_cache_metrics_sample=sample)
