"""Pages of the KV cache that go to other workers and come from them (``proto/messages/moves.py``).

The compute thread reads and writes pages between steps, in the order of plans, and on a CPU sends them. One thread here
sends what a GPU has copied to the host; another receives what others send, and holds the rest back in the sockets while
the compute thread has not written it. Their socket is a file beside the scheduler's, or tcp with keys.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from ..proto.codec import BadFrame, from_i32
from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import BetweenWorkers, Forget, Give, Lease, NotMoved, Pages, Take
from ..proto.process import new_incarnation
from ..proto.taking import Taking
from ..proto.wire.sockets import Dealer, Keys, Router, is_loopback, own_bind
from .kv_cache import KVCache
from .shared_pages import Given, Received

log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Messages of pages that wait for the compute thread; the others wait in their senders' sockets."""
MAX_PEERS = 8
"""Workers that a connection to is kept open."""
LOOK_MS = 500


class Peer:
    """A worker that pages are sent to: by a socket, and through memory where that is on this machine."""

    def __init__(self, dealer: Dealer[Any], endpoint: str):
        self.dealer = dealer
        self.memory: Given | None = None
        if endpoint.startswith("ipc://"):
            try:
                self.memory = Given()
            except OSError as error:
                log.info("pages go to %s as bytes: %s", endpoint, error)

    def close(self) -> None:
        """Nothing more goes to it."""
        self.dealer.close()
        if self.memory is not None:
            self.memory.close()


