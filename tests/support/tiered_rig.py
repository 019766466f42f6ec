"""A Rig whose workers keep blocks outside of their device's cache."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

from scheduler_rig import Rig

from quire.proto.codec import i32
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Lease, Move, Moved
from quire.scheduler.fake.fake_model import cell
from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.replica import Replica
from quire.scheduler.tiers import Sizes, Tier


class TieredRig(Rig):
    """A rig whose workers keep blocks: ``hold`` keeps back the answers to loads."""

    def __init__(self, *, slots: int = 100, disk: bool = False, **flags: Any):
        self.slots, self.disk = slots, {} if disk else None
        self.hold = False
        self.answers: deque[Moved] = deque()
        self.moves: list[Move] = []
        super().__init__(**flags)

    def add(self, number: int, blocks: int) -> Replica:
        config = self.core.config
        self.leases += 1
        lease, size = Lease(1, number, self.leases), config.block_size
        self.stores[number] = PageStore(
            config.max_num_seqs, blocks, size, self.vocab, slots=self.slots, disk=self.disk
        )  # fmt: skip
        self.plans[number], self.loads[number] = deque(), []
        tier = Tier(Sizes(self.slots, self.disk is not None, 8 * size, size), self.core.count_tiers(), self.core.clock)
        replica = Replica(
            number, lease, f"w{number}", config.max_num_seqs, blocks, size, self.max_model_len, self.vocab,
            config.enable_prefix_caching, tier=tier,
        )  # fmt: skip
        self.core.add_replica(replica)
        tier.moved(replica.pool, Moved(lease, written=b"".join(self.disk or ())))
        return replica

    @property
    def tier(self) -> Tier:
        tier = self.replica.tier
        assert tier is not None
        return tier

    def plan(self, number: int = 0) -> Any:
        plan = super().plan(number)
        replica, store = self.core.replicas[number], self.stores[number]
        assert replica.tier is not None
        for move in replica.tier.take(replica.lease):
            self.moves.append(move)
            queue = self.plans[number]
            queue.insert(len(queue) - (plan is not None), move)  # before the plan, behind those in flight
        while self.plans[number] and isinstance(move := self.plans[number][0], Move):
            self.plans[number].popleft()
            self.answers += store.move(move)
        self.arrive()
        return plan

    def work(self, number: int = 0) -> None:
        super().work(number)
        while self.plans[number] and isinstance(move := self.plans[number][0], Move):
            self.plans[number].popleft()
            self.answers += self.stores[number].move(move)
        self.arrive()

    def arrive(self, release: bool = False) -> None:
        """Hand over the answers, those to loads only where they are not held back."""
        for _ in range(len(self.answers)):
            answer = self.answers.popleft()
            if self.hold and not release and answer.number in self.tier.loads:
                self.answers.append(answer)
            else:
                self.tier.moved(self.replica.pool, answer)
        self.core.check_integrity()

    def whole(self, prompt: list[int], tokens: int = 4, **params: Any) -> list[int]:
        """Run one request to its end; its tokens."""
        uid = self.submit(prompt, max_tokens=tokens, ignore_eos=True, **params)
        self.run()
        return self.tokens[uid, 0]

    def keep(self, *prompts: list[int]) -> None:
        """Their full blocks are on the worker's disk."""
        assert self.disk is not None
        size = self.core.config.block_size
        for prompt in prompts:
            hashes = hash_blocks(i32(prompt), size)
            cells = [cell(position, token) for position, token in enumerate(prompt)]
            self.disk.update({each: array("q", cells[size * at :][:size]) for at, each in enumerate(hashes)})
            self.tier.moved(self.replica.pool, Moved(self.replica.lease, written=b"".join(hashes)))

    def crowd(self, count: int = 3, length: int = 40) -> None:
        """Others take all blocks of the cache."""
        for _ in range(count):
            self.submit(length)
        self.run()


def small(**changes: Any) -> TieredRig:
    """Ten blocks: two prompts of five do not fit beside each other."""
    return TieredRig(**{"blocks": 10, "max_model_len": 72, "max_num_seqs": 2, **changes})


def loads(rig: TieredRig) -> list[Move]:
    return [move for move in rig.moves if move.load_blocks]
