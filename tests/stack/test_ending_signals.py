"""Signals at unlucky moments: nothing is printed, the exit code stays, and nobody is forgotten."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo_model"

AT_THE_LAST_MOMENT = """
import atexit, os, signal
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)  # when the interpreter has given up its handlers
last = Last()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
"""

WHILE_IT_CLOSES = """
import asyncio.selector_events, importlib, os, signal, sys
sys.modules["uvloop"] = None  # asyncio's own loop, the one that lets go of its signals last
service = importlib.import_module(f"quire.{sys.argv[1]}.main")
del sys.argv[0]
close = asyncio.selector_events.BaseSelectorEventLoop.close
def once_more(loop):
    close(loop)
    os.kill(os.getpid(), signal.SIGTERM)
    print("asked again", flush=True)
asyncio.selector_events.BaseSelectorEventLoop.close = once_more
service.tell_ready = lambda: os.kill(os.getpid(), signal.SIGTERM)
service.main()
"""

WHEN_ITS_SOCKETS_ARE_CLOSED = """
import os, signal
from quire.scheduler import loop
from quire.scheduler.main import main
loop.tell_ready = lambda: os.kill(os.getpid(), signal.SIGTERM)
close = loop.Loop.close
def once_more(self):
    close(self)
    os.kill(os.getpid(), signal.SIGTERM)
loop.Loop.close = once_more
main()
"""

WHEN_IT_HAS_SERVED = (
    AT_THE_LAST_MOMENT
    + """
import sys
from quire.scheduler import loop
from quire.scheduler.main import main
loop.tell_ready = lambda: os.kill(os.getpid(), signal.SIGTERM)
main()
"""
)

WHEN_IT_HAS_DRAINED = (
    AT_THE_LAST_MOMENT
    + """
from quire.gpu_worker import main as service
class Fake(service.Link):
    def __init__(self): self.asked = False
    def leave(self): self.asked = True
    def close(self, farewell): print("farewell:", farewell, flush=True)
    def finish(self): pass
    def serve(self, link):
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.asked
def load(args, links):
    links.link = Fake()
    return links.link
