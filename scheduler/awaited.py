"""Whether a worker is on its way where none serves, and how long requests wait for one. No IO.

A worker that is there and does not leave will serve. One that was lost, or was told to leave by what started it, is
followed by another, which nobody has heard of yet; one that an operator sent away is not. So that nothing waits in
silence for ever, requests fail where nobody has come.
"""

from __future__ import annotations

from ..proto.standstill import Standstill
from .request import State
from .worker import Worker
from .worker_phase import GOING
from .worker_registry import WorkerRegistry

FOLLOWS_S = 300.0
"""How long after the last one was ready another is believed to follow, while none is seen."""
GAP_S = 60.0
"""How long none must have been seen before requests fail: one that was killed after hours of loading may be followed by
another. Where an operator has sent the last worker away, requests wait no longer than this."""


class Awaited:
    """Of the workers of ``registry``. At first another is believed to follow: it may not have found us yet."""

    def __init__(self, registry: WorkerRegistry):
        self._registry, self._core = registry, registry.core
        self._served_at = self._seen_at = registry.core.clock()  # when one last was ready, and when one was there
        self._known: set[str] = set()
        self._dismissed: set[str] = set()
        self._owed = 0  # workers that were lost, and whose successors nobody has seen yet
        self._follows = self._told = True

    @property
    def staying(self) -> list[Worker]:
        """Workers that serve, or will."""
        return [worker for worker in self._registry.workers.values() if worker.phase not in GOING]

    @property
    def follows(self) -> bool:
        """Whether one is on its way that nobody has seen yet."""
        return not self.staying and self._follows and self._core.clock() - self._served_at < FOLLOWS_S

    def look(self) -> bool:
        """To be called at each change of the workers, and each second. Whether ``follows`` has changed."""
        registry, now = self._registry, self._core.clock()
        dismissed = {peer for peer, worker in registry.workers.items() if worker.dismissed}
        came = registry.workers.keys() - self._known
        lost = [
            peer for peer in self._known - registry.workers.keys()
            if peer in registry.lost or peer not in self._dismissed
        ]  # fmt: skip
        self._owed = max(0, self._owed - len(came)) + len(lost)
        if dismissed - self._dismissed and not self._owed:
            self._follows = False
        if lost:
            self._follows = True
        self._known, self._dismissed = set(registry.workers), dismissed
        if staying := self.staying:
            self._seen_at = now
        if any(worker.replica is not None for worker in staying):
            self._served_at = now
        before, self._told = self._told, self.follows
        return before is not self._told

    def expire(self) -> None:
        """Once a second: fail what runs nowhere where nobody has come to run it."""
        now = self._core.clock()
        limit = FOLLOWS_S if self._follows else GAP_S
        if now - self._seen_at < GAP_S or now - self._served_at < limit:
            return
        for request in list(self._core.requests.values()):
            if all(seq.state is State.WAITING for seq in request.live):
                text = f"No worker is ready, none was in the last {limit:g} s, and none is on its way; try again later."
                self._core.fail(request, 503, text, retry_after=GAP_S)

    def forgive(self, standstill: Standstill) -> None:
        """This process stood still, and could not see who came."""
        self._served_at, self._seen_at = standstill.since(self._served_at), standstill.since(self._seen_at)
