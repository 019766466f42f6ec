"""A simulated network between the processes of a simulated cluster: ZeroMQ as it is seen from outside, and its faults.

The product's own ``Router`` and ``Dealer`` run on it, on sockets that are stand-ins (``sockets.py``). A DEALER keeps
what it cannot send and connects again by itself; what was on its way when a connection breaks is lost, or partly so;
which of the things that libzmq and the kernel may do is done, is a draw by the history's seed and the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from quire.proto.wire.sockets import Dealer, Router
from quire.proto.wire.wire import CONNECT_TIMEOUT_MS

from . import chance
from .connections import Context, Session, join
from .host import Host
from .links import Link, Weather
from .sockets import DealerSocket, RouterSocket, Signal, Socket
from .timeline import Timeline

Machine = Host | str
"""A machine by its name, or by a process on it."""

RETRIED_S = 1.0
"""After that TCP asks once more for a connection that nobody has answered."""


class Network:
    """All links of one history. ``seed`` decides what takes how long, and what is lost when something breaks."""

    def __init__(self, timeline: Timeline, seed: int):
        self.timeline, self.seed, self.weather = timeline, seed, Weather(seed)
        self.tap: Callable[[bytes], None] | None = None  # told of each frame that a process sends, before it travels
        self.signals: dict[int, Signal] = {}
        self._numbers = 0
        self._links: dict[tuple[str, str], Link] = {}
        self._contexts: dict[str, Context] = {}
        self._listeners: dict[str, RouterSocket] = {}
        self._listened: dict[str, tuple[str, bool]] = {}  # endpoint: its last machine, and whether that is off
        self._connections: dict[tuple[bytes, str], int] = {}

    # -- sockets

    def listen(
        self,
        host: Host,
        endpoint: str,
        union: Any,
        on_message: Callable[[str, Any], None] | None = None,
        on_event: Callable[[str], None] | None = None,
        wake: Callable[[], Any] | None = None,
    ) -> Router[Any]:
        """A Router bound to ``endpoint``. Either it calls ``on_message(peer, message)`` and ``on_event(event)``, or
        ``wake()`` whenever something can be read. Raises ConfigError where another listens there."""
        context: Any = self.context(host)
        router: Router[Any] = Router(union, endpoint, None, context, host.clock)
        return self._attach(host, router, on_message, on_event, wake)

    def dial(
        self,
        host: Host,
        endpoint: str,
        union: Any,
        identity: str,
        on_message: Callable[[Any], None] | None = None,
        on_event: Callable[[str], None] | None = None,
        wake: Callable[[], Any] | None = None,
    ) -> Dealer[Any]:
        """A Dealer that connects to ``endpoint``, now or when somebody listens there. Callbacks as for ``listen``."""
        context: Any = self.context(host)
        dealer: Dealer[Any] = Dealer(union, endpoint, identity, None, context, host.clock)
        return self._attach(host, dealer, on_message, on_event, wake)

    def _attach(self, host: Host, wire: Any, on_message: Any, on_event: Any, wake: Any) -> Any:
        if wake is not None:
            wire.socket.signal.reader = wire.monitor().signal.reader = wake
        elif on_message is not None:
            wire.attach(on_message, on_event, _Loop(self, host))
        return wire

    def context(self, host: Host) -> Context:
        """What a process gives to a Router or Dealer that it makes itself."""
        context = self._contexts.get(host.name)
        if context is None:
            context = self._contexts[host.name] = Context(self, host)
        return context

    def make_socket(self, context: Context, kind: int) -> Socket:
        """For ``Context.socket``."""
        socket = (RouterSocket if kind == zmq.ROUTER else DealerSocket)(context)
        context.sockets.append(socket)
        return socket

    def next_number(self) -> int:
        """A descriptor's number."""
        self._numbers += 1
        return self._numbers

    def sent(self, frame: bytes) -> None:
        """A process sends this."""
        if self.tap is not None:
            self.tap(frame)

    def bind(self, socket: RouterSocket, endpoint: str) -> None:
        """Have it listen. Raises ZMQError where another does."""
        if endpoint in self._listeners:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        machine = socket.context.host.machine
        if self._listened.get(endpoint) == (machine, True):  # it was off; now it says that it knows of no connection
            for link in [link for (here, _), link in self._links.items() if here == machine]:
                link.refuse(self.timeline)
        self._listeners[endpoint], self._listened[endpoint] = socket, (machine, False)

    def unbind(self, socket: RouterSocket, fin: bool) -> None:
        """Nobody listens there any more; without ``fin`` nobody says so either."""
        for endpoint, listener in list(self._listeners.items()):
            if listener is socket:
                del self._listeners[endpoint]
                self._listened[endpoint] = socket.context.host.machine, not fin

    def link(self, here: str, there: str) -> Link:
        """From one machine to another."""
        link = self._links.get((here, there))
        if link is None:
            link = self._links[here, there] = Link()
        return link

    # -- connecting

    def connect(self, session: Session, waited: float = 0.0) -> None:
        """Try, as the system does for ``connect``. ``waited`` is for how many seconds nobody has answered."""
        if not session.open:
            return
        context, here = session.socket.context, session.socket.context.host.machine
        there, off = self._listened.get(session.endpoint, (here, False))
        forth, back = self.link(here, there), self.link(there, here)
        if off or forth.blocked or back.blocked:
            limit = CONNECT_TIMEOUT_MS / 1000
            if waited >= limit:
                context.do(session.failed)
            else:
                pause = RETRIED_S if waited == 0.0 else limit - waited
                self.timeline.after(pause, self.connect, session, waited + pause)
            return
        key = session.socket.identity, session.endpoint
        count = self._connections[key] = self._connections.get(key, 0) + 1
        travel = self.weather.low * (1 + chance.draw(chance.key(self.seed, *key), count)) + forth.extra + back.extra
        self.timeline.after(travel, context.do, self._answered, session, count)

    def _answered(self, session: Session, count: int) -> None:
        listener = self._listeners.get(session.endpoint)
        if not session.open:
            return
        if listener is None:
            session.failed()
        else:
            join(self, session, listener, count)

    # -- faults

    def cut(self, a: Machine, b: Machine) -> None:
        """Nothing passes either way. Connections are half open until heartbeats time out, and none is made."""
        self.cut_one_way(a, b)
        self.cut_one_way(b, a)

    def cut_one_way(self, a: Machine, b: Machine) -> None:
        """Nothing passes from ``a`` to ``b``."""
        self.link(_machine(a), _machine(b)).block(self.timeline.now, cut=True)

    def stall(self, a: Machine, b: Machine) -> None:
        """Bytes wait, and come in order when it is healed. Heartbeats wait too."""
        for here, there in ((a, b), (b, a)):
            self.link(_machine(here), _machine(there)).block(self.timeline.now, cut=False)

    def slow(self, a: Machine, b: Machine, seconds: float) -> None:
        """Everything between them takes so much longer from now on."""
        for here, there in ((a, b), (b, a)):
            self.link(_machine(here), _machine(there)).extra = seconds

    def heal(self, a: Machine, b: Machine) -> None:
        """End whatever is wrong between them."""
        for here, there in ((a, b), (b, a)):
            self.link(_machine(here), _machine(there)).heal(self.timeline)

    def reset(self, a: Machine, b: Machine) -> None:
        """Every connection between them breaks, and both sides are told now."""
        for here, there in ((a, b), (b, a)):
            for flow in list(self.link(_machine(here), _machine(there)).flows):
                flow.sender.context.do(flow.sender.broken)

    def vanish(self, host: Host) -> None:
        """Its machine is off: the process ends, and nobody is told."""
        context = self._contexts.get(host.name)
        if context is not None:
            context.end(fin=False)
        host.end()


def _machine(machine: Machine) -> str:
    return machine if isinstance(machine, str) else machine.machine


class _Loop:
    """What ``Wire.attach`` needs of an event loop."""

    def __init__(self, network: Network, host: Host):
        self._network, self._host = network, host

    def add_reader(self, number: int, reader: Callable[[], None]) -> None:
        self._network.signals[number].reader = reader

    def remove_reader(self, number: int) -> None:
        self._network.signals[number].reader = None

    def call_soon(self, action: Callable[..., Any], *arguments: Any) -> None:
        self._host.after(0.0, action, *arguments)

    def call_later(self, delay: float, action: Callable[..., Any], *arguments: Any) -> None:
        self._host.after(delay, action, *arguments)

    def is_closed(self) -> bool:
        return False
