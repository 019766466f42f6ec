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

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from ..codec import MAX_FRAME, BadFrame, encode
from ..config import ConfigError
from .addresses import (
    MAX_FOLDER,
    front_endpoint,
    host_of,
    ip_of,
    is_loopback,
    needs_curve,
    own_bind,
    private_dir,
    worker_endpoint,
)
from .keys import Keys, connect_with, load_keys, serve_with
from .unread import ANSWER, ASK, RESET, Unread
from .wire import CONNECTED, DISCONNECTED, DRAIN_LIMIT, EVENTS, NOBLOCK, SNDMORE, Wire

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
    "front_endpoint",
    "is_loopback",
    "load_keys",
    "needs_curve",
    "own_bind",
    "private_dir",
    "worker_endpoint",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED_S = 1.0
"""A DEALER in an event loop that was refused for its keys waits this long before it tries again."""


class Router(Wire[T]):
    """A ROUTER that knows its peers by their incarnation and raises nothing."""

    def __init__(
        self,
        union: Any,
        endpoint: str,
        keys: Keys | None = None,
        context: zmq.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Bind ``endpoint``; ``self.endpoint`` is what was bound. Raises ConfigError where it cannot be."""
        encrypted = needs_curve(endpoint, keys)
        context = context or zmq.Context.instance()
        super().__init__(zmq.ROUTER, union, context, clock)
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
                peer = self._get(NOBLOCK).decode("ascii", "replace")
                frame = self._get(NOBLOCK)
            except zmq.Again:
                return None
            if more := self._rest():
                self._drop(peer, f"{1 + more} frames where one was expected")
                continue
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
        now = self._clock()
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
            self._put_frame(peer.encode("ascii", "replace"), NOBLOCK | SNDMORE)
            self._put_frame(frame, NOBLOCK)
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
        if EVENTS.get(event) == DISCONNECTED:  # forget what those owe who are no longer there
            now = self._clock()
            for peer, unread in list(self._unread.items()):
                self._put(peer, unread.ask(now))


class Dealer(Wire[T]):
    """A DEALER whose identity is its process's incarnation."""

    def __init__(
        self,
        union: Any,
        endpoint: str,
        identity: str,
        keys: Keys | None = None,
        context: zmq.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Connect to ``endpoint`` (the peer may come later), which may have the peer's public key after a space.

        Raises ConfigError for an endpoint off loopback without keys, or of another kind than ours, and ZMQError for
        one that makes no sense.
        """
        self.endpoint, _, server = endpoint.partition(" ")
        self._encrypted = needs_curve(self.endpoint, keys)
        super().__init__(zmq.DEALER, union, context, clock)
        self._unread = Unread(self._clock())
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
                frame = self._get(NOBLOCK)
            except zmq.Again:
                return None
            if more := self._rest():
                self._drop(self.endpoint, f"{1 + more} frames where one was expected")
                continue
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
        now = self._clock()
        if len(frame) > MAX_FRAME:
            log.error("a frame of %d bytes for %s was not sent: it is over %d", len(frame), self.endpoint, MAX_FRAME)
            return False
        if self._unread.hopeless(now):
            log.warning("gave up %s: %d MiB are unread", self.endpoint, self._unread.owed >> 20)
            self._reset()
            return False
        try:
            self._put_frame(frame, NOBLOCK)
            self._unread.add(len(frame))
            if (question := self._unread.question(now)) is not None:
                self._put_frame(question, NOBLOCK)
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
        self._unread = Unread(self._clock())
        self._put_frame(RESET, NOBLOCK)
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
