"""How long KV blocks live: a sample of them is followed where ``--kv-cache-metrics`` is given. No IO.

Who follows is a subclass of who does not, so a pool without the flag does nothing more. What is measured is vLLM's: a
block that is handed out may be followed from then on, is used when its content is found in the prefix cache or shared,
and has ended when it is handed out again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from ..proto.messages.operators import BLOCK_SECONDS, Binned, BlockTimes
from .block_pool import BlockPool
from .tiers import Tier, TieredPool

USES = 4
"""Uses of a block that are kept: the last, so that a popular one does not count for more than others."""


class Life:
    """One block's content, since it was handed out."""

    __slots__ = ("born", "uses")

    def __init__(self, born: float):
        self.born = born
        self.uses: deque[float] = deque(maxlen=USES)


class BlockLives:
    """What was measured of all pools. ``sample`` is the share of blocks that are followed, above 0 and up to 1; which
    ones is the same in every run. ``clock`` gives seconds that only rise."""

    def __init__(self, sample: float, clock: Callable[[], float]):
        self.sample, self.clock = sample, clock
        self.times = BlockTimes(*(Binned([0] * (len(BLOCK_SECONDS) + 1)) for _ in range(3)))
        self._state = 1
        self._passed_over = self._draw()  # blocks to hand out before the next that is followed

    def choose(self, count: int) -> list[int]:
        """Which of the next ``count`` blocks are followed, as places among them."""
        places = []
        while self._passed_over < count:
            places.append(self._passed_over)
            self._passed_over += 1 + self._draw()
        self._passed_over -= count
        return places

    def ended(self, life: Life, now: float) -> None:
        """Its block has been handed out again."""
        times, uses = self.times, life.uses
        _observe(times.lifetime, now - life.born)
        _observe(times.idle, now - (uses[-1] if uses else life.born))
        for at in range(1, len(uses)):
            _observe(times.reuse_gap, uses[at] - uses[at - 1])

    def _draw(self) -> int:
        """How many are passed over: of a geometric distribution, so one draw for each block that is followed."""
        if self.sample >= 1:
            return 0
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX
        return int(math.log(((self._state >> 11) + 0.5) / 2**53) / math.log1p(-self.sample))


def _observe(bins: Binned, seconds: float) -> None:
    bins.counts[bisect_left(BLOCK_SECONDS, seconds)] += 1
    bins.sum += seconds


class FollowedPool(BlockPool):
    """A pool some of whose blocks are followed. ``follow`` comes before its first block is handed out."""

    def follow(self, lives: BlockLives) -> None:
        """What is measured goes into ``lives``."""
        self._all = lives
        self._lives: dict[int, Life] = {}

    def allocate_many(self, count: int) -> list[int]:
        """As of any pool. The lives of what these blocks held end here."""
        blocks = super().allocate_many(count)
        now = self._all.clock()
        for block in self._lives.keys() & blocks:
            self._all.ended(self._lives.pop(block), now)
        for place in self._all.choose(count):
            self._lives[blocks[place]] = Life(now)
        return blocks

    def share(self, block: int) -> None:
        """As of any pool."""
        super().share(block)
        if (life := self._lives.get(block)) is not None:
            life.uses.append(self._all.clock())

    def forget_cached(self) -> None:
        """As of any pool. Nothing that was followed ends by being replaced any more."""
        super().forget_cached()
        self._lives.clear()


class FollowedTieredPool(FollowedPool, TieredPool):
    """The same where blocks are offered to tiers."""


def make_pool(num_blocks: int, caching: bool, tier: Tier | None, lives: BlockLives | None) -> BlockPool:
    """A replica's pool. With ``lives`` some of its blocks are followed."""
    if lives is None:
        return BlockPool(num_blocks, caching) if tier is None else TieredPool(num_blocks, caching, tier)
    pool = FollowedPool(num_blocks, caching) if tier is None else FollowedTieredPool(num_blocks, caching, tier)
    pool.follow(lives)
    return pool
