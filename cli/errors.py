"""How a command fails."""

from __future__ import annotations


class CommandError(Exception):
    """What went wrong, in one line, and the exit code."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code
