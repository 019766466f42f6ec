"""The one door of the scheduler: whatever happens to it comes in here, and what it owes is taken out here. No IO.

The loop calls these methods in the order in which things happen, and so does a replay. What wants to see all of it
(``transcript.py``, ``recorder.py``) is a subclass that looks, and then does the same.
"""

from __future__ import annotations

from typing import Any

from ..proto.messages import StepPlan
from .membership import Membership

Outgoing = list[tuple[str, Any]]
"""Messages to send, each with its peer."""


class Inputs:
    """Everything that a ``Membership`` and its workers can be told."""

    def __init__(self, membership: Membership):
        self.membership, self.registry, self.core = membership, membership.registry, membership.core

    # -- messages, and news of connections

    def worker(self, peer: str, message: Any) -> None:
        """A worker sent this."""
        self.registry.on_worker(peer, message)

    def front(self, peer: str, message: Any) -> None:
        """A detokenizer, frontend or operator sent this."""
        self.membership.on_front(peer, message)

    def worker_gone(self, peer: str, why: str, unsent: int = 0) -> None:
        """A worker's connection broke, or it cannot be reached: the last ``unsent`` of its plans never left."""
        self.registry.gone(peer, why, unsent=unsent)

    def front_gone(self, peer: str) -> None:
        """The connection of a peer of the front side broke."""
        self.membership.front_gone(peer)

    def undelivered(self, peer: str, message: Any) -> None:
        """This message of ``to_front`` did not reach its peer."""
        self.membership.undelivered(peer, message)

    def bad_frames(self, count: int) -> None:
        """So many frames have not been decoded by both sockets since the start."""
        self.membership.wire_bad_frames = count

    # -- time

    def notice(self) -> None:
        """Time has passed; where it is too much, the process stood still."""
        self.membership.notice()

    def tick(self) -> None:
        """Do what is due."""
        self.membership.tick()

    # -- what goes out

    def plans(self) -> None:
        """Plan for every replica until it has enough in flight."""
        self.registry.plans()

    def to_workers(self) -> Outgoing:
        """What workers are owed, in order."""
        messages, self.registry.to_workers = self.registry.to_workers, []
        return messages

    def to_front(self) -> Outgoing:
        """What the front side is owed, in order."""
        return self.core.outbox.take()


def plans_to(peer: str, outgoing: Outgoing) -> int:
    """How many of these messages are plans for ``peer``."""
    return sum(each == peer and isinstance(message, StepPlan) for each, message in outgoing)
