"""The links between the processes of one replica: its leader to each of the others.

Only the leader talks to the scheduler. What is to be done it tells the others here, before it does it itself, and so
all of them do the same steps in the same order. To another process its leader looks like a scheduler: ``Member`` has
the interface of ``link.Link``.

One process cannot go on without the rest. Whatever breaks between them - a connection, an exchange of tensors, a
farewell that was not asked for - ends them all, each with one line, and whoever started them starts them anew. So the
thread here watches while the compute thread waits in an exchange for somebody who may be dead, and ends the process
itself. A process that is stopped or unplugged is found by ZeroMQ's heartbeats (``proto/wire/sockets.py``), 12 s at most
after its last sign of life.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import zmq

from ...proto.codec import encode
from ...proto.group import FromLeader, Join, Meet, ToLeader
from ...proto.messages import PROTOCOL, AdapterReady, Bye, Drain, Heartbeat, Moved, NotMoved, Taken
from ...proto.process import heartbeat, new_incarnation
from ...proto.wire.sockets import DISCONNECTED, Dealer, Keys, Router
from ..link import LINGER_MS, LOOK_S, MAX_QUEUED, Leave

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PATIENCE_S = 0.5
"""A broken link is noticed sooner than this."""
MISSING_S = 15.0
"""How often a process says for whom it waits."""

T = TypeVar("T")
_ending = threading.Lock()


def take(inbox: queue.SimpleQueue[T], timeout: float | None = None) -> T:
    """The next item, waited for where signals are seen. Raises queue.Empty after ``timeout`` seconds, by default
    never."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return inbox.get(timeout=min(left, LOOK_S))
        except queue.Empty:
            if left <= LOOK_S:
                raise


def end(reason: object, code: int = 1) -> NoReturn:
    """End this process at once with one line, whatever its threads are doing; the first call's line."""
    if _ending.acquire(blocking=False):
        log.error("%s; ending with the rest of its replica", " ".join(str(reason).split()))
        sys.stderr.flush()
        os._exit(code)
    while True:
        time.sleep(1)


class _GroupLink:
    """A socket in a thread of its own, which passes on what the compute thread hands over."""

    def __init__(self, wire: Any) -> None:
        self._wire, self._context = wire, wire.socket.context
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        name = f"inproc://group-link-{id(self)}"
        self._in, self._out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for socket in (self._in, self._out):
            socket.set_hwm(0)
            socket.linger = 0
        self._in.bind(name)
        self._out.connect(name)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="group-link", daemon=True)

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    def send(self, message: Any) -> None:
        """Hand over a message."""
        self._hand_over(encode(message))

    def _hand_over(self, frame: bytes) -> None:
        with self._lock, contextlib.suppress(zmq.Again):  # the thread has ended: nobody is there to send it
            self._out.send(frame, zmq.NOBLOCK)

    def _queue(self, item: Any) -> None:
        """Put a message of another process before the compute thread, which has at most a few plans before it."""
        if self._inbox.qsize() > MAX_QUEUED:
            end(f"over {MAX_QUEUED} messages of this replica's other processes wait")
        self._inbox.put(item)

    def _close(self, word: Any) -> None:
        """Send a last message, let it leave, and end the thread."""
        if self._context.closed:
            return
        self._closing = True  # from here on nobody's going is news
        if self._thread.is_alive():
            if word is not None:
                self.send(word)
            self._hand_over(b"")
            self._thread.join(5)
        self._out.close()
        self._context.destroy(LINGER_MS)

    def _run(self) -> None:
        wire = self._wire
        poller = zmq.Poller()
        for socket in (wire.socket, wire.monitor(), self._in):
            poller.register(socket, zmq.POLLIN)
        try:
            next_heartbeat = time.monotonic()
            while True:
                poller.poll(max(0, int(1000 * (next_heartbeat - time.monotonic())) + 1))
                while (item := wire.recv()) is not None:
                    self._received(item)
                if not self._pass_on():
                    return
                while (event := wire.next_event()) is not None:
                    if event == DISCONNECTED:
                        while (item := wire.recv()) is not None:  # last words, where both came since the look above
                            self._received(item)
                        if not self._closing:
                            self._disconnected()
                if time.monotonic() >= next_heartbeat:
                    self._heartbeat()
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
        except Exception as error:  # noqa: BLE001  # without its links a process must end
            if not self._closing:
                end(f"the links of this replica failed: {type(error).__name__}: {error}")
        finally:
            wire.socket.disable_monitor()
            wire.monitor().close(0)
            wire.socket.close(LINGER_MS)
            self._in.close()

    def _pass_on(self) -> bool:
        """False once the link is closed."""
        while True:
            try:
                frame = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if not frame:
                return False
            self._put(frame)

    def _received(self, item: Any) -> None:
        raise NotImplementedError

    def _put(self, frame: bytes) -> None:
        raise NotImplementedError

    def _disconnected(self) -> None:
        raise NotImplementedError

    def _heartbeat(self) -> None:
        """Once a second."""


