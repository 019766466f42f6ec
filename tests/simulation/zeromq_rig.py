"""One small cluster of sockets, simulated or real, under the same commands: what ``test_network.py`` compares."""

from __future__ import annotations

import functools
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import zeromq_child
from .host import Host
from .network import Network
from .timeline import Timeline
from .zeromq_child import Note

LIMIT_S = 60.0
"""For what a script waits for, and never comes."""


class Peer:
    """One process with one socket. ``got`` are (peer, number) in order, "" for a DEALER's; ``events`` those told."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int]] = []
        self.events: list[str] = []

    @property
    def numbers(self) -> list[int]:
        """What came, from whomever."""
        return [number for _, number in self.got]

    def heard(self, event: str, times: int = 1) -> bool:
        """Whether that event was told so often."""
        return self.events.count(event) >= times


class Simulated:
    """The cluster on the simulated network."""

    def __init__(self, seed: int):
        self.timeline = Timeline()
        self.network = Network(self.timeline, seed)
        self._count = itertools.count()
        self.links: list[tuple[Host, Host]] = []
        self._routers: dict[str, Host] = {}

    def router(self, name: str) -> SimulatedPeer:
        """A process that listens at the place ``name``."""
        peer = SimulatedPeer(self, next(self._count), name, None)
        self._routers[name] = peer.host
        return peer

    def dealer(self, name: str, identity: str = "d", via: bool = False) -> SimulatedPeer:
        """A process that dials the place ``name``, ``via`` what can be stalled and reset if a router listens there."""
        peer = SimulatedPeer(self, next(self._count), name, identity)
        if via:
            self.links.append((peer.host, self._routers[name]))
        return peer

    def stall(self) -> None:
        """Pass nothing on."""
        for pair in self.links:
            self.network.stall(*pair)

    def heal(self) -> None:
        """Pass on what came meanwhile, and what comes."""
        for pair in self.links:
            self.network.heal(*pair)

    def reset(self) -> None:
        """Break what there is."""
        for pair in self.links:
            self.network.reset(*pair)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for it."""
        limit = self.timeline.now + 30 * LIMIT_S
        while not holds():
            if not self.timeline.step(limit):
                raise TimeoutError

    def pause(self, heartbeats: float) -> None:
        """Wait for so many times of what it takes heartbeats to time out."""
        until = self.timeline.now + 12.0 * heartbeats
        while self.timeline.step(until):
            pass

    def close(self) -> None:
        """Nothing to do."""


class SimulatedPeer(Peer):
    def __init__(self, cluster: Simulated, number: int, place: str, identity: str | None):
        super().__init__()
        self.host = Host(cluster.timeline, "process", f"p{number}")
        net, where = cluster.network, f"ipc:///sim/{place}"
        self.wire: Any = (
            net.listen(self.host, where, Note, wake=self._read)
            if identity is None
            else net.dial(self.host, where, Note, identity, wake=self._read)
        )

    def _read(self) -> None:
        while self.wire.waits():
            if (got := self.wire.recv()) is not None:
                peer, note = got if isinstance(got, tuple) else ("", got)
                self.got.append((peer if peer.isprintable() else "nobody", note.number))
        while (event := self.wire.next_event()) is not None:
            self.events.append(event)

    def send(self, *numbers: int, to: str = "", size: int = 0) -> list[bool]:
        """Send these; which of them it took."""
        peer = (to,) if to else ()
        return [self.wire.send(*peer, Note(number, bytes(size))) for number in numbers]

    def raw(self, frame: bytes) -> None:
        """Send bytes that need be no message."""
        self.wire._put_frame(frame, 1)

    def bad_frames(self) -> int:
        """How many came."""
        return int(self.wire.bad_frames)

    def kill(self) -> None:
        """SIGKILL."""
        self.host.end()

    def stop(self) -> None:
        """SIGSTOP."""
        self.host.stop()

    def hang(self) -> None:
        """Read nothing, with ZeroMQ's thread at work."""
        self.host.hang()

    def go_on(self) -> None:
        """After either."""
        self.host.go_on()
        self.host.do(self._read)


