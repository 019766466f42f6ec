"""What an operator may ask of a running launcher: a rolling restart. A socket in its 0700 folder takes the order.

An order is one line of JSON, ``{"restart": ["frontend", ...], "timeout": 30.0}``, where no name means all services, and
null that a frontend's streams may take as long as when the server ends. What comes back is lines of JSON, such as
``{"name": "frontend 1 of 1", "said": "successor listens"}`` for each thing that happened, and at last
``{"done": true}`` or ``{"error": "..."}``. Who closes the connection stops the restart after the process that is being
replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from ...proto.process import LISTEN_FD, STARTED_AGAIN
from .child import Child
from .commands import command_of, has_gpu
from .launch import GRACE_S, POLL_S, Supervisor
from .place import Place
from .roll import ORDER, Roll, RollError

log = logging.getLogger(__name__)

SOCKET = "launcher.sock"
ORDER_BYTES = 4096
ANSWER_S = 5.0
"""How long whoever connects may take to say what it wants, and to take a line of an answer."""


class Control:
    """Takes orders for a server that is ready, until the launcher ends. Raises OSError where it cannot listen."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor, self._rolling = supervisor, threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(os.path.join(supervisor.make_run_dir(), SOCKET))
        self._socket.listen(4)
        threading.Thread(target=self._accept, name="quire-control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="quire-roll", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            operator = Operator(connection)
            if not (order := operator.read()):  # it only looked whether somebody listens
                return
            try:
                self._restart(*_read(order), operator)
                operator.write(done=True)
            except RollError as error:
                log.warning("the rolling restart has stopped: %s", error)
                operator.write(error=str(error))
            except Exception:
                log.exception("the rolling restart has stopped")
                operator.write(error="the rolling restart failed within the server; its log says how.")

    def _restart(self, services: list[str], timeout: float | None, operator: Operator) -> None:
        """Raises RollError."""
        if not self._rolling.acquire(blocking=False):
            raise RollError("another rolling restart is under way; wait until it is done.")
        try:
            there = {place.service for place in self._supervisor.watch.places}
            if missing := [name for name in services if name not in there]:
                raise RollError(f"this server has no {missing[0]}; it has {', '.join(sorted(there))}.")

            def tell(name: str, said: str) -> None:
                log.info("rolling restart, %s: %s", name, said)
                operator.write(name=name, said=said)

            Roll[Child](Rolling(self._supervisor, operator, timeout), tell).run(services or there)
        finally:
            self._rolling.release()


def _read(line: bytes) -> tuple[list[str], float | None]:
    """The services that an order names, and for how long streams may go on. Raises RollError."""
    try:
        order: Any = json.loads(line)
        services, timeout = order["restart"], order.get("timeout")
        if all(name in ORDER for name in services) and (timeout is None or timeout >= 0):
            return list(services), timeout
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise RollError(f'an order must be {{"restart": [SERVICE, ...]}} with services of {", ".join(ORDER)}.')


class Operator:
    """Whoever gave the order. ``gone`` once it has closed the connection, or reads no more."""

    def __init__(self, connection: socket.socket):
        self._connection, self._left = connection, False
        connection.settimeout(ANSWER_S)

    def read(self) -> bytes:
        """Its order, empty where none comes."""
        data = b""
        with contextlib.suppress(OSError):
            while not data.endswith(b"\n") and len(data) < ORDER_BYTES and (more := self._connection.recv(ORDER_BYTES)):
                data += more
        return data

    def write(self, **line: Any) -> None:
        """Send a line."""
        try:
            self._connection.sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            self._left = True

    @property
    def gone(self) -> bool:
        """It has left."""
        if not self._left and select.select([self._connection], [], [], 0)[0]:
            try:
                self._left = not self._connection.recv(1, socket.MSG_PEEK)
            except OSError:
                self._left = True
        return self._left


class Rolling:
    """The real processes of a rolling restart (``roll.Host``)."""

    def __init__(self, supervisor: Supervisor, operator: Operator, timeout: float | None):
        self._supervisor, self._operator = supervisor, operator
        self._stream_s = supervisor.args.shutdown_timeout if timeout is None else timeout
        self.watch = supervisor.watch

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while the watch or a place is looked at or changed."""
        return self._supervisor.lock

    def clock(self) -> float:
        """Seconds."""
        return time.monotonic()

    def wait(self, seeing_through: bool) -> None:
        """Pass a little time."""
        if self._supervisor.closed:
            raise RollError("the server is ending.")
        if not seeing_through and self._operator.gone:
            raise RollError("whoever asked for it has left; what is not replaced yet stays as it is.")
        time.sleep(POLL_S)

    def ready(self) -> bool:
        """Whether a request would run."""
        return self._supervisor.ready()

    def successor(self, place: Place[Child]) -> Place[Child]:
        """A new place as this one."""
        return Place(place.service, place.command, {**place.environment, STARTED_AGAIN: "1"}, place.replica)

    def trial(self, place: Place[Child]) -> Place[Child] | None:
        """A scheduler with an address of its own; for others there is nothing that could be tried."""
        if place.service != "scheduler":
            return None
        address = f"ipc://{self._supervisor.make_run_dir()}/trial"
        args = dataclasses.replace(
            self._supervisor.args, scheduler=address, bind=None, advertise=None, flight_recorder=None,
            otlp_traces_endpoint=None,
        )  # fmt: skip
        return Place("scheduler", command_of("scheduler", args), place.environment)

    def beside(self, place: Place[Child]) -> bool:
        """Whether a successor can run beside the process of this place: there is room, and no address is in its way."""
        args = self._supervisor.args
        return {
            "frontend": LISTEN_FD in place.environment,
            "detokenizer": args.bind is None,
            "gpu_worker": args.device == "cpu" or not has_gpu(),
        }.get(place.service, False)

    def patience(self, service: str) -> tuple[float, float]:
        """How long a process may take to finish what it has, and then to end."""
        finish_s = {"frontend": self._stream_s, "gpu_worker": self._supervisor.args.drain_timeout}
        return finish_s.get(service, 0.0), GRACE_S[service]

    def forget(self, place: Place[Child]) -> None:
        """Give up what is held for a process that has ended."""
        if place.process is not None:
            self._supervisor.forget(place.process)
