"""How much of what was sent to a peer it has not read, and when that is too much.

ZeroMQ's high-water marks count messages, and a socket that reached one blocks or drops. What matters is bytes, and
that nobody is dropped in silence. So every ASK_EVERY bytes the sender puts a question into the stream, which the
other socket answers when its process reads it: all that was sent before has been read. A peer that owes more than
MAX_UNREAD and has answered nothing for STALL_S is given up; its owner is told as of any other that is gone.

(A process that is stopped or a machine that is cut off is found earlier, by ZMTP heartbeats: they time out even while
the connection is too full for another byte. This is for processes that are alive and do not read.)
"""

from __future__ import annotations

MAX_UNREAD = 64 * 2**20
ASK_EVERY = 4 * 2**20
STALL_S = 10.0
OVERHEAD = 64
"""What ZeroMQ keeps for a message beside its bytes."""

# 0xc1 begins no msgpack value, so no message can be taken for one of these.
ASK, ANSWER, RESET = b"\xc1?", b"\xc1!", b"\xc1~"
"""Have you read this? / I have read what came before this question. / I have given this connection up: make another."""


class Unread:
    """What one peer owes. ``now`` is monotonic seconds, of the sender's own clock."""

    __slots__ = ("asked", "asked_at", "given_up", "last", "read", "sent", "waited")

    def __init__(self, now: float):
        self.sent = self.read = self.asked = 0  # bytes in all; ``asked`` is where the last question stands
        self.asked_at = self.last = now
        self.waited = 0.0  # seconds for an answer
        self.given_up = False

    @property
    def owed(self) -> int:
        """Bytes sent that the peer has not said it has read."""
        return self.sent - self.read

    def hopeless(self, now: float) -> bool:
        """Whether the peer owes too much for too long. A sender that was stopped itself counts one second of that."""
        if self.asked <= self.read:
            self.waited = 0.0
        else:
            self.waited += min(now - self.last, 1.0)
        self.last = now
        return self.waited > STALL_S and self.owed > MAX_UNREAD

    def add(self, size: int) -> None:
        """A message of so many bytes was sent."""
        self.sent += size + OVERHEAD

    def question(self, now: float) -> bytes | None:
        """The question to send, where one is due: again after a second, for a broken connection may have lost it."""
        if self.sent - self.asked < ASK_EVERY and (self.asked <= self.read or now - self.asked_at < 1.0):
            return None
        return self.ask(now)

    def ask(self, now: float) -> bytes:
        """A question to send now."""
        self.asked, self.asked_at = self.sent, now
        return ASK + self.sent.to_bytes(8, "little")

    def answered(self, mark: int) -> None:
        """The peer has read what was sent up to ``mark``."""
        if self.read < mark <= self.sent:
            self.read, self.waited, self.given_up = mark, 0.0, False
