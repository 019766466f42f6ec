"""How an answer looks as it comes: plain, wrapped at a terminal's edge, or as Markdown where rich is installed."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import Any, TextIO
from unicodedata import east_asian_width

FENCES = ("```", "~~~")
REFRESHES = 12
"""How often a second Markdown that still grows is drawn."""
_SHOWN = {code: chr(0x2400 + code) for code in range(32)} | dict.fromkeys(
    range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}"
)
_SHOWN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def shown(text: str) -> str:
    """What a model or a server said, for a terminal: control characters, which could write its clipboard or title, or
    draw over what stands there, become signs for them."""
    return text.translate(_SHOWN)


class Plain:
    """Writes what comes, unchanged."""

    def __init__(self, out: TextIO):
        self._out, self._kind = out, ""

    def add(self, kind: str, text: str) -> None:
        """Show a piece. ``kind``: thought, text, or a call and its number; another kind begins a new line."""
        if self._kind not in ("", kind):
            self._write(self._kind, "\n")
        self._kind = kind
        self._write(kind, text)

    def _write(self, kind: str, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        """The answer is whole, or will never be."""
        self._write(self._kind, "\n")
        self._kind = ""


class Wrapped(Plain):
    """For a terminal: no word is broken at its edge, and thoughts are dim. A word is shown when it has ended."""

    def __init__(self, out: TextIO, columns: int | None = None):
        super().__init__(out)
        self._columns, self._at, self._word, self._wide = columns, 0, "", 0

    def _write(self, kind: str, text: str) -> None:
        parts: list[str] = []
        limit = self._columns or shutil.get_terminal_size().columns
        for char in shown(text):
            width = 2 if east_asian_width(char) in "WF" else 1
            if char == "\n" or char == " " or width == 2 or self._wide + width > limit:
                self._flush(parts, limit)
            if char == "\n":
                parts.append(char)
                self._at = 0
            elif char == " ":
                if self._at < limit:  # else the line's end stands for it
                    parts.append(char)
                    self._at += 1
            else:
                self._word += char
                self._wide += width
        said = "".join(parts)
        self._out.write(f"\x1b[2m{said}\x1b[0m" if kind == "thought" and said.strip() else said)
        self._out.flush()

    def _flush(self, parts: list[str], limit: int) -> None:
        if self._word and self._at + self._wide > limit:
            parts.append("\n")
            self._at = 0
        parts.append(self._word)
        self._at += self._wide
        self._word, self._wide = "", 0


class Markdown:
    """For a terminal, by rich: each block is drawn anew while it grows, and printed once it has ended, so that what has
    left the screen is never drawn again."""

    def __init__(self, console: Any):
        from rich.live import Live

        self._console, self._kind, self._text, self._printed = console, "", "", False
        self._live = Live(
            console=console, refresh_per_second=REFRESHES, transient=True, vertical_overflow="crop", auto_refresh=False
        )
        self._drawn = 0.0
        self._begun = False

    def add(self, kind: str, text: str) -> None:
        """Show a piece, as Plain's."""
        if not self._begun:
            self._live.start()
            self._begun = True
        if self._kind not in ("", kind):
            self._print(self._text)
            self._text = ""
        self._kind = kind
        self._text += shown(text)
        if kind == "text" and (at := block_end(self._text)):
            self._print(self._text[:at])
            self._text = self._text[at:]
        now = self._console.get_time()
        if now - self._drawn >= 1 / REFRESHES:
            self._drawn = now
            self._live.update(_Lines(self._rendered(self._text), max(1, self._console.height - 2)), refresh=True)

    def end(self) -> None:
        """The answer is whole, or will never be."""
        if self._begun:
            self._live.update("", refresh=True)
            self._live.stop()
        self._print(self._text)
        self._kind = self._text = ""
        self._begun = self._printed = False

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._printed:
            self._console.print()
        self._console.print(_Lines(self._rendered(text.strip("\n"))), end="")
        self._printed = True

    def _rendered(self, text: str) -> Any:
        from rich.markdown import Markdown as Rendered
        from rich.text import Text

        if self._kind == "text":
            return Rendered(text)
        return Text(text, style="dim" if self._kind == "thought" else "cyan")


class _Lines:
    """Something without the empty lines around it, and no more of its last lines than ``limit``."""

    def __init__(self, whole: Any, limit: int = 0):
        self._whole, self._limit = whole, limit

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.segment import Segment

        lines = console.render_lines(self._whole, options, pad=False)
        full = [at for at, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        for line in lines[-self._limit :]:
            yield from line
            yield Segment.line()


def block_end(text: str) -> int:
    """Where the last whole block of Markdown ends in a text that grows: after the last empty line that is in no fence
    of code and is followed by a line that is not indented, as what goes on with a list is. 0 where there is none."""
    end = at = 0
    fence = ""
    empty = False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if empty and not fence and bare and not line[0].isspace():
            end = at
        if bare.startswith(FENCES):
            mark = bare[:3]
            fence = "" if fence == mark else (fence or mark)
        empty = not bare and not fence
        at += len(line)
    return end


def wrapped(line: str) -> str:
    """A line that is told to a user, in as many as a terminal needs."""
    return textwrap.fill(shown(line), shutil.get_terminal_size().columns) if sys.stdout.isatty() else line


def screen(markdown: bool | None) -> Any:
    """What fits standard output. ``markdown``: None for where rich is installed, False for never."""
    if not sys.stdout.isatty():
        return Plain(sys.stdout)
    if markdown is not False and os.environ.get("TERM") != "dumb":
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            return Markdown(Console())
    return Wrapped(sys.stdout)
