"""What there is to be reached: every transition of the state machines, and every fault in every phase.

``UNREACHABLE`` has what no history can reach, each with its reason.
"""

from __future__ import annotations

from collections.abc import Collection

Mark = tuple[str, ...]

UNREACHABLE: dict[Mark, str] = {}


def every() -> set[Mark]:
    """All marks there are."""
    return set()


def not_reached(marks: Collection[str]) -> dict[str, str]:
    """Of ``marks`` as they are written down, those that are missing, each with the reason where it has one."""
    reached = {tuple(mark.split(" | ")) for mark in marks}
    missing = sorted(every() - reached)
    return {" | ".join(mark): UNREACHABLE.get(mark, "") for mark in missing}
