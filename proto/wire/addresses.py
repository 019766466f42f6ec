"""Where processes meet: the scheduler's address, the sockets that follow from it, and which of them need keys."""

from __future__ import annotations

import ipaddress
import os
import stat

from ..config import ConfigError
from .keys import Keys

MAX_FOLDER = 85
"""A socket file's whole path may have 107 characters; the longest name in the folder has 21."""


def private_dir(path: str) -> str:
    """Make (or accept) a folder that is ours and 0700. Raises ConfigError otherwise."""
    if len(path) > MAX_FOLDER:
        raise ConfigError(
            f"socket folder {path!r} is {len(path)} characters long, over {MAX_FOLDER}; choose a shorter one."
        )
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"socket folder {path} cannot be made: {error.strerror}; name another.") from error
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"{path} must be a folder of this user with mode 0700; name another with --scheduler ipc://…")
    return path


def front_endpoint(address: str) -> str:
    """Where detokenizers and frontends meet the scheduler at ``address``."""
    return _endpoint(address, "scheduler.front", 0)


def worker_endpoint(address: str) -> str:
    """Where workers meet the scheduler at ``address``."""
    return _endpoint(address, "scheduler.workers", 1)


def own_bind(address: str, incarnation: str) -> str:
    """Where a detokenizer or a worker listens by default, given the scheduler's address: a socket file beside its."""
    if address.startswith("tcp://"):
        return "tcp://127.0.0.1:*"
    return f"{address}/{incarnation[:20]}"


def _endpoint(address: str, name: str, offset: int) -> str:
    if address.startswith("ipc://"):
        return f"{address}/{name}"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(f"address {address!r} must look like ipc:///folder or tcp://host:port.")
    return f"tcp://{host}:{int(port) + offset}"


def host_of(endpoint: str) -> str:
    """The host in a tcp endpoint, without the brackets of an IPv6 address."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def ip_of(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in a tcp endpoint, or None for a name. ZeroMQ writes IPv4 as ::ffff:127.0.0.1."""
    try:
        address = ipaddress.ip_address(host_of(endpoint))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp endpoint is of this machine alone."""
    address = ip_of(endpoint)
    return host_of(endpoint) == "localhost" if address is None else address.is_loopback


def needs_curve(endpoint: str, keys: Keys | None) -> bool:
    """Whether ``keys`` are for this endpoint. ConfigError where it is none of ours, or must not go without keys."""
    if endpoint.startswith("ipc://"):
        return False
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{endpoint!r} must look like ipc:///path or tcp://host:port.")
    if keys is None and not is_loopback(endpoint):
        raise ConfigError(f"{endpoint} is off loopback and needs --keys; make a file with `quire keygen`.")
    return keys is not None