class Leader(_GroupLink):
    """The leader's links, to the processes ``others``.

    ``settings`` are what all must have alike; ``on_leave`` is called, by the thread here, where another process was
    asked to end.
    """

    def __init__(
        self, endpoint: str, others: list[int], settings: dict[str, str], keys: Keys | None, on_leave: Callable[[], Any]
    ) -> None:
        """Raises ConfigError where ``endpoint`` cannot be bound."""
        super().__init__(Router(ToLeader, endpoint, keys, zmq.Context()))
        self._missing, self._settings, self._on_leave = set(others), settings, on_leave
        self._numbers: dict[str, int] = {}
        self.on_moved: Callable[[int, Moved], Any] = lambda number, message: None
        """Called, by the thread here, where another process has moved blocks."""
        self.on_taken: Callable[[int, Taken | NotMoved], Any] = lambda number, answer: None
        """The same, where it has taken pages of another worker, or cannot."""
        self.endpoints: dict[int, str] = {}  # where the others take pages of other workers, by number
        self._complete = threading.Event()
        self._told: Callable[[int, AdapterReady], Any] = lambda number, answer: None

    def meet(self, file: str, port: int) -> None:
        """Wait for all, and tell them where torch's store is."""
        began = time.monotonic()
        while not self._complete.wait(MISSING_S):
            log.info("waiting for processes %s of this replica at %s since %.0f s",
                     sorted(self._missing), self._wire.endpoint, time.monotonic() - began)  # fmt: skip
        self.send(Meet(file, port))

    def close(self, reason: str, done: bool) -> None:
        """Tell all to end, with code 0 where the replica is ``done``, let it leave, and end the thread. Safe to call
        twice."""
        self._close(Drain(reason) if done else Bye(reason))

    def watch_adapters(self, told: Callable[[int, AdapterReady], Any]) -> int:
        """From now on call ``told``, in the thread here, with what a process says of an adapter. How many processes the
        replica has, this one among them."""
        self._told = told
        return len(self._numbers) + 1

    def collect(self, kind: type[T], lease: Any) -> list[T]:
        """Each other process's answer of ``kind`` under ``lease``; those of other leases are dropped."""
        found: dict[int, T] = {}
        while len(found) < len(self._numbers):
            number, message = take(self._inbox)
            if isinstance(message, kind) and message.lease == lease:  # type: ignore[attr-defined]
                found[number] = message
        return list(found.values())

    def _received(self, item: Any) -> None:
        peer, message = item
        number = self._numbers.get(peer)
        if isinstance(message, Join):
            self._joined(peer, message)
        elif number is None:
            return  # a stranger
        elif isinstance(message, Bye):
            if not self._closing:
                end(f"process {number} of this replica has left: {message.reason}")
        elif isinstance(message, AdapterReady):
            self._told(number, message)
        elif isinstance(message, Drain):
            log.info("process %d of this replica was asked to end", number)
            self._on_leave()
        elif isinstance(message, Moved):
            self.on_moved(number, message)
        elif isinstance(message, Taken | NotMoved):
            self.on_taken(number, message)
        else:
            self._queue((number, message))

    def _joined(self, peer: str, join: Join) -> None:
        refusal = self._refusal(join)
        if refusal:
            log.warning("refused process %d (pid %d): %s", join.number, join.pid, refusal)
            self._wire.send(peer, Bye(refusal))
            return
        self._numbers[peer] = join.number
        self.endpoints[join.number] = join.endpoint
        self._missing.discard(join.number)
        if not self._missing:
            self._complete.set()

    def _refusal(self, join: Join) -> str:
        if join.protocol != PROTOCOL:
            return f"it speaks protocol {join.protocol} and its leader {PROTOCOL}; install the same version for both."
        if join.number not in self._missing:
            return f"process {join.number} of this replica is here already, or is none of it; check --rank."
        for name, own in self._settings.items():
            if (its := join.settings.get(name)) != own:
                return f"its {name} is {its} where its leader's is {own}; start all processes of a replica alike."
        return ""

    def _put(self, frame: bytes) -> None:
        for peer, number in self._numbers.items():
            if not self._wire.send_frame(peer, frame) and not self._closing:
                end(f"process {number} of this replica is gone")

    def _disconnected(self) -> None:
        self._heartbeat()  # the monitor does not say who went

    def _heartbeat(self) -> None:
        self._put(encode(Heartbeat()))


