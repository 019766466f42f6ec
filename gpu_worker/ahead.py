"""Memory of a CPU's KV cache, asked for before it is written.

The system clears pages when they are first touched, a huge page (2 MiB) at a time. Blocks lie beside each other in each
layer's and head's own range, so the first block past such a page touches one in every range: 32 of them take 12 ms,
in a virtual machine whose host has to find the memory too over 100 ms, and the step that does so stands still. So a
thread has the kernel provide them (madvise(2), MADV_POPULATE_WRITE, which leaves alone what is there), only as far
ahead of what is used that memory nobody needs stays with the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import weakref

import torch

log = logging.getLogger(__name__)

AHEAD_BYTES = 2 * 2**20
"""Of each range, from the last block that is used."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14, which ``mmap`` does not name."""


class Ahead:
    """Keeps ``pools``, [ranges, num_blocks, bytes of a page] each and contiguous, provided past the last block used."""

    def __init__(self, pools: list[torch.Tensor]):
        self._pools, self._num_blocks = pools, pools[0].shape[1]
        self._margin = max(1, AHEAD_BYTES // max(pool.shape[2] for pool in pools))
        self._provided = self._due = 0  # blocks that are provided, or on their way; the first that wants more
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise

    def reach(self, block: int) -> None:
        """``block`` is the furthest of those that are written next. To be called by one thread."""
        if block < self._due or self._provided == self._num_blocks:
            return
        first, self._provided = self._provided, min(self._num_blocks, block + 1 + self._margin)
        self._due = self._provided - self._margin // 2
        run = threading.Thread(
            target=_provide, args=(weakref.ref(self), first, self._provided), name="ahead", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # there may be no thread to be had; memory comes when it is touched
            run.start()

    def provide(self, number: int, first: int, end: int) -> bool:
        """Blocks from ``first`` to before ``end`` of one range. False where there is none of this number, or the system
        does not do so."""
        for pool in self._pools:
            if number < pool.shape[0]:
                start, page = pool[number].data_ptr(), pool.shape[2]
                at = (start + first * page) // mmap.PAGESIZE * mmap.PAGESIZE
                size = ctypes.c_size_t(start + end * page - at)
                failed = self._madvise(ctypes.c_void_p(at), size, _POPULATE_WRITE)
                if failed:
                    log.debug("pages come when they are touched: madvise says errno %d", ctypes.get_errno())
                return not failed
            number -= pool.shape[0]
        return False


def _provide(of: weakref.ref[Ahead], first: int, end: int) -> None:
    """Until all is provided, or the cache is gone."""
    number = 0
    while (ahead := of()) is not None and ahead.provide(number, first, end):
        number += 1
        del ahead
