"""One row's thoughts, held to a budget of tokens: when it is used up, the tokens that end the thought are all that may
be drawn. What a row may draw is a function of its output alone, so that one that is sent again draws the same."""

from __future__ import annotations

from collections.abc import Callable

from ...proto.thinking import Thinking


class Thought:
    """Where a row is in its thoughts. ``piece`` gives the bytes of a token, and of a special token its name's."""

    __slots__ = ("_at", "_open", "_piece", "_spent", "_tail", "_thinking")

    def __init__(self, thinking: Thinking, piece: Callable[[int], bytes]):
        self._thinking, self._piece = thinking, piece
        self._open, self._spent = thinking.open, thinking.spent
        self._at = 0  # tokens of the forced end that have come
        self._tail = b""  # text that may be the begin of a mark

    @property
    def forced(self) -> int | None:
        """The one token that may come next; None: any."""
        thinking = self._thinking
        return thinking.end[self._at] if self._open and self._spent >= thinking.budget else None

    def take(self, token: int) -> None:
        """The row's next token."""
        if self.forced == token:
            self._at += 1
            if self._at == len(self._thinking.end):
                self._open, self._at, self._tail = False, 0, b""
            return
        self._at = 0
        if self._passes(token, self._thinking.ends if self._open else self._thinking.starts):
            self._open = not self._open
        else:
            self._spent += self._open

    def _passes(self, token: int, marks: list[str]) -> bool:
        """Whether one of ``marks`` is complete with this token."""
        self._tail += self._piece(token)
        for mark in marks:
            place = self._tail.find(mark.encode())
            if place >= 0:
                self._tail = self._tail[place + len(mark.encode()) :]
                return True
        longest = max(len(mark.encode()) for mark in marks)
        self._tail = self._tail[max(0, len(self._tail) - longest + 1) :]
        return False

    def copy(self) -> Thought:
        """An independent one in the same state."""
        new = Thought(self._thinking, self._piece)
        new._open, new._spent, new._at, new._tail = self._open, self._spent, self._at, self._tail
        return new
