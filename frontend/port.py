"""A frontend's port: those of one scheduler may share it, one of another scheduler is refused.

With SO_REUSEPORT any process of the same user can join a port, and the kernel shares new connections out among all. So
each frontend also holds an abstract Unix socket, whose name says which port it has and of which scheduler it is. Such a
name goes with the process that holds it, however that ends, and is seen by all processes that could share the port,
those of other containers on the same network included. Only Linux has them; elsewhere nothing is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from ..proto.config import ConfigError, EngineArgs
from ..proto.listening import listen, listen_unix
from ..proto.process import LISTEN_FD

log = logging.getLogger(__name__)

CLAIM_S = 10.0
"""How long another process may take to claim the port."""
_NAMES = Path("/proc/self/net/unix")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_MAPPED = "::ffff:"  # before an address of IPv4 that is written as one of IPv6


def bound(args: EngineArgs) -> socket.socket:
    """The socket to listen on: its launcher's, which successors of this process get too, or one of its own. Raises
    ConfigError."""
    if (inherited := os.environ.get(LISTEN_FD)) is not None:
        sock = socket.socket(fileno=int(inherited))
        sock.set_inheritable(False)
        return sock
    return listen_unix(args.uds) if args.uds else listen(args.host, args.port)


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """SCHEME://HOST:PORT of a bound socket, or unix:PATH."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def claim(sock: socket.socket, scheduler: str) -> socket.socket | None:
    """Claim the port of a bound socket for a frontend of the scheduler at this address, until the result is closed.

    None where the system has no abstract sockets. Raises ConfigError where a frontend of another scheduler has it.
    """
    if not sys.platform.startswith("linux") or sock.family == socket.AF_UNIX:
        return None
    host, port = sock.getsockname()[:2]
    ours = hashlib.sha256(_same_for_all(scheduler).encode()).hexdigest()[:16]
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        with _alone(port):
            for pid, theirs, other in _claims(port):
                if theirs != ours and _overlap(host, other):
                    raise ConfigError(
                        f"port {port} on {host} is served by a frontend of another scheduler (process {pid}) than "
                        f"{scheduler}; choose another --port, or write --scheduler as it is written there."
                    )
            held.bind(f"\0{_prefix(port)}{os.getpid()}/{ours}/{host}/{uuid.uuid4().hex[:8]}")
    except OSError as error:
        log.warning("cannot see whether a frontend of another scheduler has port %d: %s", port, error)
        held.close()
        return None
    except ConfigError:
        held.close()
        raise
    return held


def _prefix(port: int) -> str:
    return f"quire/frontend/{port}/"


@contextlib.contextmanager
def _alone(port: int) -> Iterator[None]:
    """While one process looks who has the port, and claims it, no other does."""
    deadline = time.monotonic() + CLAIM_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while True:
            try:
                lock.bind("\0" + _prefix(port))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
        yield


def _claims(port: int) -> Iterator[tuple[str, str, str]]:
    """The process id, scheduler and host of each frontend that has the port at any of this machine's addresses."""
    for line in _NAMES.read_text("utf-8", "replace").splitlines():
        _, found, rest = line.partition(" @" + _prefix(port))
        if found and rest.count("/") == 3:
            pid, scheduler, host, _ = rest.split("/")
            yield pid, scheduler, host


def _overlap(one: str, other: str) -> bool:
    """Whether a connection may reach either of two hosts that are listened on."""
    one, other = one.removeprefix(_MAPPED), other.removeprefix(_MAPPED)
    if one == other or "::" in (one, other):
        return True
    return "0.0.0.0" in (one, other) and ":" not in one + other


def _same_for_all(scheduler: str) -> str:
    """A scheduler's address in one spelling."""
    if scheduler.startswith("ipc://"):
        return "ipc://" + os.path.realpath(scheduler.removeprefix("ipc://"))
    host, _, port = scheduler.removeprefix("tcp://").lower().rpartition(":")
    return f"tcp://{'localhost' if host in _LOOPBACK else host}:{port}"


class ClaimedSite(web.SockSite):
    """Gives up the claim on its port with the port, and a Unix socket's path where that is its own."""

    __slots__ = ("_claimed", "_path")

    def __init__(self, runner: web.AppRunner, sock: socket.socket, claimed: socket.socket | None, **options: Any):
        super().__init__(runner, sock, **options)
        self._claimed = claimed
        owned = sock.family == socket.AF_UNIX and LISTEN_FD not in os.environ
        self._path = sock.getsockname() if owned else None

    async def stop(self) -> None:
        """Close the port."""
        await super().stop()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None
        if self._claimed is not None:
            self._claimed.close()
