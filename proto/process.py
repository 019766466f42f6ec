"""What every process does the same way: logging, dying with one line, noticing that its parent is gone."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from .log_lines import JsonFormatter, LineFormatter, as_json, printable

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import TracebackType

EXIT_CONFIG = 78
"""Exit code (sysexits' EX_CONFIG) of a process that can never work as configured: do not restart it."""

RETRY_AFTER = "QUIRE_RETRY_AFTER"
"""Environment variable: seconds that a process waits before it ends with EXIT_CONFIG, where its engine starts again
whatever ends, and cannot be told of exit codes."""

FAILURE = "QUIRE_FAILURE"
"""Environment variable: a file for why a process ends with EXIT_CONFIG, which the check of its health reads."""

PARENT_FD = "QUIRE_PARENT_FD"
"""Environment variable: a pipe's read end that reaches end of file when the parent is gone, however it went."""

PARENT_GRACE_S = 5.0

LOCAL_WORKERS = "QUIRE_LOCAL_WORKERS"
"""Environment variable: how many workers share this machine's cores, where one launcher started several."""

FEW_BESIDE = "QUIRE_FEW_BESIDE"
"""Environment variable: set for a worker whose launcher starts no frontend, which would take cores from it."""

STARTED_AGAIN = "QUIRE_STARTED_AGAIN"
"""Environment variable: set for a process that takes the place of one that has ended."""

FIGURES = "QUIRE_FIGURES"
"""Environment variable: the folder in which frontends that share a port tell each other what they measured."""

TERMINAL = "QUIRE_TERMINAL"
"""Environment variable: set where what this process prints is passed on to a terminal, as it is."""

READY_FD = "QUIRE_READY_FD"
"""Environment variable: the descriptor on which a process tells its launcher that it has begun to serve, and lives."""

HAND_OVER = signal.SIGUSR1
"""Asks a frontend to leave what is new to its successor on the same socket, to finish what it has begun, and to end."""

LISTEN_FD = "QUIRE_LISTEN_FD"
"""Environment variable: the bound socket on which a frontend is to listen. Its launcher holds it too."""

HEARTBEAT_S = 1.0
IDLE, NEEDED = b".", b"+"
"""What a heartbeat says. NEEDED is a frontend's while a request would run, or is open: its server must go on."""
_json: str | None = None  # this process's name in lines of JSON; None where they are text
_launched = PARENT_FD in os.environ  # by a supervisor, which passes on what this process prints
_launcher = -1  # the descriptor of READY_FD, once told; -1 where nobody asked for it
_heartbeat_due = 0.0


def tell_ready() -> None:
    """Say that this process serves: from here on only what others send can end it. It owes a ``heartbeat`` each second.

    Said once, where somebody asked.
    """
    global _launcher
    descriptor = os.environ.pop(READY_FD, None)
    if descriptor is not None:
        with contextlib.suppress(OSError, ValueError):
            os.write(int(descriptor), b"1")
            os.set_blocking(int(descriptor), False)
            os.set_inheritable(int(descriptor), False)
            _launcher = int(descriptor)


def heartbeat(needed: bool = False) -> None:
    """Show the launcher that this process lives: one that serves and does not for long is killed and started again.

    To be called by the loop that must not stand still, in every turn; it writes once a second.
    """
    global _heartbeat_due
    if _launcher >= 0 and (now := time.monotonic()) >= _heartbeat_due:
        _heartbeat_due = now + HEARTBEAT_S
        with contextlib.suppress(OSError):  # nobody has read for hours, or the launcher is gone
            os.write(_launcher, NEEDED if needed else IDLE)


def tell_left(count: int) -> None:
    """Tell the launcher how many requests a process that hands over still answers."""
    if _launcher >= 0:
        with contextlib.suppress(OSError):
            os.write(_launcher, b"[%d]" % count)


def collect_from_now() -> None:
    """Look for garbage from here on, but never among what is there already: modules and tables, which stay.

    A service's ``__main__`` has switched collection off. Importing makes tens of thousands of objects and no garbage,
    and a third of its time would go into looking for some.
    """
    gc.freeze()
    gc.enable()


def new_incarnation(kind: str) -> str:
    """A process's identity on every socket; never used again."""
    return f"{kind}-{os.urandom(16).hex()}"


def setup_logging(service: str, level: str = "info", form: str = "text") -> None:
    """One line a record on standard error, with date, service and pid. ``level``: Python's, or uvicorn's trace. In the
    ``form`` json every line that Python writes is a JSON object, warnings and what nobody caught included."""
    handler = logging.StreamHandler(sys.stderr)
    sys.excepthook = _without_memory(service)
    if form == "json":
        handler.setFormatter(JsonFormatter(service))
        _speak_json(service)
    else:
        handler.setFormatter(
            LineFormatter(f"%(asctime)s %(levelname).1s {service}[{os.getpid()}] %(message)s", "%Y-%m-%d %H:%M:%S")
        )
    logging.basicConfig(level="DEBUG" if level == "trace" else level.upper(), handlers=[handler])


def _without_memory(service: str) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """What is said of an exception that nobody caught: one line where memory ran out, else Python's traceback."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, MemoryError):
            complain(f"quire.{service}: error", "out of memory; lift this process's limit (ulimit -v) or give it more.")
        else:
            sys.__excepthook__(kind, error, trace)

    return uncaught


def _speak_json(service: str) -> None:
    """Have the log say what would be lines of text on standard error and standard output."""
    global _json
    _json = service
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logging.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))

    sys.excepthook = uncaught


def announce(line: str) -> None:
    """One line on standard output. Where its reader has left, the process stays for others."""
    with contextlib.suppress(OSError):
        print(line if _json is None else as_json("info", _json, os.getpid(), line), flush=True)


def shows_bars() -> bool:
    """Whether there is a terminal for progress bars: in a file they are noise."""
    return TERMINAL in os.environ or (_json is None and sys.stderr is not None and sys.stderr.isatty())


def die(service: str, message: object, code: int = EXIT_CONFIG) -> NoReturn:
    """End this process with one line that names cause and remedy."""
    complain(f"quire.{service}: error", message)
    if code == EXIT_CONFIG and not _launched:
        if told := os.environ.get(FAILURE):
            with contextlib.suppress(OSError), open(told, "w", encoding="utf-8") as file:
                file.write(f"quire.{service}: error: {' '.join(str(message).split())}")
        if (pause := os.environ.get(RETRY_AFTER, "")).isdecimal():
            atexit.register(_wait, int(pause))  # at the very end, when peers have been told
    sys.exit(code)


def _wait(seconds: int) -> None:
    """Until then, or until a signal ends this process at once: all is settled."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(seconds)


def complain(who: str, message: object) -> None:
    """One line on standard error, in one piece: other processes may write there too. Nothing where it is closed.

    It is text in any format for a supervisor, which reads it and says it in its own words.
    """
    if sys.stderr is not None:
        said = printable(" ".join(str(message).split()))
        with contextlib.suppress(OSError, ValueError):
            line = f"{who}: {said}" if _json is None or _launched else as_json("critical", _json, os.getpid(), said)
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def ignore_signals(*more: signal.Signals) -> None:
    """SIGTERM, SIGINT and ``more`` mean nothing from here on: this process is ending, and its exit code is settled.

    A launcher in a hurry asks again and again, and what the interpreter does at its end takes long. Not for a signal's
    handler: Python complains of a signal that has come already and then finds itself ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT, *more):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def ending_signals(
    loop: AbstractEventLoop, act: Callable[[], object], hand_over: Callable[[], object] | None = None
) -> Iterator[None]:
    """``act`` in ``loop`` at each SIGTERM and SIGINT, ``hand_over`` at each HAND_OVER; afterwards all are ignored.

    A loop's own handlers would not do: to give them up it makes the signals deadly again, if only for a moment, and
    one that closes does so after it has closed the socket by which they wake it.
    """
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)

    def woken() -> None:
        """That is all: then Python calls the handlers."""
        with contextlib.suppress(BlockingIOError):
            wake.recv(4096)

    loop.add_reader(wake, woken)
    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(act))
    if hand_over is not None:
        signal.signal(HAND_OVER, lambda *_: loop.call_soon_threadsafe(hand_over))
    try:
        yield
    finally:
        ignore_signals(*([HAND_OVER] if hand_over is not None else []))
        signal.set_wakeup_fd(before)
        loop.remove_reader(wake)
        wake.close()
        waker.close()


def watch_parent() -> None:
    """End this process when its parent dies, even by kill -9. Does nothing where no parent asked for it."""
    fd = os.environ.pop(PARENT_FD, None)
    if fd is None:
        return

    def wait() -> None:
        try:
            while os.read(int(fd), 1):
                pass
        except OSError:
            return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARENT_GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def resident_bytes() -> int:
    """This process's resident memory (Linux; 0 elsewhere)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
