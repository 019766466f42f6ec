"""One process of the stack: started, read from, found dead, restarted."""

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
from typing import IO, cast

from ...proto.process import READY_FD

START_S = 60.0
"""A scheduler that does not serve after so long counts as silent from then on; what others load may take hours."""

PIPE_BYTES = 2**20
"""Room for what a child prints while its parent is held up, so that the child is not."""

OPEN_FILES = 65536
"""How many descriptors a child may have where the system's hard limit allows it."""

_ERROR = re.compile(rb"(?:python -m )?quire\.\w+: error: (.*)")


class Child:
    """One place in the stack, and the process that fills it now."""

    def __init__(self, service: str, command: list[str], environment: dict[str, str], replica: int | None = None):
        self.service, self.command, self.environment = service, command, environment
        self.replica = replica  # of several processes, which live and die together
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.due: float | None = None  # when it is to be started again
        self.deaths = 0  # quick ones in a row
        self.left = False  # on purpose: it is not started again
        self.proven = False  # a process has served here with this very command: it can work as configured
        self.alone_since: float | None = None  # when another process of its replica was first found dead
        self.served = False  # the process has said that it does
        self._heard = math.inf  # when it last gave the sign of life that it owes each second; inf: it owes none yet
        self._ready_fd = -1  # on which it says that it serves, and pulses
        self.carry = b""
        self.error: str | None = None  # its last `quire.X: error:` line
        self.drained = threading.Event()  # all it printed has been read

    @property
    def stream(self) -> IO[bytes] | None:
        """What it prints, standard output and error together."""
        return self.process.stdout if self.process is not None else None

    def start(self, alive_fd: int, *held: int) -> IO[bytes]:
        """Start the process in a session of its own; it ends when ``alive_fd``'s other end is closed.

        The descriptors ``held`` stay open as long as it runs.
        """
        self.carry, self.error, self.due, self.drained = b"", None, None, threading.Event()
        self.started, self.alone_since, self.served = time.monotonic(), None, False
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
        _allow_files(self.process.pid)
        stream = cast(IO[bytes], self.process.stdout)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(stream.fileno(), False)
        return stream

    def dead(self) -> bool:
        """True when the process has ended; it is then reaped, and whatever it had started is killed."""
        process = self.process
        if process is None or process.returncode is not None:
            return True
        if not _ended(process):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        process.wait()
        return True

    def fallen(self) -> bool:
        """Whether it has ended and nothing was done about it yet."""
        return self.due is None and not self.left and self.dead()

    def silence(self) -> float:
        """Seconds since it last showed that it lives (``proto.process.pulse``), 0 or less where that is not owed."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            if self._ready_fd >= 0 and os.read(self._ready_fd, 65536):
                self.served = self.proven = True
                self._heard = now
        return now - self._heard

    def forgive(self) -> None:
        """Begin to count its silence again, where it is counted."""
        self._heard = max(self._heard, time.monotonic())

    def has_served(self) -> bool:
        """Whether it said so (``proto.process.tell_ready``), of one that has ended too."""
        self.silence()
        return self.served

    def close_ready(self) -> None:
        """Give up the descriptor."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def obituary(self) -> str:
        """How it ended, in one line."""
        code = self.process.returncode if self.process is not None else 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return self.error or f"quire.{self.service} {how}; what it said is above."


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
