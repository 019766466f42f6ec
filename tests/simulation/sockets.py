"""Stand-ins for the sockets of pyzmq, as far as the product's Router and Dealer use them.

What an application sees of libzmq is here: pipes, routing identities, handover, monitors. ``connections.py`` has what
its own thread does.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from quire.proto.wire.wire import RCVMORE, SNDMORE

from .connections import LATE_S, Session

if TYPE_CHECKING:
    from .connections import Context, End

_STATE, _READABLE, _NUMBER = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.FD)
_EVENT = struct.Struct("=Hi")


class Signal:
    """A descriptor: whoever waits for it is told, in its process, that something can be read."""

    def __init__(self, context: Context):
        self.number = context.network.next_number()
        self.reader: Callable[[], Any] | None = None
        self._host, self._told = context.host, False
        context.network.signals[self.number] = self

    def tell(self) -> None:
        """Something came."""
        if not self._told and self.reader is not None:
            self._told = True
            self._host.do(self._call)

    def _call(self) -> None:
        self._told = False
        if self.reader is not None:
            self.reader()


class Monitor:
    """The PAIR socket that tells of connections."""

    def __init__(self, context: Context, wanted: int):
        self.closed, self._wanted = False, wanted
        self.signal = Signal(context)
        self._events: deque[int] = deque()

    def put(self, event: int) -> None:
        """Something happened to a connection."""
        if event & self._wanted and not self.closed:
            self._events.append(event)
            self.signal.tell()

    def getsockopt(self, option: int) -> int:
        """EVENTS or FD."""
        return self.signal.number if option == _NUMBER else (_READABLE if self._events else 0)

    def recv_multipart(self, flags: int) -> list[bytes]:
        """The next event, with its value and endpoint empty."""
        if not self._events:
            raise zmq.Again
        return [_EVENT.pack(self._events.popleft(), 0), b""]

    def close(self, linger: int) -> None:
        """No more events."""
        self.closed = True


class Socket:
    """What ROUTER and DEALER share."""

    def __init__(self, context: Context):
        self.context = context
        self.closed = False
        self.options: dict[int, Any] = {}
        self.signal = Signal(context)
        self._monitor: Monitor | None = None
        self._told_until = 0.0

    def setsockopt(self, option: int, value: Any) -> None:
        """Kept; what is honoured is read where it matters."""
        self.options[option] = value

    def getsockopt_string(self, option: int) -> str:
        """LAST_ENDPOINT."""
        return str(self.options[option])

    def get_monitor_socket(self, events: int) -> Monitor:
        """The monitor, from now on."""
        self._monitor = Monitor(self.context, events)
        return self._monitor

    def disable_monitor(self) -> None:
        """No more events."""
        self._monitor = None

    def event(self, event: int, late: float = 0.0) -> None:
        """Tell the monitor, so many seconds later, but not before what it is told already."""
        timeline = self.context.network.timeline
        self._told_until = max(self._told_until, timeline.now + late)
        if self._told_until > timeline.now:
            timeline.at(self._told_until, self._event, event)
        else:
            self._event(event)

    def _event(self, event: int) -> None:
        if self._monitor is not None and not self.context.over:
            self._monitor.put(event)

    def close(self, linger: int) -> None:
        """Close at once."""
        self.over(True)

    def over(self, fin: bool) -> None:
        """The socket is gone, by its process's will or with it."""
        raise NotImplementedError

    def deliver(self, end: End, frame: bytes) -> None:
        """A frame came."""
        raise NotImplementedError

    def made(self, end: End) -> None:
        """A handshake is over."""
        raise NotImplementedError

    def lost(self, end: End, kept: list[bytes]) -> None:
        """A connection broke; these frames were in its pipe still."""
        raise NotImplementedError


