"""What frontends that share a port have measured, told by any of them: each keeps its figures in a file of one folder.

A scrape reaches the frontend that the kernel chooses. It writes its own figures first and then reads the others', so
what a scrape told is in the files that the next one reads, whoever answers that: no counter goes backwards. Files are
written every second too. The file of a process that has ended stays, until one that starts adds it to the sum of those
that are gone; it names the files in that sum, so that none is counted twice.

Nothing waits for another process, and with one frontend there is no folder and no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
import uuid
from pathlib import Path
from typing import TypeVar

import msgspec

from .metrics import Measured, Metrics

T = TypeVar("T")
log = logging.getLogger(__name__)

WRITE_S = 1.0
_GONE, _LOCK = "gone", "lock"


class _Gone(msgspec.Struct):
    """The sum of processes that have ended, and the files of which it was made."""

    of: list[str] = []
    figures: Measured = msgspec.field(default_factory=Measured)


class SharedFigures:
    """This process's place among those that share ``folder``. ``own`` are its figures."""

    def __init__(self, folder: Path, own: Metrics):
        self._folder, self._own = folder, own
        self._name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._written = b""
        self._turn, self._asked, self._put_last = threading.Lock(), 0, 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._add_up()

    async def others(self) -> list[Measured]:
        """Write this process's figures, then read what all others have."""
        await self._write()
        return await asyncio.to_thread(self._read)

    async def keep(self) -> None:
        """Write whenever there is something new, until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(WRITE_S)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        self._asked += 1
        await asyncio.to_thread(self._put, self._asked, self._own.measured())

    def _put(self, number: int, figures: Measured) -> None:
        data = msgspec.json.encode(figures)
        with self._turn:
            if number < self._put_last or data == self._written:  # what is there is newer, or the same
                return
            self._put_last = number
            try:
                _replace(self._folder / self._name, data)
                self._written = data
            except OSError as error:
                log.warning("other frontends cannot tell what this one has measured: %s", error)

    def _read(self) -> list[Measured]:
        found = {}
        for path in self._files():
            if path.name != self._name and (figures := _load(path, Measured)) is not None:
                found[path.name] = figures
        gone = _load(self._folder / _GONE, _Gone) or _Gone()  # last: it has what was taken away meanwhile
        return [gone.figures, *(figures for name, figures in found.items() if name not in gone.of)]

    def _files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if "-" in path.name and not path.suffix]

    def _add_up(self) -> None:
        """Put the files of processes that have ended into one. Whoever comes while another does leaves it to that."""
        with (self._folder / _LOCK).open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = _load(self._folder / _GONE, _Gone) or _Gone()
            ended = [path for path in self._files() if not _lives(int(path.name.partition("-")[0]))]
            total = Metrics("")
            for figures in (before.figures, *(_load(p, Measured) for p in ended if p.name not in before.of)):
                if figures is not None:
                    total.add(figures)
            gone = _Gone([path.name for path in ended], total.measured())
            _replace(self._folder / _GONE, msgspec.json.encode(gone))
            for path in ended:
                path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _replace(path: Path, data: bytes) -> None:
    """Write a file that nobody sees half of. Raises OSError."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _load(path: Path, kind: type[T]) -> T | None:
    """None where there is no such file (any more), or another version wrote it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
