"""Pages that go to another worker of this machine through memory that both have mapped, in place of a socket.

The giver has an anonymous file in memory (memfd_create(2)) for each worker that it sends to. The taker opens it by way
of the giver's /proc/PID/fd, which the kernel allows to processes of one user alone. It has no name, and is gone with
the two processes, however they end. A taker that cannot open it, as in another container, goes on to get bytes: the
giver uses the memory once the taker has said so in it.

Layout: 16 bytes that both know, a byte that is 1 once the taker is there, a byte for each slot that is 1 while the slot
is full, and from PAGE on the slots. The giver fills a slot and names it in a message; the taker empties it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
from collections import OrderedDict

import torch

from ..proto.messages import SharedMemory

log = logging.getLogger(__name__)

SLOTS, SLOT_BYTES, PAGE = 8, 4 * 2**20, 4096
TOKEN, THERE, FULL = 16, 16, 17
"""Bytes of the token; where the taker says that it is there; where the slots' states begin."""
MAX_MAPPED = 8
"""Givers whose memory a taker keeps mapped."""


class Given:
    """The giver's side, of one taker. Raises OSError where the system has no such memory."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        size = PAGE + SLOTS * SLOT_BYTES
        self._fd = os.memfd_create("quire-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self._fd, size)
        except OSError:
            self.close()
            raise
        token = os.urandom(TOKEN)
        self._map[:TOKEN] = token
        self.told = SharedMemory(os.getpid(), self._fd, token)

    def slot(self, size: int) -> int:
        """One that is empty and holds ``size`` bytes; -1 where there is none, or the taker is not there (yet)."""
        if size > SLOT_BYTES or not self._map[THERE]:
            return -1
        return self._map.find(b"\0", FULL, FULL + SLOTS) - FULL if 0 in self._map[FULL : FULL + SLOTS] else -1

    def filled(self, slot: int) -> None:
        """It is the taker's until that has read it, and is told so next."""
        self._map[FULL + slot] = 1

    def place(self, slot: int, size: int) -> torch.Tensor:
        """Uint8 [size] of an empty slot."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=PAGE + slot * SLOT_BYTES)

    def close(self) -> None:
        """The taker may still read what it was told of."""
        os.close(self._fd)


class Received:
    """The taker's side: the memory of those who give to it."""

    def __init__(self) -> None:
        self._maps: OrderedDict[bytes, mmap.mmap | None] = OrderedDict()  # by token; None: it cannot be had

    def meet(self, told: SharedMemory) -> None:
        """A giver has this memory for us."""
        if told.token in self._maps:
            return
        found: mmap.mmap | None = None
        try:
            found = _map(told)
            found[THERE] = 1
        except (OSError, ValueError) as error:
            log.info("pages of process %d come as bytes: %s", told.pid, error)
        self._maps[told.token] = found
        while len(self._maps) > MAX_MAPPED:
            self._maps.popitem(last=False)

    def read(self, told: SharedMemory, slot: int, size: int) -> torch.Tensor:
        """Uint8 [size], until ``done``. Raises ValueError where there is no such slot."""
        found = self._maps.get(told.token)
        if found is None or not 0 <= slot < SLOTS or not 0 <= size <= SLOT_BYTES:
            raise ValueError(f"{size} bytes in slot {slot} of memory of process {told.pid}, which is not mapped here")
        return torch.frombuffer(found, dtype=torch.uint8, count=size, offset=PAGE + slot * SLOT_BYTES)

    def done(self, told: SharedMemory, slot: int) -> None:
        """The slot may be filled again."""
        found = self._maps.get(told.token)
        if found is not None and 0 <= slot < SLOTS:
            found[FULL + slot] = 0


def _map(told: SharedMemory) -> mmap.mmap:
    """Raises OSError or ValueError where it is not what it should be."""
    size = PAGE + SLOTS * SLOT_BYTES
    fd = os.open(f"/proc/{int(told.pid)}/fd/{int(told.fd)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
            raise ValueError("it is another file")  # which might become shorter while it is read
        found = mmap.mmap(fd, size)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    if found[:TOKEN] != told.token:
        found.close()
        raise ValueError("it is another process's")
    return found
