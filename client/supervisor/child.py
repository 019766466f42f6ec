"""One process of the server: started, heard, read from, found to have ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

from ...proto.log_lines import as_json, printable
from ...proto.process import HAND_OVER, IDLE, NEEDED, READY_FD

PIPE_BYTES = 2**20
"""Room for what a child prints while its parent is held up, so that the child is not."""

OPEN_FILES = 65536
"""How many descriptors a child may have where the system's hard limit allows it."""

LINE_BYTES = 2**16
"""A longer line of what is no JSON object is told in parts."""

_LEFT = re.compile(rb"\[(\d+)\]")  # of ``proto.process.tell_left``
_ERROR = re.compile(rb"(?:python -m )?quire\.\w+: error: (.*)")


class Child:
    """A process in a session of its own. It ends when the other end of ``alive_fd`` is closed; the descriptors ``held``
    stay open as long as it runs.

    Raises OSError where it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], alive_fd: int, *held: int):
        self.carry = b""
        self.form: Callable[..., bytes] = as_it_is  # what is made of that which it prints
        self.left: int | None = None  # requests that it still answers, where it hands over
        self.needed = False  # by its last heartbeat: a request would run, or one is open
        self.error: str | None = None  # its last `quire.X: error:` line
        self.drained = threading.Event()  # all it printed has been read
        self._ready_fd, told = os.pipe()  # on which it says that it serves, and its heartbeats come
        os.set_blocking(self._ready_fd, False)
        try:
            self._process = subprocess.Popen(
                command, env={**environment, READY_FD: str(told)}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(alive_fd, told, *held),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.close_ready()
            raise
        finally:
            os.close(told)
        _allow_files(self.pid)
        self.stream = cast(IO[bytes], self._process.stdout)  # what it prints, standard output and error together
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self.stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.stream.fileno(), False)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ended(self) -> int | None:
        """None while it runs; else its exit code, or minus the signal that ended it. It is reaped then, and whatever
        it had started is killed."""
        if not _ended(self._process):
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        return self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def hand_over(self) -> None:
        """Ask it to leave what is new to its successor, to finish what it has begun, and to end."""
        self._process.send_signal(HAND_OVER)

    def kill(self) -> None:
        """End it and all that it has started, without a chance to say anything."""
        os.killpg(self.pid, signal.SIGKILL)

    def heard(self) -> bool:
        """Whether it has said something on the descriptor of ``proto.process.tell_ready`` since this was last asked."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._ready_fd, 65536) if self._ready_fd >= 0 else b""
            if told := _LEFT.findall(data):
                self.left = int(told[-1])
            if (last := max(data.rfind(IDLE), at := data.rfind(NEEDED))) >= 0:
                self.needed = last == at
            return bool(data)
        return False

    def last_words(self) -> str | None:
        """The line in which it says why it ends. Waits until all that it printed has been read, but 1 s at most:
        something else may hold its output open."""
        self.drained.wait(1.0)
        return self.error

    def close_ready(self) -> None:
        """Give up the descriptor on which it is heard."""
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def close(self) -> None:
        """Give up all that is held for one that has ended."""
        self.drained.wait(1.0)
        self.stream.close()
        self.close_ready()


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


class JsonLines:
    """Makes whole lines of what a child prints, and JSON objects of those that are none: what C code prints is text."""

    def __init__(self, service: str, pid: int):
        self._service, self._pid, self._part = service, pid, b""

    def __call__(self, data: bytes, last: bool = False) -> bytes:
        """The lines that end in ``data``. ``last``: nothing more will come."""
        *lines, self._part = (self._part + data).replace(b"\r", b"\n").split(b"\n")
        if last or len(self._part) > LINE_BYTES:
            lines.append(self._part)
            self._part = b""
        return b"".join(self._told(line) for line in lines if line.strip())

    def _told(self, line: bytes) -> bytes:
        if line.startswith(b'{"time": '):
            return line + b"\n"
        return as_json("info", self._service, self._pid, printable(line.decode("utf-8", "replace"))).encode() + b"\n"


def as_it_is(data: bytes, last: bool = False) -> bytes:
    """What a child prints is text."""
    return data


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
