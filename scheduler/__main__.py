"""``python -m quire.scheduler``: one scheduler, the only one at its address."""

from __future__ import annotations

import fcntl
import os

from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.process import die, setup_logging, watch_parent
from ..proto.sockets import front_endpoint, private_dir, worker_endpoint
from .loop import serve


def main(argv: list[str] | None = None) -> None:
    """Parse flags, take the address, serve."""
    config = parse_service_args("scheduler", argv)
    setup_logging("scheduler", config.log_level)
    watch_parent()
    try:
        lock = take_address(config)
        serve(config)
    except ConfigError as error:
        die("scheduler", error)
    if lock is not None:
        remove_socket_files(config)
        os.close(lock)


def take_address(config: EngineArgs) -> int | None:
    """Lock the folder of an ipc address until this process ends: its descriptor, or None for tcp (bind is the lock).

    Raises ConfigError where another scheduler holds it.
    """
    assert config.scheduler is not None
    if not config.scheduler.startswith("ipc://"):
        return None
    folder = private_dir(config.scheduler.removeprefix("ipc://"))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"another scheduler serves {config.scheduler}; stop it, or choose another address with --scheduler."
        ) from None
    return lock


def remove_socket_files(config: EngineArgs) -> None:
    """Leave no socket file behind."""
    assert config.scheduler is not None
    for endpoint in (front_endpoint(config.scheduler), worker_endpoint(config.scheduler)):
        try:
            os.unlink(endpoint.removeprefix("ipc://"))
        except FileNotFoundError:
            pass


if __name__ == "__main__":
    main()
