"""What a model will take of its device's memory, told before anything of its size is allocated.

The estimate is a floor, so that nothing is refused that would fit: the weights once, in the dtype they will have; the
cache of one request of max_model_len (of one token where the length is left to what fits); a step of one token. The
loaded model is measured exactly later (``memory.fit``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..proto.checkpoint.model_config import AUTO_LENGTH, ModelConfig
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.checkpoint.quantization import online
from ..proto.config import ConfigError, EngineArgs
from .device import parameter_estimate
from .kv_cache import KVCache
from .layers.formats.at_load import AtLoad
from .layers.formats.dense import cpu_has_bf16
from .lora.target import most_bytes
from .memory import gib, memory_limits, step_bytes
from .models.adapter_reader import adapter_dtype
from .models.dtypes import gpu_capability, stored_dtype
from .models.fallback import uses_fallback
from .models.files import Tensors, weight_files
from .models.loader import adapted_targets, size_of
from .spec import Shard

log = logging.getLogger(__name__)

_MOST_SHARES = 1024
"""Into more processes than this no remedy divides a model."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process of a model needs: numbers of parameters and of tokens, and bytes."""

    parameters: int
    itemsize: float  # of a parameter, on the average
    tokens: int  # that the cache must hold
    token_bytes: int  # of the cache of one token
    step: int  # bytes of the smallest step's activations
    follows: bool = True  # whether the cache has the model's dtype, whatever that is
    adapters: int = 0  # bytes of the most that adapters may take

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return int(self.parameters * self.itemsize)

    @property
    def cache(self) -> int:
        """Bytes of the smallest cache."""
        return self.tokens * self.token_bytes

    @property
    def total(self) -> int:
        """Bytes of it all."""
        return self.weights + self.cache + self.step + self.adapters


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take of a device; ``source`` says where that was read, ``whole`` is what it could be with
    a gpu_memory_utilization of 1."""

    free: int
    source: str
    whole: int


def check_footprint(
    args: EngineArgs,
    config: ModelConfig,
    pooler: PoolerConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Raises ConfigError, one line with the numbers and what would fit, where the model is larger than the memory."""
    need = footprint_of(args, config, pooler, dtype, shard, cache_dtype)
    need = replace(need, adapters=_adapters(args, config, pooler, dtype, shard, device))
    stored = stored_dtype(config)
    if stored.itemsize < dtype.itemsize == need.itemsize and args.load_format != "dummy":
        log.info("the weights are cast from %s (%s) to %s (%s)", _name(stored), gib(need.parameters * stored.itemsize),
                 _name(dtype), gib(need.weights))  # fmt: skip
    refuse_larger(config, need, room_of(device, args.gpu_memory_utilization), dtype, device, shard)


def _adapters(
    args: EngineArgs, config: ModelConfig, pooler: PoolerConfig | None, dtype: torch.dtype, shard: Shard,
    device: torch.device,
) -> int:  # fmt: skip
    """Bytes of the adapters that may come: on a GPU those in slots; on a CPU those that are kept and one being read."""
    if not args.enable_lora or (uses_fallback(config) if pooler is None else pooler.whole):  # which take none
        return 0
    count = args.max_loras if device.type != "cpu" else (args.max_cpu_loras or args.max_loras) + 1
    targets = adapted_targets(config, pooler, shard, args.fully_sharded_loras)
    return count * most_bytes(targets, args.max_lora_rank, adapter_dtype(args.lora_dtype, dtype).itemsize)


def refuse_larger(
    config: ModelConfig, need: Footprint, room: Room, dtype: torch.dtype, device: torch.device, shard: Shard
) -> None:
    """Raises ConfigError where ``need`` is more than ``room`` has."""
    if need.total <= room.free:
        return
    share = f" of one of {shard.size * shard.stages} processes" if shard != Shard() else ""
    adapters = f", adapters up to {gib(need.adapters)}" if need.adapters else ""
    raise ConfigError(
        f"{config.path} does not fit the memory: {need.parameters / 1e9:.2f} billion parameters{share} take "
        f"{gib(need.weights)} in {_name(dtype)}, the cache of {need.tokens} tokens and a step "
        f"{gib(need.cache + need.step)}{adapters}; {gib(room.free)} are free ({room.source}). "
        f"Use {', or '.join(_remedies(need, room, dtype, device, shard))}."
    )


