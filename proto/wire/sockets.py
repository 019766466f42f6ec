"""ZeroMQ sockets with identities, monitors, and CURVE when they leave the machine.

``ipc://FOLDER`` is the default address of a scheduler: a 0700 folder of socket files. ``tcp://HOST:PORT`` takes PORT
for the front side and PORT + 1 for workers. Plain tcp off loopback is refused at both ends.

Sockets here never block and have no high-water marks: bounds are the scheduler's business (429), and a peer that is
gone is an error at the sender (ROUTER_MANDATORY) or found by its monitor, not a silent drop. So is one that is there
and does not read (``unread.py``): it is given up, and when it reads on it learns that it was.

What finds a peer that went without a word: ZMTP heartbeats, sent and checked by ZeroMQ's own thread whatever the
process does. A link that is cut in silence, a machine that is off, and a process that is stopped are disconnected
12 s after the last sign of life at most, at both ends. A DEALER then connects again by itself, under the same
identity, and sends what it had not sent yet. What was on its way is lost. Every two seconds each process lists what it
believes to be open (Reconcile) and is told what is not (Unknown): that is how the loss is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..codec import BadFrame, Decoder, encode
from ..config import ConfigError
from .addresses import (
    MAX_FOLDER,
    detokenizer_bind,
    front_endpoint,
    host_of,
    ip_of,
    needs_curve,
    private_dir,
    worker_endpoint,
)
from .keys import Keys, connect_with, load_keys, serve_with
from .unread import ANSWER, ASK, RESET, Unread

__all__ = [
    "CONNECTED",
    "DISCONNECTED",
    "DRAIN_LIMIT",
    "MAX_FOLDER",
    "MAX_FRAME",
    "Dealer",
    "Keys",
    "Router",
    "Wire",
    "detokenizer_bind",
    "front_endpoint",
    "load_keys",
    "needs_curve",
    "private_dir",
    "worker_endpoint",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FRAME = 256 * 2**20
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
REFUSED_S = 1.0
"""A DEALER in an event loop that was refused for its keys waits this long before it tries again."""
CONNECT_TIMEOUT_MS = 3_000
"""The system's own is two minutes, with ever longer pauses: too long for a link that has come back."""
DRAIN_LIMIT = 512
"""Messages handled in one turn of an event loop before others get theirs."""

CONNECTED, DISCONNECTED = "connected", "disconnected"

_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: CONNECTED,
    zmq.EVENT_DISCONNECTED: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: DISCONNECTED,
}


def _descriptor(socket: zmq.Socket) -> int:
    return int(socket.getsockopt(zmq.FD))


class Wire(Generic[T]):
    """A socket that sends messages and receives one closed union.

    ``bad_frames`` counts what did not decode; such bytes are logged with their peer and dropped.
    """

    def __init__(self, kind: int, union: Any, context: zmq.Context | None = None):
        self.socket = (context or zmq.Context.instance()).socket(kind)
        self._decode: Decoder[T] = Decoder(union)
        self._monitor: zmq.Socket | None = None
        self._pump: Callable[[], None] | None = None
        self._pump_events: Callable[[], None] | None = None
        self._resets = 0  # connections given up, not told by next_event yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self.bad_frames = 0
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS), (zmq.HANDSHAKE_IVL, HEARTBEAT_TIMEOUT_MS),
        ):  # fmt: skip
            self.socket.setsockopt(option, value)

    # -- asyncio

    def attach(self, on_message: Callable[..., None], on_event: Callable[[str], None] | None = None) -> None:
        """Call ``on_message`` for each message (a Router gives peer and message) in the running loop.

        ZeroMQ's descriptor signals edges, not levels, so the socket is drained after every send as well.
        """
        self._loop = asyncio.get_running_loop()
        loop = self._loop

        def pump() -> None:
            for _ in range(DRAIN_LIMIT):
                if self.socket.closed:
                    return
                item = self.recv()
                if item is None:
                    self._look_again()  # after many bad frames there may be more
                    return
                on_message(*item) if isinstance(item, tuple) else on_message(item)
            loop.call_soon(pump)

        self._pump = pump
        loop.add_reader(_descriptor(self.socket), pump)
        if on_event is not None:
            monitor = self.monitor()

            def pump_events() -> None:
                while not monitor.closed and (event := self.next_event()) is not None:
                    on_event(event)

            self._pump_events = pump_events
            loop.add_reader(_descriptor(monitor), pump_events)
            loop.call_soon(pump_events)
        loop.call_soon(pump)

    def _look_again(self) -> None:
        if self._pump is not None and self._loop is not None and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._pump)

    # -- monitor

    def monitor(self) -> zmq.Socket:
        """The PAIR socket that tells of connections made and lost; poll it, then call ``next_event``."""
        if self._monitor is None:
            events = 0
            for event in _EVENTS:
                events |= event
            self._monitor = self.socket.get_monitor_socket(events)
        return self._monitor

    def next_event(self) -> str | None:
        """CONNECTED or DISCONNECTED, or None when there is nothing to tell."""
        if self._resets:
            self._resets -= 1
            return DISCONNECTED
        if self._monitor is None or self._monitor.closed:
            return None
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        self._note(event["event"])
        return _EVENTS.get(event["event"])

    def _note(self, event: int) -> None:
        """What a kind of socket makes of an event of its monitor."""

    def recv(self) -> Any:
        raise NotImplementedError

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
            self._loop.remove_reader(_descriptor(self.socket))
            if self._monitor is not None:
                self._loop.remove_reader(_descriptor(self._monitor))
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.close(0)


