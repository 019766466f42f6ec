"""Signals that come while a process is already ending: nothing is printed, and the exit code stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "demo_model"

WHILE_IT_CLOSES = """
import asyncio.selector_events, importlib, os, signal, sys
sys.modules["uvloop"] = None  # asyncio's own loop, the one that lets go of its signals last
service = importlib.import_module(f"quire.{sys.argv[1]}.__main__")
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

WHILE_IT_LOADS = """
import os, signal, sys, weakref
from quire.gpu_worker import __main__ as service
class Thing: pass
load = service._load
def lost(*args):
    thing = Thing()
    watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing
    return load(*args)
service._load = lost
print(service.main())
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


def test_what_a_signal_raises_may_be_lost_while_a_worker_loads(tmp_path: Path) -> None:
    done = run(WHILE_IT_LOADS, f"--scheduler=ipc://{tmp_path}", f"--model={DEMO}", "--device=cpu")
    assert "Exception ignored in" in done.stderr  # it was lost
    assert (done.returncode, done.stdout) == (0, "")  # and the worker ends all the same, before it serves