def footprint_of(
    args: EngineArgs, config: ModelConfig, pooler: PoolerConfig | None, dtype: torch.dtype, shard: Shard,
    cache_dtype: torch.dtype | None = None,
) -> Footprint:  # fmt: skip
    """The least that the part ``shard`` of the model takes; ``cache_dtype`` is of the KV cache, ``dtype`` by default.

    Raises ConfigError where config.json has no sizes.
    """
    if pooler is None and uses_fallback(config):  # its cache and steps are known once it is loaded
        return Footprint(_counted(args, config), dtype.itemsize, 0, 0, 0)
    spec, count, itemsize = size_of(
        config, pooler, dtype, shard, AtLoad(online(config.hf, args.quantization), args.quantize_lm_head)
    )
    local = spec.local(shard)
    tokens = 1 if args.max_model_len == AUTO_LENGTH else config.max_model_len
    if args.kv_cache_memory_bytes is not None or args.num_gpu_blocks_override is not None:
        tokens = 0  # the user has sized the cache
    per_token = KVCache.block_bytes(local, 1, cache_dtype or dtype)
    step = step_bytes(local, 1, 1, dtype.itemsize)
    return Footprint(count, itemsize, tokens, per_token, step, cache_dtype in (None, dtype))


def _counted(args: EngineArgs, config: ModelConfig) -> int:
    """Parameters of a model of transformers': those in its files, or about as many as config.json describes."""
    if args.load_format in ("dummy", "pt"):
        return parameter_estimate(config)
    width = config.hf.get("hidden_size")
    table = config.vocab_size * (width if type(width) is int else 1)  # what the files lack would be made up
    count = 0
    for file in weight_files(Path(config.path), args.load_format):
        with Tensors.open(file) as tensors:
            count += sum(math.prod(entry.shape) for entry in tensors)
    return max(count, table)


def room_of(device: torch.device, utilization: float) -> Room:
    """What ``device`` has free now; of a GPU ``utilization`` alone is used."""
    if device.type == "cpu":
        free, source = min(memory_limits())
        return Room(free, source, free)
    free, total = torch.cuda.mem_get_info(device)
    usable = free - int((1 - utilization) * total)
    return Room(usable, f"{gib(free)} of {gib(total)} on {device}, with gpu_memory_utilization {utilization:g}", free)


def _remedies(need: Footprint, room: Room, dtype: torch.dtype, device: torch.device, shard: Shard) -> list[str]:
    """What would fit, by flag."""
    found = []
    half = _half(device)
    if need.itemsize == torch.float32.itemsize and half is not None:
        smaller = replace(need, itemsize=2, token_bytes=need.token_bytes // (2 if need.follows else 1))
        if smaller.total <= room.free:
            found.append(f"--dtype {half} ({gib(smaller.weights)} of weights)")
    if need.cache and (most := (room.free - need.total + need.cache) // need.token_bytes) >= 2:
        found.append(f"--max-model-len {most} at most")
    if need.adapters and need.total - need.adapters <= room.free:
        found.append("a lower --max-lora-rank, --max-loras or --max-cpu-loras")
    if need.total <= room.whole:
        found.append("a larger --gpu-memory-utilization")
    for count in (2**power for power in range(1, _MOST_SHARES.bit_length())):
        share = replace(need, parameters=need.parameters // count, token_bytes=need.token_bytes // count)
        if share.total <= room.free:
            kind = "machines" if device.type == "cpu" else "devices"
            found.append(f"--tensor-parallel-size {count * shard.size} on as many such {kind}")
            break
    return [*found, "a smaller model"]


def _half(device: torch.device) -> str | None:
    """The dtype of 16 bits to ask for on ``device``; None where it computes in none."""
    if device.type == "cpu":
        return "bfloat16" if cpu_has_bf16() else None
    return "bfloat16" if gpu_capability(device) >= (8, 0) else "half"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
