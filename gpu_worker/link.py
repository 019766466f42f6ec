"""The worker's connection to the scheduler: one thread that receives, sends and shows that this process lives, whatever
a step is doing.

A *session* is one connection under one identity. It ends when the connection breaks or the worker ends its lease;
the next one has a fresh identity and says Hello again. Everything handed over carries its session's number, so that
nothing of an old session is acted on or sent in a new one.

        scheduler  <--DEALER-->  IO thread  --SimpleQueue-->  compute thread
                                            <--inproc PAIR--
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from typing import Any, TypeVar

import zmq

from ..proto.codec import encode
from ..proto.messages import PROTOCOL, Bye, FromSchedulerWorkers, Heartbeat, Hello
from ..proto.process import heartbeat, new_incarnation, resident_bytes
from ..proto.wire.sockets import DISCONNECTED, Dealer, Keys

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
RETRY_S = (0.05, 2.0)
"""First and longest wait before a new session after one that the scheduler did not answer."""

MAX_QUEUED = 64
"""Messages that may wait for the compute thread; a scheduler has at most two plans in flight."""

_SEND, _RENEW, _CLOSE = b"s", b"r", b"c"
"""First byte of what the compute thread hands over; then its session in 8 bytes, then a frame to send, if any."""

HUNG_S = 10.0
"""Dismissed for so long with the compute thread still in a step: that step hangs, and the process must end."""

LINGER_MS = 1000
"""How long last words may take to leave when a session is closed on purpose."""


LOOK_S = 1.0
"""How long a thread may wait at once: Python lets a signal that came right before a wait be handled only after it."""

T = TypeVar("T")


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


class LeaseLost:
    """In place of a message: this session is over. Rows are void; the next Assign comes in a new session."""

    def __init__(self, reason: str):
        self.reason = reason


class Leave:
    """In place of a message: this process was asked to end, and should drain first."""


class Dismissed(Exception):
    """The scheduler said Bye; the text is its reason. ``served``: this worker had a lease before."""

    def __init__(self, reason: str, served: bool):
        super().__init__(reason)
        self.served = served


class Link:
    """Threads: one creates, starts, gets, sends and closes; the IO thread belongs to the link."""

    def __init__(self, endpoint: str, device: str, keys: Keys | None = None):
        self.loaded = False  # told in the next Hello
        self.last_step = 0  # told in each Heartbeat
        self.bad_frames = 0
        self._endpoint, self._device, self._keys = endpoint, device, keys
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._session = 0  # the IO thread's
        self._seen = 0  # the session of the message the compute thread got last
        name = f"inproc://out-{id(self)}"
        self._in = self._context.socket(zmq.PAIR)
        self._in.bind(name)
        self._out = self._context.socket(zmq.PAIR)
        for end in (self._in, self._out):
            end.set_hwm(0)
            end.linger = 0
        self._out.connect(name)
        self._lock = threading.RLock()  # _out is used by the compute thread and, on a GPU, by the one that waits for it
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Connect and say Hello; keeps trying until the scheduler is there."""
        self._thread.start()

    # ------------------------------------------------------------ the compute thread's side

    def get(self, timeout: float | None = None) -> Any:
        """The next message or LeaseLost, or None after ``timeout`` seconds. Waits without end by default."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                session, message = take(self._inbox, left)
            except queue.Empty:
                return None
            if isinstance(message, BaseException):
                raise message
            if session == self._session or isinstance(message, LeaseLost | Leave):
                self._seen = max(session, self._seen)
                return message

    def send(self, message: Any) -> None:
        """Hand a message to the IO thread; dropped if the session it answers is over."""
        self._hand_over(_SEND, encode(message))

    def renew(self) -> None:
        """End this session after what was sent: a new identity, a new Hello. Void if it has ended already."""
        self._hand_over(_RENEW)

    def post(self, message: Any) -> None:
        """Put a message of this process's own before the compute thread; safe from any thread."""
        self._inbox.put((self._session, message))

    def leave(self) -> None:
        """Put Leave before the compute thread; safe in a signal handler."""
        self._inbox.put((0, Leave()))

    def close(self, reason: str | None = None) -> None:
        """Say Bye (unless ``reason`` is None), let it leave, and end the thread. Safe to call twice."""
        if self._context.closed:
            return
        if self._thread.is_alive():
            self._hand_over(_CLOSE, b"" if reason is None else encode(Bye(reason)))
            self._thread.join(5)
        self._out.close()
        self._context.destroy(LINGER_MS)

    def _hand_over(self, kind: bytes, frame: bytes = b"") -> None:
        with self._lock:
            self._out.send(kind + self._seen.to_bytes(8, "little") + frame)

    # ------------------------------------------------------------ the IO thread's side

    def _run(self) -> None:
        wait = RETRY_S[0]
        try:
            while True:
                outcome, answered = self._run_session()
                if outcome == _CLOSE:
                    return
                wait = RETRY_S[0] if answered else min(wait * 2, RETRY_S[1])
                if self._sleep(wait):
                    return
        except Exception as error:  # noqa: BLE001  # the compute thread raises it: a worker without a link must end
            self._inbox.put((self._session, error))
        finally:
            self._in.close()

    def _run_session(self) -> tuple[bytes, bool]:
        """One identity, from Hello until it ends. Returns how it ended, and whether the scheduler ever answered."""
        self._session += 1
        wire: Dealer[Any] = Dealer(
            FromSchedulerWorkers, self._endpoint, new_incarnation("gpu_worker"), self._keys, self._context
        )
        monitor, dropped_before = wire.monitor(), self.bad_frames
        poller = zmq.Poller()
        for socket in (wire.socket, monitor, self._in):
            poller.register(socket, zmq.POLLIN)
        answered, linger = False, 0
        dismissed = False
        hung_at: float | None = None
        try:
            wire.send(self._hello(wire))
            next_heartbeat = time.monotonic() + HEARTBEAT_S
            while True:
                heartbeat()
                poller.poll(max(0, int(1000 * (next_heartbeat - time.monotonic())) + 1))
                while self._inbox.qsize() <= MAX_QUEUED and (message := wire.recv()) is not None:
                    answered = True
                    if isinstance(message, Bye):
                        if message.again and not dismissed:
                            return self._lose(message.reason), answered
                        dismissed = True
                    if not isinstance(message, Heartbeat):
                        self.post(message)
                self.bad_frames = dropped_before + wire.bad_frames
                ended = self._forward(wire)
                if ended:
                    linger = LINGER_MS
                    return ended, answered
                while (event := wire.next_event()) is not None:
                    if event == DISCONNECTED:
                        return self._lose("the connection to the scheduler broke"), answered
                if self._inbox.qsize() > MAX_QUEUED:
                    return self._lose(f"the scheduler sent over {MAX_QUEUED} messages unasked"), answered
                now = time.monotonic()
                if dismissed and self.loaded:
                    hung_at = hung_at or now + HUNG_S
                    if now > hung_at:
                        log.error("dismissed, and step %d still runs after %g s; ending", self.last_step + 1, HUNG_S)
                        os._exit(1)
                if now >= next_heartbeat:
                    wire.send(Heartbeat(self.last_step, resident_bytes(), self.bad_frames))
                    next_heartbeat = now + HEARTBEAT_S
        finally:
            wire.socket.disable_monitor()
            monitor.close(0)
            wire.socket.close(linger)

    def _hello(self, wire: Dealer[Any]) -> Hello:
        identity = wire.socket.getsockopt(zmq.IDENTITY).decode("ascii")
        return Hello("gpu_worker", identity, PROTOCOL, os.getpid(), device=self._device, loaded=self.loaded)

    def _lose(self, reason: str) -> bytes:
        log.warning("%s; the lease is over, saying Hello again", reason)
        self.post(LeaseLost(reason))
        self._session += 1  # what waits in the inbox is void from now on
        return _RENEW

    def _forward(self, wire: Dealer[Any]) -> bytes | None:
        """Send what the compute thread handed over. Returns what ends the session, if something does."""
        while True:
            try:
                handed = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            kind, frame = handed[:1], handed[9:]
            current = int.from_bytes(handed[1:9], "little") == self._session
            if frame and (current or kind == _CLOSE):
                wire.send_frame(frame)
            if kind == _CLOSE or (kind == _RENEW and current):
                return kind

    def _sleep(self, seconds: float) -> bool:
        """Wait between sessions. True where the link was closed meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._in.poll(int(1000 * left) + 1) and self._in.recv()[:1] == _CLOSE:
                return True
        return False
