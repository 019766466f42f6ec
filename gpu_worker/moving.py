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
from pathlib import Path
from typing import Any

import torch
import zmq

from ..proto.codec import BadFrame, from_i32
from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import BetweenWorkers, Forget, Give, Lease, NotMoved, Pages, Take
from ..proto.process import new_incarnation
from ..proto.taking import Taking
from ..proto.wire.sockets import Dealer, Keys, Router, is_loopback, own_bind
from .kv_cache import KVCache

log = logging.getLogger(__name__)

MAX_WAITING = 8
"""Messages of pages that wait for the compute thread; the others wait in their senders' sockets."""
MAX_DEALERS = 8
"""Workers that a connection to is kept open."""
LOOK_MS = 500


class Mover:
    """One worker's part in moves. ``post`` puts pages before the compute thread, which calls ``handle``."""

    def __init__(self, bind: str, advertise: str | None, keys: Keys | None, post: Callable[[Any], Any]):
        """Raises ConfigError where ``bind`` cannot be listened on."""
        self._context = zmq.Context()
        self._router: Router[Pages] = Router(BetweenWorkers, bind, keys, self._context)
        self.endpoint = self._router.advertised(advertise)
        self._keys, self._post, self._bind = keys, post, bind
        self._room = threading.Semaphore(MAX_WAITING)
        self._to_send: queue.SimpleQueue[tuple[Give, torch.Tensor, Any]] = queue.SimpleQueue()
        self._dealers: OrderedDict[str, Dealer[Any]] = OrderedDict()  # by endpoint, the last used last
        self._taking: Taking | None = None
        self._closing = False
        for run in (self._receive, self._send):
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

    def handle(self, message: Take | Give | Forget | Pages, lease: Lease | None, kv: KVCache | None) -> Any:
        """Do it; the answer for the scheduler, or None. To be called of all Pages that were posted, also where they are
        of another lease or there is no cache: each holds one of MAX_WAITING places until then."""
        if isinstance(message, Pages):
            self._room.release()
        if self._taking is None or kv is None or (message.to if isinstance(message, Pages) else message.lease) != lease:
            return None
        try:
            if isinstance(message, Take):
                answer = self._taking.take(message)
                for pages in self._taking.early(message.move):
                    answer = self._write(pages, kv) or answer
                return answer
            if isinstance(message, Give):
                return self._give(message, kv)
            if isinstance(message, Forget):
                return self._taking.forget(message)
            return self._write(message, kv)
        except (BadFrame, ValueError, RuntimeError, MemoryError) as error:
            log.warning("move %d fails: %s", message.move, error)
            return NotMoved(lease, message.move, f"{type(error).__name__}: {error}"[:300])

    def _give(self, give: Give, kv: KVCache) -> None:
        blocks = from_i32(give.blocks)
        cuda = kv.k[0].is_cuda
        pages = torch.empty((len(blocks), kv.bytes_of_block), dtype=torch.uint8, pin_memory=cuda)
        kv.read_blocks(blocks, pages)
        if cuda:
            done = torch.cuda.Event()
            done.record()
            self._to_send.put((give, pages, done))
        else:  # at once: a thread would come to it when the next step is done
            self._deliver(give, pages)

    def _write(self, pages: Pages, kv: KVCache) -> Any:
        assert self._taking is not None  # a lease is open
        blocks = self._taking.places(pages)
        if blocks is None:
            return None
        if len(pages.data) != len(blocks) * kv.bytes_of_block:
            raise BadFrame(f"{len(pages.data)} bytes for {len(blocks)} blocks of {kv.bytes_of_block}")
        data = torch.frombuffer(bytearray(pages.data), dtype=torch.uint8).view(len(blocks), kv.bytes_of_block)
        kv.write_blocks(blocks, data)
        return self._taking.placed(pages)

    # -- the threads

    def _receive(self) -> None:
        while not self._closing:
            if self._room.acquire(timeout=LOOK_MS / 1000):  # given back by the compute thread
                while (received := self._router.recv()) is None and not self._closing:
                    self._router.socket.poll(LOOK_MS)
                if received is not None:
                    self._post(received[1])
        self._router.close()

    def _send(self) -> None:
        while True:
            give, pages, done = self._to_send.get()
            done.synchronize()
            self._deliver(give, pages)

    def _deliver(self, give: Give, pages: torch.Tensor) -> None:
        """Hand pages over to ZeroMQ. Always called by the same thread."""
        dealers = self._dealers
        try:
            dealer = dealers.get(give.endpoint)
            if dealer is None:
                dealer = dealers[give.endpoint] = Dealer(
                    BetweenWorkers, give.endpoint, new_incarnation("gpu_worker"), self._keys, self._context
                )
            dealers.move_to_end(give.endpoint)
            dealer.recv()  # what the other socket has to say of what it has read
            dealer.send(Pages(give.to, give.move, give.first, len(pages), pages.numpy().tobytes()))
        except (zmq.ZMQError, ConfigError) as error:  # the scheduler gives the move up when nothing comes
            log.warning("pages of move %d were not sent: %s", give.move, error)
        while len(dealers) > MAX_DEALERS:
            dealers.popitem(last=False)[1].close()


def mover_for(args: EngineArgs, keys: Keys | None, post: Callable[[Any], Any]) -> Mover | None:
    """The mover of a worker with these flags; None where nobody could reach it. Raises ConfigError for an address that
    cannot be listened on."""
    address = args.scheduler or ""
    if args.bind is None and address.startswith("tcp://") and not is_loopback(address):
        log.info("no --bind: blocks of this worker's sequences cannot be moved to others and from them")
        return None
    return Mover(args.bind or own_bind(address, new_incarnation("gpu_worker")), args.advertise, keys, post)
