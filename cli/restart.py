"""``quire restart [SERVICE ...]``: replace the processes of a running server one by one, under load."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from ..proto.flag_parser import nearest, port_number
from .errors import CommandError
from .serving import LAUNCHER, named, serving, serving_folders
from .workers import seconds

SERVICES = ("scheduler", "detokenizer", "gpu_worker", "frontend")


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("restart")
    parser.set_defaults(run=restart)
    parser.add_argument(
        "services", nargs="*", type=_service, metavar="SERVICE",
        help=f"which to replace: {', '.join(SERVICES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout",
        type=seconds,
        help="seconds that an old frontend's streams may go on (default: --shutdown-timeout)",
    )
    parser.add_argument("--port", type=port_number, help="the port of the server, where several run here")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="the same, by the address of its scheduler")


def _service(name: str) -> str:
    """One of ``SERVICES``. Raises ArgumentTypeError."""
    if name not in SERVICES:
        hint = nearest(name, SERVICES) or ";"
        raise argparse.ArgumentTypeError(
            f"there is no service {name!r:.80}{hint} name some of {', '.join(SERVICES)}, or none for all"
        )
    return name


def restart(args: argparse.Namespace) -> int:
    """Give the order and print what happens. Raises CommandError where not all was replaced."""
    folder, order = _folder(args.port, args.scheduler), {"restart": args.services, "timeout": args.timeout}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.path.join(folder, LAUNCHER))
            connection.sendall(json.dumps(order).encode() + b"\n")
            error = _print(connection)
        except OSError as broken:
            raise CommandError(f"the server in {folder} cannot be told to restart: {broken.strerror}.") from broken
    if error:
        raise CommandError(error)
    return 0


def _folder(port: int | None, scheduler: str | None) -> str:
    """The folder of the server that is meant. Raises CommandError."""
    found = serving_folders(LAUNCHER)
    known = [(folder, serving(folder)) for folder in found]
    meant = [folder for folder, told in known if port in (None, told.port) and scheduler in (None, told.scheduler)]
    if len(meant) == 1:
        return meant[0]
    others = ", ".join(map(named, found))
    if meant:
        raise CommandError(f"several servers run here: {others}; name one with --port or --scheduler.")
    at = "" if port is None else f" at port {port}"
    at += "" if scheduler is None else f" with its scheduler at {scheduler}"
    rest = f"; there run {others}" if found else ""
    raise CommandError(f"no server of this user is ready{at} here that `quire serve` has started{rest}.")


def _print(connection: socket.socket) -> str:
    """Print what the server tells, a line for each process; what went wrong, or nothing."""
    error, name = "the server has ended before all was replaced.", ""
    for line in _lines(connection):
        if "said" in line:
            begins = ("\n" if name else "") + f"{line['name']}: " if line["name"] != name else "; "
            name = line["name"]
            print(begins + line["said"], end="", flush=True)
        else:
            error = line.get("error", "")
            break
    if name:
        print(flush=True)
    return error


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("r", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
