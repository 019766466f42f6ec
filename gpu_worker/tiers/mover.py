"""Stores and loads of blocks beside the steps, as the scheduler's ``Move`` says.

The compute thread only hands them over. Stores, loads from host memory, loads from disk and files have a thread each,
so that none waits for a slower one; on a GPU copies go on a stream of their own, through pinned memory. The scheduler
sees to it that no two touch the same place: a slot is written to or read, and a block that is loaded is nobody's. One
thing is left to see to here: a block that is being stored is not overwritten before its bytes are read (``guard``).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...proto.codec import i32
from ...proto.hashing import HASH_SIZE
from ...proto.messages import Lease, Move, Moved, StepPlan, Tiers
from ..kv_cache import KVCache
from ..state import PlanError, column
from ..transfer import RING
from .disk import Disk

log = logging.getLogger(__name__)

WRITE_BEHIND = 256 << 20
"""Bytes that wait to be written to disk, at most; what comes then is not kept there."""
TOLD_AT_ONCE = 4096
"""Hashes in one message, at most."""
FEW_TOKENS = 32
"""Prompt tokens of a step, by fewer of which no rate is measured."""
_OLD = 0.5
"""Weight of what was measured before."""


@dataclass(slots=True)
class _Job:
    """What one Move stores, or loads."""

    lease: Lease
    number: int
    blocks: list[int]
    slots: list[int]
    files: list[int]  # of stores
    hashes: list[bytes]
    after: Any  # CUDA event: what was launched before this came
    waits: list[_Job] = field(default_factory=list)  # stores out of blocks that are loaded into
    done: threading.Event = field(default_factory=threading.Event)


class Rate:
    """Seconds for each of something, by the last that were measured; 0 before any."""

    def __init__(self) -> None:
        self.each = 0.0

    def add(self, count: int, seconds: float) -> None:
        """So many took so long."""
        if count:
            self.each = _OLD * self.each + (1 - _OLD) * seconds / count if self.each else seconds / count


class _Line:
    """A thread that does what is handed over, in order."""

    def __init__(self, name: str, do: Callable[[Any], None]):
        self._do = do
        self._queue: queue.Queue[Any] = queue.Queue()  # as short as the scheduler's bound on Moves, or WRITE_BEHIND
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Any) -> None:
        self._queue.put(job)

    def empty(self) -> bool:
        return self._queue.empty()

    def join(self) -> None:
        """Wait until all is done."""
        self._queue.join()

    def close(self) -> None:
        """End the thread when all is done."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            finally:
                self._queue.task_done()
        self._queue.task_done()