class Real:
    """The cluster of processes with real sockets, in ``folder``. Times of heartbeats are short."""

    def __init__(self, folder: Path):
        self.folder, self._count, self._script = folder, itertools.count(), 0
        self.peers: list[RealPeer] = []
        self._relays: list[Relay] = []
        self.parent = subprocess.Popen(
            [sys.executable, zeromq_child.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.parent.stdout is not None
        self.parent.stdout.readline()

    def router(self, name: str) -> RealPeer:
        return RealPeer(self, "router", name, "-")

    def dealer(self, name: str, identity: str = "d", via: bool = False) -> RealPeer:
        if via:
            self._relays.append(Relay(self.place(name)))
        return RealPeer(self, "dealer", name + ".via" * via, identity)

    def stall(self) -> None:
        for relay in self._relays:
            relay.stalled = True

    def heal(self) -> None:
        for relay in self._relays:
            relay.stalled = False

    def reset(self) -> None:
        for relay in self._relays:
            relay.reset()

    def fork(self, line: str) -> None:
        """Have a process begun."""
        assert self.parent.stdin is not None
        self.parent.stdin.write(line + "\n")
        self.parent.stdin.flush()

    def place(self, name: str) -> str:
        """A socket file of this script."""
        return str(self.folder / f"{self._script}{name}")

    def next_path(self) -> str:
        """Of a control socket."""
        return str(self.folder / f"c{next(self._count)}")

    def until(self, holds: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not holds():
            self._hear(0.2)
            if time.monotonic() > limit:
                raise TimeoutError

    def pause(self, heartbeats: float) -> None:
        until = time.monotonic() + 0.6 * heartbeats
        while (left := until - time.monotonic()) > 0:
            self._hear(left)

    def _hear(self, seconds: float) -> None:
        heard: dict[socket.socket, Callable[[], None]] = {
            peer.control: peer.hear for peer in self.peers if not peer.over
        }
        for relay in self._relays:
            heard.update(relay.readable())
        for control in select.select(list(heard), [], [], seconds)[0]:
            heard[control]()

    def forget(self) -> None:
        """End the processes of a script."""
        for peer in self.peers:
            peer.kill()
        for relay in self._relays:
            relay.close()
        self.peers.clear()
        self._relays.clear()
        self._script += 1

    def close(self) -> None:
        """End them all."""
        self.forget()
        self.parent.communicate()


class RealPeer(Peer):
    def __init__(self, cluster: Real, kind: str, place: str, identity: str):
        super().__init__()
        self.over, self._answers, self._rest = False, [], b""
        path = cluster.next_path()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            cluster.fork(f"{path} {kind} ipc://{cluster.place(place)} {identity}")
            self.control, _ = door.accept()
        self._pid = 0
        cluster.peers.append(self)
        while not self._pid:
            self.hear()

    def hear(self) -> None:
        """Take what it wrote."""
        data = self.control.recv(2**16)
        self.over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, *values = json.loads(line)
            if what == "got":
                self.got.append((values[0], values[1]))
            elif what == "event":
                self.events.append(values[0])
            elif what == "begun":
                self._pid = values[0]
            else:
                self._answers.append(values[0])

    def _ask(self, *command: Any) -> Any:
        self.control.sendall(json.dumps(command).encode() + b"\n")
        while not self._answers:
            self.hear()
        return self._answers.pop()

    def send(self, *numbers: int, to: str = "", size: int = 0) -> list[bool]:
        return list(self._ask("send", to, numbers, size))

    def raw(self, frame: bytes) -> None:
        self._ask("raw", frame.hex())

    def bad_frames(self) -> int:
        return int(self._ask("bad frames"))

    def kill(self) -> None:
        if not self.over:
            os.kill(self._pid, signal.SIGKILL)
            while not self.over:
                self.hear()
            self.control.close()

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def hang(self) -> None:
        self._ask("hang")

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        self._ask("go on")


class Relay:
    """Passes on what comes to ``place``.via, or holds it up."""

    def __init__(self, place: str):
        self.stalled, self._place = False, place
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(place + ".via")
        self._door.listen()
        self._ends: dict[socket.socket, socket.socket] = {}

    def readable(self) -> dict[socket.socket, Callable[[], None]]:
        """What to wait for, and what to do then."""
        if self.stalled:
            return {}
        return {self._door: self._accept} | {end: functools.partial(self._pass, end) for end in self._ends}

    def _accept(self) -> None:
        here, _ = self._door.accept()
        there = socket.socket(socket.AF_UNIX)
        there.connect(self._place)
        self._ends |= {here: there, there: here}

    def _pass(self, end: socket.socket) -> None:
        if end not in self._ends:
            return  # closed in this round
        try:
            data = end.recv(2**16)
            self._ends[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._ends.pop(self._ends[end]).close()
            self._ends.pop(end).close()

    def reset(self) -> None:
        """Break what there is."""
        for end in self._ends:
            end.close()
        self._ends.clear()

    def close(self) -> None:
        """Pass on nothing more."""
        self.reset()
        self._door.close()


Cluster = Simulated | Real


def in_order(numbers: Sequence[int]) -> bool:
    """Whether each is over the one before."""
    return all(a < b for a, b in itertools.pairwise(numbers))
