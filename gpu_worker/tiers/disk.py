"""Blocks as files, which outlive every process: named by their hash, in a folder that one model and layout has.

A file is written under another name and renamed, so a process that is killed leaves no half of one; a checksum covers
the name and the bytes, so what is cut off, damaged or not ours is found and the block computed. Only this user may read
the folder. What was used longest ago makes room: the time is the file's own, so a worker that starts knows it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
import zlib
from pathlib import Path

from ...proto.config import ConfigError
from ...proto.hashing import HASH_SIZE

log = logging.getLogger(__name__)

MAGIC = b"quire kv block 2"
_CHECK = 4
HEAD = len(MAGIC) + _CHECK
"""Bytes of a file before those of its block."""
_SUFFIX, _UNFINISHED = ".kv", ".new"
PAUSE_S = 30.0
"""How long nothing is written after the disk refused it."""
_RESCAN = 16
"""Others may use the folder: it is looked through again after this part of the limit has been written."""


class Disk:
    """The files of one folder. Methods may be called by any thread.

    ``limit`` is the most bytes that all files may take, ``page_bytes`` the size of a block. Raises ConfigError where
    the folder cannot be used, or others could read or change what is in it.
    """

    def __init__(self, folder: Path, limit: int, page_bytes: int):
        self.folder, self.limit, self._size = folder, limit, HEAD + page_bytes
        self._lock = threading.Lock()
        self._files: dict[bytes, None] = {}  # the one that was used longest ago first
        self._foreign: set[bytes] = set()  # names that something else has
        self._since_scan = 0
        self._paused_until, self._warned = 0.0, False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise ConfigError(f"kv_disk_path: cannot use {folder}: {error.strerror}; name another folder.") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"kv_disk_path: {folder} must be a folder of this user's that nobody else may enter (mode 0700); it "
                f"has mode {stat.S_IMODE(found.st_mode):04o} and belongs to uid {found.st_uid}."
            )
        self._scan()

    def hashes(self) -> list[bytes]:
        """Of all files, the one that was used longest ago first."""
        with self._lock:
            return list(self._files)

    def __contains__(self, block_hash: bytes) -> bool:
        with self._lock:
            return block_hash in self._files

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """Copy a block's bytes into ``into``. False where they cannot be had: the block is no file's any more then."""
        path = self._path(block_hash)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(handle, "rb", buffering=0) as file:
                if os.fstat(handle).st_size != self._size:
                    raise ValueError("it is cut off, or no block of this model's")
                head = file.read(HEAD)
                if not head.startswith(MAGIC):
                    raise ValueError("it is no file of quire's")
                if _fill(file, into) < len(into) or head[len(MAGIC) :] != _checksum(block_hash, into):
                    raise ValueError("its bytes are damaged")
            os.utime(path)
        except FileNotFoundError:
            self._drop(block_hash)  # another worker made room
            return False
        except (OSError, ValueError) as error:
            self._warn(f"{path}: {error}; the block is computed again")
            self._drop(block_hash, unlink=True)
            return False
        with self._lock:
            if block_hash in self._files:
                self._files[block_hash] = self._files.pop(block_hash)
        return True

    def write(self, block_hash: bytes, data: memoryview | bytes) -> tuple[bool, list[bytes]]:
        """Keep a block. Whether there is a file of it now, and the hashes of those that made room."""
        with self._lock:
            if block_hash in self._files:
                return True, []
            if block_hash in self._foreign or time.monotonic() < self._paused_until or self._size > self.limit:
                return False, []
        if self._since_scan * _RESCAN > self.limit:
            self._scan()
        lost = self._make_room()
        path = self._path(block_hash)
        new = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{_UNFINISHED}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(handle, "wb", buffering=0) as file:
                for part in (MAGIC + _checksum(block_hash, data), data):
                    _write(file, part)
            os.rename(new, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            self._paused_until = time.monotonic() + PAUSE_S
            self._warn(f"cannot write to {self.folder}: {error.strerror}; blocks are not kept there until it can be "
                       f"written again, which is tried every {PAUSE_S:g} s")  # fmt: skip
            return False, lost
        with self._lock:
            self._files[block_hash] = None
            self._since_scan += self._size
        return True, lost

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / (name + _SUFFIX)

    def _make_room(self) -> list[bytes]:
        """Delete what was used longest ago until one more file fits."""
        lost = []
        with self._lock:
            while self._files and (len(self._files) + 1) * self._size > self.limit:
                oldest = next(iter(self._files))
                del self._files[oldest]
                lost.append(oldest)
        for block_hash in lost:
            with contextlib.suppress(OSError):
                self._path(block_hash).unlink()
        return lost

    def _drop(self, block_hash: bytes, unlink: bool = False) -> None:
        """It cannot be read. Only a file of ours is deleted; what else has its name stays, and the name is left to
        it."""
        with self._lock:
            self._files.pop(block_hash, None)
        if unlink:
            path = self._path(block_hash)
            try:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
                with open(handle, "rb") as file:
                    found = os.fstat(handle)
                    ours = stat.S_ISREG(found.st_mode) and file.read(len(MAGIC)) == MAGIC[: found.st_size]
                if ours:
                    path.unlink()
                    return
            except OSError:
                pass
            self._foreign.add(block_hash)

    def _scan(self) -> None:
        """What is there, by the time it was last used. Unfinished files of processes that are gone are deleted."""
        found: list[tuple[int, bytes]] = []
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(parent, name)
                try:
                    if name.endswith(_UNFINISHED):
                        _delete_left(path, name)
                    elif (block_hash := _hash_of(name)) is not None and os.path.basename(parent) == name[:2]:
                        at = os.lstat(path)
                        if stat.S_ISREG(at.st_mode) and at.st_size == self._size:
                            found.append((at.st_mtime_ns, block_hash))
                except OSError:
                    continue  # another worker made room meanwhile
        with self._lock:
            self._files = dict.fromkeys(block_hash for _, block_hash in sorted(found))
            self._since_scan = 0

    def _warn(self, text: str) -> None:
        """Once: the rest goes to the debug log."""
        log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", text)
        self._warned = True


def _hash_of(name: str) -> bytes | None:
    stem, dot, suffix = name.partition(".")
    if dot + suffix != _SUFFIX or len(stem) != 2 * HASH_SIZE:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def _delete_left(path: str, name: str) -> None:
    """Raises OSError."""
    pid = name.split(".")[1] if name.count(".") >= 3 else ""
    if pid.isdecimal() and int(pid) != os.getpid():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            os.unlink(path)


def _checksum(block_hash: bytes, data: memoryview | bytes) -> bytes:
    """Of damage, not of intent: nobody else may write here. CRC-32 is five times as fast as a digest, and pages are
    large."""
    return zlib.crc32(data, zlib.crc32(block_hash)).to_bytes(_CHECK, "big")


def _fill(file: object, into: memoryview) -> int:
    """Read until ``into`` is full or the file ends; how many bytes came."""
    got = 0
    while got < len(into) and (count := file.readinto(into[got:])):  # type: ignore[attr-defined]
        got += count
    return got


def _write(file: object, data: memoryview | bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]  # type: ignore[attr-defined]