class Member(_GroupLink):
    """Another process's link to its leader, with the interface of ``link.Link``."""

    def __init__(
        self, endpoint: str, number: int, settings: dict[str, str], keys: Keys | None, pid: int | None = None,
        pages: str = "",
    ) -> None:  # fmt: skip
        """Joins at ``endpoint`` once started, whenever the leader comes. Other workers reach it at ``pages``."""
        super().__init__(Dealer(FromLeader, endpoint, new_incarnation("rank"), keys, zmq.Context()))
        self._number = number
        self.loaded, self.last_step = False, 0
        self.send(Join(PROTOCOL, number, pid or os.getpid(), settings, pages))

    def meet(self) -> Meet:
        """Wait for the leader's word that all are there."""
        began = time.monotonic()
        while not isinstance(message := self.get(MISSING_S), Meet):
            log.info("process %d waits for its leader, or for others, at %s since %.0f s",
                     self._number, self._wire.endpoint, time.monotonic() - began)  # fmt: skip
        return message

    def get(self, timeout: float | None = None) -> Any:
        """The leader's next message, or None after ``timeout`` seconds."""
        try:
            return take(self._inbox, timeout)
        except queue.Empty:
            return None

    def next_of(self, kind: type[T]) -> T | None:
        """As a link's, and never any: there is no hurry before the leader's own part is done."""
        return None

    def post(self, message: Any) -> None:
        """Put a message of this process's own before the compute thread; safe from any thread."""
        self._inbox.put(message)

    def leave(self) -> None:
        """Put Leave before the compute thread; safe in a signal handler."""
        self.post(Leave())

    def close(self, reason: str | None = None) -> None:
        """Say Bye (unless ``reason`` is None), let it leave, and end the thread. Safe to call twice."""
        self._close(None if reason is None else Bye(reason))

    def _received(self, message: Any) -> None:
        if isinstance(message, Bye):
            if not self._closing:
                end(f"process {self._number}: its leader says: {message.reason}")
        elif not isinstance(message, Heartbeat):
            if isinstance(message, Drain):
                self._closing = True  # the leader ends now, and that is as it should be
            self._queue(message)

    def _put(self, frame: bytes) -> None:
        self._wire.send_frame(frame)

    def _disconnected(self) -> None:
        end(f"process {self._number}: its leader is gone")

    def _heartbeat(self) -> None:
        heartbeat()  # the leader shows by its link to the scheduler that it lives
