"""Stores and loads of blocks beside the steps, as the scheduler's ``Move`` says.

The compute thread only hands them over. Stores, loads from host memory, loads from disk and files have a thread each,
so that none waits for a slower one; on a GPU copies go on a stream of their own, through pinned memory. The scheduler
sees to it that no two touch the same place: a slot is written to or read, and a block that is loaded is nobody's. One
thing is left to see to here: a block that is being stored is not overwritten before its bytes are read (``guard``).
"""

from __future__ import annotations

import contextlib
import logging
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
from ...proto.messages import Lease, Move, Moved, SpeculativePlan, StepPlan, Tiers
from ..kv_cache import KVCache
from ..state import PlanError, column
from ..transfer import RING
from .disk import Disk
from .host_memory import HostMemory
from .line import Line
from .rates import FEW_TOKENS, PromptRate, Rate

log = logging.getLogger(__name__)

WRITE_BEHIND = 256 << 20
"""Bytes that wait to be written to disk, at most; what comes then is not kept there."""
TOLD_AT_ONCE = 4096
"""Hashes in one message, at most."""
HANGS_S = 5.0
"""After so long without a block a load from disk is given up; then nothing is read until the disk answers."""
FLUSH_S = 3.0
"""How long a process that ends writes what waits. Whoever ends it kills it after five seconds."""


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
    done: threading.Event = field(default_factory=threading.Event)  # of a load: it is answered
    tried: int = 0  # of a load: places that have their block, or failed to
    failed: list[int] = field(default_factory=list)


