"""``quire top``: a running server's figures in a terminal, drawn again every second."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .api import DEFAULT_URL, Api
from .errors import CommandError
from .figures import parse

if TYPE_CHECKING:
    from .top_frame import View

LIMIT_S = 5.0
"""How long a server may take to tell its figures."""


AGAIN_S = 60.0
"""When a server that does not tell its workers is asked for them again."""
NOT_TOLD = "told to this machine's user, and to administrators: give that key with --api-key"
"""Why a server's workers are not known."""
_FIGURES = {"replica", "state", "running", "blocks", "blocks_used", "last_step", "device"}


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("top")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is (default: {DEFAULT_URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of administrators, or of figures; also QUIRE_API_KEY or OPENAI_API_KEY"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between readings (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="take two readings, print one frame, and end")
    parser.set_defaults(run=top)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


def top(args: argparse.Namespace) -> int:
    """Show frames until q or Ctrl-C. Raises CommandError where rich is not installed, and where the server does not
    answer at first; one that goes away later is waited for."""
    try:
        from rich.console import Console
        from rich.live import Live

        from .top_frame import View, frame
    except ImportError:
        raise CommandError("quire top needs a package: pip install 'quire[cli]'.") from None
    api = Api(args.url, args.api_key)
    view = View(api.url)
    read(api, view)
    console = Console()
    if args.once or not sys.stdout.isatty():
        time.sleep(args.interval)
        read(api, view)
        console.print(frame(view))
        return 0
    with _keys(), Live(frame(view), console=console, screen=True, auto_refresh=False) as live:
        while not _quits(args.interval):
            try:
                read(api, view)
                view.trouble = ""
            except CommandError as error:
                view.trouble, view.health = str(error), "away"
            live.update(frame(view), refresh=True)
    return 0


def read(api: Api, view: View) -> None:
    """Take a reading. Raises CommandError where there is none."""
    view.readings.append(parse(api.read("/metrics", LIMIT_S), time.monotonic()))
    try:
        api.read("/health", LIMIT_S)
        view.health = "ready"
    except CommandError:
        view.health = "not ready"
    now = time.monotonic()
    if view.hint != NOT_TOLD or now >= view.again:  # each refusal is an error in the server's log and figures
        (view.workers, view.hint), view.again = _workers(api), now + AGAIN_S


def _workers(api: Api) -> tuple[list[dict[str, Any]] | None, str]:
    """The workers, from the scheduler of a server that runs here, else by /server_info; or why they are not known."""
    from .serving import serving, serving_folders

    here = api.host in ("localhost", "127.0.0.1", "::1")
    folder = next((each for each in serving_folders() if serving(each).port == api.port), None) if here else None
    if folder is not None:
        try:
            return _asked(folder), ""
        except CommandError:
            return None, "the scheduler does not answer"
    try:
        found = json.loads(api.read("/server_info", LIMIT_S))["replicas"]
        sound = found is None or all(set(each) >= _FIGURES for each in found)
    except (CommandError, ValueError, LookupError, TypeError):
        return None, NOT_TOLD
    return (found if sound else None), "the scheduler does not answer"


def _asked(folder: str) -> list[dict[str, Any]]:
    """What the scheduler of a folder tells of its workers, and the memory of their processes. Raises CommandError."""
    import msgspec

    from .workers import Operator

    operator = Operator("ipc://" + folder)
    try:
        workers = [msgspec.structs.asdict(each) for each in operator.ask("list").workers]
    finally:
        operator.close()
    return [each | {"memory": resident(each["pid"])} for each in sorted(workers, key=lambda each: each["replica"])]


def resident(pid: int) -> int:
    """Bytes of host memory that a process of this machine has; 0 where that is not known."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Have the terminal give each key at once, and show none."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    kept = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def _quits(patience: float) -> bool:
    """Wait for the next reading; whether q was pressed meanwhile."""
    end = time.monotonic() + patience
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", "\x04", ""):
            return True
    return False
