"""What a worker is ready for, and what comes after what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """What a worker is ready for."""

    UNASSIGNED = "it has no lease"
    ASSIGNED = "it has a lease, and tells how many blocks fit"
    READY = "it has its cache, and takes plans"
    RESTING = "it has a lease, and has given its cache back"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.UNASSIGNED: frozenset({Phase.ASSIGNED, Phase.RESTING}),  # Assign; Rest
    Phase.ASSIGNED: frozenset({Phase.READY, Phase.UNASSIGNED}),  # Configure; the lease ends
    Phase.READY: frozenset({Phase.UNASSIGNED}),  # the lease ends: a step fails, the link breaks, another Assign comes
    Phase.RESTING: frozenset({Phase.UNASSIGNED}),  # the lease ends: the link breaks, Assign comes, or another Rest
}
