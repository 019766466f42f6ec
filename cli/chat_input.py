"""What a user types: one line or several, with history and completion of ``/commands`` at a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

HISTORY_LINES = 1000
QUOTES = '"""'


class Typed:
    """Messages from standard input. At a terminal a message may have several lines, between ``\"\"\"``."""

    def __init__(self, commands: Iterable[str] = ()):
        self.at_terminal = sys.stdin.isatty()
        self._history: Path | None = None
        if self.at_terminal:
            with contextlib.suppress(ImportError):  # then input() edits as the terminal does
                self._prepare(sorted(commands))

    def _prepare(self, commands: list[str]) -> None:
        import readline

        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self._history = home / "quire" / "chat_history"
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")

        def complete(text: str, state: int) -> str | None:
            found = [each for each in commands if each.startswith(text)] if text.startswith("/") else []
            return found[state] if state < len(found) else None

        readline.set_completer(complete)

    def read(self) -> str:
        """The next message, not empty. Raises EOFError at the end, and KeyboardInterrupt at Ctrl-C; within a message of
        several lines that takes back the message alone."""
        while True:
            text = input("> " if self.at_terminal else "")
            if self.at_terminal and text.lstrip().startswith(QUOTES):
                try:
                    text = self._several(text.lstrip()[len(QUOTES) :])
                except KeyboardInterrupt:
                    print()
                    continue
            if text.strip():
                return text

    def _several(self, line: str) -> str:
        """Lines up to the quotes that end them."""
        lines = []
        while QUOTES not in line:
            lines.append(line)
            line = input(". ")
        lines.append(line.partition(QUOTES)[0])
        return "\n".join(lines).strip("\n")

    def ask(self, what: str) -> str:
        """One line. Raises EOFError where there is no more input: a model might call its tools for ever."""
        return input(what if self.at_terminal else "")

    def close(self) -> None:
        """Keep the history, for this user's eyes alone."""
        if self._history is None:
            return
        import readline

        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)
