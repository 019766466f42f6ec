"""The answers of a batch in the order in which they come: a file that is only appended to, and survives any kill.

A record is one line: the CRC-32 of its rest in hex, the number of the request's line, 1 for an answer and 0 for an
error, and JSON. What was half written when a process died is cut off when the file is opened again, and a record
whose checksum does not hold is left out: its request is then answered again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from ...proto.config import ConfigError

HEAD = -1
"""The line number of the first record, which says what the answers belong to."""

Record = tuple[int, bool, bytes]
"""The number of a line, whether it was answered (False: an error), and JSON without line breaks."""


def encode(record: Record) -> bytes:
    """A record as it stands in the file."""
    rest = b"%d %d %b" % record
    return b"%08x %b\n" % (crc32(rest), rest)


def decode(line: bytes) -> Record | None:
    """The record of a line without its line break; None where it is damaged."""
    checksum, _, rest = line.partition(b" ")
    if checksum != b"%08x" % crc32(rest):
        return None
    number, ok, data = rest.split(b" ", 2)
    return int(number), ok == b"1", data


class Journal:
    """One batch's answers. Blocking; one process at a time has it open."""

    def __init__(self, path: Path, head: dict[str, str]):
        """Open or begin it. ``head`` says what is answered: a journal of anything else is refused.

        Raises ConfigError, OSError.
        """
        self.path = path
        self.counts = {True: 0, False: 0}  # answers, and errors
        self._at: dict[int, int] = {}  # where each line's record begins
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO = os.fdopen(fd, "r+b", buffering=0)
        try:
            self._lock()
            self._read(head)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another process; wait for its end.") from None

    def _read(self, head: dict[str, str]) -> None:
        self._end = 0
        found: dict[str, str] | None = None
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # the process that wrote it was killed
                    break
                record = decode(line[:-1])
                if record is not None and record[0] == HEAD:
                    found = msgspec.json.decode(record[2], type=dict[str, str])
                elif record is not None and record[0] not in self._at:
                    self._at[record[0]] = self._end
                    self.counts[record[1]] += 1
                self._end += len(line)
        if found is None and self._end:
            raise ConfigError(f"{self.path} is no journal of a batch; move it away, or name another output.")
        os.ftruncate(self._file.fileno(), self._end)
        if found is None:
            self.append([(HEAD, True, msgspec.json.encode(head))])
            sync_folder(self.path.parent)
        elif found != head:
            differs = ", ".join(name for name in head if found.get(name) != head[name])
            raise ConfigError(
                f"{self.path} has answers of another batch (another {differs}): delete it to begin anew, or name "
                "another output."
            )

    def __contains__(self, number: int) -> bool:
        return number in self._at

    def __len__(self) -> int:
        return len(self._at)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self._end

    def append(self, records: Iterable[Record]) -> None:
        """Write records, and return when they are on the disk. Of a write that fails nothing stays. Raises OSError."""
        data, at = bytearray(), []
        for record in records:
            if record[0] not in self._at:
                at.append((record, self._end + len(data)))
                data += encode(record)
        try:
            os.lseek(self._file.fileno(), self._end, os.SEEK_SET)
            left = memoryview(data)
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(data)
        for (number, ok, _), place in at:
            if number != HEAD:
                self._at[number] = place
                self.counts[ok] += 1

    def in_order(self) -> Iterator[Record]:
        """All records by the number of their line."""
        with open(self.path, "rb") as file:
            for number in sorted(self._at):
                file.seek(self._at[number])
                record = decode(file.readline()[:-1])
                if record is None:
                    raise OSError(
                        f"{self.path} was damaged while it was open: the answer of line {number + 1} is lost."
                    )
                yield record

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def remove(self) -> None:
        """Delete it: what it holds is elsewhere by now."""
        self.close()
        self.path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Put a file in place whole or not at all, whatever is killed meanwhile; it is on the disk on return."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