class Router(Wire[T]):
    """A ROUTER that knows its peers by their incarnation and raises nothing."""

    def __init__(self, union: Any, endpoint: str, keys: Keys | None = None, context: zmq.Context | None = None):
        """Bind ``endpoint``; ``self.endpoint`` is what was bound. Raises ConfigError where it cannot be."""
        encrypted = needs_curve(endpoint, keys)
        context = context or zmq.Context.instance()
        super().__init__(zmq.ROUTER, union, context)
        self._keys = keys
        self._unread: dict[str, Unread] = {}
        self._refused = 0
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that comes back before its old connection was found broken takes its identity over. Without this
        # ZeroMQ accepts the new connection, and then never reads from it.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if encrypted and keys is not None:
                serve_with(self.socket, context, keys)
            self.socket.bind(endpoint)
        except (zmq.ZMQError, ConfigError) as error:
            self.socket.close(0)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot listen on {endpoint}: {error}; choose another address.") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def advertised(self, address: str | None = None) -> str:
        """What to tell others of where they reach this socket: ``address`` or the one it is bound to, with its public
        key where they cannot know it. Raises ConfigError for one that means nothing elsewhere."""
        address = address or self.endpoint
        needs_curve(address, self._keys)
        where = ip_of(address)
        if address.startswith("tcp://") and (host_of(address) == "*" or (where is not None and where.is_unspecified)):
            raise ConfigError(f"others cannot reach {address}; say with --advertise tcp://host:port where they can.")
        if self._keys is None or self._keys.shared or not address.startswith("tcp://"):
            return address
        return f"{address} {self._keys.public.decode()}"

    def recv(self) -> tuple[str, T] | None:
        """The next (peer, message), or None when nothing waits (but bad frames, which are counted and dropped)."""
        for _ in range(DRAIN_LIMIT):  # a peer that sends bad frames alone must not keep the process from its work
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = frames[0].decode("ascii", "replace")
            if len(frames) != 2:
                self._drop(peer, f"{len(frames) - 1} frames where one was expected")
                continue
            frame = frames[1]
            if frame[:1] == b"\xc1" and self._control(peer, frame):
                continue
            try:
                return peer, self._decode(frame)
            except BadFrame as error:
                self._drop(peer, error)
        return None

    def send(self, peer: str, message: Any) -> bool:
        """False where the peer is gone, or given up."""
        return self.send_frame(peer, encode(message))

    def send_frame(self, peer: str, frame: bytes) -> bool:
        """Send bytes already encoded. False where the peer is gone, or has left too much unread for too long."""
        now = time.monotonic()
        unread = self._unread.get(peer)
        if unread is None:
            unread = self._unread[peer] = Unread(now)
        if len(frame) > MAX_FRAME:
            log.error("a frame of %d bytes for %r was not sent: it is over %d", len(frame), peer, MAX_FRAME)
            self._put(peer, RESET)
            return False
        if unread.hopeless(now):
            if not unread.given_up:
                unread.given_up = True
                log.warning("gave up %r: %d MiB are unread and nothing was read for long", peer, unread.owed >> 20)
                self._put(peer, RESET)
            if (question := unread.question(now)) is not None:
                self._put(peer, question)
            return False
        if not self._put(peer, frame):
            return False
        unread.add(len(frame))
        if (question := unread.question(now)) is not None:
            self._put(peer, question)
        return True

    def _put(self, peer: str, frame: bytes) -> bool:
        try:
            self.socket.send_multipart((peer.encode("ascii", "replace"), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                self._unread.pop(peer, None)
                return False
            raise
        finally:
            self._look_again()  # in any case: a send may have taken the signal that others have sent something
        return True

    def _control(self, peer: str, frame: bytes) -> bool:
        """Whether this was a frame of the sockets' own."""
        kind = frame[:2]
        if kind == ASK and len(frame) == 10:
            self.send_frame(peer, ANSWER + frame[2:])
        elif kind == ANSWER and len(frame) == 10:
            if (unread := self._unread.get(peer)) is not None:
                unread.answered(int.from_bytes(frame[2:], "little"))
        elif frame == RESET:
            self._unread.pop(peer, None)  # the first frame of a connection made anew
        else:
            return False
        return True

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refused += 1
            if self._refused <= 20 or self._refused % 1000 == 0:
                log.warning("refused a connection to %s (%d so far): it is not quire's, or has wrong keys or none",
                            self.endpoint, self._refused)  # fmt: skip
        if _EVENTS.get(event) == DISCONNECTED:  # forget what those owe who are no longer there
            now = time.monotonic()
            for peer, unread in list(self._unread.items()):
                self._put(peer, unread.ask(now))


class Dealer(Wire[T]):
    """A DEALER whose identity is its process's incarnation."""

    def __init__(
        self, union: Any, endpoint: str, identity: str, keys: Keys | None = None, context: zmq.Context | None = None
    ):
        """Connect to ``endpoint`` (the peer may come later), which may have the peer's public key after a space.

        Raises ConfigError for an endpoint off loopback without keys, or of another kind than ours, and ZMQError for
        one that makes no sense.
        """
        self.endpoint, _, server = endpoint.partition(" ")
        self._encrypted = needs_curve(self.endpoint, keys)
        super().__init__(zmq.DEALER, union, context)
        self._unread = Unread(time.monotonic())
        try:
            self.socket.setsockopt(zmq.IDENTITY, identity.encode("ascii"))
            if self._encrypted and keys is not None:
                connect_with(self.socket, keys, server.encode("ascii", "replace"))
            self.monitor()  # before connecting, so that no event is missed
            self.socket.connect(self.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def recv(self) -> T | None:
        """The next message, or None when nothing waits (but bad frames, which are counted and dropped)."""
        for _ in range(DRAIN_LIMIT):  # a peer that sends bad frames alone must not keep the process from its work
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) != 1:
                self._drop(self.endpoint, f"{len(frames)} frames where one was expected")
                continue
            frame = frames[0]
            if frame[:1] == b"\xc1" and self._control(frame):
                continue
            try:
                return self._decode(frame)
            except BadFrame as error:
                self._drop(self.endpoint, error)
        return None

    def send(self, message: Any) -> bool:
        """False where it was not queued: the peer has left too much unread for too long, and was given up."""
        return self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> bool:
        """Send bytes already encoded. False as for ``send``; ``next_event`` will say DISCONNECTED then."""
        now = time.monotonic()
        if len(frame) > MAX_FRAME:
            log.error("a frame of %d bytes for %s was not sent: it is over %d", len(frame), self.endpoint, MAX_FRAME)
            return False
        if self._unread.hopeless(now):
            log.warning("gave up %s: %d MiB are unread", self.endpoint, self._unread.owed >> 20)
            self._reset()
            return False
        try:
            self.socket.send(frame, zmq.NOBLOCK)
            self._unread.add(len(frame))
            if (question := self._unread.question(now)) is not None:
                self.socket.send(question, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._look_again()
        return True

    def _control(self, frame: bytes) -> bool:
        """Whether this was a frame of the sockets' own."""
        kind = frame[:2]
        if kind == ASK and len(frame) == 10:
            self.send_frame(ANSWER + frame[2:])
        elif kind == ANSWER and len(frame) == 10:
            self._unread.answered(int.from_bytes(frame[2:], "little"))
        elif frame == RESET:
            log.warning("%s has given this connection up; making another", self.endpoint)
            self._reset()
        else:
            return False
        return True

    def _connect(self) -> None:
        """Once more, without what waits in the connection there was."""
        if not self.socket.closed:
            with contextlib.suppress(zmq.ZMQError):  # ZeroMQ has forgotten an endpoint whose handshake failed
                self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def _reset(self) -> None:
        """Give up the connection and all that waits in it, and make another."""
        self._connect()
        self._unread = Unread(time.monotonic())
        self.socket.send(RESET, zmq.NOBLOCK)
        self._look_again()
        self._resets += 1
        if self._pump_events is not None and self._loop is not None:
            self._loop.call_soon(self._pump_events)

    def _note(self, event: int) -> None:
        """Say once that keys do not fit, until it has worked. ZeroMQ does not try again after a refusal; we do."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            _not_let_in.discard(self.endpoint)
        elif event in _HANDSHAKE_FAILED and self._encrypted and self.endpoint not in _not_let_in:
            _not_let_in.add(self.endpoint)
            log.warning("%s: %s; trying again", self.endpoint, _HANDSHAKE_FAILED[event])
        if event in _REFUSED and self._loop is not None:
            self._loop.call_later(REFUSED_S, self._connect)


_HANDSHAKE_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "this process's key is not allowed there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "who listens there has no keys, or is not quire",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off while keys were exchanged, as when they are not the same",
}
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_not_let_in: set[str] = set()
