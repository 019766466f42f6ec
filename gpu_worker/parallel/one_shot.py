"""Sums of small tensors among GPUs of one machine in one launch: each reads what the others have, and adds it up.

NCCL's rings and trees pass a sum on from GPU to GPU, which takes 2 (size - 1) steps whatever there is to send; a decode
step of a few rows waits for those, twice a layer. Here it is torch's own kernel over symmetric memory: buffers of equal
size that all processes have mapped. It is captured in CUDA graphs as any launch is. Larger tensors go through NCCL, as
each GPU would read all of every other's.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..spec import Shard

log = logging.getLogger(__name__)

KIB = 1024
LIMITS = {2: 1024 * KIB, 4: 512 * KIB, 8: 256 * KIB}
"""Ranks that torch's kernel is made for -> bytes up to which it is used: those of vLLM's own kernel for 4 and 8. Not
measured here."""
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's kernel adds up."""
ALIGNED = 16
PATIENCE = timedelta(seconds=60)
"""How long a process waits for another that failed to map its part."""


class OneShot:
    """The sum over a group whose processes have all mapped each other's ``buffer`` (uint8 [bytes])."""

    def __init__(self, buffer: torch.Tensor, group_name: str, handle: Any = None) -> None:
        """``handle`` is kept as long as the mapping is needed."""
        self._buffer, self._name, self._handle = buffer, group_name, handle
        self._operation = torch.ops.symm_mem.one_shot_all_reduce_copy_out
        self._rooms: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def takes(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is small and of a type to be summed so: the same in all processes, as they have one shape."""
        size = x.numel() * x.itemsize
        return 0 < size <= len(self._buffer) and not size % ALIGNED and x.dtype in DTYPES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in a new tensor."""
        x = x.contiguous()
        if x.storage_offset() * x.itemsize % ALIGNED:
            x = x.clone()  # the buffer is aligned, and torch wants both alike
        key = x.shape, x.dtype
        if (room := self._rooms.get(key)) is None:
            room = self._rooms[key] = self._buffer[: x.numel() * x.itemsize].view(x.dtype).view(x.shape)
        out = torch.empty_like(x)
        self._operation(room, x, "sum", self._name, out)
        return out


def one_shot_of(group: dist.ProcessGroup, store: dist.Store, shard: Shard, device: torch.device) -> OneShot | None:
    """For the tensor ranks ``group`` of a stage; None, with one line in the log, where they cannot map each other's
    memory. Called by all of them, who get one or get none."""
    if why := _never(shard.size) or _apart(store, shard):
        found = None
    else:
        found, why = _map(group, store, LIMITS[shard.size], device)
        agreed = torch.tensor(float(found is not None), device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        if found is not None and not agreed.item():
            found, why = None, "another process could not map it"
    if found is None:
        log.info("small tensors are summed by NCCL too, without symmetric memory: %s", why)
    return found


def _never(size: int) -> str:
    """Why groups of ``size`` cannot in this installation; "" where they may."""
    if torch.version.hip is not None:
        return "it is for NVIDIA's GPUs"
    if size not in LIMITS:
        return f"it is for {', '.join(map(str, LIMITS))} processes, and these are {size}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out"):
        return f"torch {torch.__version__} has no such operation"
    return ""


def _apart(store: dist.Store, shard: Shard) -> str:
    """Why not, where a stage's processes are on several machines, or in containers of their own; else ""."""
    names = [f"one-shot-{shard.stage}-{rank}" for rank in range(shard.size)]
    store.set(names[shard.rank], _place())
    places = {bytes(store.get(name)) for name in names}
    return "" if len(places) == 1 else f"the processes are in {len(places)} places"


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _map(
    group: dist.ProcessGroup, store: dist.Store, size: int, device: torch.device
) -> tuple[OneShot | None, str]:  # fmt: skip
    """This process's part, or why there is none."""
    if torch.cuda.device_count() == 1:
        # Each process sees its own GPU alone, as number 0, which torch takes for one GPU in all of them. (What this
        # switches off beside that check is multicast, which is not used here.)
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    try:
        from torch.distributed import _symmetric_memory as symmetric

        with _waiting(store, PATIENCE):
            buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
            return OneShot(buffer, group.group_name, symmetric.rendezvous(buffer, group.group_name)), ""
    except (RuntimeError, ImportError) as error:
        return None, (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _waiting(store: dist.Store, most: timedelta) -> Iterator[None]:
    """Wait no longer than ``most`` for what others put into ``store``."""
    before = store.timeout  # type: ignore[attr-defined]  # which the stubs leave out
    store.set_timeout(most)
    try:
        yield
    finally:
        store.set_timeout(before)