service._load = load
raise SystemExit(service.main())
"""
)

WHILE_IT_DRAINS = WHEN_IT_HAS_DRAINED.replace(
    "        assert self.asked\n",
    """
        class Thing: pass
        thing, watched = Thing(), []
        watched.append(__import__("weakref").ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
        del thing
        print("it goes on")
""",
)

WHILE_IT_LOADS = """
import os, signal, sys, weakref
from quire.gpu_worker import main as service
class Thing: pass
def lost(*args):
    thing = Thing()
    watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing
    print("it goes on", flush=True)
service._load = lost
print(service.main())
"""

WHILE_IT_STARTS = """
import os, signal, subprocess
from quire.cli.main import run
from quire.client.supervisor import launch
launch.cpu_count = lambda: 8  # all are started at once
begin, started = subprocess.Popen, []
def popen(*arguments, **options):
    process = begin(*arguments, **options)
    started.append(process.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
subprocess.Popen = popen
print(run(["serve", "--host=127.0.0.1", "--port=0"]), len(started))
for pid in started:
    try:
        print("not waited for:", os.waitpid(pid, os.WNOHANG))
    except ChildProcessError:
        pass
"""

WITH_NOHUP = """
import signal
from quire.cli.serve import Ending
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as it is inherited
ending = Ending()
signal.raise_signal(signal.SIGHUP)
print(ending.stop.is_set())
"""

BEFORE_A_WAIT = """
import os, queue, signal, sys, threading
if sys.argv[1] == "scheduler":
    from quire.gpu_worker.link import Link
    link = Link("ipc:///nobody/listens", "cpu")
    leave, wait = link.leave, lambda: type(link.get()).__name__
else:
    from quire.gpu_worker.parallel.group_link import take
    inbox = queue.SimpleQueue()
    leave, wait = lambda: inbox.put("Leave"), lambda: take(inbox)
signal.signal(signal.SIGTERM, lambda *_: leave())
waits = threading.Event()
def ask():
    waits.wait()
    os.kill(os.getpid(), signal.SIGTERM)  # this thread has it, and nothing interrupts the wait of the first
threading.Thread(target=ask).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Timer(0.5, waits.set).start()
print(wait())
"""

IN_A_LOCK = """
import signal
from quire.cli.serve import Ending
ending = Ending()
ending.interrupts = False
for flag in (ending.stop, ending.hurry):
    with flag._cond:  # as for a moment in every look at it
        signal.raise_signal(signal.SIGTERM)
    print(flag.is_set())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("service", ["frontend", "detokenizer"])
def test_asked_to_end_once_more_while_the_event_loop_closes(service: str, tmp_path: Path) -> None:
    flags = [f"--scheduler=ipc://{tmp_path}", f"--model={DEMO}"]
    if service == "frontend":
        flags += ["--host=127.0.0.1", "--port=0"]
    done = run(WHILE_IT_CLOSES, service, *flags)
    assert done.stdout.endswith("asked again\n")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "code", [WHEN_ITS_SOCKETS_ARE_CLOSED, WHEN_IT_HAS_SERVED, WHEN_IT_HAS_DRAINED],
    ids=["scheduler-closed", "scheduler", "gpu_worker"],
)  # fmt: skip
def test_asked_to_end_once_more_at_the_very_end(code: str, tmp_path: Path) -> None:
    done = run(code, f"--scheduler=ipc://{tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("code", "said"), [(WHILE_IT_LOADS, ""), (WHILE_IT_DRAINS, "farewell: asked to end\n")])
def test_a_worker_ends_at_once_wherever_the_signal_comes(code: str, said: str, tmp_path: Path) -> None:
    """Python drops what a signal's handler raises within a weak reference's callback."""
    done = run(code, f"--scheduler=ipc://{tmp_path}")
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_server_that_is_asked_to_end_between_a_process_and_the_next_leaves_none() -> None:
    done = run(WHILE_IT_STARTS)
    assert done.stdout == "0 5\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("whom", ["scheduler", "leader"])
def test_a_worker_sees_a_signal_that_did_not_interrupt_its_wait(whom: str) -> None:
    """As one that comes in the moment before, when Python has looked for signals and does not wait yet."""
    assert run(BEFORE_A_WAIT, whom).stdout == "Leave\n"


def test_the_server_s_handler_waits_for_no_lock() -> None:
    assert run(IN_A_LOCK).stdout == "True\nTrue\n"


def test_a_server_outlives_its_terminal_under_nohup() -> None:
    assert run(WITH_NOHUP).stdout == "False\n"


def test_a_ctrl_c_is_not_the_grammar_helper_s() -> None:
    command = [sys.executable, "-m", "quire.detokenizer.grammar_helper", str(DEMO), "512", "0", str(2**29)]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert helper.stdout is not None
    assert helper.stdout.read(1)  # it is ready
    helper.send_signal(signal.SIGINT)
    _, said = helper.communicate(timeout=120)  # its parent's end of the pipe is closed
    assert (helper.returncode, said) == (0, b"")


@pytest.mark.parametrize("command", [["quire.cli", "serve", "/nowhere"], ["quire.scheduler", "--scheduler=tcp://x:1"]])
def test_an_error_is_one_line_in_one_piece(command: list[str]) -> None:
    """Lines of several processes on one standard error do not mix, unbuffered as in a container."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # which keeps the pieces apart
    ours.settimeout(60)
    with ours, theirs:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run([sys.executable, "-m", *command], stderr=theirs, timeout=120, env=environment)
        said = ours.recv(65536)
    assert done.returncode == 78
    assert b": error: " in said and said.endswith(b"\n") and said.count(b"\n") == 1