class DealerSocket(Socket):
    """One session for each ``connect`` (the product has one at a time)."""

    def __init__(self, context: Context):
        super().__init__(context)
        self._session: Session | None = None
        self._in: deque[bytes] = deque()

    @property
    def identity(self) -> bytes:
        """What the peer knows it by."""
        return bytes(self.options[zmq.IDENTITY])

    def connect(self, endpoint: str) -> None:
        """Begin to."""
        self._session = Session(self, endpoint)

    def disconnect(self, endpoint: str) -> None:
        """Without what waits in either direction."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._in.clear()

    def send(self, frame: bytes, flags: int) -> None:
        """Never blocks: there is no high-water mark."""
        self.context.network.sent(frame)
        if self._session is not None:
            self._session.send(frame)

    def recv(self, flags: int) -> bytes:
        """The next frame. Raises Again where none waits."""
        if not self._in:
            raise zmq.Again
        return self._in.popleft()

    def getsockopt(self, option: int) -> int:
        """EVENTS, RCVMORE or FD."""
        if option == _STATE:
            return _READABLE if self._in else 0
        return self.signal.number if option == _NUMBER else 0

    def deliver(self, end: End, frame: bytes) -> None:
        self._in.append(frame)
        self.signal.tell()

    def made(self, end: End) -> None:
        if self._session is not None and self._session.end is end:
            self._session.made()

    def lost(self, end: End, kept: list[bytes]) -> None:
        if self._session is not None and self._session.end is end:
            self._session.lost(kept)

    def over(self, fin: bool) -> None:
        if not self.closed:
            self.closed = True
            self._in.clear()
            if self._session is not None:
                self._session.close(fin)


class RouterSocket(Socket):
    """MANDATORY and HANDOVER are taken for granted, as the product sets them."""

    def __init__(self, context: Context):
        super().__init__(context)
        self._peers: dict[bytes, End] = {}
        self._ends: dict[End, None] = {}
        self._in: deque[tuple[End, bytes]] = deque()
        self._rest: bytes | None = None  # of a message whose identity was read
        self._to: End | None = None
        self._anonymous = 0

    def bind(self, endpoint: str) -> None:
        """Listen. Raises ZMQError where another does."""
        self.context.network.bind(self, endpoint)
        self.options[zmq.LAST_ENDPOINT] = endpoint

    def accepted(self, end: End) -> None:
        """A connection is being made."""
        self._ends[end] = None

    def send(self, frame: bytes, flags: int) -> None:
        """First the identity, then the frame. Raises EHOSTUNREACH for one that is not there."""
        if flags & SNDMORE:
            self._to = self._peers.get(frame)
            if self._to is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        else:
            self.context.network.sent(frame)
            if self._to is not None and self._to.open:
                self._to.out.push(frame)
            self._to = None

    def recv(self, flags: int) -> bytes:
        """First the identity, then the frame. Raises Again where nothing waits."""
        if self._rest is not None:
            frame, self._rest = self._rest, None
            return frame
        if not self._in:
            raise zmq.Again
        end, self._rest = self._in.popleft()
        return end.identity

    def getsockopt(self, option: int) -> int:
        """EVENTS, RCVMORE or FD."""
        if option == _STATE:
            return _READABLE if self._in else 0
        if option == RCVMORE:
            return self._rest is not None
        return self.signal.number

    def deliver(self, end: End, frame: bytes) -> None:
        self._in.append((end, frame))
        self.signal.tell()

    def made(self, end: End) -> None:
        """The peer has a pipe from now on. What is unread of an older connection of its name is lost while that one
        holds, and comes from a name of ZeroMQ's own where it is broken (``router_t::identify_peer``)."""
        dealer = end.peer.socket
        assert isinstance(dealer, DealerSocket)
        name = end.identity = dealer.identity
        for old in {**self._ends, **dict(self._in)}:
            if old is not end and old.identity == name:
                self._hand_over(old)
        self._peers[name] = end

    def _hand_over(self, old: End) -> None:
        if old.open:
            old.muted = True
            self._in = deque(item for item in self._in if item[0] is not old)
        else:
            self._anonymous += 1
            old.identity = b"\0" + self._anonymous.to_bytes(4, "big")

    def lost(self, end: End, kept: list[bytes]) -> None:
        late = end.into.drawn()
        if late < 0.5:
            self._drop(end)
        else:
            self.context.network.timeline.after(LATE_S * (late - 0.5), self._drop, end)

    def _drop(self, end: End) -> None:
        self._ends.pop(end, None)
        if self._peers.get(end.identity) is end:
            del self._peers[end.identity]

    def over(self, fin: bool) -> None:
        if not self.closed:
            self.closed = True
            self.context.network.unbind(self, fin)
            self._in.clear()
            for end in list(self._ends):
                end.close(fin)
            self._ends.clear()
            self._peers.clear()
