"""Who waits to hear that torch's profiler has begun in the workers, or that its traces are written. No IO."""

from __future__ import annotations

from collections.abc import Mapping

from ..proto.messages import Lease, Profile, Profiled, Sleep, Sleeping

START, STOP = "start_profile", "stop_profile"


class Profiling:
    """``ask`` is told of an administrator's wish, ``heard`` what a worker answers, and ``settle`` which leases there
    are now: a worker whose lease has ended is waited for no more."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], dict[str, Lease]] = {}
        self._errors: dict[tuple[str, int], str] = {}

    @property
    def waits(self) -> bool:
        """Somebody does."""
        return bool(self._waiting)

    def ask(self, peer: str, message: Sleep, leases: Mapping[str, Lease]) -> list[tuple[str, Profile]]:
        """What is sent to which worker. Nothing where it was told before: it is sent again after a loss on the way."""
        key = peer, message.token
        if key in self._waiting:
            return []
        self._waiting[key], self._errors[key] = dict(leases), "" if leases else "no worker is ready; try again later."
        return [(worker, Profile(lease, message.action == START)) for worker, lease in leases.items()]

    def heard(self, worker: str, message: Profiled) -> None:
        """A worker has done it, or says why not."""
        for key, workers in self._waiting.items():
            if workers.get(worker) == message.lease:
                del workers[worker]
                self._errors[key] = self._errors[key] or message.error

    def settle(self, leases: Mapping[str, Lease]) -> list[tuple[str, Sleeping]]:
        """The answers of those for whom nothing is waited for any more, and who gets them."""
        done = []
        for key, workers in list(self._waiting.items()):
            if not any(leases.get(worker) == lease for worker, lease in workers.items()):
                del self._waiting[key]
                done.append((key[0], Sleeping(key[1], [], self._errors.pop(key))))
        return done
