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

from ..proto.config import ConfigError

log = logging.getLogger(__name__)

CLAIM_S = 10.0
"""How long another process may take to claim the port."""
_NAMES = Path("/proc/self/net/unix")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_MAPPED = "::ffff:"  # before an address of IPv4 that is written as one of IPv6


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket that other frontends may share (SO_REUSEPORT). Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is no address to listen on: {error}; choose another with --host.") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port.") from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port."
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def claim(sock: socket.socket, scheduler: str) -> socket.socket | None:
    """Claim the port of a bound socket for a frontend of the scheduler at this address, until the result is closed.

    None where the system has no abstract sockets. Raises ConfigError where a frontend of another scheduler has it.
    """
    if not sys.platform.startswith("linux"):
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
    """Gives up the claim on its port with the port."""

    __slots__ = ("_claimed",)

    def __init__(self, runner: web.AppRunner, sock: socket.socket, claimed: socket.socket | None, **options: Any):
        super().__init__(runner, sock, **options)
        self._claimed = claimed

    async def stop(self) -> None:
        """Close the port."""
        await super().stop()
        if self._claimed is not None:
            self._claimed.close()
