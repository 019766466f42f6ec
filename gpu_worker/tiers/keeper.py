"""The tiers of one worker through its leases, and, in a replica of several processes, those of all of them as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import EngineArgs
from ...proto.messages import Lease, Move, Moved, StepPlan, Tiers
from ..kv_cache import KVCache
from ..results import DeviceFailure
from ..state import PlanError
from .make import make_mover, wanted
from .together import Together

if TYPE_CHECKING:
    from ..models.model import Model
    from ..parallel.group_link import Leader
    from .mover import Mover

log = logging.getLogger(__name__)


class Keeper:
    """Belongs to the compute thread. ``others``: a leader's links. Where no tiers are ``wanted`` nothing is here."""

    def __init__(self, args: EngineArgs, config: ModelConfig, others: Leader | None):
        self._args, self._config, self._others = args, config, others
        self.wanted = wanted(args)
        self._link: Any = None  # a worker's, or that of a member of a replica
        self._mover: Mover | None = None
        self._together: Together | None = None

    def attach(self, link: Any) -> Callable[[], None] | None:
        """``link`` takes messages from any thread. Returns what is to be called when a step is done, or None."""
        self._link, args = link, self._args
        if not self.wanted:
            return None
        if self._others is not None:
            self._together = Together(args.tensor_parallel_size * args.pipeline_parallel_size, link.send)
            self._others.on_moved = self._together.add
        return self.ended

    def expect(self, lease: Lease) -> None:
        """The others are told of ``lease`` next, and may have their tiers before this process has."""
        if self._together is not None:
            self._together.open(lease)

    def offer(self, model: Model, kv: KVCache, lease: Lease) -> None:
        """Make the tiers of ``kv``, where they are not there yet, and tell what all processes have room for. Raises
        ConfigError."""
        if not kv.bytes_of_block:
            log.info("no KV cache tiers: this model keeps nothing in a KV cache")
            self.wanted = False
            return
        if self._mover is None or self._mover.kv is not kv:
            self.drop()
            send = self._link.send if self._together is None else self._gather
            self._mover = make_mover(self._args, self._config, model, kv, send, self._failed)
        sizes = self._mover.sizes(lease)
        if self._others is not None:
            for each in self._others.collect(Tiers, lease):
                sizes.slots, sizes.block_bytes = min(sizes.slots, each.slots), sizes.block_bytes + each.block_bytes
        self._link.send(sizes)

    def open(self, lease: Lease) -> None:
        """Ready was sent."""
        if self._mover is not None:
            self._mover.open(lease)

    def move(self, move: Move) -> None:
        """Begin what the scheduler asks for, in all processes. What cannot be ends the lease."""
        if self._others is not None:
            self._others.send(move)
        try:
            if self._mover is None:
                raise PlanError(f"Move {move.number} came where there are no tiers")
            self._mover.move(move)
        except Exception as error:  # noqa: BLE001  # as of a step
            self._failed(move.lease, error)

    def begin(self, plan: StepPlan) -> None:
        """``plan`` is launched next."""
        if self._mover is not None:
            self._mover.begin(plan)

    def ended(self) -> None:
        """The oldest plan that was launched is done."""
        if self._mover is not None:
            self._mover.ended()

    def guard(self, blocks: bytes) -> None:
        """``blocks`` (i32) are written over next."""
        if self._mover is not None:
            self._mover.guard(blocks)

    def end_lease(self) -> None:
        """The blocks are somebody else's from here on."""
        if self._mover is not None:
            self._mover.end_lease()

    def drop(self) -> None:
        """The cache goes, and host memory with it. Files stay."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _gather(self, message: Moved) -> None:
        """The leader's own part of what all say."""
        assert self._together is not None  # it is where this is used
        self._together.add(self._args.rank, message)

    def _failed(self, lease: Lease, error: Exception) -> None:
        """What a thread here could not do ends the lease, as a step's failure does."""
        self._link.post(DeviceFailure(lease, 0, error))
