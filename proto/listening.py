"""Bound sockets for HTTP: a port that several processes may share, or the path of a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from .config import ConfigError


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


def listen_unix(path: str) -> socket.socket:
    """A bound Unix socket, which by the usual umask this user alone can reach. Raises ConfigError where somebody
    listens there; what a dead process has left is taken over."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                raise
            raise ConfigError(f"--uds {path} cannot be used: {error.strerror}; choose another path.") from error
        raise ConfigError(f"somebody listens at --uds {path}; end it, or choose another path.")
    sock = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen at --uds {path}: {error.strerror}; choose another path.") from error
    return sock
