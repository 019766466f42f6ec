"""What a worker under a lease goes through: ``TRANSITIONS`` is the whole of it.

A lease begins with a Hello, or where the workers fall asleep or wake up, and is in the table until it ends. What ends
it does so in every phase: a Bye, a failed step, a second Hello, a broken connection, a time limit, and every event that
the table does not have.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a worker is."""

    LOADING = "loading"
    """Assign was sent. It loads weights, and measures how many blocks fit."""
    RESTING = "asleep"
    """Rest was sent in place of Assign. It gives back its memory, and has no replica until it is woken."""
    CONFIGURING = "configuring"
    """Configure was sent. It allocates the blocks, compiles kernels and captures graphs."""
    READY = "ready"
    """It has a replica and gets plans."""
    DRAINING = "draining"
    """It is to leave: what runs there goes on for a while, and nothing new comes."""
    LEAVING = "leaving"
    """Drain was sent. Nothing runs there any more, and its Bye is on the way."""
    RECALLED = "recalled"
    """Drain was sent before it was ready, and its Bye is on the way. What it still says of its loading is dropped."""


class Event(Enum):
    """What moves it on."""

    LOADED = "Loaded"
    READY = "Ready"
    RESTED = "Rested"
    RESULT = "result"
    """Of a step."""
    DRAIN = "drain"
    """It, or an operator, asks that it leaves."""
    EMPTY = "empty"
    """Nothing runs there any more that somebody waits for, or the time for that is up."""


TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.LOADING: {
        Event.LOADED: Phase.CONFIGURING,
        Event.DRAIN: Phase.RECALLED,
    },
    Phase.RESTING: {
        Event.RESTED: Phase.RESTING,
        Event.DRAIN: Phase.RECALLED,
    },
    Phase.CONFIGURING: {
        Event.READY: Phase.READY,
        Event.DRAIN: Phase.RECALLED,
    },
    Phase.READY: {
        Event.RESULT: Phase.READY,
        Event.DRAIN: Phase.DRAINING,
    },
    Phase.DRAINING: {
        Event.RESULT: Phase.DRAINING,
        Event.DRAIN: Phase.DRAINING,
        Event.EMPTY: Phase.LEAVING,
    },
    Phase.LEAVING: {
        Event.RESULT: Phase.LEAVING,  # of what was in flight when it was told to leave
        Event.DRAIN: Phase.LEAVING,
    },
    Phase.RECALLED: {
        Event.LOADED: Phase.RECALLED,
        Event.READY: Phase.RECALLED,
        Event.RESTED: Phase.RECALLED,
        Event.DRAIN: Phase.RECALLED,
    },
}

STARTING = (Phase.LOADING, Phase.RESTING, Phase.CONFIGURING)
"""It will have a replica, and nobody knows yet how large."""
GOING = (Phase.DRAINING, Phase.LEAVING, Phase.RECALLED)
"""It was asked to leave. Operators read of all three as draining."""
