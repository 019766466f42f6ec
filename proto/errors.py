"""A request that cannot be run, told to its client."""

from __future__ import annotations


class Refused(Exception):
    """One request's fault: an HTTP status, a message for its client, the field at fault, and seconds until it may be
    worth another try."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, retry_after: float | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.retry_after = message, param, status, retry_after
