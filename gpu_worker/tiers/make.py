"""The tiers that the flags ask for: how large, where, whose files they may read, and how fast they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError, EngineArgs
from ...proto.messages import Lease
from ..kv_cache import KVCache
from ..memory import GIB, gib
from ..models.identity import digest_of
from .disk import HEAD, Disk
from .host_memory import HostMemory
from .mover import Mover

if TYPE_CHECKING:
    from ..models.model import Model

log = logging.getLogger(__name__)

_PROBED = 4
"""Blocks that are moved to measure a rate."""


def wanted(args: EngineArgs) -> bool:
    """Whether any tier is asked for."""
    return bool(args.swap_space or args.kv_offloading_size or args.kv_disk_path)


def make_mover(
    args: EngineArgs, config: ModelConfig, model: Model, kv: KVCache, send: Callable[[Any], None],
    fail: Callable[[Lease, Exception], None],
) -> Mover:  # fmt: skip
    """The tiers of this process over ``kv``. Raises ConfigError where there is no room for them."""
    size, cuda = kv.bytes_of_block, kv.k[0].device.type != "cpu"
    slots = host_bytes(args) // size
    if (args.swap_space or args.kv_offloading_size) and not slots:
        raise ConfigError(f"no block of {size} bytes fits {gib(host_bytes(args))} of host memory; raise swap_space.")
    host = HostMemory(slots, size, cuda) if slots else None
    disk = None
    if args.kv_disk_path is not None and args.kv_disk_size is not None:
        shard = model.group.shard
        told = KVCache.format_of(model.spec, kv.block_size, model.cache_dtype, kv.k[0].device, model.kv_scales)
        folder = Path(args.kv_disk_path) / f"quire-kv-{digest_of(args, config, told, repr(shard), model)}"
        limit = int(args.kv_disk_size * GIB) // (shard.size * shard.stages)
        disk = Disk(folder, limit, size)
        if limit < size + HEAD:
            raise ConfigError(f"no block of {size} bytes fits {gib(limit)} of disk; raise kv_disk_size.")
    mover = Mover(kv, host, disk, send, fail)
    _say(mover, disk, slots, size)
    return mover


def host_bytes(args: EngineArgs) -> int:
    """Of host memory for this process."""
    if args.kv_offloading_size:
        return int(args.kv_offloading_size * GIB) // (args.tensor_parallel_size * args.pipeline_parallel_size)
    return int(args.swap_space * GIB)


def _say(mover: Mover, disk: Disk | None, slots: int, size: int) -> None:
    """Sizes and rates, measured with blocks that nobody uses yet."""
    count = min(_PROBED, mover.kv.num_blocks, slots or _PROBED)
    load_s, store_s = mover.probe(count)
    parts = []
    if slots:
        parts.append(f"{slots} blocks of {size} bytes ({gib(slots * size)}) in host memory")
    if disk is not None:
        found = len(disk.hashes())
        parts.append(
            f"{disk.limit // (size + HEAD)} blocks ({gib(disk.limit)}) in {disk.folder}, {found} of them there"
        )
    log.info(
        "KV cache tiers: %s; stores run at %s/s and loads from host memory at %s/s",
        ", and ".join(parts), gib(int(size / store_s)), gib(int(size / load_s)),
    )  # fmt: skip
