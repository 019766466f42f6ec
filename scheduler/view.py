"""The scheduler's state at one moment, for people who look: queue, rows, workers, and a map of the KV blocks. It reads,
and changes nothing but what it has made itself. No IO.

However many frontends ask, a view is made once in ``KEEP_S``, and a map of a large pool more seldom, so that looking
costs the same for any number of eyes and any size of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ..proto.messages import BlockMap, GetView, Running, View, Waiting, WorkerView
from ..proto.messages.view import CELLS, SHARED
from .beam_group import BeamGroup
from .operators import info_of
from .replica import Replica
from .request import Sequence
from .worker import Worker
from .worker_registry import WorkerRegistry

KEEP_S = 0.2
MAP_BLOCKS_S = 100_000
"""Blocks that are looked at in a second at most: a pool of twice as many is mapped every two seconds."""
MOST_WAITING, MOST_RUNNING, MOST_MAPS, MOST_WORKERS = 64, 128, 16, 64
CELL_BYTES = 48 * 1024
"""Bytes of all ``Running.cells`` of a view: about 100 KiB is all that a view takes."""


class Views:
    """Makes views, and keeps the last one for a moment."""

    def __init__(self, registry: WorkerRegistry):
        self._registry, self._core = registry, registry.core
        self._view: View | None = None
        self._maps: list[BlockMap] = []
        self._cells: dict[tuple[int, int], bytes] = {}  # of the sequences that ran when the maps were made
        self._again_at = self._maps_again_at = -np.inf

    def answer(self, message: GetView, bad_frames: int) -> View:
        """What one asker is told. From here on the steps are kept, until nobody has asked for a while."""
        core, now = self._core, self._core.clock()
        watch = core.open_watch()
        if self._view is None or now >= self._again_at:
            self._again_at = now + KEEP_S
            self._view = self._make(now, bad_frames)
        return replace(self._view, token=message.token, now=now, steps=watch.since(message.since))

    def forget(self) -> None:
        """Nobody watches any more."""
        self._view, self._maps, self._cells = None, [], {}
        self._again_at = self._maps_again_at = -np.inf

    def _make(self, now: float, bad_frames: int) -> View:
        core, replicas = self._core, list(self._core.replicas.values())
        share = max(1, MOST_RUNNING // max(len(replicas), 1))
        running = [(replica, list(islice(_sequences(replica), share))) for replica in replicas]
        if now >= self._maps_again_at:
            self._maps_again_at = now + sum(r.pool.num_blocks for r in replicas) / MAP_BLOCKS_S
            self._map(running)
        workers = islice(self._registry.workers.items(), MOST_WORKERS)
        in_line = islice(core.queue.in_turn(core.running_by_account), MOST_WAITING)
        return View(
            token=0,
            now=now,
            stats=core.stats(0, bad_frames, self._registry.compilations, self._registry.slumber.state),
            workers=[_worker(peer, worker) for peer, worker in workers],
            waiting=[
                Waiting(seq.uid, seq.index, seq.prompt_len, seq.output_len, seq.request.arrival) for seq in in_line
            ],
            running=[self._running(replica, seq) for replica, seqs in running for seq in seqs],
            maps=self._maps,
            steps=[],
        )

    def _map(self, running: list[tuple[Replica, list[Sequence]]]) -> None:
        """Maps of the first replicas, and where in them each sequence holds blocks."""
        self._maps, self._cells, room = [], {}, CELL_BYTES
        for replica, seqs in running[:MOST_MAPS]:
            found = block_map(replica)
            self._maps.append(found)
            for seq in seqs:
                cells = cells_of(seq, found.fold)
                if (room := room - len(cells)) < 0:
                    break
                self._cells[seq.uid, seq.index] = cells

    def _running(self, replica: Replica, seq: Sequence) -> Running:
        phase = "prefill" if seq.prefilling else "beam" if isinstance(seq, BeamGroup) else "decode"
        return Running(
            seq.uid, seq.index, replica.number, seq.row, "move" if seq in replica.held else phase, seq.prompt_len,
            seq.computed, seq.total, seq.limit, seq.request.arrival, self._cells.get((seq.uid, seq.index), b""),
        )  # fmt: skip


def _sequences(replica: Replica) -> Iterator[Sequence]:
    return chain(replica.prefilling, replica.decoding)


def _worker(peer: str, worker: Worker) -> WorkerView:
    block_bytes = worker.loaded.block_bytes if worker.loaded is not None else 0
    return WorkerView(info_of(peer, worker), worker.phase.value, worker.resident, max(0, block_bytes))


def block_map(replica: Replica) -> BlockMap:
    """The states of its blocks, several in one cell where they are more than ``CELLS``."""
    states = replica.pool.states()
    fold = max(1, -(-len(states) // CELLS))
    _, cached, used, shared = np.bincount(states, minlength=SHARED + 1).tolist()
    if fold > 1:
        states = np.pad(states, (0, -len(states) % fold)).reshape(-1, fold).max(axis=1)
    return BlockMap(replica.number, replica.pool.num_blocks, fold, states.tobytes(), cached, used + shared, shared)


def cells_of(seq: Sequence, fold: int) -> bytes:
    """Where it holds blocks, as ``Running.cells`` has it."""
    if isinstance(seq, BeamGroup):
        blocks = np.array([*chain(*seq.holdings().tables)], np.int32)
    else:
        blocks = seq.columns.tables[seq.row, : seq.columns.num_blocks[seq.row]]
    return runs(np.unique(blocks // fold))


def runs(cells: NDArray[np.int32]) -> bytes:
    """Rising numbers as i32 pairs: the first of those that follow one another, and how many they are."""
    if not len(cells):
        return b""
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(cells) != 1) + 1))
    lengths = np.diff(np.append(firsts, len(cells)))
    return np.stack((cells[firsts], lengths), axis=1).astype("<i4").tobytes()
