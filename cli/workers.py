"""``quire workers list|drain|remove``: look at a running server's workers, and let one go."""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import TYPE_CHECKING, Any

from ..proto.flag_parser import port_number
from .errors import CommandError
from .serving import named as named_server
from .serving import serving, serving_folders

if TYPE_CHECKING:
    from ..proto.messages import Managed, WorkerInfo

ANSWER_S = 10.0
"""How long the scheduler may take to answer."""
LOOK_S = 0.3
LOCAL = "tcp://127.0.0.1:5600"
"""Where a scheduler is from within its own container: asked where QUIRE_KEYS is set and nothing else is named."""


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("workers")
    parser.set_defaults(run=workers)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help in (
        ("list", "show every worker"),
        ("drain", "take nothing new to a worker, let it finish, and let it go"),
        ("remove", "the same without waiting: what runs there goes on elsewhere"),
    ):
        action = actions.add_parser(name, help=help, description=help[:1].upper() + help[1:] + ".")
        if name != "list":
            action.add_argument("worker", help="replica number, or the beginning of the worker's name")
        action.add_argument(
            "--scheduler", help="address of the scheduler (default: QUIRE_SCHEDULER, or this user's running server)"
        )
        action.add_argument(
            "--keys", help="key file of a deployment whose scheduler is at tcp:// (default: QUIRE_KEYS)"
        )
        action.add_argument("--port", type=port_number, help="the port of the server, where several run here")
        if name != "list":
            action.add_argument(
                "--force", action="store_true", help="also the last worker that could run requests which are open"
            )
        if name == "drain":
            action.add_argument(
                "--timeout", type=seconds, default=-1.0,
                help="seconds that requests there may take to finish (default: the server's --drain-timeout)",
            )  # fmt: skip


def seconds(text: str) -> float:
    """A number of seconds; argparse's error for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def workers(args: argparse.Namespace) -> int:
    """Ask, print, and for drain and remove wait until the worker has left. Raises CommandError."""
    address, keys = where(args)
    if args.action == "list":
        _list([address] if address else ["ipc://" + folder for folder in find_schedulers(args.port)], keys)
        return 0
    operator = Operator(address or find_scheduler(args.port), keys)
    try:
        before = {worker.worker for worker in operator.ask("list").workers}
        action = f"force-{args.action}" if args.force else args.action
        answer = operator.ask(action, args.worker, getattr(args, "timeout", -1.0))
        worker = named(answer.workers, args.worker)
        if worker is None:  # it has left already
            print("it has left")
            return 0
        print(f"{worker.worker} (replica {worker.replica}) drains: {worker.running} sequences run there", flush=True)
        while any(other.worker == worker.worker for other in operator.ask("list", worker.worker).workers):
            time.sleep(LOOK_S)
        print(f"it has left; {len(before) - 1} workers stay" if len(before) > 1 else "it has left; no worker is left")
        return 0
    finally:
        operator.close()


def where(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """The address that is named, or None for a server of this machine, and the key file."""
    keys = args.keys or os.environ.get("QUIRE_KEYS") or None
    address = args.scheduler or os.environ.get("QUIRE_SCHEDULER") or None
    if address is None and args.port is None and keys and not serving_folders():
        address = LOCAL
    return address, keys if address and not address.startswith("ipc://") else args.keys


def _list(addresses: list[str], keys: str | None) -> None:
    """The workers of each server, under its name where there are several. Raises CommandError where one is asked."""
    if len(addresses) == 1:
        print(_listed(addresses[0], keys))
        return
    for number, address in enumerate(addresses):
        print("\n" if number else "", named_server(address.removeprefix("ipc://")), sep="")
        try:
            print(_listed(address, keys))
        except CommandError as error:
            print(error)


def _listed(address: str, keys: str | None) -> str:
    """A table of a server's workers. Raises CommandError."""
    operator = Operator(address, keys)
    try:
        return table(operator.ask("list").workers)
    finally:
        operator.close()


def named(workers: list[WorkerInfo], name: str) -> WorkerInfo | None:
    """The worker that the scheduler took ``name`` for."""
    for worker in workers:
        if name in (worker.worker, str(worker.replica)):
            return worker
    for worker in workers:
        if worker.worker.startswith(name) or worker.worker.rpartition("-")[2].startswith(name):
            return worker
    return None


def table(workers: list[WorkerInfo]) -> str:
    """One line a worker."""
    header = ("REPLICA", "WORKER", "STATE", "RUNNING", "BLOCKS", "STEP", "PID", "DEVICE")
    rows = [header]
    for w in sorted(workers, key=lambda w: w.replica):
        device = "".join(c if c.isprintable() else "?" for c in w.device)
        blocks = f"{w.blocks_used}/{w.blocks}" if w.blocks else "-"
        name = w.worker.rpartition("-")[2][:12]
        rows.append((str(w.replica), name, w.state, str(w.running), blocks, str(w.last_step), str(w.pid), device))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


class Operator:
    """A connection to a scheduler's front socket. Raises CommandError where it does not answer."""

    def __init__(self, address: str, keys: str | None = None):
        from ..proto.messages import PROTOCOL, FromSchedulerFront, Hello
        from ..proto.process import new_incarnation
        from ..proto.wire.sockets import Dealer, front_endpoint, load_keys

        self.address, self._token = address, 0
        name = new_incarnation("operator")
        self._wire: Dealer[Any] = Dealer(FromSchedulerFront, front_endpoint(address), name, load_keys(keys))
        self._wire.send(Hello("operator", name, PROTOCOL, os.getpid()))

    def ask(self, action: str, worker: str = "", timeout: float = -1.0) -> Managed:
        """The answer. Raises CommandError where there is none, or it says what is wrong."""
        from ..proto.messages import Bye, Manage, Managed

        self._token += 1
        self._wire.send(Manage(self._token, action, worker, timeout))
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0:
            self._wire.socket.poll(int(1000 * left) + 1)
            message = self._wire.recv()
            if isinstance(message, Bye):
                raise CommandError(f"the scheduler at {self.address} refuses: {message.reason}")
            if isinstance(message, Managed) and message.token == self._token:
                if message.error:
                    raise CommandError(message.error)
                return message
        raise CommandError(
            f"no answer from the scheduler at {self.address} in {ANSWER_S:g} s; is the address right, and --keys?"
        )

    def close(self) -> None:
        """Leave."""
        from ..proto.messages import Bye

        self._wire.send(Bye())
        self._wire.socket.close(1000)


def find_schedulers(port: int | None = None) -> list[str]:
    """Folders of this user's running servers, or of the one at ``port``. Raises CommandError where there is none."""
    found = serving_folders()
    if port is not None:
        at_port = [folder for folder in found if serving(folder).port == port]
        if not at_port:
            others = f"; there run {', '.join(map(named_server, found))}" if found else ""
            raise CommandError(f"no server of this user is at port {port} here{others}.")
        return at_port
    if not found:
        raise CommandError(
            "no server of this user runs here; name one with --scheduler ipc://FOLDER or tcp://HOST:PORT, or in "
            "QUIRE_SCHEDULER."
        )
    return found


def find_scheduler(port: int | None = None) -> str:
    """The address of this user's one running server. Raises CommandError where there is none, or several."""
    found = find_schedulers(port)
    if len(found) > 1:
        told = ", ".join(map(named_server, found))
        raise CommandError(f"several servers run: {told}; name one with --port or --scheduler.")
    return "ipc://" + found[0]
