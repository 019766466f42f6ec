"""The tiers that the flags ask for: how large, where, whose files they may read, and how fast they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import ConfigError, EngineArgs
from ...proto.messages import Lease
from ...proto.version import __version__
from ..kv_cache import KVCache
from ..memory import GIB, available_memory, gib
from .disk import HEAD, Disk
from .mover import Mover

if TYPE_CHECKING:
    from ..models.model import Model

log = logging.getLogger(__name__)

MOST_OF_MEMORY, MUCH_OF_MEMORY = 0.7, 0.4
"""Of the host's available memory: a tier that takes more is refused, or warned of. vLLM's shares."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Parts of each weight file that are read to tell it from others."""
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
    host = _host_memory(slots, size, cuda) if slots else None
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


def _host_memory(slots: int, size: int, cuda: bool) -> torch.Tensor:
    """Pages that the system gives on first touch, or pinned ones that a GPU can copy beside its steps."""
    total, available = slots * size, available_memory()
    if total > MOST_OF_MEMORY * available:
        raise ConfigError(
            f"Too large swap space. {gib(total)} out of the {gib(available)} of available CPU memory is allocated for "
            f"the swap space of one worker; lower swap_space (or kv_offloading_size)."
        )
    if total > MUCH_OF_MEMORY * available:
        log.warning("Possibly too large swap space. %s out of the %s of available CPU memory is allocated for it",
                    gib(total), gib(available))  # fmt: skip
    if cuda:
        try:
            return torch.empty((slots, size), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("%s of host memory cannot be pinned (%s): blocks are copied more slowly", gib(total), error)
    return torch.from_numpy(np.zeros((slots, size), np.uint8))


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


def digest_of(args: EngineArgs, config: ModelConfig, told: str, shard: str, model: Model) -> str:
    """What names a folder of files: 32 hex digits of all that the bytes of a block depend on beside its hash.

    That is the model's files and what the flags make of them, the layout and its part (``told``, ``shard``), and what
    computes it: another processor, or another version of quire or torch, may round otherwise.
    """
    parts = [
        f"quire {__version__} torch {torch.__version__} {_processor(model.device)}", told, shard,
        f"{model.dtype} {model.whole!r} {args.quantization} {args.quantize_lm_head}",
        f"{args.load_format} {args.seed if args.load_format == 'dummy' else 0} {args.model_impl}",
        repr(sorted(config.hf.items(), key=str)), str(config.max_model_len if "dynamic" in repr(config.hf) else 0),
    ]  # fmt: skip
    if model.adapters is not None:  # blocks of adapters' rows are told apart by what is in their files
        parts.append(f"lora {model.adapters.dtype}")
    made = blake2b(digest_size=16)
    for part in [*parts, *_files(Path(config.path), args.load_format == "dummy")]:
        made.update(blake2b(part.encode(), digest_size=16).digest())
    return made.hexdigest()


def _processor(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    from ..kernels.cpu.library import library

    found = library()
    return f"cpu {found.name if found is not None else torch.backends.cpu.get_cpu_capability()}"


def _files(folder: Path, dummy: bool) -> list[str]:
    """Each file of a checkpoint: its name, size, time, and what stands at places all over it."""
    told = []
    for path in [folder] if folder.is_file() else sorted(folder.iterdir()):
        if dummy or path.suffix not in (".safetensors", ".bin", ".pt", ".gguf") or not path.is_file():
            continue
        at, made = path.stat(), blake2b(digest_size=16)
        with open(path, "rb") as file:
            for start in np.linspace(0, max(0, at.st_size - SAMPLE_BYTES), SAMPLES, dtype=np.int64).tolist():
                file.seek(start)
                made.update(file.read(SAMPLE_BYTES))
        told.append(f"{os.path.basename(path)} {at.st_size} {at.st_mtime_ns} {made.hexdigest()}")
    return told
