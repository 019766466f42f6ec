"""What a scheduler does before it serves, and after: its address, its epoch, its socket files."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time

from ..proto.config import ConfigError, EngineArgs, default_run_dir, parse_service_args
from ..proto.process import collect_from_now, die, ignore_signals, setup_logging, watch_parent
from ..proto.wire.sockets import front_endpoint, private_dir, worker_endpoint
from .blame import Blame
from .loop import serve

log = logging.getLogger(__name__)

MAX_EPOCH = 2**53
"""No clock says so much: a lock file that does is broken."""


def main(argv: list[str] | None = None) -> None:
    """Parse flags, take the address, serve."""
    config = parse_service_args("scheduler", argv)
    setup_logging("scheduler", config.log_level, config.log_format)
    watch_parent()
    try:
        lock = take_address(config)
        collect_from_now()
        serve(config, next_epoch(lock, time.time_ns() // 1_000_000), Blame(lock))
        ignore_signals()
    except ConfigError as error:
        die("scheduler", error)
    remove_socket_files(config)
    if lock is not None:
        os.close(lock)


def take_address(config: EngineArgs) -> int | None:
    """Lock an address until this process ends: the descriptor of its lock file, or None where a tcp address has none
    because the run folder cannot be used (there the bind is the lock).

    The file stays, for the epoch in it. Raises ConfigError where another scheduler holds it.
    """
    address = config.scheduler or ""
    if address.startswith("ipc://"):
        path = os.path.join(private_dir(address.removeprefix("ipc://")), "scheduler.lock")
    else:
        try:
            path = os.path.join(private_dir(default_run_dir()), re.sub(r"\W+", "-", address) + ".lock")
        except ConfigError as error:
            log.warning("%s; the clock must not go back between two starts", error)
            return None
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}; name another address with --scheduler.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"another scheduler serves {config.scheduler}; stop it, or choose another address with --scheduler."
        ) from None
    return lock


def next_epoch(lock: int | None, now_ms: int) -> int:
    """What the clock says, in ms since 1970, or just above the last epoch kept in the lock file, where the clock has
    gone back since then: peers ignore lower epochs."""
    epoch = now_ms
    if lock is not None:
        kept = os.pread(lock, 32, 0).rstrip(b" \n\0")  # behind it stands what blame.py keeps
        if kept.isdigit() and int(kept) < MAX_EPOCH:
            epoch = max(epoch, int(kept) + 1)
        try:
            os.pwrite(lock, b"%-18d\n" % epoch, 0)
        except OSError as error:  # a full disk is no reason not to serve
            log.warning("cannot keep the epoch: %s; the clock must not go back until the next start", error.strerror)
    return epoch


def remove_socket_files(config: EngineArgs) -> None:
    """Leave no socket file behind."""
    assert config.scheduler is not None
    if not config.scheduler.startswith("ipc://"):
        return
    for endpoint in (front_endpoint(config.scheduler), worker_endpoint(config.scheduler)):
        try:
            os.unlink(endpoint.removeprefix("ipc://"))
        except FileNotFoundError:
            pass
