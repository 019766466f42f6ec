"""One answer of the processes of a replica, each of which keeps its part of every block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...proto.codec import from_i32, i32
from ...proto.hashing import HASH_SIZE
from ...proto.messages import Lease, Moved


class Together:
    """Gathers what ``count`` processes say. A load is done when all have their part, and has failed where one lacks
    it; a block is on disk when all have written theirs. ``send`` takes what there is to tell, from any thread."""

    def __init__(self, count: int, send: Callable[[Any], None]):
        self._count, self._send = count, send
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._moves: dict[int, list[Moved]] = {}
        self._files: dict[bytes, set[int]] = {}  # who has written a block that not all have

    def open(self, lease: Lease) -> None:
        """What is of another lease counts no more."""
        with self._lock:
            self._lease = lease
            self._moves.clear()
            self._files.clear()

    def add(self, process: int, message: Moved) -> None:
        """One of them says this."""
        with self._lock:
            if message.lease != self._lease:
                return
            lost = _hashes(message.lost)
            for block_hash in lost:
                self._files.pop(block_hash, None)
            written = [each for each in _hashes(message.written) if self._all_have(process, each)]
            whole = Moved(message.lease, 0, b"", b"".join(written), b"".join(lost))
            if message.number:
                parts = self._moves.setdefault(message.number, [])
                parts.append(message)
                if len(parts) == self._count:
                    del self._moves[message.number]
                    failed = sorted({place for part in parts for place in from_i32(part.failed)})
                    whole.number, whole.failed = message.number, i32(failed) if failed else b""
                    whole.load_s, whole.disk_s, whole.token_s = (
                        max(getattr(part, name) for part in parts) for name in ("load_s", "disk_s", "token_s")
                    )
            if whole.number or whole.written or whole.lost:
                self._send(whole)

    def _all_have(self, process: int, block_hash: bytes) -> bool:
        having = self._files.setdefault(block_hash, set())
        having.add(process)
        if len(having) < self._count:
            return False
        del self._files[block_hash]
        return True


def _hashes(column: bytes) -> list[bytes]:
    return [column[at : at + HASH_SIZE] for at in range(0, len(column), HASH_SIZE)]
