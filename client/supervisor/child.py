"""One process of the server: started, heard, read from, found to have ended, started again."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import IO, cast

from ...proto.process import EXIT_CONFIG, READY_FD
from ...proto.standstill import Standstill
from .decision import QUICK_EXITS, Exit

START_S = 60.0
"""A scheduler that does not serve after so long counts as silent from then on; what others load may take hours."""

PIPE_BYTES = 2**20
"""Room for what a child prints while its parent is held up, so that the child is not."""

OPEN_FILES = 65536
"""How many descriptors a child may have where the system's hard limit allows it."""

_ERROR = re.compile(rb"(?:python -m )?quire\.\w+: error: (.*)")


class State(Enum):
    """What the process in a child's place is doing."""

    NEW = "new"
    LOADING = "loading"
    SERVING = "serving"
    ENDED = "ended"
    WAITING = "waiting"
    LEFT = "left"


TRANSITIONS = {
    (State.NEW, State.LOADING): "its first process is started",
    (State.LOADING, State.SERVING): "the process says that it serves",
    (State.LOADING, State.ENDED): "the process has ended, whatever ended it",
    (State.SERVING, State.ENDED): "the process has ended, whatever ended it",
    (State.ENDED, State.WAITING): "it was decided to start another, after a pause",
    (State.ENDED, State.LEFT): "it was decided to start no other: the process has left on purpose",
    (State.ENDED, State.LOADING): "another is started at once, by another command",
    (State.WAITING, State.LOADING): "the pause is over, or another is started at once, by another command",
}
"""All changes of a child's state, and what causes them."""


