"""What the supervisor's children are started with: their command lines, GPUs and port."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import socket
import sys

from ...proto.config import ConfigError, EngineArgs


def command_of(service: str, args: EngineArgs) -> list[str]:
    """The command line of a service."""
    return [sys.executable, "-P", "-m", f"quire.{service}", *args.argv_for(service)]


def free_port(host: str, port: int) -> int:
    """``port``, or a free one for 0. Raises ConfigError where it is taken, before anything is started."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            return probe.getsockname()[1]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is no address to listen on: {error}; choose another with --host.") from error
    except OSError as error:
        flag = "--port" if error.errno == errno.EADDRINUSE else "--host or --port"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}.") from error


def connect(args: EngineArgs) -> socket.socket:
    """A connection to the server's own port, or its Unix socket, to be closed by the caller. Raises OSError."""
    if args.uds:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(2)
        try:
            connection.connect(args.uds)
        except OSError:
            connection.close()
            raise
        return connection
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    return socket.create_connection((host, args.port), timeout=2)


def devices_of(count: int, device: str) -> list[str]:
    """The CUDA device of each of ``count`` workers, in order; none where there are none, or none are wanted.

    Raises ConfigError where there are too few: the rest would find none, and compute on the CPU.
    """
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        devices = [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")) or count)]
    else:
        devices = list(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, told.split(","))))
    if device == "cpu" or not devices:
        return []
    if len(devices) < count:
        raise ConfigError(
            f"{count} workers need a GPU each, and there are {len(devices)}; lower data_parallel_size, "
            "tensor_parallel_size or pipeline_parallel_size, or give --device=cpu."
        )
    return devices[:count]


def has_gpu() -> bool:
    """Whether a worker of this machine may hold a GPU."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return bool(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd")) if told is None else told not in ("", "-1")


def import_path() -> str:
    """PYTHONPATH with which a child finds what this process can import: a script's own folder, say."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))


def cpu_count() -> int:
    """How many cores this process and its children may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
