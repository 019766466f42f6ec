"""Which replica takes a waiting sequence: the longest cached prefix, less the load. One that stalls comes last."""

from __future__ import annotations

from collections.abc import Iterable

from .block_pool import blocks_for
from .replica import Replica
from .request import Sequence

TOKENS_PER_ROW = 64
"""Cached tokens that weigh as much as one running row: a prefix 640 tokens longer makes up for ten rows more."""
HELD = 2048
"""Cached tokens that weigh as much as to have the adapter: it is loaded on another replica where 32 rows more run."""


def cached_prefix(replica: Replica, seq: Sequence) -> list[int]:
    """Blocks in this replica's cache that begin ``seq``."""
    if not replica.pool.caching:
        return []
    limit = seq.reusable() // replica.block_size
    return replica.pool.find(seq.hash_blocks(limit, replica.block_size), limit)


def known_prefix(replica: Replica, seq: Sequence, cached: list[int]) -> int:
    """Blocks that begin ``seq`` which this replica need not compute: the ``cached``, and those in its tiers."""
    if replica.tier is None:
        return len(cached)
    limit = seq.reusable() // replica.block_size
    hashes = seq.hash_blocks(limit, replica.block_size)
    return len(cached) + replica.tier.find(replica.pool, hashes, len(cached), limit)


def can_ever_hold(replica: Replica, seq: Sequence) -> bool:
    """False where even an empty replica is too small for the sequence at its longest, or of the other kind."""
    if replica.pools is not seq.request.pools or (seq.request.adapter is not None and replica.adapters is None):
        return False
    need = seq.most_blocks(replica.block_size)
    return need <= replica.pool.num_blocks and seq.limit <= replica.max_model_len


def has_room(replica: Replica, seq: Sequence, cached: list[int]) -> bool:
    """All its tokens fit now, and one block more for each row that runs.

    Without that spare block, two sequences could go on preempting each other in turns.
    """
    if len(replica.free_rows) < seq.width:
        return False
    pool = replica.pool
    need = blocks_for(seq.total, replica.block_size) - len(cached) + pool.count_free(cached)
    return pool.free_count - need >= replica.running + seq.spare_blocks(replica.block_size)


def elsewhere(here: Replica, replicas: Iterable[Replica], now: float) -> list[Replica]:
    """The replicas beside ``here`` that would take somebody who waits at their next step."""
    return [r for r in replicas if r is not here and r.takes_prompts and not r.quarantined and not r.stalled(now)]


def belongs_elsewhere(
    seq: Sequence, here: Replica, cached: list[int], others: Iterable[Replica], stalled: bool = False,
    now: float = 0.0,
) -> bool:  # fmt: skip
    """One of ``others`` has room for ``seq`` and is the better place, or ``here`` has stalled. It takes it when its
    next step is planned."""
    score = (_score(here, seq, known_prefix(here, seq, cached)), -here.number)
    for other in others:
        if not can_ever_hold(other, seq) or not _could_have_adapter(other, seq, now):
            continue
        theirs = cached_prefix(other, seq)
        better = stalled or (_score(other, seq, known_prefix(other, seq, theirs)), -other.number) > score
        if better and has_room(other, seq, theirs):
            return True
    return False


def _could_have_adapter(replica: Replica, seq: Sequence, now: float) -> bool:
    adapter, adapters = seq.request.adapter, replica.adapters
    return adapter is None or adapters is None or adapters.could_take(adapter, now)


def _score(replica: Replica, seq: Sequence, known_blocks: int) -> int:
    backlog = sum(each.total - each.scheduled for each in replica.prefilling)
    score = known_blocks * replica.block_size - TOKENS_PER_ROW * replica.running - backlog
    adapter, adapters = seq.request.adapter, replica.adapters
    return score + HELD if adapter is not None and adapters is not None and adapters.holds(adapter) else score
