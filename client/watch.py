"""Finding a scheduler that hangs. A dead one is found by its process; one that is stopped, or turns in circles, is not.

The launcher connects as an operator does and listens for the beats that the scheduler sends each second.
"""

from __future__ import annotations

import os
import time

import zmq

from ..proto import messages as m
from ..proto.process import new_incarnation
from ..proto.sockets import CONNECTED, Dealer, Keys, front_endpoint

STOOD_STILL_S = 5.0
"""Where so much passes between two looks it was this process that was stopped, and perhaps the machine with it."""
START_S = 60.0
"""A scheduler that starts may take so long to answer its socket before its silence counts."""


class Watch:
    """One connection to the scheduler at ``address``, whichever process that is at the moment."""

    def __init__(self, address: str, keys: Keys | None):
        self._context = zmq.Context()
        self._name = new_incarnation("operator")
        self._wire: Dealer[m.FromSchedulerFront] = Dealer(
            m.FromSchedulerFront, front_endpoint(address), self._name, keys, self._context
        )
        self._looked = time.monotonic()
        self._heard = self._looked + START_S

    def silence(self) -> float:
        """Seconds since the present scheduler was last heard, 0 for the first START_S of its life. Look often."""
        now = time.monotonic()
        stood_still, self._looked = now - self._looked > STOOD_STILL_S, now
        while (event := self._wire.next_event()) is not None:
            if event == CONNECTED:
                self._wire.send(m.Hello("operator", self._name, m.PROTOCOL, os.getpid()))
                self._heard = now  # from here on it owes a beat each second
        while self._wire.recv() is not None:
            self._heard = now
        if stood_still:
            self._heard = max(self._heard, now)
        return max(0.0, now - self._heard)

    def restart(self) -> None:
        """The scheduler is another one from now on."""
        self._heard = time.monotonic() + START_S

    def close(self) -> None:
        """Leave."""
        self._wire.close()
        self._context.destroy(linger=0)
