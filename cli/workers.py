"""``quire workers list|drain|remove``: look at a running server's workers, and let one go."""

from __future__ import annotations

import argparse
import glob
import math
import os
import socket
import stat
import tempfile
import time
from typing import TYPE_CHECKING, Any

from ..proto.config import default_run_dir
from .errors import CommandError

if TYPE_CHECKING:
    from ..proto.messages import Managed, WorkerInfo

ANSWER_S = 10.0
"""How long the scheduler may take to answer."""
LOOK_S = 0.3
RUN_DIRS, SHARED_TMP = "quire-run-*", "/tmp"
"""What ``quire serve`` calls its folder of socket files, and where it is if TMPDIR is too long; see ``rundir.py``."""


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
        action.add_argument("--scheduler", help="address of the scheduler (default: this user's running server)")
        action.add_argument("--keys", help="key file of a deployment whose scheduler is at tcp://")
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
    operator = Operator(args.scheduler or find_scheduler(), args.keys)
    try:
        if args.action == "list":
            print(table(operator.ask("list").workers))
            return 0
        before = {worker.worker for worker in operator.ask("list").workers}
        answer = operator.ask(args.action, args.worker, getattr(args, "timeout", -1.0))
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


def find_scheduler() -> str:
    """The address of this user's one running server. Raises CommandError where there is none, or several."""
    found = serving_folders()
    if not found:
        raise CommandError(
            "no server of this user runs here; name one with --scheduler ipc://FOLDER or tcp://HOST:PORT."
        )
    if len(found) > 1:
        raise CommandError(f"several servers run: {', '.join('ipc://' + f for f in found)}; name one with --scheduler.")
    return "ipc://" + found[0]


def serving_folders() -> list[str]:
    """Folders of this user's schedulers that are running."""
    folders = {default_run_dir()}
    for base in {tempfile.gettempdir(), SHARED_TMP}:
        folders.update(glob.glob(os.path.join(glob.escape(base), RUN_DIRS)))
    return sorted(folder for folder in folders if _serves(folder))


def _serves(folder: str) -> bool:
    """Somebody listens on the folder's scheduler socket, and the folder is ours."""
    path = os.path.join(folder, "scheduler.front")
    try:
        info = os.lstat(folder)
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
        return True
    except OSError:
        return False
