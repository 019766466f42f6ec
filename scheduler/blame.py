"""Which request ended the scheduler before this one: a submission is written down for as long as it is handled.

It is written into the scheduler's lock file, in memory shared with the kernel: that costs no system call, and what was
written stays when the process is killed. A request that has ended too many schedulers gets a 500, and no other try.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct

from ..proto.losses import Losses

log = logging.getLogger(__name__)

START, SLOTS = 64, 32
"""Where in the lock file this begins (the epoch comes before it), and how many requests are remembered, the last."""

_NOW, _ENTRY = struct.Struct("<qq"), struct.Struct("<qq")  # (1 while busy, uid); (uid, deaths)
_SIZE = START + _NOW.size + SLOTS * _ENTRY.size


class Blame:
    """``lock`` is the lock file's descriptor; without one nothing outlives the process."""

    def __init__(self, lock: int | None = None):
        self._losses: dict[int, Losses] = {}
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if lock is not None and _has_room(lock):
            self._memory = mmap.mmap(lock, _SIZE)
        for slot in range(SLOTS):
            uid, deaths = _ENTRY.unpack_from(self._memory, START + _NOW.size + slot * _ENTRY.size)
            if deaths > 0:
                self._losses[uid] = Losses(deaths, 0)
        busy, uid = _NOW.unpack_from(self._memory, START)
        self.last: int | None = uid if busy else None
        """The request that ended the scheduler before this one."""
        if busy:
            self._losses[uid] = losses = self._losses.pop(uid, Losses())  # the latest stands last
            losses.lost()
            self._keep()
        self.end()

    def begin(self, uid: int) -> None:
        """Write down that the submission of ``uid`` (an int64) is being handled."""
        _NOW.pack_into(self._memory, START, 1, uid)

    def end(self) -> None:
        """Nothing is being submitted any more."""
        _NOW.pack_into(self._memory, START, 0, 0)

    def losses(self, uid: int) -> Losses:
        """Schedulers that ended while they handled the submission of ``uid``."""
        return self._losses.get(uid, Losses())

    def _keep(self) -> None:
        last = list(self._losses.items())[-SLOTS:]
        for slot, (uid, losses) in enumerate(last):
            _ENTRY.pack_into(self._memory, START + _NOW.size + slot * _ENTRY.size, uid, losses.count)


def _has_room(lock: int) -> bool:
    """Whether the file can hold it. To write into shared memory that the disk has no room for would end the process."""
    try:
        os.pwrite(lock, os.pread(lock, _SIZE, 0).ljust(_SIZE, b"\0"), 0)
    except OSError as error:
        log.warning("a request that ends the scheduler will not be known to the next: %s", error.strerror)
        return False
    return True
