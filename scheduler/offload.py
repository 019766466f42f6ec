"""What workers and the scheduler tell each other of tiers. A room beside the registry, which has the workers."""

from __future__ import annotations

from ..proto.codec import BadFrame
from ..proto.messages import Move, Moved, Tiers
from .core import Scheduler
from .tiers import Sizes, Tier
from .worker import Worker, count

MOST_SLOTS = 2**22
"""Of what a worker keeps in host memory, so much is used: books cost memory."""


def tier_of(core: Scheduler, worker: Worker) -> Tier | None:
    """What ``worker``, which is ready, keeps outside of its device's cache, if it does."""
    told = worker.tiers
    if told is None or not core.config.enable_prefix_caching:
        return None
    sizes = Sizes(min(count(told.slots), MOST_SLOTS), told.disk, count(told.block_bytes), core.config.block_size)
    return Tier(sizes, core.count_tiers(), core.clock)


def heard(worker: Worker, message: Tiers | Moved) -> str:
    """It has tiers; blocks were stored or loaded, or files were lost. What is wrong with that, or ""."""
    if isinstance(message, Tiers):
        worker.keep(message)
        return ""
    replica = worker.replica
    if replica is None or replica.tier is None:
        return ""
    try:
        replica.tier.moved(replica.pool, message)
    except BadFrame as error:
        return str(error)
    return ""


def moves(core: Scheduler) -> list[tuple[str, Move]]:
    """What workers are to store and load, before anything that was planned since."""
    keeping = [replica for replica in core.replicas.values() if replica.tier is not None]
    return [(each.peer, move) for each in keeping if each.tier is not None for move in each.tier.take(each.lease)]
