"""How many KV blocks fit, and the two errors when too few do.

On a GPU one worst-case step is run and its peak measured, and a few CUDA graphs are captured, of which all are
extrapolated; ``gpu_memory_utilization`` of the whole device, less these and what others hold, goes to the cache. On a
CPU the step's size is computed, and the share is of the memory that is available; without
``--kv-cache-memory-bytes`` it stays under a cap, so that a laptop is not filled.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..proto.checkpoint.model_config import AUTO_LENGTH
from ..proto.config import ConfigError, EngineArgs
from ..proto.log_lines import counted
from .spec import DecoderSpec

if TYPE_CHECKING:  # `quire fit` and `quire doctor` ask for sizes without torch
    import torch

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


_NO_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory", "Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'",
)  # fmt: skip
"""What errors without a type of their own say: torch's of a CPU, of CUDA itself and of its libraries; Triton's where a
kernel is loaded; NCCL's, new and old, which torch quotes as its last error."""


def says_no_memory(error: BaseException) -> bool:
    """Whether ``error`` itself says that memory ran out."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _NO_MEMORY)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what ``error`` says, or an error that it came of (a capture that ends early is void as well)."""
    while error is not None:
        if says_no_memory(error):
            return True
        error = error.__context__
    return False


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
            f"engine. (gpu_memory_utilization={args.gpu_memory_utilization:g} of {gib(budget.total)} with "
            f"{gib(budget.used)} used by weights and activations leaves nothing; max_model_len {max_model_len} needs "
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
    longest = min(fits, max_model_len)
    count = fits / longest
    log.info(
        "KV cache: %d blocks of %d tokens (%s), which hold %s of %d tokens at once", blocks, budget.block_size,
        gib(blocks * budget.block_bytes), f"{count:.1f} requests" if 1 < count < 10 else counted(int(count), "request"),
        longest,
    )  # fmt: skip
    return blocks


def _utilization_remedy(budget: Budget, blocks: int) -> str:
    needed = budget.used + blocks * budget.block_bytes
    if needed <= budget.total:
        return f"gpu_memory_utilization of at least {math.ceil(1000 * needed / budget.total) / 1000:g}"
    return f"{gib(needed)} of memory where there are {gib(budget.total)}, so no gpu_memory_utilization is enough"


def gib(size: int) -> str:
    """``size`` bytes for a reader."""
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
    step: Callable[[], object], graphs: Callable[[], int], block_bytes: int, block_size: int, device: torch.device
) -> Budget:
    """A GPU's, measured while ``step`` runs the worst case. ``graphs`` then tells the bytes of CUDA graphs.

    The peak is of what torch had reserved, fragments between tensors included. What others hold is read behind the
    step, when NCCL has its buffers, cuBLAS its workspace and the driver its kernels.
    """
    import torch

    device_used(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    others = device_used(device) - torch.cuda.memory_reserved(device)
    total, captured = torch.cuda.mem_get_info(device)[1], graphs()
    log.info(
        "worst-case step: peak %s, CUDA graphs %s, outside torch %s of %s",
        gib(peak), gib(captured), gib(others), gib(total),
    )  # fmt: skip
    return Budget(total, peak + others + captured, block_bytes, block_size)


def device_used(device: torch.device) -> int:
    """Bytes of the device in use, by whomever, once torch has given back what it only keeps for later."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def available_memory() -> int:
    """Bytes this process could still take: the system's MemAvailable within its cgroups' limits."""
    return min(memory_limits())[0]


def memory_limits(root: Path = Path("/")) -> list[tuple[int, str]]:
    """What the system, and each memory cgroup that holds this process, still allow: bytes, and who says so.

    ``root`` is where /proc and /sys are found.
    """
    return [(_system_available(root), "MemAvailable"), *_cgroups_available(root)]


def _system_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroups_available(root: Path) -> Iterator[tuple[int, str]]:
    """Of this process's cgroup and of those around it: version 2's, and version 1's memory controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        at = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        names = [name for name in path.split("/") if name]
        inside = [] if ".." in names else names  # those of another namespace are not to be seen here
        for depth in range(len(inside) + 1):
            found = _cgroup_available(at.joinpath(*inside[:depth]), "total_" if controllers else "")
            if found is not None:
                yield found, f"within the memory limit of cgroup /{'/'.join(inside[:depth])}"


def _cgroup_available(group: Path, prefix: str) -> int | None:
    """Bytes that the limit of ``group`` leaves; None without one. Its page cache gives way, and counts as free."""
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if prefix else ("max", "current")
    try:
        text = (group / f"memory.{limit}").read_text().strip()
        if text == "max":
            return None
        used = int((group / f"memory.{usage}").read_text()) - _page_cache(group, prefix)
        return max(0, int(text) - max(0, used))
    except (OSError, ValueError):
        return None


def _page_cache(group: Path, prefix: str) -> int:
    try:
        figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(figures[f"{prefix}inactive_file"]) + int(figures[f"{prefix}active_file"])
    except (OSError, ValueError, LookupError):
        return 0
