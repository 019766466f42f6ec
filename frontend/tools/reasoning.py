"""What tells a model's thought from its answer.

Some templates open the thought in the prompt, so that the answer only closes it, and some close it there: the prompt's
end says which. Blanks around a thought are the form's.
"""

from __future__ import annotations

from .reader import Content, Parser, Wait


class Thinker(Parser):
    """A thought between marks, before the answer. ``prompt`` is the rendered prompt, where it is known."""

    STARTS: tuple[str, ...] = ("<think>",)
    ENDS: tuple[str, ...] = ("</think>",)
    ALWAYS = False
    """The answer begins with a thought even where nothing says so."""

    def __init__(self, prompt: str | None = None):
        super().__init__()
        tail = (prompt or "")[-200:].rstrip()
        self._open = tail.endswith(self.STARTS) or (self.ALWAYS and not tail.endswith(self.ENDS))
        self._closed = tail.endswith(self.ENDS)
        self._called = True  # blanks that are left over at the end are those of a thought that was cut off

    def read(self) -> Wait:
        self.mark = self.at
        for start in () if self._closed else self.STARTS:
            if (yield from self.follows(start)):
                break
        else:
            if not self._open:
                self.give_up()
                yield from self.rest(self.content)
        self.mark = None
        yield from self.blanks()
        yield from self.upto(self.ENDS, self.thought)
        self._blank = ""
        yield from self.blanks()
        yield from self.rest(self.content)

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


class DeepSeekR1(Thinker):
    """DeepSeek R1 and others that always think; many of their templates open the thought in the prompt."""

    ALWAYS = True


class MistralThinker(Thinker):
    """Magistral's marks."""

    STARTS, ENDS = ("[THINK]",), ("[/THINK]",)


class GraniteThinker(Thinker):
    """Granite 3.2 says in words which is which."""

    STARTS = ("Here is my thought process:", "Here's my thought process:")
    ENDS = ("Here is my response:", "Here's my response:")