class Child:
    """One place among the server's processes, and the process that fills it now."""

    def __init__(self, service: str, command: list[str], environment: dict[str, str], replica: int | None = None):
        self.service, self.command, self.environment = service, command, environment
        self.replica = replica  # of several processes, which live and die together
        self.process: subprocess.Popen[bytes] | None = None
        self.state = State.NEW
        self.history: list[Exit] = []  # of the processes with this very command, the last of them
        self.started = self.ended = 0.0
        self.due = math.inf  # when to start the next process, in WAITING
        self.alone_since: float | None = None  # when another process of its replica was first found dead
        self.served = False  # the process has said that it serves
        self.killed = False  # ``kill`` ended the process
        self._heard = math.inf  # when its last heartbeat came; inf: it owes none yet
        self._ready_fd = -1  # on which it says that it serves, and its heartbeats come
        self.carry = b""
        self.error: str | None = None  # its last `quire.X: error:` line
        self.drained = threading.Event()  # all it printed has been read
        self.drained.set()

    def _become(self, state: State) -> None:
        if (self.state, state) not in TRANSITIONS:
            raise RuntimeError(f"quire.{self.service} is {self.state.value} and cannot become {state.value}")
        self.state = state

    @property
    def stream(self) -> IO[bytes] | None:
        """What it prints, standard output and error together."""
        return self.process.stdout if self.process is not None else None

    def start(self, alive_fd: int, *held: int) -> IO[bytes]:
        """Start the process in a session of its own; it ends when ``alive_fd``'s other end is closed.

        The descriptors ``held`` stay open as long as it runs.
        """
        self.carry, self.error, self.drained = b"", None, threading.Event()
        self.started, self.alone_since, self.served, self.killed = time.monotonic(), None, False, False
        self._heard = self.started + START_S if self.service == "scheduler" else math.inf
        self.close_ready()
        self._ready_fd, told = os.pipe()
        os.set_blocking(self._ready_fd, False)
        try:
            self.process = subprocess.Popen(
                self.command, env={**self.environment, READY_FD: str(told)}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(alive_fd, told, *held),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(told)
        self._become(State.LOADING)
        _allow_files(self.process.pid)
        stream = cast(IO[bytes], self.process.stdout)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(stream.fileno(), False)
        return stream

    def dead(self) -> bool:
        """True when no process runs here. One that has ended is then reaped, and whatever it had started is killed."""
        process = self.process
        if process is None or self.state not in (State.LOADING, State.SERVING):
            return True
        if not _ended(process):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        process.wait()
        self.ended = time.monotonic()
        self._listen()
        self._become(State.ENDED)
        return True

    def fallen(self) -> bool:
        """Whether its process has ended and nothing was decided about that yet."""
        return self.dead() and self.state is State.ENDED

    def kill(self) -> None:
        """End the process and all that it has started, without a chance to say anything."""
        if not self.dead() and self.process is not None:
            self.killed = True
            os.killpg(self.process.pid, signal.SIGKILL)

    def restart_at(self, due: float) -> None:
        """Another process is to be started here at that time (``time.monotonic``)."""
        self._become(State.WAITING)
        self.due = due

    def leave(self) -> None:
        """No other process is to be started here."""
        self._become(State.LEFT)

    def is_due(self) -> bool:
        """Whether the next process is to be started now."""
        return self.state is State.WAITING and time.monotonic() >= self.due

    def _listen(self) -> None:
        """Take in what it has said on the descriptor of ``proto.process.tell_ready``."""
        with contextlib.suppress(BlockingIOError):
            if self._ready_fd >= 0 and os.read(self._ready_fd, 65536):
                self.served, self._heard = True, time.monotonic()
                if self.state is State.LOADING:
                    self._become(State.SERVING)

    def silence(self) -> float:
        """Seconds since its last heartbeat (``proto.process.heartbeat``), 0 or less where none is owed."""
        self._listen()
        return time.monotonic() - self._heard

    def forgive(self, standstill: Standstill) -> None:
        """Leave the time that this process stood still out of the child's silence."""
        self._heard = standstill.since(self._heard)

    def listen_anew(self) -> None:
        """Begin to count its silence again, where it is counted."""
        self._heard = max(self._heard, time.monotonic())

    def close_ready(self) -> None:
        """Give up the descriptor."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    @property
    def code(self) -> int:
        """The exit code of the process that has ended, or minus the signal that ended it."""
        return self.process.returncode if self.process is not None else 1

    def how_it_ended(self) -> str:
        """One line: what the process said itself, or what is known of its end."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"
        if self.code == -signal.SIGKILL and not self.killed:
            how += ", probably out of memory"
        return self.error or f"quire.{self.service} {how}; what it said is above."


def has_room(children: Sequence[Child], cores: int) -> bool:
    """Whether one more of ``children`` may be started for the first time.

    No more load at once than there are cores: the rest would only hold up the workers, which take longest. One beside
    the workers may always.
    """
    loading = [child.service for child in children if child.state is State.LOADING]
    return len(loading) < max(cores, loading.count("gpu_worker") + 1)


def spokesman(children: Sequence[Child]) -> Child:
    """Of processes that ended together, the one that says why: not one that ended because another had."""
    return max(
        children,
        key=lambda child: (
            child.code == EXIT_CONFIG, child.code == 0, child.code < 0 and not child.killed, not child.killed,
            child.error is not None,
        ),
    )  # fmt: skip


def record_exit(together: Sequence[Child], starting: bool) -> Child:
    """Add to the history of each process of one place how they ended. Returns the process that says why."""
    child = spokesman(together)
    served = any(each.served for each in together)
    last = Exit(child.code, child.ended - child.started, served, starting)
    for each in together:
        each.history = [*each.history[1 - QUICK_EXITS :], last]
    return child


def _allow_files(pid: int) -> None:
    """Let a process hold as many connections as it may: what a shell allows at first is less than our line is long."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: not Linux
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < OPEN_FILES and resource.RLIM_INFINITY not in (soft, hard):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(hard, OPEN_FILES), hard))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without reaping it where the system can tell: its number must stay its own for a while."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # someone else has reaped it
        return True


def without_errors(child: Child, data: bytes) -> bytes:
    """``data`` less its error lines, the last of which the child keeps: the launcher says it, once."""
    *lines, last = (child.carry + data).splitlines(keepends=True)
    child.carry = b""
    if last.endswith((b"\n", b"\r")):
        lines.append(last)
        last = b""
    elif last.startswith((b"quire.", b"python -m quire.")):
        child.carry, last = last, b""
    kept = []
    for line in lines:
        if found := _ERROR.match(line):
            child.error = found[1].decode("utf-8", "replace").strip()
        else:
            kept.append(line)
    return b"".join(kept) + last


def say(data: bytes) -> None:
    """Pass on what a child printed."""
    if not data or sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):
        raw = getattr(sys.stderr, "buffer", None)
        if raw is not None:
            raw.write(data)
        else:  # a notebook's
            sys.stderr.write(data.decode("utf-8", "replace"))
        sys.stderr.flush()
