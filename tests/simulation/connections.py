"""Connections as ZeroMQ's own thread sees them: handshake, heartbeats that stop, and what a break leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from quire.proto.wire.wire import HEARTBEAT_TIMEOUT_MS

from .links import FIN, GREETING, HEARTBEAT_S, READY, Flow

if TYPE_CHECKING:
    from .host import Host
    from .network import Network
    from .sockets import DealerSocket, RouterSocket, Socket

TIMEOUT_S = HEARTBEAT_TIMEOUT_MS / 1000
LATE_S = 1e-3
"""An application sees what ZeroMQ's thread did up to so much later."""
OUTSTANDING = 0.05
"""How often a process is stopped while it waits for the answer to a heartbeat."""

SUCCEEDED, LOST = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class Context:
    """What one process has of ZeroMQ: its sockets, and the thread that serves them. Given to the product's sockets as
    their ``zmq.Context``."""

    def __init__(self, network: Network, host: Host):
        self.network, self.host = network, host
        self.stands, self._since = False, 0.0  # with the whole process, since when
        self.over = False
        self.sockets: list[Socket] = []
        self.ends: dict[End, None] = {}
        self._held: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        host.ended.append(self.end)
        host.frozen.append(self._stand)
        host.thawed.append(self._go_on)

    def socket(self, kind: int) -> Socket:
        """A socket, as ``zmq.Context.socket`` makes one."""
        return self.network.make_socket(self, kind)

    def do(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Have ZeroMQ's thread do it: now, or first of all when the process goes on."""
        if self.stands:
            self._held.append((action, arguments))
        elif not self.over:
            action(*arguments)

    def end(self, fin: bool = True) -> None:
        """The process is gone, and with ``fin`` its machine is not: the kernel closes what was open."""
        if not self.over:
            self.over, self.stands = True, False
            self._held.clear()
            for socket in self.sockets:
                socket.over(fin)

    def _stand(self) -> None:
        self.stands, self._since = True, self.network.timeline.now
        for end in self.ends:
            end.peer.suspect()

    def _go_on(self) -> None:
        self.stands = False
        while self._held and not self.over:
            action, arguments = self._held.popleft()
            action(*arguments)
        long = self.network.timeline.now - self._since > TIMEOUT_S
        for end in list(self.ends):
            if long and end.into.drawn() < OUTSTANDING:
                end.broken()  # timers come before what the kernel has
            elif end.out.passes():
                end.out.resume_in(0.0)
            end.into.drain()


class End:
    """One side of a connection."""

    __slots__ = ("_announced", "_jammed", "_since", "context", "identity", "into", "muted", "open", "out", "peer",
                 "ready", "socket", "vanished")  # fmt: skip

    out: Flow
    into: Flow
    peer: End

    def __init__(self, socket: Socket):
        self.socket, self.context = socket, socket.context
        self.open, self.ready, self.vanished, self.muted = True, False, False, False
        self.identity = b""  # of the peer, for a ROUTER
        self._announced, self._jammed, self._since = False, False, -1.0
        self.context.ends[self] = None

    def begin(self) -> None:
        """The connection has been accepted: say so, and see that the other side answers."""
        if self.open:
            self.out.push(GREETING)
            self._after(TIMEOUT_S, self._handshake_over)

    def got(self, item: Any) -> None:
        """This came."""
        if not self.open:
            return
        if type(item) is bytes:
            if not self.muted:
                self.socket.deliver(self, item)
            elif not self._jammed:
                # ZeroMQ stops to read from it, and so hears no heartbeats either. (libzmq 4.3.5 aborts the process
                # where such a connection is reset before they time out: "Assertion failed: !_io_error". Left out here.)
                self._jammed = True
                self._after(TIMEOUT_S + HEARTBEAT_S * self.into.drawn(), self.broken)
        elif self._jammed:
            pass
        elif item is FIN:
            self.broken()
        elif item is GREETING:
            self.out.push(READY)
        else:
            self.ready = True
            self.socket.made(self)
            self._tell(SUCCEEDED)

    def suspect(self) -> None:
        """Nothing comes any more: heartbeats will notice."""
        if self.open and self._since < self.into.heard:
            self._since = self.into.heard
            now = self.context.network.timeline.now
            self._after(TIMEOUT_S + HEARTBEAT_S * self.into.drawn(), self._overdue, now)

    def _overdue(self, since: float) -> None:
        if not (self.open and self.ready):
            return  # the handshake has a limit of its own
        heard = self.into.heard
        if heard > since and self.into.passes():
            return
        if heard > since:  # something was on its way
            now = self.context.network.timeline.now
            self._after(max(0.0, heard + TIMEOUT_S + HEARTBEAT_S * self.into.drawn() - now), self._overdue, heard)
        else:
            self.broken()

    def _handshake_over(self) -> None:
        if self.open and not self.ready:
            self.broken()

    def _after(self, seconds: float, action: Callable[..., Any], *arguments: Any) -> None:
        self.context.network.timeline.after(seconds, self.context.do, action, *arguments)

    def announce_lost(self) -> None:
        """Tell the monitor that the connection broke."""
        if self.open and not self._announced:
            self._announced = True
            if not self.ready:
                self.socket.event(FAILED)
            self._tell(LOST)

    def _tell(self, event: int) -> None:
        delay = self.into.drawn()
        self.socket.event(event, LATE_S * (delay - 0.5) if delay > 0.5 else 0.0)

    def broken(self) -> None:
        """The connection is lost to this side, whose socket goes on."""
        if self.open:
            self.announce_lost()
            kept = self.close()
            self.socket.lost(self, kept)

    def close(self, fin: bool = True) -> list[bytes]:
        """This side is no more. Frames that ZeroMQ's thread had not taken out of the pipe come back."""
        if not self.open:
            return []
        self.open = False
        self.context.ends.pop(self, None)
        kept = self.out.cut_off(fin)
        self.into.forget()
        if not fin:
            self.vanished = True
            self.peer.suspect()
        return kept


class Session:
    """What a DEALER's ``connect`` makes: tries again by itself, and keeps what could not be sent."""

    def __init__(self, socket: DealerSocket, endpoint: str):
        self.socket, self.endpoint = socket, endpoint
        self.waiting: deque[bytes] = deque()
        self.end: End | None = None
        self.open = True
        self._interval = 0
        self.attempt()

    def send(self, frame: bytes) -> None:
        """Send it, now or when there is a connection."""
        end = self.end
        if end is not None and end.ready:
            end.out.push(frame)
        else:
            self.waiting.append(frame)

    def attempt(self) -> None:
        """Try to connect."""
        if self.open:
            self.socket.context.network.connect(self)

    def failed(self) -> None:
        """It could not: again, after twice as long as last time."""
        first, most = self.socket.options[zmq.RECONNECT_IVL], self.socket.options[zmq.RECONNECT_IVL_MAX]
        self._interval = min(self._interval * 2, most) if self._interval else first
        context = self.socket.context
        context.network.timeline.after(self._interval / 1000, context.do, self.attempt)

    def made(self) -> None:
        """The handshake is over: send what waits."""
        end = self.end
        while self.waiting and end is not None and end.open:
            end.out.push(self.waiting.popleft())

    def lost(self, kept: list[bytes]) -> None:
        """The connection broke. A new one is made, which begins with what the old one had not taken."""
        self.end = None
        self.waiting.extendleft(reversed(kept))
        self._interval = 0
        self.failed()

    def close(self, fin: bool = True) -> None:
        """Disconnect. What was not sent is given up."""
        self.open = False
        if self.end is not None:
            self.end.close(fin)
            self.end = None


def join(network: Network, session: Session, listener: RouterSocket, count: int) -> None:
    """A connection has been made in the kernels of both machines; the handshake follows."""
    dealer, router = End(session.socket), End(listener)
    dealer.peer, router.peer = router, dealer
    names = network.seed, session.socket.identity, session.endpoint, count
    here, there = session.socket.context.host.machine, listener.context.host.machine
    dealer.out = router.into = Flow(
        network.timeline, network.weather, network.link(here, there), dealer, router, *names, "up"
    )
    router.out = dealer.into = Flow(
        network.timeline, network.weather, network.link(there, here), router, dealer, *names, "down"
    )
    session.end = dealer
    listener.accepted(router)
    dealer.begin()
    router.context.do(router.begin)
