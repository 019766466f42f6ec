"""A request that cannot be run, told to its client."""

from __future__ import annotations


class Refused(Exception):
    """One request's fault: an HTTP status, a message for its client and the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.status = message, param, status
