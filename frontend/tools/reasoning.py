"""What tells a model's thought from its answer.

Some templates open the thought in the prompt, so that the answer only closes it, and some close it there: the prompt's
end says which. Blanks around a thought are the form's.
"""

from __future__ import annotations

from ...proto.thinking import Marks
from .reader import Content, Parser, Wait


class Thinker(Parser):
    """A thought between marks, before the answer. ``prompt`` is the rendered prompt, where it is known."""

    def __init__(self, marks: Marks, prompt: str | None = None):
        super().__init__()
        tail = (prompt or "")[-200:].rstrip()
        self._marks = marks
        self._open = tail.endswith(marks.starts) or (marks.always and not tail.endswith(marks.ends))
        self._closed = tail.endswith(marks.ends)
        self._called = True  # blanks that are left over at the end are those of a thought that was cut off

    def read(self) -> Wait:
        self.mark = self.at
        for start in () if self._closed else self._marks.starts:
            if (yield from self.follows(start)):
                break
        else:
            if not self._open:
                self.give_up()
                yield from self._answer()
        self.mark = None
        yield from self.blanks()
        yield from self.upto(self._marks.ends, self.thought)
        self._blank = ""
        yield from self.blanks()
        yield from self._answer()

    def _answer(self) -> Wait:
        """The text that is left, without the marks around it and the blanks within those."""
        around = self._marks.around
        if not around:
            yield from self.rest(self.content)
        self._called = False  # blanks that are left over at the end are the answer's
        while True:
            opens = (yield from self.upto(around, self._held)) in around[::2]
            self.content(self._blank if opens else "")
            self._blank = ""
            if opens:
                yield from self.blanks()

    def _held(self, text: str) -> None:
        """Blanks at its end wait, for they may be those before a mark."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self.content(kept)

    def content(self, text: str) -> None:
        """All of it: who reads it next decides about blanks."""
        if text:
            self._out.append(Content(text))

    def thought(self, text: str) -> None:
        """Blanks at its end wait, for they may be those before the mark."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        super().thought(kept)
