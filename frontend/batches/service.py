"""Runs the batches of a folder, in whichever frontend has the folder's lock.

It sleeps until the bell rings: a named pipe into which a frontend writes a byte when there is something to do. Who
takes the lock over, or is started in its place, goes on with what the journals do not have yet.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
from aiohttp import web

from ...proto.config import ConfigError
from ..front import FRONT
from .journal import Journal, Record
from .lines import Line, LineError, Lines
from .local import answer
from .objects import Counts, StoredBatch, StoredFile, count_used
from .run import Answer, Run, not_done
from .store import Store

log = logging.getLogger(__name__)

AT_ONCE, MOST_AT_ONCE = 8, 64
"""Batches of one key that are run at a time, and of all keys; they share the requests that may be under way."""
MAX_LINES = 50_000
"""Requests of one batch at most, as at OpenAI."""
MAX_TOLD = 100
"""Errors of a batch's input that are told."""
SAVE_S = 1.0
"""How often the counts of a batch that runs are written, at most."""
SWEEP_S = 3600.0
AGAIN_S = 60.0
"""When what the disk refused is tried again."""


class Service:
    """The batches of one folder, as far as this process has to do with them."""

    def __init__(self, app: web.Application, store: Store):
        self._app, self.store = app, store
        self._main: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[str, Counts] = {}  # of the batches that run here, as they are now
        self._stops: dict[str, asyncio.Future[str]] = {}  # why a batch that runs is to end before its time
        self._given_up: set[str] = set()  # batches of which not even that could be written
        self._places = asyncio.Semaphore(app[FRONT].settings.batch_window)
        self._woken = asyncio.Event()

    async def begin(self) -> None:
        """Make the folder, and take part in running what is in it. Raises OSError."""
        if self._main is None:
            await asyncio.to_thread(self._make)
            if self._main is None:  # nobody else has begun meanwhile
                self._main = asyncio.create_task(self._lead())

    def _make(self) -> None:
        self.store.begin()
        with suppress(FileExistsError):
            os.mkfifo(self._bell, 0o600)

    @property
    def _bell(self) -> str:
        return str(self.store.root / "bell")

    def ring(self) -> None:
        """Tell whoever runs the batches that there is something to do. Where nobody does, who begins to will look."""
        with suppress(OSError):
            fd = os.open(self._bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"!")
            finally:
                os.close(fd)

    def current(self, batch: StoredBatch) -> StoredBatch:
        """A batch that was read, with its counts as they are now where it runs here: on disk they come later."""
        batch.request_counts = self._counts.get(batch.id, batch.request_counts)
        return batch

    async def close(self) -> None:
        """Let go of everything; what has been answered is kept."""
        if self._main is not None:
            self._main.cancel()  # it ends the batches that run, and each once: the second time would cut a write short
            await asyncio.gather(self._main, return_exceptions=True)

    # -- the process that runs them

    async def _lead(self) -> None:
        while True:
            try:
                with ExitStack() as files:
                    await self._lead_until_refused(files)
            except OSError as error:
                log.error("batches are not run for the next %g s: %s", AGAIN_S, error)
            await asyncio.sleep(AGAIN_S)

    async def _lead_until_refused(self, files: ExitStack) -> None:
        """Run batches as long as the disk takes part. Raises OSError."""
        lock = os.open(self.store.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        files.callback(os.close, lock)
        bell = os.open(self._bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        files.callback(os.close, bell)
        loop = asyncio.get_running_loop()
        try:
            await _locked(lock)
            loop.add_reader(bell, self._rung, bell)
            swept = 0.0
            while True:
                if time.monotonic() - swept > SWEEP_S or not swept:
                    swept = time.monotonic()
                    await asyncio.to_thread(self.store.sweep)
                await self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), SWEEP_S)
                self._woken.clear()
        finally:
            loop.remove_reader(bell)
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _rung(self, bell: int) -> None:
        with suppress(BlockingIOError):
            os.read(bell, 4096)
        self._woken.set()

    async def _look(self) -> None:
        """Begin what waits, the oldest first, and end what was cancelled."""
        batches = await asyncio.to_thread(lambda: [each for each in self.store.all_batches() if not each.over])
        shares = Counter(each.owner for each in batches if each.id in self._running)
        for batch in sorted(batches, key=lambda each: (each.created_at, each.id)):
            running = self._running.get(batch.id)
            if running is not None and batch.status == "cancelling":
                _stop(self._stops[batch.id], "cancelled")
            elif running is None and batch.id not in self._given_up:
                if shares[batch.owner] >= AT_ONCE or len(self._running) >= MOST_AT_ONCE:
                    continue
                shares[batch.owner] += 1
                self._stops[batch.id] = asyncio.get_running_loop().create_future()
                self._counts[batch.id] = batch.request_counts
                task = self._running[batch.id] = asyncio.create_task(self._run(batch))
                task.add_done_callback(lambda _, id=batch.id: self._ended(id))  # type: ignore[misc]

    def _ended(self, id: str) -> None:
        del self._running[id], self._stops[id], self._counts[id]
        self._woken.set()  # the next one has a place

    # -- one batch

    async def _run(self, batch: StoredBatch) -> None:
        """Run a batch. What the disk refuses is tried again until the window is over: no answer is thrown away."""
        while True:
            try:
                return await self._run_once(msgspec.structs.replace(batch))  # what is on the disk stays what it was
            except OSError as error:
                if isinstance(error, FileNotFoundError) or time.time() >= batch.expires_at:  # it will not come back
                    return await self._fail(batch, [_error("storage_error", str(error))])
                log.error("%s is tried again in %g s: %s", batch.id, AGAIN_S, error)
            await asyncio.sleep(AGAIN_S)

    async def _run_once(self, batch: StoredBatch) -> None:
        """Raises OSError."""
        try:
            lines = await asyncio.to_thread(
                Lines, self.store.input_of(batch.id), self._app[FRONT].settings.max_request_bytes, (batch.endpoint,),
                MAX_LINES,
            )  # fmt: skip
            try:
                await self._run_lines(batch, lines)
            finally:
                lines.close()
        except OSError:
            raise
        except ConfigError as error:
            await self._fail(batch, [_error("storage_error", str(error))])
        except Exception as error:
            log.exception("%s failed", batch.id)
            words = f"the server failed while it ran this batch: {type(error).__name__}."
            await self._fail(batch, [_error("server_error", words)])

    async def _run_lines(self, batch: StoredBatch, lines: Lines) -> None:
        if batch.status == "validating" and not await self._validate(batch, lines):
            return
        head = {"batch": batch.id, "input": lines.digest}
        journal = await asyncio.to_thread(Journal, self.store.journal_of(batch.id), head)
        _count(batch, journal)  # who was killed here had answered more than its last counts say
        try:
            if batch.status == "in_progress":
                state = await self._answer_all(batch, lines, journal)
            else:  # a process before this one had come so far
                state = "cancelled" if batch.status == "cancelling" else "completed"
            await self._finish(batch, lines, journal, state)
        finally:
            journal.close()

    async def _validate(self, batch: StoredBatch, lines: Lines) -> bool:
        errors = await asyncio.to_thread(_errors, lines)
        batch.request_counts.total = len(lines)
        if errors:
            await self._fail(batch, errors)
            return False
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await asyncio.to_thread(self.store.save_batch, batch)
        return True

    async def _fail(self, batch: StoredBatch, errors: list[dict[str, object]]) -> None:
        log.info("%s failed: %s", batch.id, errors[0]["message"])
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), errors
        try:
            await asyncio.to_thread(self._end, batch)
        except OSError as error:
            log.error("%s: %s", batch.id, error)
            self._given_up.add(batch.id)

    def _end(self, batch: StoredBatch) -> None:
        self.store.save_batch(batch)
        self.store.forget_work(batch.id)

    async def _answer_all(self, batch: StoredBatch, lines: Lines, journal: Journal) -> str:
        """Answer what is left; the state in which the batch ends."""
        left = batch.expires_at - time.time()
        if left <= 0:
            return "expired"
        if await asyncio.to_thread(self.store.room) < journal.size:
            return "failed"
        stop = self._stops[batch.id]
        kept = self._counted(batch, journal, stop)
        run = Run(lines, journal, self._one(batch), self._app[FRONT].settings.batch_window, on_kept=kept)
        going = asyncio.create_task(run.go())
        try:
            waited: list[asyncio.Future[Any]] = [going, stop]
            await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            over = going.done()
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
        if over:
            going.result()
            return "completed"
        return stop.result() if stop.done() else "expired"

    def _one(self, batch: StoredBatch) -> Answer:
        async def one(line: Line) -> tuple[int, bytes]:
            return await answer(self._app, line.url, line.body, batch.owner, batched=True, places=self._places)

        return one

    def _counted(self, batch: StoredBatch, journal: Journal, stop: asyncio.Future[str]) -> Callable[[], None]:
        """What is done when answers are on the disk, in the thread that wrote them."""
        saved, loop = time.monotonic(), asyncio.get_running_loop()

        def kept() -> None:
            nonlocal saved
            _count(batch, journal)
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                self.store.save_batch(batch)
                if self.store.room() < journal.size:  # its output needs as much again
                    loop.call_soon_threadsafe(_stop, stop, "failed")

        return kept

    async def _finish(self, batch: StoredBatch, lines: Lines, journal: Journal, state: str) -> None:
        """Make the files of a batch that is over; killed and begun again it makes the same ones."""
        now = int(time.time())
        batch.request_counts.total = len(lines)
        if state == "cancelled":
            batch.cancelling_at = batch.cancelling_at or now
        else:
            batch.finalizing_at = batch.finalizing_at or now
        if state == "completed":
            batch.status = "finalizing"
            await asyncio.to_thread(self.store.save_batch, batch)
        elif state == "failed":
            batch.errors = [_error("storage_limit", self.store.full().message)]
        await asyncio.to_thread(self._publish, batch, lines, journal, state)
        setattr(batch, f"{state}_at", int(time.time()))
        batch.status = state
        await asyncio.to_thread(self._end, batch)

    def _publish(self, batch: StoredBatch, lines: Lines, journal: Journal, state: str) -> None:
        if state != "completed":
            records = _given_up(lines, journal, state)
            if 2 * sum(len(data) for _, _, data in records) < self.store.room():  # here, and in the file of errors
                journal.append(records)
            elif state != "failed":
                batch.errors = [_error("storage_limit", self.store.full().message)]
        _count(batch, journal)
        batch.used = None
        for name, ok in (("output", True), ("error", False)):
            if not journal.counts[ok]:
                continue
            now = int(time.time())
            id = "file-" + hashlib.sha256(f"{batch.id} {name}".encode()).hexdigest()[:32]
            info = StoredFile(
                id, batch.owner, 0, now, now + batch.output_expires_after, f"{batch.id}_{name}.jsonl", "batch_output"
            )
            found = _rows(journal, ok, batch)
            self.store.write_file(info, lambda file, found=found: file.writelines(found))  # type: ignore[misc]
            setattr(batch, f"{name}_file_id", id)


