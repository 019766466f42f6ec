"""Pages from one worker to another: through memory that both have mapped, as bytes, under keys, in several parts."""

from __future__ import annotations

import os
import queue
import types
from typing import Any

import pytest
import torch

from quire.gpu_worker import shared_pages
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.link import Arrived
from quire.gpu_worker.moving import Mover
from quire.gpu_worker.page_moves import BEFORE_RESULT_BYTES, BETWEEN, PageMoves, Said
from quire.proto.codec import i32
from quire.proto.messages import Forget, Give, Lease, NotMoved, SharedMemory, Take, Taken
from quire.proto.wire.sockets import Keys

SPEC = types.SimpleNamespace(kv_heads=(2, 2), head_dim=16)
LEASE = Lease(1, 0, 1)
BLOCKS = 24
WAIT_S = 20.0


class Side:
    """A mover with a cache, whose blocks hold ``first``, ``first`` + 1, ..."""

    def __init__(self, bind: str, keys: Keys | None = None, first: int = 0):
        self.kv = KVCache(SPEC, BLOCKS, 16, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        size = self.kv.bytes_of_block
        self.kv.write_blocks(
            list(range(BLOCKS)), torch.arange(first, first + BLOCKS, dtype=torch.uint8)[:, None].repeat(1, size)
        )
        self.mover = Mover(bind, None, keys)
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.mover.start(lambda: self.woken.put(None))
        self.mover.begin(BLOCKS)

    def do(self, message: Take | Give | Forget) -> Any:
        answer = self.mover.handle(message, LEASE, self.kv)
        self.mover.flush()
        return answer

    def arrived(self, count: int = 1) -> list[Any]:
        """The answers to so many messages of pages."""
        answers = []
        for _ in range(count):
            self.woken.get(timeout=WAIT_S)
            answers += self.mover.take_arrived(LEASE, self.kv)
        return answers

    def held(self, *blocks: int) -> list[int]:
        pages = torch.empty((len(blocks), self.kv.bytes_of_block), dtype=torch.uint8)
        self.kv.read_blocks(list(blocks), pages)
        assert (pages == pages[:, :1]).all()
        return pages[:, 0].tolist()


@pytest.fixture
def sides(tmp_path):
    made: list[Side] = []

    def make(bind: str = "", keys: tuple[Keys | None, Keys | None] = (None, None)) -> list[Side]:
        for number in (0, 1):
            made.append(Side(bind or f"ipc://{tmp_path}/{number}", keys[number], 100 * number))
        return made

    yield make
    for side in made:
        side.mover.close()


def give(taker: Side, move: int, first: int, *blocks: int) -> Give:
    return Give(LEASE, move, first, i32(blocks), taker.mover.endpoint, LEASE)


@pytest.mark.parametrize("way", ["memory", "bytes", "keys"])
def test_pages_come_as_they_were(sides, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "bytes":
        monkeypatch.delattr(os, "memfd_create")
    keys = Keys.generate()
    giver, taker = sides("tcp://127.0.0.1:*", (keys, keys)) if way == "keys" else sides()
    assert taker.do(Take(LEASE, 1, 0, i32([3, 4, 5, 6]))) == Taken(LEASE, 1, 4, 0)
    for first in range(4):  # the first is of bytes in any case: the other has not opened the memory yet
        assert giver.do(give(taker, 1, first, 10 + first)) is None
        assert taker.arrived() == [Taken(LEASE, 1, 4, first + 1)]
    assert taker.held(2, 3, 4, 5, 6, 7) == [102, 10, 11, 12, 13, 107]
    memory = giver.mover._peers[taker.mover.endpoint].memory
    assert (memory is not None) == (way == "memory")
    if memory is not None:
        assert memory.slot(1) == 0  # which was used, and is empty again


@pytest.mark.parametrize("other", [None, "stranger"])
def test_without_the_keys_nothing_comes(sides, other: str | None) -> None:
    giver, taker = sides("tcp://127.0.0.1:*", (Keys.generate() if other else None, Keys.generate()))
    taker.do(Take(LEASE, 1, 0, i32([3])))
    giver.do(give(taker, 1, 0, 10))
    with pytest.raises(queue.Empty):
        taker.woken.get(timeout=0.5)
    assert taker.held(3) == [103]


def test_slots_are_filled_again_when_they_are_read(sides) -> None:
    """Also those of pages that nobody wants; and where all are full pages go as bytes."""
    giver, taker = sides()
    taker.do(Take(LEASE, 1, 0, i32(range(BLOCKS))))
    giver.do(give(taker, 1, 0, 0))
    taker.arrived()
    memory = giver.mover._peers[taker.mover.endpoint].memory
    assert memory is not None
    for first in range(1, shared_pages.SLOTS + 3):
        giver.do(give(taker, 1, first, first))
    assert memory.slot(1) == -1
    taker.arrived(shared_pages.SLOTS + 2)
    assert taker.held(*range(shared_pages.SLOTS + 4)) == [*range(shared_pages.SLOTS + 3), 100 + shared_pages.SLOTS + 3]
    taker.do(Forget(LEASE, 1))
    for first in range(shared_pages.SLOTS + 1):  # more than there are slots
        giver.do(give(taker, 1, first, first))
        assert taker.arrived() == []
    assert memory.slot(1) >= 0


def test_pages_that_come_before_their_take_are_kept(sides) -> None:
    giver, taker = sides()
    taker.do(Take(LEASE, 1, 0, i32([0])))
    giver.do(give(taker, 1, 0, 0))
    taker.arrived()
    giver.do(give(taker, 2, 0, 20, 21))
    giver.do(give(taker, 2, 2, 22))
    assert taker.arrived(2) == []
    for block in (5, 6):  # into the same slots
        giver.do(give(taker, 1, 7, block))
        taker.arrived()
    assert taker.do(Take(LEASE, 2, 0, i32([7, 8, 9]))) == Taken(LEASE, 2, 3, 3)
    assert taker.held(7, 8, 9) == [20, 21, 22]


def test_memory_that_is_not_the_givers_is_not_used(tmp_path) -> None:
    given, received = shared_pages.Given(), shared_pages.Received()
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(shared_pages.PAGE + shared_pages.SLOTS * shared_pages.SLOT_BYTES)
        for told in (
            SharedMemory(os.getpid(), given.told.fd, b"another's".ljust(16)),
            SharedMemory(os.getpid(), file.fileno(), bytes(16)),
            SharedMemory(os.getpid(), 10**6, b"closed".ljust(16)),
            SharedMemory(2**22 + 1, 3, b"gone".ljust(16)),
        ):
            received.meet(told)
            with pytest.raises(ValueError, match="is not mapped here"):
                received.read(told, 0, 1)
    assert given.slot(1) == -1
    received.meet(given.told)
    assert given.slot(1) == 0 and given.slot(shared_pages.SLOT_BYTES + 1) == -1
    for slot, size in ((-1, 1), (shared_pages.SLOTS, 1), (0, shared_pages.SLOT_BYTES + 1)):
        with pytest.raises(ValueError):
            received.read(given.told, slot, size)
    given.close()


class Noted:
    """What is sent, and where to; a leader's others, a link and a mover."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.given: list[str] = []
        self.flushed = 0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def start(self, wake: Any) -> None: ...

    def next_of(self, kind: type) -> Any:
        return None

    def flush(self) -> None:
        self.flushed += 1

    def end(self) -> None: ...

    def handle(self, message: Any, lease: Any, kv: Any) -> Any:
        self.given += [message.endpoint] if isinstance(message, Give) else []
        return Taken(LEASE, message.move, 4, 2) if isinstance(message, Take) else None

    def take_arrived(self, lease: Any, kv: Any) -> list[Any]:
        return [Taken(LEASE, 1, 4, 4)]


def test_pages_that_are_to_follow_a_step_leave_before_its_result_but_not_too_many() -> None:
    class Line(Noted):
        """A link with Gives that wait."""

        def __init__(self, waiting: list[Any]) -> None:
            super().__init__()
            self.waiting = waiting

        def next_of(self, kind: type) -> Any:
            return self.waiting.pop(0) if self.waiting and isinstance(self.waiting[0], kind) else None

    gives = [Give(LEASE, move, 0, i32([1, 2]), f"ipc://{move}", LEASE) for move in range(1, 6)]
    mover, link = Noted(), Line([*gives[:2], Forget(LEASE, 9), *gives[2:]])
    moves = PageMoves(mover, None, 0, 1, lambda blocks: None)  # type: ignore[arg-type]
    moves.attach(link)
    kv = types.SimpleNamespace(bytes_of_block=16)
    moves.after_step(LEASE, kv)  # type: ignore[arg-type]
    assert mover.given == ["ipc://1", "ipc://2"] and isinstance(link.waiting.pop(0), Forget)  # behind another message
    kv.bytes_of_block = BEFORE_RESULT_BYTES // 4
    moves.after_step(LEASE, kv)  # type: ignore[arg-type]
    assert mover.given[2:] == ["ipc://3", "ipc://4"]
    moves.handle(link.waiting.pop(0), LEASE, kv)  # type: ignore[arg-type]
    assert mover.given[4:] == ["ipc://5"] and mover.flushed == 3


def test_pages_have_come_when_all_processes_have_theirs() -> None:
    mover, others, link, guarded = Noted(), Noted(), Noted(), []
    moves = PageMoves(mover, others, 1, 2, guarded.append)  # type: ignore[arg-type]
    moves.attach(link)
    take = Take(LEASE, 1, 0, i32([1, 2, 3, 4]))
    moves.handle(take, LEASE, None)
    assert others.sent == [take] and guarded == [take.blocks] and link.sent == []
    moves.handle(Said(0, Taken(LEASE, 1, 4, 1)), LEASE, None)
    moves.handle(Arrived(), LEASE, None)
    moves.handle(Said(0, Taken(LEASE, 1, 4, 3)), LEASE, None)
    assert link.sent == [Taken(LEASE, 1, 4, 1), Taken(LEASE, 1, 4, 1), Taken(LEASE, 1, 4, 3)]
    moves.handle(Said(0, Taken(Lease(1, 0, 0), 1, 4, 4)), LEASE, None)  # of the lease before
    moves.handle(Said(0, NotMoved(LEASE, 1, "full")), LEASE, None)
    assert link.sent[3:] == [NotMoved(LEASE, 1, "full")]
    moves.handle(Give(LEASE, 1, 0, i32([1]), BETWEEN.join(("ipc://a", "ipc://b")), LEASE), LEASE, None)
    assert mover.given == ["ipc://b"] and others.sent[-1].endpoint.endswith("ipc://b")
    moves.handle(Forget(LEASE, 1), LEASE, None)
    moves.handle(Said(0, Taken(LEASE, 1, 4, 4)), LEASE, None)  # late: nobody asks for it any more
    assert link.sent[4:] == []
