"""How many KV blocks fit, and the two errors when too few do.

On a GPU one worst-case step is run and its peak measured; ``gpu_memory_utilization`` of the whole device, less that
peak and what others hold, goes to the cache. On a CPU the step's size is computed, and the share is of the memory
that is available; without ``--kv-cache-memory-bytes`` it stays under a cap, so that a laptop is not filled.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..proto.checkpoint.model_config import AUTO_LENGTH
from ..proto.config import ConfigError, EngineArgs
from .spec import DecoderSpec

log = logging.getLogger(__name__)

GIB = 2**30
CPU_CACHE_CAP = 4 * GIB
"""Default limit of the cache on a CPU; raised to what one request of max_model_len needs, where that is more."""


@dataclass(slots=True)
class Budget:
    """Bytes: ``total`` that utilization is a share of, ``used`` by everything but the cache, and of one block."""

    total: int
    used: int
    block_bytes: int
    block_size: int
    cap: int | None = None  # bytes of cache at most


def out_of_memory(error: BaseException) -> bool:
    """Whether that is what ``error`` says; torch has no type of its own for a CPU's memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def fit(args: EngineArgs, budget: Budget, max_model_len: int) -> int:
    """The number of blocks. Raises ConfigError where a request of ``max_model_len`` tokens would not fit, unless the
    user left the length to what fits."""
    needed = -(-max_model_len // budget.block_size)
    if args.num_gpu_blocks_override is not None:
        blocks, remedy = args.num_gpu_blocks_override, f"num_gpu_blocks_override of at least {needed}"
    elif args.kv_cache_memory_bytes is not None:
        blocks = args.kv_cache_memory_bytes // budget.block_bytes
        remedy = f"kv_cache_memory_bytes of at least {needed * budget.block_bytes}"
    else:
        room = int(args.gpu_memory_utilization * budget.total) - budget.used
        if budget.cap is not None:
            room = min(room, max(budget.cap, needed * budget.block_bytes))
        blocks, remedy = room // budget.block_bytes, _utilization_remedy(budget, needed)
    if blocks < 1:
        raise ConfigError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            f"engine. (gpu_memory_utilization={args.gpu_memory_utilization:g} of {_gib(budget.total)} with "
            f"{_gib(budget.used)} used by weights and activations leaves nothing; max_model_len {max_model_len} needs "
            f"{remedy}.)"
        )
    fits = blocks * budget.block_size
    if max_model_len > fits and args.max_model_len == AUTO_LENGTH:
        log.info("max_model_len is %d, which is what fits; the model would allow %d", fits, max_model_len)
    elif max_model_len > fits:
        raise ConfigError(
            f"The model's max seq len ({max_model_len}) is larger than the maximum number of tokens that can be stored "
            f"in KV cache ({fits}). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            f"initializing the engine. (The largest max_model_len that fits is {fits}; {max_model_len} needs {remedy}.)"
        )
    log.info(
        "KV cache: %d blocks of %d tokens (%s); the longest request that fits is %d tokens, %.1f of max_model_len fit",
        blocks, budget.block_size, _gib(blocks * budget.block_bytes), min(fits, max_model_len), fits / max_model_len,
    )  # fmt: skip
    return blocks


def _utilization_remedy(budget: Budget, blocks: int) -> str:
    needed = budget.used + blocks * budget.block_bytes
    if needed <= budget.total:
        return f"gpu_memory_utilization of at least {math.ceil(1000 * needed / budget.total) / 1000:g}"
    return f"{_gib(needed)} of memory where there are {_gib(budget.total)}, so no gpu_memory_utilization is enough"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def cpu_budget(
    activations: int, block_bytes: int, block_size: int, longest_use: int, available: int | None = None
) -> Budget:
    """A CPU's. Weights are in memory already and so not in ``available``. ``longest_use`` blocks can be of use."""
    available = available_memory() if available is None else available
    return Budget(available, activations, block_bytes, block_size, min(CPU_CACHE_CAP, longest_use * block_bytes))


def step_bytes(spec: DecoderSpec, tokens: int, rows: int, itemsize: int) -> int:
    """About the activations of a step of ``tokens`` tokens that samples ``rows`` rows (logits are float32)."""
    return tokens * (8 * spec.hidden_size + 3 * spec.intermediate_size) * itemsize + 4 * rows * spec.vocab_size * 4


def cuda_budget(
    step: Callable[[], object], graphs: int, block_bytes: int, block_size: int, device: torch.device
) -> Budget:
    """A GPU's, measured while ``step`` runs the worst case; ``graphs`` bytes are kept for CUDA graphs."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # driver, NCCL, other processes
    log.info("worst-case step: peak %s, outside torch %s of %s", _gib(peak), _gib(others), _gib(total))
    return Budget(total, peak + others + graphs, block_bytes, block_size)


def available_memory() -> int:
    """Bytes this process could still take: the system's MemAvailable within the cgroup's limit."""
    return min([_system_available(), *_cgroup_available()])


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> list[int]:
    folders = (("/sys/fs/cgroup", "memory.max", "memory.current"),
               ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))  # fmt: skip
    for folder, limit, usage in folders:
        try:
            text = Path(folder, limit).read_text().strip()
            return [] if text == "max" else [max(0, int(text) - int(Path(folder, usage).read_text()))]
        except (OSError, ValueError):
            continue
    return []
