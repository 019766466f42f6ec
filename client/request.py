"""One request as the client keeps it: everything needed to send it again, whatever was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..proto.codec import from_i32
from ..proto.losses import Losses
from ..proto.messages import Accepted, Tokenize
from .results import Prompt, RequestError, RequestMetrics


class OpenRequest:
    """What generation and pooling have in common. ``now`` is in seconds of the owner's clock.

    ``on_change`` is called whenever something has happened that its consumer may wait for.
    """

    def __init__(self, message: Tokenize, now: float):
        self.message = message  # as first sent; `again` derives later attempts from it
        self.uid, self.attempt = message.uid, message.attempt
        self.accepted: Prompt | None = None
        self.started = False  # in this attempt
        self.cached_tokens = 0
        self.losses = Losses()  # at points counted in output tokens
        self.unblamed = 0  # losses in quarantine, before it is accepted, that were held against nobody
        self.link: Any = None  # the detokenizer it sticks to
        self.since = now  # when it was last sent, or began to wait for a detokenizer
        self.metrics = RequestMetrics(arrival_time=now)
        self.done = False
        self.error: RequestError | None = None
        self.on_change: Callable[[], None] = lambda: None  # nobody waits yet

    # -- towards the model

    @property
    def in_quarantine(self) -> bool:
        """True where one more loss before it is accepted fails it as the cause of all of them."""
        return self.accepted is None and self.losses.in_quarantine()

    @property
    def reached(self) -> int:
        """How far it has got, in output tokens."""
        return 0

    @property
    def spent(self) -> int:
        """Tokens so far, of the prompt and the output."""
        return len(self.accepted.prompt_ids if self.accepted is not None else ()) + self.reached

    @property
    def ended_at(self) -> float:
        """When it ended; 0 while it runs."""
        return self.metrics.finished_time or 0.0

    def again(self) -> Tokenize:
        """The message of the present attempt."""
        return msgspec.structs.replace(self.message, attempt=self.attempt, losses=self.losses.count)

    def lost(self, counts: bool) -> bool:
        """Note a loss on the path and raise the attempt; False when the request has used up its chances."""
        if counts:
            self.losses.lost(self.reached)
        self.attempt += 1
        self.started = False
        return not self.losses.exhausted

    # -- from the model

    def accept(self, message: Accepted) -> None:
        """The prompt's ids are known; the first acceptance is kept, later ones repeat it without its text."""
        if self.accepted is None:
            self.losses, self.unblamed = Losses(), 0  # what was lost before was while it was read, and that is done
            self.accepted = Prompt(from_i32(message.ids), message.prompt)
            self.on_change()

    def start(self, now: float, cached: int) -> None:
        """The request has come into its first step of this attempt."""
        self.started = True
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = now
            self.metrics.time_in_queue = now - self.metrics.arrival_time
            self.cached_tokens = cached

    def end(self, now: float, error: RequestError | None = None) -> None:
        """Nothing more will come. Only the first end counts."""
        if not self.done:
            self.done, self.error = True, error
            self.metrics.finished_time = now
            self.ended()
            self.on_change()

    def ended(self) -> None:
        """What is left to do at the end."""


R = TypeVar("R", bound=OpenRequest)
