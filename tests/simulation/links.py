"""Bytes on their way: the link between two machines, and one direction of a connection over it.

A flow is what lies between two ZeroMQ engines: the sender's buffers, the network, the receiver's kernel. It is first
in, first out, whatever its delays are.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from quire.proto.wire.wire import HEARTBEAT_MS

from . import chance

if TYPE_CHECKING:
    from .connections import End
    from .timeline import Timeline

GREETING, READY, FIN = "greeting", "ready", "fin"
"""What passes on a connection beside frames: ZMTP's handshake, and that the other side has closed."""

BUFFERS = 2**18
"""Bytes that the kernels of both sides keep of one direction, at least; up to sixteen times as much."""

HEARTBEAT_S = HEARTBEAT_MS / 1000

_MASK, _SCALE = chance.MASK, chance.SCALE


class Weather:
    """How long things take in one history, seconds: at least ``low``, up to ``low + span``, and rarely ``late``."""

    def __init__(self, seed: int):
        drawn = chance.Draws(seed, "weather")
        self.low = 2e-5 + 1e-4 * drawn()
        self.span = 2e-4 * 10 ** (1.2 * drawn())
        self.late = 0.02 * drawn()
        self.rare = drawn.below(40) if drawn() < 0.5 else 0  # of 4096 messages


class Link:
    """From one machine to another. While it is blocked nothing arrives."""

    def __init__(self) -> None:
        self.cut = self.stalled = False
        self.extra = 0.0  # seconds more
        self.since = 0.0  # when it was blocked
        self.flows: dict[Flow, None] = {}

    @property
    def blocked(self) -> bool:
        """Whether nothing arrives now."""
        return self.cut or self.stalled

    def block(self, now: float, cut: bool) -> None:
        """Let nothing arrive. Who listens finds out by heartbeats."""
        if not self.blocked:
            self.since = now
            for flow in self.flows:
                flow.receiver.suspect()
        self.cut, self.stalled = self.cut or cut, self.stalled or not cut

    def heal(self, timeline: Timeline) -> None:
        """Let it pass again: at once after a stall, when TCP tries again after a cut."""
        was_blocked, was_cut = self.blocked, self.cut
        self.cut, self.stalled, self.extra = False, False, 0.0
        if was_blocked:
            for flow in list(self.flows):
                flow.resume_in((timeline.now - self.since) * flow.drawn() if was_cut else 0.0)

    def refuse(self, timeline: Timeline) -> None:
        """Break what comes from a machine that has been off since: it answers the next heartbeat by a reset."""
        for flow in self.flows:
            end = flow.receiver
            if flow.sender.vanished and not (self.blocked or end.out.link.blocked):
                timeline.after(HEARTBEAT_S * flow.drawn(), end.context.do, end.broken)