class Mover:
    """One process's tiers over its cache ``kv``. ``host`` uint8 [slots, bytes of a block], or None.

    ``send`` takes messages from any thread; ``fail`` the error of a thread here, which ends the lease.
    """

    def __init__(
        self, kv: KVCache, host: torch.Tensor | None, disk: Disk | None, send: Callable[[Any], None],
        fail: Callable[[Lease, Exception], None],
    ):  # fmt: skip
        self.kv, self.slots, self._host, self._disk, self._send, self._fail = (
            kv, 0 if host is None else len(host), host, disk, send, fail
        )  # fmt: skip
        self._device = kv.k[0].device
        self._cuda = self._device.type != "cpu"
        self._streams = [torch.cuda.Stream(self._device) for _ in range(3)] if self._cuda else [None] * 3
        self._pages = [self._page() for _ in range(2)]  # of stores that go to disk alone, and of loads from there
        self._lease: Lease | None = None
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=RING)  # tokens, rows and begin of steps under way
        self._ended_at = 0.0
        self._storing: dict[int, _Job] = {}  # by block
        self._lock = threading.Lock()
        self._behind = 0  # bytes that wait to be written
        self._told: tuple[list[bytes], list[bytes]] = [], []  # written and lost, not yet sent
        self.load, self.disk, self.token = Rate(), Rate(), Rate()
        self._stores, self._loads = _Line("kv-stores", self._store), _Line("kv-loads", self._load_host)
        self._reads, self._writes = _Line("kv-reads", self._load_disk), _Line("kv-writes", self._write)

    def _page(self) -> torch.Tensor:
        return torch.empty((1, self.kv.bytes_of_block), dtype=torch.uint8, pin_memory=self._cuda)

    # -- the compute thread's side

    def sizes(self, lease: Lease) -> Tiers:
        """What the scheduler is told before Ready."""
        return Tiers(lease, self.slots, self._disk is not None, self.kv.bytes_of_block)

    def probe(self, count: int) -> tuple[float, float]:
        """Seconds to load a block and to store one, measured on the first ``count``, which nobody uses yet."""
        page, after, took = self._pages[0], None, []
        if self._cuda:
            after = torch.cuda.Event()
            after.record()
        write = self.kv.write_blocks  # its first time takes pages of the cache from the system
        for move in (self.kv.read_blocks, write, self.kv.read_blocks, write):
            began = time.monotonic()
            with torch.inference_mode(), self._on(0, after):
                for block in range(count):
                    move([block], page)
                self._synchronize(0)
            took.append(max(time.monotonic() - began, 1e-9) / max(1, count))
        self.load.add(1, took[3])
        return took[3], took[2]

    def open(self, lease: Lease) -> None:
        """A lease has begun, and Ready was sent: tell what is on disk."""
        self._lease = lease
        if self._disk is not None:
            found = self._disk.hashes()
            for first in range(0, len(found), TOLD_AT_ONCE):
                self._send(Moved(lease, written=b"".join(found[first : first + TOLD_AT_ONCE])))

    def end_lease(self) -> None:
        """Nobody asks for what is under way any more; it is waited for, as it uses blocks."""
        self._lease = None
        self._steps.clear()
        for line in (self._stores, self._loads, self._reads):
            line.join()

    def close(self) -> None:
        """End the threads once they have done what they have; files that wait are written."""
        for line in (self._stores, self._loads, self._reads):
            line.join()
            line.close()
        self._writes.join()
        self._writes.close()

    def move(self, move: Move) -> None:
        """Begin what the scheduler asks for. Raises PlanError."""
        after = None
        if self._cuda:
            after = torch.cuda.Event()
            after.record()
        if move.store_blocks:
            job = self._job(move, move.store_blocks, move.store_slots, move.store_hashes, after)
            job.files = np.frombuffer(move.store_files, np.int8).tolist()
            if len(job.files) != len(job.blocks) or (self._disk is None and any(job.files)):
                raise PlanError(f"store_files has {len(job.files)} items for {len(job.blocks)} blocks")
            with self._lock:
                self._storing.update(dict.fromkeys(job.blocks, job))
            self._stores.put(job)
        if move.load_blocks:
            job = self._job(move, move.load_blocks, move.load_slots, move.load_hashes, after)
            if self._disk is None and min(job.slots) < 0:
                raise PlanError("load_slots asks for the disk, where nothing is kept")
            job.waits = self._stored_from(job.blocks)
            (self._reads if min(job.slots) < 0 else self._loads).put(job)

    def _job(self, move: Move, blocks: bytes, slots: bytes, hashes: bytes, after: Any) -> _Job:
        held = column("blocks", blocks, self.kv.num_blocks).tolist()
        places = column("slots", slots, self.slots, low=-1).tolist()
        if len(places) != len(held) or len(hashes) != HASH_SIZE * len(held) or len(set(held)) < len(held):
            raise PlanError(f"a Move of {len(held)} blocks has {len(places)} slots and {len(hashes)} bytes of hashes")
        names = [hashes[at : at + HASH_SIZE] for at in range(0, len(hashes), HASH_SIZE)]
        return _Job(move.lease, move.number, held, places, [], names, after)

    def guard(self, blocks: bytes) -> None:
        """Wait for the stores out of these (i32), which are written over next. Of most there are none."""
        if self._storing and blocks:
            for job in self._stored_from(np.frombuffer(blocks, np.int32).tolist()):
                job.done.wait()

    def _stored_from(self, blocks: list[int]) -> list[_Job]:
        with self._lock:
            found = [self._storing[block] for block in blocks if block in self._storing]
        return list({id(job): job for job in found}.values())

    def begin(self, plan: StepPlan) -> None:
        """``plan`` is launched next."""
        if self._storing:
            self.guard(plan.delta_blocks + plan.copy_dst)
        counts = np.frombuffer(plan.counts, np.int32)
        self._steps.append((int(counts.sum()), len(counts), time.monotonic()))

    def ended(self) -> None:
        """The oldest step that was begun is done: those of prompts are what the rate of computing is measured by."""
        if self._steps:
            tokens, rows, began = self._steps.popleft()
            now = time.monotonic()
            if tokens - rows >= FEW_TOKENS:
                self.token.add(tokens, now - max(began, self._ended_at))
            self._ended_at = now

    # -- threads

    def _store(self, job: _Job) -> None:
        lost: list[bytes] = []
        try:
            with torch.inference_mode(), self._on(0, job.after):
                for block, slot, to_disk, block_hash in zip(job.blocks, job.slots, job.files, job.hashes, strict=True):
                    page = self._pages[0] if slot < 0 or self._host is None else self._host[slot : slot + 1]
                    self.kv.read_blocks([block], page)
                    if to_disk:
                        self._synchronize(0)
                        if not self._behind_put(job.lease, block_hash, page):
                            lost.append(block_hash)
                self._synchronize(0)
        except Exception as error:  # noqa: BLE001  # the device is lost, and this thread has nobody else to tell
            self._fail(job.lease, error)
            return
        finally:
            with self._lock:
                for block in job.blocks:
                    if self._storing.get(block) is job:
                        del self._storing[block]
            job.done.set()
        self._answer(job, Moved(job.lease, job.number, lost=b"".join(lost)))

    def _behind_put(self, lease: Lease, block_hash: bytes, page: torch.Tensor) -> bool:
        """Have a file written of these bytes. False where too many wait."""
        size = self.kv.bytes_of_block
        with self._lock:
            if self._behind + size > max(WRITE_BEHIND, size):
                return False
            self._behind += size
        self._writes.put((block_hash, page.numpy().tobytes()))
        return True

    def _load_host(self, job: _Job) -> None:
        self._load(job, 1, self.load)

    def _load_disk(self, job: _Job) -> None:
        self._load(job, 2, self.disk)

    def _load(self, job: _Job, stream: int, rate: Rate) -> None:
        for store in job.waits:
            store.done.wait()
        failed, began = [], time.monotonic()
        try:
            with torch.inference_mode(), self._on(stream, job.after):
                for place, (block, slot, block_hash) in enumerate(zip(job.blocks, job.slots, job.hashes, strict=True)):
                    if job.lease != self._lease:
                        return  # nobody waits for it
                    page = self._pages[1]
                    if slot >= 0 and self._host is not None:
                        page = self._host[slot : slot + 1]
                    elif self._disk is None or not self._disk.read(block_hash, memoryview(page.numpy()[0])):
                        failed.append(place)
                        continue
                    self.kv.write_blocks([block], page)
                    if slot < 0:
                        self._synchronize(stream)  # the page is used again
                self._synchronize(stream)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(job.lease, error)
            return
        rate.add(len(job.blocks), time.monotonic() - began)
        rates = self.load.each, self.disk.each, self.token.each
        lost = b"".join(job.hashes[place] for place in failed if job.slots[place] < 0)
        self._answer(job, Moved(job.lease, job.number, i32(failed) if failed else b"", b"", lost, *rates))

    def _write(self, item: tuple[bytes, bytes]) -> None:
        assert self._disk is not None  # nothing else is handed over
        block_hash, data = item
        there, made_room = self._disk.write(block_hash, data)
        with self._lock:
            self._behind -= self.kv.bytes_of_block
        written, lost = self._told
        (written if there else lost).append(block_hash)
        lost += made_room
        if self._writes.empty() or len(written) + len(lost) >= TOLD_AT_ONCE:
            self._told = [], []
            if (lease := self._lease) is not None:
                self._send(Moved(lease, written=b"".join(written), lost=b"".join(lost)))

    def _answer(self, job: _Job, message: Moved) -> None:
        if job.lease == self._lease:
            self._send(message)

    # -- the device

    def _on(self, number: int, after: Any) -> Any:
        """Within this, copies go on a stream of their own, behind what was launched before."""
        stream = self._streams[number]
        if stream is not None:
            stream.wait_event(after)
            return torch.cuda.stream(stream)
        return contextlib.nullcontext()

    def _synchronize(self, number: int) -> None:
        stream = self._streams[number]
        if stream is not None:
            stream.synchronize()
