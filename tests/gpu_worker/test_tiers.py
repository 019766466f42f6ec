"""A worker's tiers: files that outlive it and can be trusted, and blocks moved beside the steps."""

from __future__ import annotations

import logging
import os
import queue
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.state import PlanError
from quire.gpu_worker.tiers import disk as disk_module
from quire.gpu_worker.tiers import host_memory
from quire.gpu_worker.tiers import mover as mover_module
from quire.gpu_worker.tiers.disk import HEAD, MAGIC, Disk
from quire.gpu_worker.tiers.host_memory import HostMemory
from quire.gpu_worker.tiers.keeper import Keeper
from quire.gpu_worker.tiers.mover import Mover
from quire.gpu_worker.tiers.together import Together
from quire.proto.codec import from_i32, i8, i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import Lease, Move, Moved, SpeculativePlan, StepPlan

LEASE = Lease(1, 0, 1)
SIZE = 200
NAMES = [bytes([n]) * 16 for n in range(1, 9)]


def page(n: int) -> bytes:
    return bytes((n * 31 + i) % 256 for i in range(SIZE))


def disk_at(path: Path, blocks: int = 4) -> Disk:
    return Disk(path / "kv", blocks * (SIZE + HEAD), SIZE)


def read(disk: Disk, name: bytes) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if disk.read(name, memoryview(into)) else None


def file_of(path: Path, name: bytes) -> Path:
    return path / "kv" / name.hex()[:2] / f"{name.hex()}.kv"