class Flow:
    """One direction of a connection."""

    __slots__ = ("_ahead", "_armed", "_count", "_due", "_key", "_not_before", "_timeline", "_weather", "drawn", "heard",
                 "kernel", "link", "receiver", "sender")  # fmt: skip

    def __init__(self, timeline: Timeline, weather: Weather, link: Link, sender: End, receiver: End, *names: object):
        self.link, self.sender, self.receiver = link, sender, receiver
        self.heard = timeline.now  # when something came out of it
        self.kernel: deque[Any] = deque()  # of a receiver that stands still
        self.drawn = chance.Draws(*names, "breaks")
        self._timeline, self._weather = timeline, weather
        self._key, self._count = chance.key(*names), 0
        self._ahead: deque[tuple[float, Any]] = deque()
        self._armed, self._due, self._not_before = False, 0.0, 0.0
        link.flows[self] = None

    def push(self, item: Any) -> None:
        """Send a frame, or one of the words above."""
        self._count = count = self._count + 1
        x = (self._key + count * 0x9E3779B9) & _MASK  # chance.bits, without the call
        x = ((x ^ x >> 16) * 0x21F0AAAD) & _MASK
        x = ((x ^ x >> 15) * 0x735A2D97) & _MASK
        weather, u = self._weather, x * _SCALE
        due = self._timeline.now + weather.low + weather.span * u * u + self.link.extra
        if x & 4095 < weather.rare:
            due += weather.late
        self._append(due, item)

    def _append(self, due: float, item: Any) -> None:
        if due < self._due:
            due = self._due
        self._due = due
        self._ahead.append((due, item))
        if not self._armed:
            self._armed = True
            self._timeline.at(due, self._arrive)

    def _arrive(self) -> None:
        """What is due comes out, unless the link is blocked."""
        now, ahead, receiver = self._timeline.now, self._ahead, self.receiver
        if self.link.blocked or now < self._not_before:
            self._armed = now < self._not_before and not self.link.blocked
            if self._armed:
                self._timeline.at(self._not_before, self._arrive)
            return
        self.heard = now
        if receiver.context.stands:
            while ahead and ahead[0][0] <= now:
                self.kernel.append(ahead.popleft()[1])
        elif ahead and ahead[-1][1] is FIN and ahead[-1][0] <= now and len(ahead) > 1 and self.drawn() < 0.5:
            receiver.announce_lost()  # the monitor's socket is looked at before the messages
        while ahead and ahead[0][0] <= now:
            receiver.got(ahead.popleft()[1])
        self._armed = bool(ahead)
        if ahead:
            self._timeline.at(ahead[0][0], self._arrive)

    def passes(self) -> bool:
        """Whether bytes, and so ZMTP's heartbeats, get through."""
        return not (self.link.blocked or self.sender.context.stands or self.sender.vanished)

    def resume_in(self, delay: float) -> None:
        """Go on after that many seconds, with what waits in it."""
        self._not_before = self._timeline.now + delay
        self._timeline.at(self._not_before, self._resume)

    def _resume(self) -> None:
        if self.passes() and self._timeline.now >= self._not_before:
            self.heard = self._timeline.now
            if not self._armed:
                self._armed = True
                self._arrive()

    def drain(self) -> None:
        """The receiver goes on: it reads what waits in its kernel."""
        waiting, self.kernel = self.kernel, deque()
        now = self._timeline.now
        self._ahead.extendleft((now, item) for item in reversed(waiting))
        if self._ahead and not self._armed:
            self._armed = True
            self._timeline.at(now + self._weather.low * (1 + self.drawn()), self._arrive)

    def cut_off(self, fin: bool) -> list[bytes]:
        """The sender's side of the connection is no more. What the engine had not taken yet comes back; of the rest, as
        much arrives as chance has it, and then ``fin``."""
        ahead, now, extra = self._ahead, self._timeline.now, self.link.extra
        kept: list[bytes] = []
        if ahead:
            young = sum(due - extra > now for due, _ in ahead)
            for _ in range(int(self.drawn() * (young + 1)) if self.drawn() < 0.5 else 0):
                _, item = ahead.pop()
                if type(item) is bytes:
                    kept.append(item)
            if self.drawn() < 0.5:
                for _ in range(int(self.drawn() * (len(ahead) + 1))):
                    ahead.pop()
            kept.reverse()
        if len(ahead) + len(self.kernel) > 64:
            kept = self._overflow() + kept
        if fin:
            self._due = ahead[-1][0] if ahead else 0.0
            if ahead and self.drawn() < 0.5:
                self._append(self._due, FIN)  # is read together with the last of the frames
            else:
                self.push(FIN)
        return kept

    def _overflow(self) -> list[bytes]:
        """Take out what never fitted into the kernels: the receiver stands still, or the link does."""
        room = BUFFERS * 16 ** self.drawn()
        fits = 0
        kept: list[bytes] = []
        frames = [*self.kernel, *(item for _, item in self._ahead)]
        for frame in frames:
            room -= len(frame)
            fits += room >= 0
        if fits < len(frames):
            kept = [frame for frame in frames[fits:] if type(frame) is bytes]
            while len(self._ahead) > max(0, fits - len(self.kernel)):
                self._ahead.pop()
            while len(self.kernel) > fits:
                self.kernel.pop()
        return kept

    def forget(self) -> None:
        """Nobody reads it any more."""
        self.link.flows.pop(self, None)
        self.kernel.clear()
        self._ahead.clear()
