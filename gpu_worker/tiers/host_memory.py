"""Host memory for blocks: pages of the system's own, which a GPU reaches by itself once they are registered with it.

torch's pinned memory is rounded up to a power of two and kept for good. This is as large as it says, and all of it is
given back when it is closed.
"""

from __future__ import annotations

import logging
import mmap
import os

import numpy as np
import torch

from ...proto.config import ConfigError
from ...proto.process import LOCAL_WORKERS
from ..memory import available_memory, gib

log = logging.getLogger(__name__)

MOST_OF_MEMORY, MUCH_OF_MEMORY = 0.7, 0.4
"""Of the host's memory: tiers that take more are refused, or warned of. vLLM's shares."""


class HostMemory:
    """``pages`` uint8 [slots, bytes of a block], zeros, which the system gives on first touch; with ``cuda`` all at
    once, registered. Where that cannot be they are ordinary memory, with a warning: copies take longer.

    Raises ConfigError where there is not that much memory.
    """

    def __init__(self, slots: int, size: int, cuda: bool):
        check_room(slots * size)
        memory = np.frombuffer(mmap.mmap(-1, slots * size), np.uint8)
        self.pages: torch.Tensor | None = torch.from_numpy(memory).view(slots, size)
        self._registered = cuda and self._register()

    def _register(self) -> bool:
        assert self.pages is not None
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(self.pages.data_ptr(), self.pages.nbytes, 0))
            why = f"CUDA error {error}" if error else ""
        except RuntimeError as raised:
            why = str(raised)
        if why:
            log.warning(
                "%s of host memory cannot be pinned (%s): blocks are copied more slowly", gib(self.pages.nbytes), why
            )
        return not why

    def close(self) -> None:
        """Give it back. Nobody copies to or from it any more."""
        if self.pages is not None and self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.pages.data_ptr())
        self.pages = None


def check_room(size: int) -> None:
    """Whether this process may take so much, and all workers that this server starts on this machine, which take as
    much each: what the others will take is not taken yet. Raises ConfigError."""
    workers = int(os.environ.get(LOCAL_WORKERS, "1"))
    total, memory, told = size, available_memory(), "available CPU memory is allocated for the swap space of one worker"
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if workers > 1 and workers * total * memory > total * machine:
        told = f"total CPU memory is allocated for the swap space of {workers} workers"
        total, memory = workers * total, machine
    if total > MOST_OF_MEMORY * memory:
        raise ConfigError(
            f"Too large swap space. {gib(total)} out of the {gib(memory)} of {told}; lower swap_space (or "
            "kv_offloading_size)."
        )
    if total > MUCH_OF_MEMORY * memory:
        log.warning("Possibly too large swap space. %s out of the %s of %s", gib(total), gib(memory), told)