class Mover:
    """One process's tiers over its cache ``kv``, in ``host`` memory and on ``disk``, either of which may be None.

    ``send`` takes messages from any thread; ``fail`` the error of a thread here, which ends the lease.
    """

    def __init__(
        self, kv: KVCache, host: HostMemory | None, disk: Disk | None, send: Callable[[Any], None],
        fail: Callable[[Lease, Exception], None],
    ):  # fmt: skip
        self.kv, self._memory, self._disk, self._send, self._fail = kv, host, disk, send, fail
        self._host = None if host is None else host.pages
        self.slots = 0 if self._host is None else len(self._host)
        self._device = kv.k[0].device
        self._cuda = self._device.type != "cpu"
        self._streams = [torch.cuda.Stream(self._device) for _ in range(3)] if self._cuda else [None] * 3
        self._pages = [self._page() for _ in range(2)]  # of stores that go to disk alone, and of loads from there
        self._lease: Lease | None = None
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=RING)  # tokens, rows and begin of steps under way
        self._ended_at = 0.0
        self._storing: dict[int, _Job] = {}  # by block
        self._lock = threading.Lock()
        self._into = threading.Lock()  # held while a loaded block is written, and where it must not be any more
        self._hangs = False  # a file is being read, for too long
        self._behind = 0  # bytes that wait to be written
        self._told: tuple[list[bytes], list[bytes]] = [], []  # written and lost, not yet sent
        self.load, self.disk, self.token = Rate(), Rate(), PromptRate()
        self._stores, self._loads = Line("kv-stores", self._store), Line("kv-loads", self._load_host)
        self._reads, self._writes = Line("kv-reads", self._load_disk), Line("kv-writes", self._write)
        self._watch = Line("kv-watch", self._watch_load)

    def _page(self) -> torch.Tensor:
        return torch.empty((1, self.kv.bytes_of_block), dtype=torch.uint8, pin_memory=self._cuda)

    # -- the compute thread's side

    def sizes(self, lease: Lease) -> Tiers:
        """What the scheduler is told before Ready."""
        return Tiers(lease, self.slots, self._disk is not None, self.kv.bytes_of_block)

    def probe(self, count: int) -> tuple[float, float]:
        """Seconds to load a block and to store one, measured on the first ``count``, which nobody uses yet: the best
        of a few, as each waits now and then for a processor."""
        page, after, took = self._pages[0], None, []
        if self._cuda:
            after = torch.cuda.Event()
            after.record()
        for move in (self.kv.read_blocks, self.kv.write_blocks) * 4:  # the first takes pages from the system
            began = time.monotonic()
            with torch.inference_mode(), self._on(0, after):
                for block in range(count):
                    move([block], page)
                self._synchronize(0)
            took.append(max(time.monotonic() - began, 1e-9) / max(1, count))
        load_s, store_s = min(took[1::2]), min(took[::2])
        self.load.add(1, load_s)
        return load_s, store_s

    def open(self, lease: Lease) -> None:
        """A lease has begun, and Ready was sent: tell what is on disk."""
        self._lease = lease
        if self._disk is not None:
            found = self._disk.hashes()
            for first in range(0, len(found), TOLD_AT_ONCE):
                self._send(Moved(lease, written=b"".join(found[first : first + TOLD_AT_ONCE])))

    def end_lease(self) -> None:
        """Nobody asks for what is under way any more; it is waited for, as it uses blocks. A file that is being read
        is not, for that may take for ever: what comes of it is written nowhere."""
        with self._into:
            self._lease = None
            self._synchronize(2)
        self._steps.clear()
        for line in (self._stores, self._loads):
            line.join()

    def close(self) -> None:
        """End the threads once they have done what they have. What waits for the disk is written, as far as FLUSH_S
        goes, and host memory given back."""
        self.end_lease()
        for line in (self._stores, self._loads, self._reads, self._watch, self._writes):
            line.close()
        deadline = time.monotonic() + FLUSH_S
        if not self._writes.join(FLUSH_S):
            log.warning("%d bytes of KV blocks are not written to disk after %g s", self._behind, FLUSH_S)
        if self._memory is not None and self._reads.join(max(0.0, deadline - time.monotonic())):
            self._host = None
            self._memory.close()

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
            if min(job.slots) >= 0:
                self._loads.put(job)
            elif self._hangs:
                self._loaded(job, given_up=True)
            else:
                self._reads.put(job)
                self._watch.put(job)

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
        # How many tokens a verification runs its plan does not say.
        tokens = 0 if isinstance(plan, SpeculativePlan) and plan.draft_rows else int(counts.sum())
        self._steps.append((tokens, len(counts), time.monotonic()))

    def ended(self) -> None:
        """The oldest step that was begun is done: those of prompts are what the rate of computing is measured by."""
        if self._steps:
            tokens, rows, began = self._steps.popleft()
            now = time.monotonic()
            if tokens - rows >= FEW_TOKENS:  # else it is of decodes
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
        self._hangs = False

    def _load(self, job: _Job, stream: int, rate: Rate) -> None:
        for store in job.waits:
            store.done.wait()
        began = time.monotonic()
        try:
            with torch.inference_mode(), self._on(stream, job.after):
                for place, slot in enumerate(job.slots):
                    page = self._pages[1] if slot < 0 or self._host is None else self._host[slot : slot + 1]
                    found = slot >= 0 or self._read(job, place, page)
                    with self._into:
                        if self._over(job):
                            return  # nobody waits for it, and the block is somebody else's
                        if found:
                            self.kv.write_blocks([job.blocks[place]], page)
                        else:
                            job.failed.append(place)
                        if slot < 0:
                            self._synchronize(stream)  # the page is used again
                        job.tried = place + 1
                self._synchronize(stream)
            rate.add(len(job.blocks), time.monotonic() - began)
            self._loaded(job)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(job.lease, error)

    def _read(self, job: _Job, place: int, page: torch.Tensor) -> bool:
        """Have a file's bytes in ``page``; False where they are not to be had."""
        if self._disk is None or self._over(job):
            return False
        return self._disk.read(job.hashes[place], memoryview(page.numpy()[0]))

    def _over(self, job: _Job) -> bool:
        """Nobody waits for this load any more."""
        return job.done.is_set() or job.lease != self._lease

    def _loaded(self, job: _Job, given_up: bool = False) -> None:
        """Answer, unless it was answered before. ``given_up``: what has not come by now is computed, and a read that
        comes back later changes nothing any more."""
        with self._into:
            if job.done.is_set():
                return
            if given_up:
                self._synchronize(2)
                job.failed += range(job.tried, len(job.blocks))
            job.done.set()
        failed, rates = job.failed, (self.load.each, self.disk.each, self.token.each)
        lost = b"".join(job.hashes[place] for place in failed if job.slots[place] < 0)
        self._answer(job, Moved(job.lease, job.number, i32(failed) if failed else b"", b"", lost, *rates))

    def _watch_load(self, job: _Job) -> None:
        """Loads from disk are watched in the order in which they are read."""
        tried = -1
        while not self._over(job):
            if job.tried == tried:
                self._hang(job)
            if self._hangs:
                self._loaded(job, given_up=True)
            tried = job.tried
            job.done.wait(HANGS_S)

    def _hang(self, job: _Job) -> None:
        """Nothing is read until the read that this job waits for comes back."""
        with self._into:
            if job.done.is_set():
                return
            self._hangs = True
        log.warning("a file of the KV cache's disk tier was not read in %g s; blocks are computed until it answers",
                    HANGS_S)  # fmt: skip

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
