"""How many requests each API key has open, where that is limited (``--max-requests-per-key``)."""

from __future__ import annotations

from .queue import DrainRate
from .request import Request


class _Account:
    __slots__ = ("open", "rate")

    def __init__(self) -> None:
        self.open, self.rate = 0, DrainRate()


class Accounts:
    """Requests without a key are nobody's, and not counted. ``limit`` None: nothing is."""

    def __init__(self, limit: int | None):
        self.limit = limit
        self._accounts: dict[str, _Account] = {}

    def full(self, key: str, now: float) -> tuple[str, float] | None:
        """Why this key may not open another request, and seconds until it likely may; or None. Never names the key."""
        account = self._accounts.get(key)
        if self.limit is None or account is None or account.open < self.limit:
            return None
        text = f"{account.open} requests of this API key are open already, the limit is {self.limit} for each key"
        return text, account.rate.seconds(1, now)

    def enter(self, request: Request, now: float) -> None:
        """Count a request that is open now."""
        if self.limit is not None and request.account:
            account = self._accounts.setdefault(request.account, _Account())
            account.open += 1
            if account.open >= self.limit:
                account.rate.waiting(now)

    def leave(self, request: Request, now: float) -> None:
        """A request has ended."""
        account = self._accounts.get(request.account)
        if account is not None:
            account.open -= 1
            account.rate.freed(now)
            if account.open < (self.limit or 0):
                account.rate.idle()
            if not account.open:
                del self._accounts[request.account]
