"""A flight recorder's file: a ring of segments, each begun with the whole state, so that the oldest whole one is where
a replay can begin. After the state comes the turn before it, where the segment before had no room for that, and then
one record for each turn.

The file has its full size from the start and is mapped into memory: what was written is there when the process is
killed, and a full disk is found before anything is served. Each record has its length and a checksum, which is seeded
with the segment's number, so that neither a torn record nor what stands behind the last one is taken for one.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from ..proto.config import ConfigError
from ..proto.messages import PROTOCOL
from ..proto.version import __version__

MAGIC = b"quire flight recording\n"
FORMAT = 2
SEGMENTS = 4
HEAD = 4096
"""Bytes of the file before the first segment."""

_NUMBER = struct.Struct("<Q")
_RECORD = struct.Struct("<II")  # length and checksum of what follows
_TIME = struct.Struct("<d")
_END = bytes(_RECORD.size)

Turn = tuple[bytes, list[list[Any]]]
"""The hashes of blocks that were made in a turn, where token ids are not recorded, and its entries."""


class RecordingError(Exception):
    """A file that cannot be replayed, in one line."""


class Header(msgspec.Struct):
    """What a file says of itself."""

    version: str
    protocol: int
    size: int  # bytes of a segment
    tokens: bool  # token ids are in it
    pid: int


class Ring:
    """Writes a recording. Raises ConfigError where the file cannot be made."""

    def __init__(self, path: str, megabytes: float, tokens: bool):
        self.size = max(int(megabytes * 2**20) // SEGMENTS, 4096)
        total = HEAD + SEGMENTS * self.size
        kept = _keep(path)
        try:
            self._map = _make(path, total)
        except OSError as error:
            if kept:
                os.replace(f"{path}.1", path)
            raise ConfigError(
                f"cannot record into {path} ({megabytes:g} MB): {error.strerror}; name another --flight-recorder."
            ) from error
        header = msgspec.msgpack.encode(Header(__version__, PROTOCOL, self.size, tokens, os.getpid()))
        start = MAGIC + struct.pack("<I", FORMAT)
        self._map[: len(start)] = start
        self._at = len(start)
        self._end, self._seed = HEAD, 0
        self.write(header)
        self.number = 0

    def begin(self, state: bytes, now: float, before: bytes) -> bool:
        """The next segment, over the oldest: the state ``now``, after the turn ``before`` it. False where they leave
        no room in it for half as much again."""
        if (len(state) + len(before)) * 3 // 2 > self.size:
            return False
        start = HEAD + self.number % SEGMENTS * self.size
        self.number += 1
        self._map[start : start + _NUMBER.size] = bytes(_NUMBER.size)  # nobody reads it while it is half written
        self._at, self._end, self._seed = start + _NUMBER.size, start + self.size, self.number & 0xFFFFFFFF
        self.write(state)
        self.write(_TIME.pack(now) + before)
        self._map[start : start + _NUMBER.size] = _NUMBER.pack(self.number)
        return True

    def fits(self, size: int) -> bool:
        """A record of so many bytes has room in this segment."""
        return self._at + size + 2 * _RECORD.size <= self._end

    def write(self, data: bytes) -> None:
        """One more record, for which there is room."""
        record = _RECORD.pack(len(data), zlib.crc32(data, self._seed)) + data + _END
        end = self._at + len(record)
        self._map[self._at : end] = record
        self._at = end - len(_END)

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()


def _make(path: str, size: int) -> mmap.mmap:
    """A new file of its full size, in memory. Raises OSError, and leaves no file then."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)


def _keep(path: str) -> bool:
    """The recording of the process before stays, as PATH.1: it may be the one that is wanted. False where there was
    none. Raises ConfigError where a file would be lost that is no recording."""
    for name in (path, f"{path}.1"):
        empty = os.path.isfile(name) and not os.path.getsize(name)
        if os.path.lexists(name) and not empty and not holds_recording(name):
            raise ConfigError(f"{name} exists and is no recording; name another --flight-recorder.")
    try:
        if not holds_recording(path):
            os.unlink(path)
            return False
        os.replace(path, f"{path}.1")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot rename {path}: {error.strerror}; name another --flight-recorder.") from error
    return True