class Mover:
    """One process's part in moves. The compute thread calls ``handle`` and ``take_arrived``."""

    def __init__(self, bind: str, advertise: str | None, keys: Keys | None):
        """Raises ConfigError where ``bind`` cannot be listened on."""
        self._context = zmq.Context()
        self._router: Router[Pages] = Router(BetweenWorkers, bind, keys, self._context)
        self.endpoint = self._router.advertised(advertise)
        self._keys, self._bind = keys, bind
        self._room = threading.Semaphore(MAX_WAITING)
        self._arrived: queue.SimpleQueue[Pages] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[tuple[Give, torch.Tensor, Any]] = queue.SimpleQueue()
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # by endpoint, the last used last
        self._received = Received()
        self._read: list[tuple[Peer, Pages]] = []  # of Gives in a row, to be sent together
        self._taking: Taking | None = None
        self._closing = False

    def start(self, wake: Callable[[], Any]) -> None:
        """Receive and send from now on. ``wake`` is called by a thread here when pages wait for ``take_arrived``."""
        for run in (lambda: self._receive(wake), self._send):
            threading.Thread(target=run, name="moving", daemon=True).start()

    def bad_frames(self) -> int:
        """Frames that did not decode."""
        return self._router.bad_frames

    def close(self) -> None:
        """Listen no more, and leave no socket file. What was to be sent and has not left is lost."""
        self._closing = True
        if self._bind.startswith("ipc://"):
            Path(self._bind.removeprefix("ipc://")).unlink(missing_ok=True)

    def begin(self, num_blocks: int) -> None:
        """A lease begins, with so many blocks: what was under way is not known any more."""
        self._taking = Taking(num_blocks)

    def end(self) -> None:
        """The lease is over."""
        self._taking = None

    def handle(self, message: Take | Give | Forget, lease: Lease | None, kv: KVCache | None) -> Any:
        """Do it; the answer for the scheduler, or None."""
        return self._do(message, message.lease, lease, kv)

    def take_arrived(self, lease: Lease | None, kv: KVCache | None) -> list[Any]:
        """Put the pages that have come into their blocks, those of ``lease``; the answers for the scheduler. Blocks
        that pages come for are in no plan yet, so this may be done between any two steps."""
        answers = []
        while not self._arrived.empty():
            pages = self._arrived.get()
            shared, slot = pages.shared, pages.slot
            self._room.release()
            try:
                answers.append(self._do(pages, pages.to, lease, kv))
            finally:
                if shared is not None:
                    self._received.done(shared, slot)
        return [answer for answer in answers if answer is not None]

    def _do(self, message: Take | Give | Forget | Pages, of: Lease, lease: Lease | None, kv: KVCache | None) -> Any:
        if isinstance(message, Pages) and message.shared is not None:
            self._received.meet(message.shared)
        if self._taking is None or kv is None or of != lease:
            return None
        try:
            if isinstance(message, Pages):
                return self._write(message, kv)
            if isinstance(message, Take):
                answer = self._taking.take(message)
                kv.reach(max(from_i32(message.blocks), default=0))
                for pages in self._taking.early(message.move):
                    answer = self._write(pages, kv) or answer
                return answer
            if isinstance(message, Give):
                return self._give(message, kv)
            return self._taking.forget(message)
        except (BadFrame, ValueError, RuntimeError, MemoryError) as error:
            log.warning("move %d fails: %s", message.move, error)
            return NotMoved(of, message.move, f"{type(error).__name__}: {error}"[:300])

    def _give(self, give: Give, kv: KVCache) -> None:
        blocks = from_i32(give.blocks)
        if kv.k[0].is_cuda:
            pages = torch.empty((len(blocks), kv.bytes_of_block), dtype=torch.uint8, pin_memory=True)
            kv.read_blocks(blocks, pages)
            done = torch.cuda.Event()
            done.record()
            self._to_send.put((give, pages, done))
        else:  # here: a thread would come to it when the next step is done
            size = len(blocks) * kv.bytes_of_block
            read = self._fill(give, len(blocks), size, lambda into: kv.read_blocks(blocks, into.view(len(blocks), -1)))
            if read is not None:
                self._read.append(read)
            if len(self._read) >= MAX_WAITING:  # as many as its taker reads at once, and slots of memory there are
                self.flush()

    def flush(self) -> None:
        """Send what Gives have read. Each message that leaves wakes threads that take a busy CPU away from the next."""
        while self._read:
            _post(*self._read.pop(0))

    def _write(self, pages: Pages, kv: KVCache) -> Any:
        assert self._taking is not None  # a lease is open
        size = pages.count * kv.bytes_of_block
        if self._taking.is_early(pages) and pages.slot >= 0 and pages.shared is not None:  # which others fill meanwhile
            pages.data = self._received.read(pages.shared, pages.slot, size).numpy().tobytes()
            pages.shared, pages.slot = None, -1
        blocks = self._taking.places(pages)
        if blocks is None:
            return None
        if pages.slot >= 0 and pages.shared is not None:
            data = self._received.read(pages.shared, pages.slot, size)
        elif len(pages.data) == size:
            data = torch.from_numpy(np.frombuffer(pages.data, np.uint8).copy())
        else:
            raise BadFrame(f"{len(pages.data)} bytes for {len(blocks)} blocks of {kv.bytes_of_block}")
        kv.write_blocks(blocks, data.view(len(blocks), kv.bytes_of_block))
        return self._taking.placed(pages)

    # -- the threads

    def _receive(self, wake: Callable[[], Any]) -> None:
        while not self._closing:
            if self._room.acquire(timeout=LOOK_MS / 1000):  # given back by the compute thread
                while (received := self._router.recv()) is None and not self._closing:
                    self._router.socket.poll(LOOK_MS)
                if received is not None:
                    self._arrived.put(received[1])
                    wake()
        self._router.close()

    def _send(self) -> None:
        while True:
            give, pages, done = self._to_send.get()
            done.synchronize()
            if (filled := self._fill(give, len(pages), pages.nbytes, partial(_copy, pages.view(-1)))) is not None:
                _post(*filled)

    def _fill(
        self, give: Give, count: int, size: int, read: Callable[[torch.Tensor], Any]
    ) -> tuple[Peer, Pages] | None:
        """``count`` pages, ``size`` bytes that ``read`` puts where it is told, for whom they are; None where that one
        cannot be sent anything. By one thread alone."""
        pages = Pages(give.to, give.move, give.first, count, b"")
        try:
            peer = self._peer(give.endpoint)
            memory = peer.memory
            pages.slot = -1 if memory is None else memory.slot(size)
            pages.shared = None if memory is None else memory.told
            if memory is not None and pages.slot >= 0:
                read(memory.place(pages.slot, size))
                memory.filled(pages.slot)
            else:
                data = torch.empty(size, dtype=torch.uint8)
                read(data)
                pages.data = data.numpy().tobytes()
            return peer, pages
        except (zmq.ZMQError, ConfigError) as error:
            _not_sent(pages, error)
            return None

    def _peer(self, endpoint: str) -> Peer:
        """Raises ZMQError or ConfigError for an endpoint that cannot be."""
        peer = self._peers.get(endpoint)
        if peer is None:
            identity = new_incarnation("gpu_worker")
            dealer: Dealer[Any] = Dealer(BetweenWorkers, endpoint, identity, self._keys, self._context)
            peer = self._peers[endpoint] = Peer(dealer, endpoint)
            while len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(endpoint)
        peer.dealer.recv()  # what the other socket has to say of what it has read
        return peer


def _post(peer: Peer, pages: Pages) -> None:
    try:
        peer.dealer.send(pages)
    except (zmq.ZMQError, ConfigError) as error:
        _not_sent(pages, error)


def _not_sent(pages: Pages, error: Exception) -> None:
    """The scheduler gives the move up when nothing comes."""
    log.warning("pages of move %d were not sent: %s", pages.move, error)


def _copy(pages: torch.Tensor, into: torch.Tensor) -> None:
    into.copy_(pages)


def mover_for(args: EngineArgs, keys: Keys | None) -> Mover | None:
    """The mover of a worker with these flags; None where nobody could reach it. Raises ConfigError for an address that
    cannot be listened on."""
    address = args.scheduler or ""
    if args.bind is None and address.startswith("tcp://") and not is_loopback(address):
        log.info("no --bind: blocks of this worker's sequences cannot be moved to others and from them")
        return None
    return Mover(args.bind or own_bind(address, new_incarnation("gpu_worker")), args.advertise, keys)
