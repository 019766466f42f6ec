"""What a ROUTER and a DEALER have in common: a socket that receives one union of messages, and its place in a loop.

A process that serves one stream spends most of its time here, so what is done for each message is kept small: flags
are plain integers, methods are looked up once (pyzmq's sockets have a ``__getattr__``, which makes that slow), and
whether a message waits is asked rather than found out by an exception, which costs three times as much.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import zmq

from ..codec import MAX_FRAME, Decoder

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 3_000
"""The system's own is two minutes, with ever longer pauses: too long for a link that has come back."""
DRAIN_LIMIT = 512
"""Messages handled in one turn of a loop before others get theirs."""
TURN_S = 0.005
"""The same in seconds, where messages may be large: what comes of those read so far is done before more are read."""

CONNECTED, DISCONNECTED = "connected", "disconnected"

EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: CONNECTED,
    zmq.EVENT_DISCONNECTED: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: DISCONNECTED,
}

NOBLOCK, SNDMORE, RCVMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE)
_STATE, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)

_EVENT = struct.Struct("=Hi")
"""The first frame of a monitor's message: which event, and a value that depends on it (zmq_socket_monitor(3))."""


def descriptor(socket: zmq.Socket) -> int:
    """What is readable when something has come. It signals edges: whoever waits for it asks ``waits`` before."""
    return int(socket.getsockopt(zmq.FD))


def _readable(option: Callable[[int], Any]) -> bool:
    """Whether a message waits, by a socket's ``getsockopt``."""
    return bool(option(_STATE) & _READABLE)


class Wire(Generic[T]):
    """A socket that sends messages and receives one closed union.

    ``bad_frames`` counts what did not decode; such bytes are logged with their peer and dropped.
    """

    def __init__(
        self, kind: int, union: Any, context: zmq.Context | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self.socket = (context or zmq.Context.instance()).socket(kind)
        self._get, self._put_frame = self.socket.recv, self.socket.send
        self._option: Callable[[int], Any] = self.socket.getsockopt
        self._decode: Decoder[T] = Decoder(union)
        self._monitor: zmq.Socket | None = None
        self._pump: Callable[[], None] | None = None
        self._pump_events: Callable[[], None] | None = None
        self._will_look = False  # the pump runs, or is going to
        self._resets = 0  # connections given up, not told by next_event yet
        self._loop: AbstractEventLoop | None = None
        self.bad_frames = 0
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS), (zmq.HANDSHAKE_IVL, HEARTBEAT_TIMEOUT_MS),
        ):  # fmt: skip
            self.socket.setsockopt(option, value)

    def waits(self) -> bool:
        """Whether there is something to ``recv``."""
        return not self.socket.closed and _readable(self._option)

    # -- asyncio

    def attach(
        self,
        on_message: Callable[..., None],
        on_event: Callable[[str], None] | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        """Call ``on_message`` for each message (a Router gives peer and message) in ``loop``, or the running one.

        ZeroMQ's descriptor signals edges, not levels, so the socket is drained, and looked at after a send as well.
        """
        if loop is None:
            from asyncio import get_running_loop  # processes without such a loop start sooner without it

            loop = get_running_loop()
        self._loop, clock = loop, self._clock

        def pump() -> None:
            self._will_look, drained = True, False
            try:
                until = clock() + TURN_S
                while not (drained := not self.waits()):
                    item = self.recv()
                    if item is not None:
                        on_message(*item) if isinstance(item, tuple) else on_message(item)
                    if clock() >= until:
                        break
            finally:
                self._will_look = False
                if not drained:
                    self._look_again()

        self._pump = pump
        loop.add_reader(descriptor(self.socket), pump)
        if on_event is not None:
            monitor = self.monitor()

            def pump_events() -> None:
                while not monitor.closed and (event := self.next_event()) is not None:
                    on_event(event)

            self._pump_events = pump_events
            loop.add_reader(descriptor(monitor), pump_events)
            loop.call_soon(pump_events)
        self._look_again()

    def _look_again(self) -> None:
        """Have what waits pumped, for what was done may have taken the signal that it has come."""
        if not self._will_look and self._pump is not None and self._loop is not None and self.waits():
            self._will_look = True
            self._loop.call_soon(self._pump)

    # -- monitor

    def monitor(self) -> zmq.Socket:
        """The PAIR socket that tells of connections made and lost; poll it, then call ``next_event``."""
        if self._monitor is None:
            events = 0
            for event in EVENTS:
                events |= event
            self._monitor = self.socket.get_monitor_socket(events)
        return self._monitor

    def next_event(self) -> str | None:
        """CONNECTED or DISCONNECTED, or None when there is nothing to tell."""
        if self._resets:
            self._resets -= 1
            return DISCONNECTED
        monitor = self._monitor
        if monitor is None or monitor.closed or not _readable(monitor.getsockopt):
            return None
        event, _ = _EVENT.unpack(monitor.recv_multipart(NOBLOCK)[0])
        self._note(event)
        return EVENTS.get(event)

    def _note(self, event: int) -> None:
        """What a kind of socket makes of an event of its monitor."""

    def recv(self) -> Any:
        raise NotImplementedError

    def _rest(self) -> int:
        """Take what is left of a message of several frames; how many there were."""
        count = 0
        while self._option(RCVMORE):
            self._get(NOBLOCK)
            count += 1
        return count

    def _drop(self, peer: str, error: object) -> None:
        self.bad_frames += 1
        if self.bad_frames <= 20 or self.bad_frames % 1000 == 0:
            # A stranger's identity may be any bytes, and so may what an error quotes: repr keeps them from a terminal.
            log.warning("dropped a bad frame from %r (%d so far): %r", peer, self.bad_frames, str(error))

    def close(self) -> None:
        """Close at once; messages not yet sent are given up."""
        if self.socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(descriptor(self.socket))
            if self._monitor is not None:
                self._loop.remove_reader(descriptor(self._monitor))
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.close(0)
