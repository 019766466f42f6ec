"""What every parser is built on: a generator that reads text which comes in pieces, and waits where it needs more.

A parser holds back what may yet become a mark, and nothing else. So what it gives, joined, does not depend on how the
text was cut: a stream and a whole answer are parsed alike, and a stream that goes on after the loss of a process too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

Wait = Generator[None, None, None]
"""A part of a parser. It yields where it needs more text."""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thought."""

    text: str


class Begin(NamedTuple):
    """A call of the tool ``name`` begins. ``id`` is the model's own name of the call, where it gives one."""

    name: str
    id: str = ""


class Arguments(NamedTuple):
    """More of the arguments of the call that began last, as JSON text."""

    text: str


Delta = Content | Reasoning | Begin | Arguments


class Ended(Exception):
    """No more text will come."""


class Broken(Exception):
    """What looked like a call is none."""


class Parser:
    """Text in, deltas out. A subclass says in ``read`` what the text is made of; it may end with ``Ended`` anywhere.

    ``schemas`` are the JSON schemas of the arguments by the tool's name, for the forms that do not say types.
    ``at`` is the place in ``text`` up to which it is read; text before it is forgotten, but for what follows ``mark``:
    there a call has begun that may turn out to be plain text.
    """

    def __init__(self, schemas: dict[str, dict[str, Any]] | None = None):
        self.schemas = schemas or {}
        self.text, self.at = "", 0
        self.mark: int | None = None
        self._last, self._blank, self._called = False, "", False
        self._out: list[Delta] = []
        self._reading = self._run()

    # -- from outside

    def feed(self, text: str) -> list[Delta]:
        """Take more text; what is certain by now."""
        cut = self.at if self.mark is None else self.mark
        self.text = self.text[cut:] + text
        self.at -= cut
        if self.mark is not None:
            self.mark = 0
        return self._go_on()

    def end(self) -> list[Delta]:
        """The text has ended: what was held back. Call it once."""
        self._last = True
        return self._go_on()

    def read(self) -> Wait:
        """The whole text, from its begin."""
        raise NotImplementedError

    def _go_on(self) -> list[Delta]:
        next(self._reading, None)
        out, self._out = self._out, []
        return _joined(out) if len(out) > 1 else out

    def _run(self) -> Wait:
        try:
            yield from self.read()
            yield from self.rest(self.content)
        except Ended:
            if self.mark is not None:
                self.give_up()
        if self._blank and not self._called:  # blanks after a call are the form's, not the answer's
            self._out.append(Content(self._blank))

    # -- what is given

    def content(self, text: str) -> None:
        """Text for the user. Blanks at its end wait: before a call they belong to the form."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._out.append(Content(kept))
            self._called = False

    def thought(self, text: str) -> None:
        """Text of the model's thought."""
        if text:
            self._out.append(Reasoning(text))

    def begin(self, name: str, id: str = "") -> None:
        """A call begins: what was marked is no text any more."""
        self.mark, self._blank, self._called = None, "", True
        self._out.append(Begin(_sound(name), _sound(id)))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._out.append(Arguments(_sound(text)))

    def give_up(self) -> None:
        """What was marked is text after all, as far as it has been read; all of it where no more will come."""
        start, self.mark = self.mark or 0, None
        if self._last:
            self.at = len(self.text)
        self.content(self.text[start : self.at])

    # -- what is read

    def more(self) -> Wait:
        """Wait for more text. Raises Ended where there will be none."""
        if self._last:
            raise Ended
        yield

    def rest(self, give: Callable[[str], None]) -> Wait:
        """Give all that comes."""
        while True:
            text, self.at = self.text[self.at :], len(self.text)
            if text:
                give(text)
            yield from self.more()

    def upto(
        self, marks: tuple[str, ...], give: Callable[[str], None], keep: bool = False
    ) -> Generator[None, None, str]:
        """Give what comes before the first of ``marks``, read that and return it; ``keep``: set ``mark`` before it."""
        while True:
            found = [(place, -len(each), each) for each in marks if (place := self.text.find(each, self.at)) >= 0]
            if found:
                place, _, each = min(found)
                give(self.text[self.at : place])
                self.at = place + len(each)
                if keep:
                    self.mark = place
                return each
            end = len(self.text) - (0 if self._last else self._begun(marks))
            if end > self.at:
                text, self.at = self.text[self.at : end], end
                give(text)
            yield from self.more()

    def _begun(self, marks: tuple[str, ...]) -> int:
        """How many of the last characters may be the begin of a mark."""
        longest = min(max(map(len, marks)) - 1, len(self.text) - self.at)
        for size in range(longest, 0, -1):
            tail = self.text[-size:]
            if any(each.startswith(tail) for each in marks):
                return size
        return 0

    def blanks(self) -> Wait:
        """Pass over blanks; something follows them."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return
                self.at += 1
            yield from self.more()

    def glyph(self) -> Generator[None, None, str]:
        """The next character that is no blank; it is not read."""
        yield from self.blanks()
        return self.text[self.at]

    def follows(self, mark: str) -> Generator[None, None, bool]:
        """Whether ``mark`` is next, blanks aside; if so it is read. False too where the text ends."""
        seen = 0
        while True:
            while self.text[self.at + seen : self.at + seen + 1].isspace():
                seen += 1
            start = self.at + seen
            ahead = self.text[start : start + len(mark)]
            if ahead == mark:
                self.at = start + len(mark)
                return True
            if self._last or not mark.startswith(ahead):
                return False
            yield from self.more()

    def expect(self, mark: str) -> Wait:
        """Read ``mark``, blanks aside. Raises Broken where something else is there."""
        yield from self.blanks()
        if not (yield from self.follows(mark)):
            if self._last and mark.startswith(self.text[self.at :]):
                raise Ended
            raise Broken

    def guarded(self, call: Wait, *ends: str) -> Wait:
        """Read a call. What turns out to be none is text again; what breaks after its begin ends at one of ``ends``."""
        try:
            yield from call
        except Broken:
            if self.mark is not None:
                self.give_up()
            elif ends:
                yield from self.upto(ends, drop)
            else:
                yield from self.rest(drop)
        self.mark = None


def drop(text: str) -> None:
    """Take a text that nobody wants."""


def _joined(deltas: list[Delta]) -> list[Delta]:
    """The same with what follows one another of one call's arguments as one."""
    out: list[Delta] = []
    pieces: list[str] = []
    for delta in deltas:
        if isinstance(delta, Arguments):
            pieces.append(delta.text)
            continue
        if pieces:
            out.append(Arguments("".join(pieces)))
            pieces = []
        out.append(delta)
    return [*out, Arguments("".join(pieces))] if pieces else out


def _sound(text: str) -> str:
    """Half of a pair of surrogates, which escapes can name, is no character: as a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