def _stop(stop: asyncio.Future[str], why: str) -> None:
    if not stop.done():
        stop.set_result(why)


async def _locked(fd: int) -> None:
    """Take the lock, however long another process has it."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:  # in a thread that nobody waits for when the process ends
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=wait, name="quire-batches-lock", daemon=True).start()
    await done.wait()


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, object]:
    """OpenAI's form of an error of a batch."""
    return {"code": code, "message": message, "param": param, "line": line}


def _errors(lines: Lines) -> list[dict[str, object]]:
    """What is wrong with a batch's input."""
    if lines.over:
        words = f"the input file holds over {MAX_LINES} requests or empty lines, the most of a batch; send it in parts."
        return [_error("too_many_requests", words, "input_file_id")]
    if not len(lines):
        return [_error("empty_file", "the input file holds no request.", "input_file_id")]
    found: list[dict[str, object]] = []
    for number, each in lines.check():
        found.append(_error(each.code, each.message, each.param, number))
        if len(found) == MAX_TOLD:
            break
    return found


def _count(batch: StoredBatch, journal: Journal) -> None:
    batch.request_counts.completed, batch.request_counts.failed = journal.counts[True], journal.counts[False]


_WHY = {
    "expired": "its completion window is over", "cancelled": "the batch was cancelled",
    "failed": "the server has no room for more answers",
}  # fmt: skip


def _given_up(lines: Lines, journal: Journal, state: str) -> list[Record]:
    """What is said of every request that was not answered: why not."""
    why = _WHY[state]
    records = []
    for place in range(len(lines)):
        if place not in journal:
            try:
                custom_id: str | None = lines.read(place).custom_id
            except LineError as error:
                custom_id = error.custom_id
            told = not_done(custom_id, f"batch_{state}", f"This request was not executed: {why}.")
            records.append((place, False, told))
    return records


def _rows(journal: Journal, ok: bool, batch: StoredBatch) -> Iterator[bytes]:
    """The lines of the output, whose tokens are counted, or of the errors."""
    for _, each, data in journal.in_order():
        if each is ok:
            if ok:
                count_used(batch, data)
            yield data + b"\n"
