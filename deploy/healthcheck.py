"""Exit code 0 where the process in this container is well; else 1 and one line that says why.

    healthcheck.py http [/health/ready]   the frontend answers 200
    healthcheck.py answers 5600           the scheduler's or a detokenizer's loop answers a message at its port
    healthcheck.py link 5600              this machine has a connection to the scheduler's port

The last asks nothing of the process itself: one that hangs is found by those who know what it owes.

With ``--starting=SECONDS`` before these words the check of a process that has not served yet waits so long until it
does. It ends at once where the process has said why it never will (in the file that QUIRE_FAILURE names).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 4.0
PAUSE_S = 1.0
ESTABLISHED = "01"
SERVED = Path("/tmp/served")
"""There once a check was passed. A container's /tmp is empty at each of its starts."""


class Unwell(Exception):
    """Why, in one line."""


def http(path: str = "/health/ready", port: int = 8000) -> None:
    """The frontend on this machine answers 200 to GET ``path``."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    if answer.status != 200:
        raise Unwell(f"{path} answered {answer.status}: {answer.read(500).decode('utf-8', 'replace')}")


def answers(port: str) -> None:
    """The process that listens at ``port`` says that it knows nothing of a request that nobody made.

    That also shows that the key file (QUIRE_KEYS) is the one it was started with.
    """
    from quire.proto.codec import i32, i64
    from quire.proto.messages import FromDetokenizer, Reconcile, Unknown
    from quire.proto.process import new_incarnation
    from quire.proto.wire.sockets import Dealer, load_keys

    keys = load_keys(os.environ.get("QUIRE_KEYS"))
    endpoint = f"tcp://127.0.0.1:{port}" + (f" {keys.public.decode()}" if keys else "")
    dealer: Dealer = Dealer(FromDetokenizer, endpoint, new_incarnation("health"), keys)
    dealer.send(Reconcile(i64([0]), i32([0])))
    deadline = time.monotonic() + TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0:
        dealer.socket.poll(int(1000 * left) + 1)
        if isinstance(dealer.recv(), Unknown):
            return
    raise Unwell(f"nothing answered at port {port} within {TIMEOUT_S:g} s")


def link(port: str) -> None:
    """A connection from here to ``port`` is established (by the kernel's table, so nothing is sent)."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists() and connected(table.read_text(), int(port)):
            return
    raise Unwell(f"not connected to the scheduler's port {port}")


def connected(table: str, port: int) -> bool:
    """Whether /proc/net/tcp's text lists an established connection to remote ``port``."""
    for line in table.splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
            return True
    return False


def failure() -> str:
    """Why the process never will serve, as it said itself; "" where it said nothing."""
    try:
        return Path(os.environ.get("QUIRE_FAILURE", "")).read_text("utf-8")
    except OSError:
        return ""


def main(argv: list[str]) -> int:
    checks: dict[str, Callable[..., None]] = {"http": http, "answers": answers, "link": link}
    starting = 0.0
    if argv[0].startswith("--starting="):
        starting, argv = float(argv[0].partition("=")[2]), argv[1:]
    until = time.monotonic() + (0 if SERVED.exists() else starting)
    while True:
        try:
            if said := failure():
                raise Unwell(said)
            checks[argv[0]](*argv[1:])
        except (Unwell, OSError, ValueError) as error:  # ValueError: of the key file
            if time.monotonic() >= until or failure():
                print(error)
                return 1
            time.sleep(PAUSE_S)
        else:
            if starting:
                SERVED.touch()
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