def holds_recording(path: str) -> bool:
    """Whether a recording is there, of whatever version."""
    try:
        with _open(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _open(path: str) -> BinaryIO:
    """Open a file to read. Raises OSError, also for what may have no end, or keep its reader waiting."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return file


@dataclass
class Segment:
    """A state, what time it was then, and the turns from there on."""

    state: bytes
    now: float
    turns: list[Turn]


@dataclass
class Recording:
    """What a file holds. ``torn``: the last record was being written; ``number`` is that of the first
    segment, 1 where nothing was overwritten."""

    header: Header
    segments: list[Segment]
    number: int
    torn: bool


def read(path: str) -> Recording:
    """Read a file. Raises RecordingError."""
    try:
        with _open(path) as file:
            header = _header(path, data := file.read(HEAD))
            size, whole = os.fstat(file.fileno()).st_size, HEAD + SEGMENTS * header.size
            if size != whole:
                raise RecordingError(f"{path} is cut off: it has {size} bytes of {whole}; copy it whole.")
            data += file.read(whole - HEAD)
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}.") from error
    found = {}
    for start in range(HEAD, len(data), header.size):
        (number,) = _NUMBER.unpack_from(data, start)
        if number:
            found[number] = start
    last = max(found, default=0)
    first = last
    while first - 1 in found:
        first -= 1
    if not last:
        raise RecordingError(f"{path} holds nothing: the scheduler ended before it began.")
    segments: list[Segment] = []
    torn = False
    for number in range(first, last + 1):
        records = _Records(data, found[number] + _NUMBER.size, found[number] + header.size, number)
        read = list(records)
        torn = records.torn
        if len(read) < 2 or len(read[1]) < _TIME.size or (torn and number < last) or records.more():
            raise RecordingError(f"{path} is damaged in segment {number}; nothing after it can be trusted.")
        state, (now,), before = read[0], _TIME.unpack_from(read[1]), read[1][_TIME.size :]
        if segments and before:
            segments[-1].turns.append(_turn(path, before))
        segments.append(Segment(state, now, [_turn(path, record) for record in read[2:]]))
    return Recording(header, segments, first, torn)


def _header(path: str, data: bytes) -> Header:
    start = len(MAGIC) + 4
    if not data.startswith(MAGIC) or len(data) < start:
        raise RecordingError(f"{path} is no flight recording of quire's.")
    (form,) = struct.unpack_from("<I", data, len(MAGIC))
    if form != FORMAT:
        raise RecordingError(f"{path} has format {form} and this quire ({__version__}) reads {FORMAT}; use the version "
                             "that recorded it.")  # fmt: skip
    for record in _Records(data, start, min(HEAD, len(data)), 0):
        try:
            header = msgspec.msgpack.decode(record, type=Header)
        except msgspec.MsgspecError:
            break
        if (header.version, header.protocol) != (__version__, PROTOCOL):
            raise RecordingError(
                f"{path} was recorded by quire {header.version} (protocol {header.protocol}) and this is {__version__} "
                f"(protocol {PROTOCOL}); use the version that recorded it."
            )
        return header
    raise RecordingError(f"{path} is cut off or damaged: its head cannot be read.")


def _turn(path: str, record: bytes) -> Turn:
    try:
        return msgspec.msgpack.decode(record, type=Turn)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path} is damaged: {error}.") from error


class _Records:
    """The records of a part of a file. ``torn`` afterwards: behind the last one stands something that is none."""

    def __init__(self, data: bytes, at: int, end: int, seed: int):
        self._data, self._at, self._end, self._seed = data, at, end, seed & 0xFFFFFFFF
        self.torn = False

    def __iter__(self) -> Iterator[bytes]:
        while self._at + _RECORD.size <= self._end:
            length, checksum = _RECORD.unpack_from(self._data, self._at)
            start = self._at + _RECORD.size
            record = self._data[start : start + length]
            if not length and not checksum:
                return
            if start + length > self._end or zlib.crc32(record, self._seed) != checksum:
                self.torn = True
                return
            yield record
            self._at = start + length

    def more(self) -> bool:
        """Behind what is torn stands another record: so it was not being written, and is damaged."""
        if not self.torn:
            return False
        length, _ = _RECORD.unpack_from(self._data, self._at)
        behind = _Records(self._data, self._at + _RECORD.size + length, self._end, self._seed)
        return next(iter(behind), None) is not None
