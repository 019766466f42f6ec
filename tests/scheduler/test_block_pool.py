"""The block pool: counts, the prefix cache, and the order of reuse."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from quire.scheduler.block_pool import MANY, BlockPool, PoolError, blocks_for

ROOT = Path(__file__).resolve().parents[2]


def hashes(count: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(count)]


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.free_count, pool.used) == (0, 4)
    with pytest.raises(PoolError, match="no free block"):
        pool.allocate()
    pool.check_integrity([blocks])


def test_double_free_is_an_error() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(PoolError, match="released twice"):
        pool.release(block)


def test_shared_blocks_are_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.used == 1
    pool.release(block)
    assert pool.used == 0


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool, (first, second) = BlockPool(2), hashes(2)
    table = [pool.allocate(), pool.allocate()]
    for block, block_hash in zip(table, (first, second), strict=True):
        pool.register(block, block_hash)
    pool.release_table(table)
    assert pool.find([first, second], 2) == table
    assert pool.find([first, second], 1) == table[:1]
    assert pool.allocate() == table[1]  # the tail goes first: beginnings live longest
    assert pool.find([first, second], 2) == table[:1]
    pool.share(table[0])
    assert pool.free_count == 0
    pool.check_integrity([[table[1]], [table[0]]])


def test_nothing_is_found_once_all_is_forgotten() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate_many(1)
    pool.register(block, b"a")
    pool.forget_cached()
    assert not pool.find([b"a"], 1) and pool.used == 1
    pool.check_integrity([[block]])
    pool.register(block, b"b")
    pool.release(block)
    assert pool.find([b"b"], 1) == [block]
    pool.check_integrity([])


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool, (block_hash,) = BlockPool(3), hashes(1)
    cached, plain = pool.allocate(), pool.allocate()
    pool.register(cached, block_hash)
    pool.release(cached)
    pool.release(plain)
    assert [pool.allocate(), pool.allocate()] == [plain, 2]
    assert pool.allocate() == cached
    assert pool.find([block_hash], 1) == []


def test_least_recently_released_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block, block_hash in zip(blocks, hashes(3), strict=True):
        pool.register(block, block_hash)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.share(blocks[0])  # used again in between
    pool.release(blocks[0])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_a_broken_chain_ends_the_prefix() -> None:
    pool, (a, b, c) = BlockPool(3), hashes(3)
    for block_hash in (a, c):
        pool.register(pool.allocate(), block_hash)
    assert len(pool.find([a, b, c], 3)) == 1


def test_the_first_block_of_a_content_stays_its_only_one() -> None:
    pool, (a,) = BlockPool(2), hashes(1)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, a)
    pool.register(second, a)
    assert pool.find([a], 1) == [first]
    pool.check_integrity([[first], [second]])


def test_caching_can_be_off() -> None:
    pool, (a,) = BlockPool(1, caching=False), hashes(1)
    pool.register(pool.allocate(), a)
    assert pool.find([a], 1) == []


def test_so_many_at_once_as_there_are_and_not_one_more() -> None:
    pool = BlockPool(3)
    with pytest.raises(PoolError, match="4 are asked for and 3 left"):
        pool.allocate_many(4)
    assert pool.allocate_many(0) == [] and pool.free_count == 3
    assert pool.allocate_many(3) == [0, 1, 2]
    assert pool.count_free([0, 1]) == 0
    pool.release(1)
    assert pool.count_free([0, 1]) == 1 and pool.free_count == 1
    pool.check_integrity([[0], [2]])


@pytest.mark.parametrize("length", [3, MANY - 1, MANY, MANY + 1, 200])
def test_a_table_is_given_back_tail_first_and_what_is_not_cached_is_used_before_the_rest(length: int) -> None:
    """Blocks without a hash may stand among those with one, and others may hold some still."""
    pool = BlockPool(length + 5)
    waiting = list(range(length, length + 5))  # these were free all the time
    table = pool.allocate_many(length)
    cached = [block for block in table if block % 3 != 1]
    pool.register_many(cached, [bytes([block]) * 16 for block in cached])
    held = [block for block in table if block % 5 == 2]
    for block in held:
        pool.share(block)
    pool.release_table(table)
    pool.check_integrity([held])
    free = [block for block in table if block not in held]
    plain = [block for block in free if block not in cached]
    assert pool.free_count == len(free) + 5
    order = pool.allocate_many(len(free) + 5)
    # Of those without a hash the first of the table is on top, as if it had been released last.
    assert order == [*plain, *waiting, *reversed([block for block in free if block in cached])]


@pytest.mark.parametrize("length", [2, 100])
def test_a_table_that_holds_a_free_block_is_an_error(length: int) -> None:
    pool = BlockPool(length)
    table = pool.allocate_many(length)
    pool.release(table[1])
    with pytest.raises(PoolError, match=f"block {table[1]} is released twice"):
        pool.release_table(table)


def test_a_shared_block_of_the_cache_leaves_the_free_ones_once() -> None:
    pool, (block_hash, *_) = BlockPool(3), hashes(2)
    table = pool.allocate_many(3)
    pool.register(table[1], block_hash)
    pool.release_table(table)
    pool.share(table[1])
    pool.share(table[1])
    assert (pool.free_count, pool.used, pool.refs[table[1]]) == (2, 1, 2)
    pool.check_integrity([[table[1]], [table[1]]])
    assert pool.find([block_hash, b"?"], 2) == pool.find([block_hash], 9) == [table[1]]
    assert pool.find([block_hash], 0) == []


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_blocks_for_so_many_tokens(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 8) == blocks


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 0]], [[1]]])
def test_integrity_sees_wrong_books(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate() == 0
    with pytest.raises(PoolError):
        pool.check_integrity(tables)


@pytest.mark.slow
def test_against_a_model() -> None:
    """Random use, compared with plain sets."""
    rng = random.Random(1)
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for step in range(3000):
        action = rng.random()
        if action < 0.4 and pool.free_count:
            tables.append([pool.allocate() for _ in range(rng.randint(1, pool.free_count))])
            pool.register(tables[-1][0], step.to_bytes(16, "big"))
        elif action < 0.6 and tables:
            tables.append(list(rng.choice(tables)))
            for block in tables[-1]:
                pool.share(block)
        elif tables:
            pool.release_table(tables.pop(rng.randrange(len(tables))))
        pool.check_integrity(tables)
        assert pool.used == len({block for table in tables for block in table})


@pytest.mark.slow
def test_what_sharing_saves_is_measured_with_the_real_pool() -> None:
    """A short run of bench/memory_sharing.py: the numbers are those of the long one, within its noise."""
    spec = importlib.util.spec_from_file_location("memory_sharing", ROOT / "bench" / "memory_sharing.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    saved = {n: bench.paged("Alpaca", n, False, 0.7, 300)["saved"] for n in (1, 2, 6)}
    assert saved[1] == 0
    assert 4 < saved[2] < saved[6] < 17
    assert 50 < bench.paged("Alpaca", 4, True, 0.7, 60)["saved"] < 75
    assert 90 < bench.paged("ShareGPT", 1, False, 0.7, 600)["share"] < 99
    assert bench.reserved("ShareGPT", "max", 0.7, 3000) < 25
