"""The worker's connection to the scheduler, and a thread that shows that this process lives, whatever a step does.

A *session* is one connection under one identity. It ends when the connection breaks or the worker ends its lease;
the next one has a fresh identity and says Hello again. What came in a session carries its number, so that nothing of an
old session is acted on, or answered, in a new one.

One socket serves two threads, under a lock. The compute thread receives and sends by itself: between two steps of a
small model, handing a message from thread to thread would take longer than all else. The keeper thread opens and ends
sessions, sends heartbeats, and receives once a second, in case the compute thread is busy for long.

        scheduler  <--DEALER-->  compute thread: get, send
                                 keeper thread: Hello, Heartbeat, and what comes meanwhile  --deque-->  get
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from ..proto.codec import encode
from ..proto.messages import PROTOCOL, Assign, Bye, FromSchedulerWorkers, Heartbeat, Hello, Rest
from ..proto.process import heartbeat, new_incarnation, resident_bytes
from ..proto.wire.sockets import DISCONNECTED, Dealer, Keys

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 1.0
RETRY_S = (0.05, 2.0)
"""First and longest wait before a new session after one that the scheduler did not answer."""

MAX_QUEUED = 256
"""Messages that may wait for the compute thread: at most two plans in flight, and some dozens of moves."""

HUNG_S = 10.0
"""Dismissed for so long with the compute thread still in a step: that step hangs, and the process must end."""

LINGER_MS = 1000
"""How long last words may take to leave when a session is closed on purpose."""

LOOK_S = 1.0
"""How long a thread may wait at once: Python lets a signal that came right before a wait be handled only after it."""


class LeaseLost:
    """In place of a message: this session is over. Rows are void; the next Assign comes in a new session."""

    def __init__(self, reason: str):
        self.reason = reason


class Leave:
    """In place of a message: this process was asked to end, and should drain first."""


class Arrived:
    """In place of a message: pages of other workers wait to be put into their blocks."""


class Dismissed(Exception):
    """The scheduler said Bye; the text is its reason. ``served``: this worker had a lease before."""

    def __init__(self, reason: str, served: bool):
        super().__init__(reason)
        self.served = served


class _Bell:
    """Wakes the thread that polls ``fileno()``. May be rung by any thread, and in a signal handler."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        for end in (self._heard, self._rung):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        """Wake the thread, now or when it next polls."""
        with contextlib.suppress(OSError):  # so often that no more fits; or it is closed
            self._rung.send(b"!")

    def quiet(self) -> None:
        """Forget that it rang."""
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)

    def close(self) -> None:
        self._heard.close()
        self._rung.close()


class Link:
    """Threads: one creates, starts, gets and closes; any sends and posts; the keeper belongs to the link."""

    def __init__(self, endpoint: str, device: str, keys: Keys | None = None):
        self.loaded = False  # told in the next Hello, and so is
        self.asleep = -1  # the level of the last Rest, -1: none
        self.endpoint = ""  # where it takes pages of other workers
        self.role = "both"
        self.last_step = 0  # told in each Heartbeat
        self.bad_frames = 0
        self.bad_pages: Callable[[], int] = int  # frames that did not decode where other workers send pages
        self._endpoint, self._device, self._keys = endpoint, device, keys
        self._context = zmq.Context()
        self._inbox: deque[tuple[int, Any]] = deque()
        self._seen = 0  # the session of the message that ``get`` gave last
        self._lock = threading.RLock()  # of the wire and what is known of its session
        self._wire: Dealer[Any] | None = None  # None where no session is open
        self._session = 0
        self._answered = self._dismissed = False  # what the scheduler has said in this session
        self._linger_ms = 0  # how long what was sent in it may take to leave
        self._closed = False
        self._waiting = False  # the compute thread polls the wire's socket and ``_wake``
        self._wake, self._keeper_wake = _Bell(), _Bell()
        self._thread = threading.Thread(target=self._keep, name="link", daemon=True)

    def start(self) -> None:
        """Connect and say Hello; keeps trying until the scheduler is there."""
        self._thread.start()

    # ------------------------------------------------------------ the compute thread's side

    def get(self, timeout: float | None = None) -> Any:
        """The next message or LeaseLost, or None after ``timeout`` seconds. Waits without end by default."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if not self._inbox and not self._wait(deadline):
                return None
            session, message = self._inbox.popleft()
            if isinstance(message, BaseException):
                raise message
            # Pages say themselves of which lease they are, and those that wait are to be taken in any case.
            if session == self._session or isinstance(message, LeaseLost | Leave | Arrived):
                self._seen = max(session, self._seen)
                return message

    def next_of(self, kind: type[T]) -> T | None:
        """The next message where it has been received and is of this kind; else None, and it stays the next."""
        session, message = self._inbox[0] if self._inbox else (0, None)
        if session != self._session or not isinstance(message, kind):
            return None
        self._inbox.popleft()
        return message

    def send(self, message: Any) -> None:
        """Send a message; dropped if the session it answers is over."""
        frame = encode(message)
        with self._lock:
            if self._wire is not None and self._seen == self._session:
                self._wire.send_frame(frame)
                self._receive()

    def renew(self) -> None:
        """End this session after what was sent: a new identity, a new Hello. Void if it has ended already."""
        with self._lock:
            if self._seen == self._session:
                self._end(LINGER_MS)

    def post(self, message: Any) -> None:
        """Put a message of this process's own before the compute thread; safe from any thread."""
        self._inbox.append((self._session, message))
        self._wake.ring()

    def leave(self) -> None:
        """Put Leave before the compute thread; safe in a signal handler."""
        self._inbox.append((0, Leave()))
        self._wake.ring()

    def close(self, reason: str | None = None) -> None:
        """Say Bye (unless ``reason`` is None), let it leave, and end the keeper. Safe to call twice."""
        if self._context.closed:
            return
        with self._lock:
            if self._wire is not None and reason is not None:
                self._wire.send(Bye(reason))
            self._end(LINGER_MS)
            self._closed = True  # the last, for from now on the keeper takes no lock
        self._keeper_wake.ring()
        if self._thread.is_alive():
            self._thread.join(5)
        self._context.destroy(LINGER_MS)
        self._wake.close()
        self._keeper_wake.close()

    def _wait(self, deadline: float) -> bool:
        """Until something is in the inbox; False once ``deadline`` has passed."""
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                self._receive()
                if self._wire is not None:
                    poll.register(self._wire.socket.getsockopt(zmq.FD), select.POLLIN)
                self._waiting = True
            if self._inbox:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if (self._wake.fileno(), select.POLLIN) in poll.poll(1000 * min(left, LOOK_S)):
                self._wake.quiet()
        self._waiting = False
        return bool(self._inbox)

    # ------------------------------------------------------------ either thread's, with the lock held

    def _receive(self) -> None:
        """Take what has come into the inbox.

        To be called after all that is done with the socket, for that may take the signal that something has come.
        """
        while self._wire is not None and self._wire.waits() and (message := self._wire.recv()) is not None:
            self._answered = True
            if isinstance(message, Bye) and message.again and not self._dismissed:
                self._lose(message.reason)
            elif not isinstance(message, Heartbeat):
                if isinstance(message, Assign | Rest):  # known at once: the model may be loading still
                    self.asleep = message.level if isinstance(message, Rest) else -1
                self._dismissed |= isinstance(message, Bye)
                self._inbox.append((self._session, message))
                if self._waiting:
                    self._wake.ring()
            if len(self._inbox) > MAX_QUEUED:
                self._lose(f"the scheduler sent over {MAX_QUEUED} messages unasked")

    def _lose(self, reason: str) -> None:
        log.warning("%s; the lease is over, saying Hello again", reason)
        self.post(LeaseLost(reason))
        self._end(0)

    def _end(self, linger_ms: int) -> None:
        """The session is over: what waits in the inbox is void, and the keeper closes the socket."""
        if self._wire is not None:
            self._wire, self._linger_ms = None, linger_ms
            self._session += 1
            self._keeper_wake.ring()

    # ------------------------------------------------------------ the keeper's side

    def _keep(self) -> None:
        wait = RETRY_S[0]
        try:
            while not self._closed:
                answered = self._hold_session()
                wait = RETRY_S[0] if answered else min(wait * 2, RETRY_S[1])
                self._pause(wait)
        except Exception as error:  # noqa: BLE001  # the compute thread raises it: a worker without a link must end
            self.post(error)

    def _hold_session(self) -> bool:
        """One identity, from Hello until it ends. Returns whether the scheduler ever answered."""
        wire: Dealer[Any] = Dealer(
            FromSchedulerWorkers, self._endpoint, new_incarnation("gpu_worker"), self._keys, self._context
        )
        monitor, bad_before = wire.monitor(), self.bad_frames
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._keeper_wake.fileno(), zmq.POLLIN)
        hung_at: float | None = None
        try:
            self._open(wire)
            next_heartbeat = time.monotonic() + HEARTBEAT_S
            while not self._closed and self._wire is wire:
                heartbeat()
                poller.poll(max(0, int(1000 * (next_heartbeat - time.monotonic())) + 1))
                self._keeper_wake.quiet()
                if self._closed:  # perhaps by a signal's handler, and what it interrupted may hold the lock
                    break
                now = time.monotonic()
                with self._lock:
                    self._look(wire)
                    self.bad_frames = bad_before + wire.bad_frames
                    if now >= next_heartbeat and self._wire is wire:
                        wire.send(Heartbeat(self.last_step, resident_bytes(), self.bad_frames + self.bad_pages()))
                        next_heartbeat = now + HEARTBEAT_S
                        self._receive()
                if self._dismissed and self.loaded:
                    hung_at = hung_at or now + HUNG_S
                    if now > hung_at:
                        log.error("dismissed, and step %d still runs after %g s; ending", self.last_step + 1, HUNG_S)
                        os._exit(1)
            return self._answered
        finally:
            self._wire = None
            wire.socket.disable_monitor()
            monitor.close(0)
            wire.socket.close(self._linger_ms)

    def _open(self, wire: Dealer[Any]) -> None:
        """A session begins on ``wire``."""
        with self._lock:
            self._session += 1
            self._wire, self._linger_ms = wire, 0
            self._answered = self._dismissed = False
            identity = wire.socket.getsockopt(zmq.IDENTITY).decode("ascii")
            wire.send(
                Hello(
                    "gpu_worker", identity, PROTOCOL, os.getpid(), self.endpoint, self._device, self.loaded,
                    self.asleep, self.role,
                )
            )  # fmt: skip
        self._wake.ring()  # who waits for a message polls this socket from now on

    def _look(self, wire: Dealer[Any]) -> None:
        """Receive in place of a compute thread that is busy, and see whether the connection has broken."""
        self._receive()
        while (event := wire.next_event()) is not None:
            if event == DISCONNECTED and self._wire is wire:
                self._lose("the connection to the scheduler broke")

    def _pause(self, seconds: float) -> None:
        """Wait between sessions, unless the link is closed meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._closed and (left := deadline - time.monotonic()) > 0:
            select.select([self._keeper_wake], [], [], left)
            self._keeper_wake.quiet()