def test_files_are_there_after_a_restart_and_nobody_elses(tmp_path):
    disk = disk_at(tmp_path)
    assert disk.write(NAMES[0], page(0)) == (True, [])
    assert read(disk_at(tmp_path), NAMES[0]) == page(0)
    assert disk.write(NAMES[0], page(0)) == (True, [])  # it is there
    path = file_of(tmp_path, NAMES[0])
    modes = [os.stat(each).st_mode & 0o777 for each in (tmp_path / "kv", path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_what_was_used_longest_ago_makes_room(tmp_path):
    disk = disk_at(tmp_path)
    for n in range(4):
        disk.write(NAMES[n], page(n))
        os.utime(file_of(tmp_path, NAMES[n]), ns=(n, n))
    assert read(disk, NAMES[0]) == page(0)
    assert disk_at(tmp_path).hashes() == [NAMES[1], NAMES[2], NAMES[3], NAMES[0]]
    assert disk.write(NAMES[4], page(4)) == (True, [NAMES[1]])
    assert not file_of(tmp_path, NAMES[1]).exists() and NAMES[0] in disk


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed", "empty", "linked"])
def test_damaged_files_are_computed_with_one_warning(tmp_path, caplog, damage):
    disk = disk_at(tmp_path)
    for n in (0, 1):
        disk.write(NAMES[n], page(n))
    for n in (0, 1):
        path = file_of(tmp_path, NAMES[n])
        data = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(data[:-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "flipped":
            data[-7] ^= 1
            path.write_bytes(data)
        elif damage == "renamed":  # of another block, whole
            other = disk_at(tmp_path / "other")
            other.write(NAMES[5], page(5))
            path.write_bytes(file_of(tmp_path / "other", NAMES[5]).read_bytes())
        else:
            elsewhere = tmp_path / f"elsewhere{n}"
            path.rename(elsewhere)
            path.symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING):
        assert [read(disk, NAMES[n]) for n in (0, 1, 1)] == [None] * 3
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert NAMES[0] not in disk
    if damage != "linked":
        assert disk.write(NAMES[0], page(0))[0] and read(disk, NAMES[0]) == page(0)


def test_what_is_not_ours_stays_and_is_left_its_name(tmp_path):
    path = file_of(tmp_path, NAMES[0])
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_bytes(b"x" * (SIZE + HEAD))
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    disk = disk_at(tmp_path)
    assert read(disk, NAMES[0]) is None
    assert disk.write(NAMES[0], page(0)) == (False, [])
    assert path.read_bytes() == b"x" * (SIZE + HEAD) and (tmp_path / "kv" / "notes.txt").exists()


def test_unfinished_files_of_a_killed_process_go(tmp_path):
    disk_at(tmp_path).write(NAMES[0], page(0))
    left = file_of(tmp_path, NAMES[0]).with_suffix(".4194305.1.new")  # no process has such a number
    left.write_bytes(MAGIC)
    disk = disk_at(tmp_path)
    assert not left.exists() and disk.hashes() == [NAMES[0]]


def test_a_full_disk_is_warned_of_once_and_tried_again(tmp_path, monkeypatch, caplog):
    disk, now = disk_at(tmp_path), [0.0]
    full = [True]

    def write(file: Any, data: Any) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        file.write(data)

    monkeypatch.setattr(disk_module, "_write", write)
    monkeypatch.setattr(disk_module.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING):
        assert [disk.write(name, page(0))[0] for name in NAMES[:3]] == [False] * 3
        now[0] += disk_module.PAUSE_S
        assert disk.write(NAMES[3], page(0)) == (False, [])
    assert [r.getMessage().count("No space left") for r in caplog.records] == [1]
    assert list((tmp_path / "kv").rglob("*.new")) == []
    full[0] = False
    now[0] += disk_module.PAUSE_S
    assert disk.write(NAMES[0], page(0))[0] and read(disk, NAMES[0]) == page(0)


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "kv").mkdir(mode=0o755)
    (tmp_path / "kv").chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755 and belongs to uid"):
        disk_at(tmp_path)


# ---------------------------------------------------------------- blocks beside the steps


SPEC = types.SimpleNamespace(kv_heads=(2, 2), head_dim=8)


class Moves:
    """A mover over a cache whose blocks each hold their number."""

    def __init__(self, slots: int = 4, disk: Disk | None = None, dtype: torch.dtype = torch.float32):
        self.kv = KVCache(SPEC, 6, 8, dtype, torch.device("cpu"))
        for block in range(6):
            self.fill(block, block)
        host = HostMemory(slots, self.kv.bytes_of_block, cuda=False) if slots else None
        self.told: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.mover = Mover(self.kv, host, disk, self.told.put, lambda lease, error: self.errors.put(error))
        self.mover.open(LEASE)
        self.number = 0
        self.aside: list[Moved] = []  # what came before the answer that was waited for

    def fill(self, block: int, value: int) -> None:
        data = torch.full((1, self.kv.bytes_of_block), value, dtype=torch.uint8)
        self.kv.write_blocks([block], data)

    def content(self, block: int) -> int:
        data = torch.empty((1, self.kv.bytes_of_block), dtype=torch.uint8)
        self.kv.read_blocks([block], data)
        (value,) = set(data.flatten().tolist())
        return value

    def move(self, **columns: bytes) -> Moved:
        self.number += 1
        self.mover.move(Move(LEASE, self.number, **columns))
        while (found := self.told.get(timeout=20)).number != self.number:
            self.aside.append(found)
        return found

    def written(self, count: int) -> bytes:
        """The first so many hashes of files that are told."""
        told = b"".join(each.written for each in self.aside)
        while len(told) < 16 * count:
            told += self.told.get(timeout=20).written
        return told


def stores(blocks: list[int], slots: list[int], files: list[int] | None = None) -> dict[str, bytes]:
    names = b"".join(NAMES[block] for block in blocks)
    return {
        "store_blocks": i32(blocks),
        "store_slots": i32(slots),
        "store_files": i8(files or [0] * len(blocks)),
        "store_hashes": names,
    }


def test_blocks_go_to_host_memory_and_come_back():
    moves = Moves()
    assert moves.move(**stores([2, 5], [3, 0])).failed == b""
    moves.fill(2, 99)
    done = moves.move(load_blocks=i32([0, 1]), load_slots=i32([0, 3]), load_hashes=NAMES[5] + NAMES[2])
    assert not done.failed and done.load_s > 0
    assert [moves.content(block) for block in range(6)] == [5, 2, 99, 3, 4, 5]
    moves.mover.close()


def test_files_are_written_behind_and_loaded_by_another_worker(tmp_path):
    size = Moves(slots=0).kv.bytes_of_block
    moves = Moves(slots=0, disk=Disk(tmp_path / "kv", 1 << 20, size))
    moves.move(**stores([2, 5], [-1, -1], [1, 1]))
    assert moves.written(2) == NAMES[2] + NAMES[5]
    moves.mover.close()
    other = Moves(slots=0, disk=Disk(tmp_path / "kv", 1 << 20, size))
    assert other.written(2) == NAMES[2] + NAMES[5]
    done = other.move(load_blocks=i32([0, 1, 3]), load_slots=i32([-1] * 3), load_hashes=NAMES[5] + NAMES[7] + NAMES[2])
    assert (from_i32(done.failed), done.lost) == ([1], NAMES[7])
    assert [other.content(block) for block in (0, 3)] == [5, 2]
    other.mover.close()


def test_a_plan_waits_for_the_stores_out_of_what_it_gives_out():
    moves = Moves()
    reading, go_on = moves.kv.read_blocks, queue.SimpleQueue()
    order: list[str] = []

    def slow(blocks: list[int], into: torch.Tensor) -> None:
        go_on.get(timeout=20)
        reading(blocks, into)
        order.append("stored")

    moves.kv.read_blocks = slow
    moves.mover.move(Move(LEASE, 1, **stores([2], [0])))
    moves.mover.guard(i32([3, 4]))  # others: it does not wait
    assert order == []
    go_on.put(None)
    moves.mover.guard(i32([2]))
    assert order == ["stored"]
    moves.mover.close()


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"store_blocks": i32([9]), "store_slots": i32([0]), "store_files": i8([0]),
                                             "store_hashes": NAMES[0]}, "blocks holds 9"),
        (dict(stores([1], [4])), "slots holds 4"),
        (dict(stores([1], [-1], [1])), "store_files"),
        ({"load_blocks": i32([1]), "load_slots": i32([-1]), "load_hashes": NAMES[0]},
         "the disk, where nothing is kept"),
        ({"load_blocks": i32([1, 1]), "load_slots": i32([0, 1]), "load_hashes": NAMES[0] * 2}, "2 blocks"),
        ({"load_blocks": i32([1]), "load_slots": i32([0]), "load_hashes": b"short"}, "5 bytes of hashes"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused(columns, told):
    moves = Moves()
    with pytest.raises(PlanError, match=told):
        moves.mover.move(Move(LEASE, 1, **columns))
    moves.mover.close()


def test_loads_of_a_lease_that_ended_change_nothing_more():
    moves = Moves()
    moves.move(**stores([2], [0]))
    moves.mover.end_lease()
    moves.mover.move(Move(LEASE, 2, load_blocks=i32([1]), load_slots=i32([0]), load_hashes=NAMES[2]))
    moves.mover.close()
    assert moves.content(1) == 1 and moves.told.empty()


def test_what_a_disk_does_not_answer_is_computed_until_it_does(tmp_path, monkeypatch, caplog):
    size = Moves(slots=0).kv.bytes_of_block
    disk, reads, go_on = Disk(tmp_path / "kv", 1 << 20, size), queue.SimpleQueue(), queue.SimpleQueue()
    moves = Moves(slots=0, disk=disk)
    moves.move(**stores([2, 5], [-1, -1], [1, 1]))
    moves.written(2)
    reading, watch = disk.read, moves.mover._watch.put

    def hung(block_hash: bytes, into: memoryview) -> bool:
        reads.put(None)
        go_on.get(timeout=20)
        return reading(block_hash, into)

    monkeypatch.setattr(disk, "read", hung)
    monkeypatch.setattr(moves.mover._watch, "put", lambda job: (reads.get(timeout=20), watch(job)))
    monkeypatch.setattr(mover_module, "HANGS_S", 0.0)
    asked = {"load_blocks": i32([0, 1]), "load_slots": i32([-1, -1]), "load_hashes": NAMES[2] + NAMES[5]}
    with caplog.at_level(logging.WARNING):
        given_up, at_once = moves.move(**asked), moves.move(**asked)  # the second is not even tried
    assert [from_i32(each.failed) for each in (given_up, at_once)] == [[0, 1]] * 2
    assert given_up.lost == NAMES[2] + NAMES[5] and len(caplog.records) == 1
    go_on.put(None)
    moves.mover._reads.join(20)
    assert [moves.content(block) for block in (0, 1)] == [0, 1]  # they are somebody else's by now
    monkeypatch.setattr(mover_module, "HANGS_S", 20.0)
    for _ in range(2):
        go_on.put(None)
    assert moves.move(**asked).failed == b"" and [moves.content(block) for block in (0, 1)] == [2, 5]
    moves.mover.close()


def test_a_read_that_hangs_holds_up_neither_the_next_lease_nor_the_end(tmp_path, monkeypatch):
    size = Moves(slots=0).kv.bytes_of_block
    disk, go_on, reads = Disk(tmp_path / "kv", 1 << 20, size), queue.SimpleQueue(), queue.SimpleQueue()
    moves = Moves(disk=disk)

    def hung(block_hash: bytes, into: memoryview) -> bool:
        reads.put(None)
        go_on.get(timeout=20)
        return True

    monkeypatch.setattr(disk, "read", hung)
    monkeypatch.setattr(mover_module, "FLUSH_S", 0.0)
    moves.mover.move(Move(LEASE, 1, load_blocks=i32([0]), load_slots=i32([-1]), load_hashes=NAMES[2]))
    reads.get(timeout=20)
    moves.mover.end_lease()
    moves.mover.close()
    go_on.put(None)
    moves.mover._reads.join(20)
    assert moves.content(0) == 0 and moves.told.empty()


def test_what_waits_for_the_disk_is_written_at_the_end_within_a_bound(tmp_path, monkeypatch, caplog):
    size = Moves(slots=0).kv.bytes_of_block
    disk, go_on = Disk(tmp_path / "kv", 1 << 20, size), threading.Event()
    writing = disk.write
    monkeypatch.setattr(disk, "write", lambda *given: (go_on.wait(20), writing(*given))[1])
    moves = Moves(slots=0, disk=disk)
    moves.mover.move(Move(LEASE, 1, **stores([2, 5], [-1, -1], [1, 1])))
    monkeypatch.setattr(mover_module, "FLUSH_S", 0.0)
    with caplog.at_level(logging.WARNING):
        moves.mover.close()
    assert f"{2 * size} bytes of KV blocks are not written" in caplog.text
    go_on.set()
    monkeypatch.setattr(mover_module, "FLUSH_S", 20.0)
    other = Moves(slots=0, disk=disk)
    other.mover.move(Move(LEASE, 1, **stores([3], [-1], [1])))
    other.mover.close()
    assert NAMES[3] in disk


def test_what_cannot_be_told_of_a_load_ends_the_lease(monkeypatch):
    moves = Moves()
    moves.move(**stores([2], [0]))
    monkeypatch.setattr(moves.mover, "token", None)
    moves.mover.move(Move(LEASE, 2, load_blocks=i32([1]), load_slots=i32([0]), load_hashes=NAMES[2]))
    assert isinstance(moves.errors.get(timeout=20), AttributeError)
    moves.mover.close()


def test_a_verification_says_nothing_of_prompts():
    ready, verifying = SpeculativePlan(LEASE, 1), SpeculativePlan(LEASE, 1, draft_rows=i32([0]))
    for plan, measured in ((verifying, 0), (ready, 1), (StepPlan(LEASE, 1), 1)):
        moves, plan.counts = Moves(), i32([60])
        moves.mover.begin(plan)
        moves.mover.ended()
        assert (moves.mover.token.each > 0) == measured
        moves.mover.close()


def test_all_workers_of_a_machine_count_where_memory_is_shared_out(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="swap space of one worker; lower swap_space"):
        host_memory.check_room(701)
    with caplog.at_level(logging.WARNING):
        host_memory.check_room(401)
    assert "Possibly too large swap space" in caplog.text
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(host_memory, "available_memory", lambda: total)
    monkeypatch.setenv(host_memory.LOCAL_WORKERS, "3")
    with pytest.raises(ConfigError, match="swap space of 3 workers"):
        host_memory.check_room(total // 4)


def test_the_processes_of_a_replica_answer_as_one():
    sent: list[Moved] = []
    together = Together(2, sent.append)
    together.open(LEASE)
    together.add(0, Moved(LEASE, 1, failed=i32([2]), load_s=0.5))
    together.add(1, Moved(Lease(1, 0, 0), 1))  # of another lease
    assert sent == []
    together.add(1, Moved(LEASE, 1, failed=i32([0]), load_s=0.25))
    together.add(0, Moved(LEASE, written=NAMES[0] + NAMES[1]))
    together.add(1, Moved(LEASE, written=NAMES[1]))
    together.add(1, Moved(LEASE, lost=NAMES[0]))
    together.add(0, Moved(LEASE, written=NAMES[0]))  # its part alone
    assert sent == [
        Moved(LEASE, 1, failed=i32([0, 2]), load_s=0.5),
        Moved(LEASE, written=NAMES[1]),
        Moved(LEASE, lost=NAMES[0]),
    ]


def test_a_pipe_in_a_files_place_holds_nobody_up(tmp_path):
    disk = disk_at(tmp_path)
    disk.write(NAMES[0], page(0))
    path = file_of(tmp_path, NAMES[0])
    path.unlink()
    os.mkfifo(path)
    done = threading.Thread(target=read, args=(disk, NAMES[0]), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive() and path.is_fifo()


def test_a_store_that_failed_is_not_said_to_be_done():
    moves = Moves()

    def lost(blocks: list[int], into: torch.Tensor) -> None:
        raise RuntimeError("the device is lost")

    moves.kv.read_blocks = lost
    moves.mover.move(Move(LEASE, 1, **stores([2], [0])))
    assert str(moves.errors.get(timeout=20)) == "the device is lost"
    moves.mover.close()
    assert moves.told.empty()


def test_a_model_without_a_cache_has_no_tiers(caplog):
    keeper = Keeper(EngineArgs(swap_space=1), types.SimpleNamespace(), None)
    keeper.attach(types.SimpleNamespace())
    with caplog.at_level(logging.INFO):
        keeper.offer(types.SimpleNamespace(), types.SimpleNamespace(bytes_of_block=0, k=[]), LEASE)
    assert not keeper.wanted and len(caplog.records) == 1
    keeper.open(LEASE)
    keeper.end_lease()
