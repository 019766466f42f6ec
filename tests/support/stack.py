"""Start and end the real stack, as a user does, for the tests that need it."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
READY = re.compile(r"https?://\S+?:\d+")
START_S = 120
_given: set[int] = set()  # ports that this process has been told of


def _lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """``quire serve`` in a process of its own. ``url`` is what its ready line says."""

    def __init__(self, *flags, env=None):
        # Standard error goes to a file, so that a full pipe can never stop the server.
        self.log = tempfile.NamedTemporaryFile("w+", prefix="quire-test-", suffix=".log", delete=False)  # noqa: SIM115
        command = [str(BIN / "quire"), "serve", "--host=127.0.0.1", "--port=0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env={**os.environ, **(env or {})}
        )
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        try:
            lines = []
            for line in self.process.stdout:
                lines.append(line)
                if "ready" in line and READY.search(line):
                    break
            else:
                raise RuntimeError(f"no ready line; stdout {lines}, stderr:\n{self.stderr()}")
        finally:
            watchdog.cancel()
        self.ready_line = lines[-1]
        self.url = READY.search(self.ready_line).group()

    def stderr(self):
        return Path(self.log.name).read_text()

    def children(self):
        """Its processes with all of theirs, but for those that have ended and were not waited for yet."""
        return [each for each in psutil.Process(self.process.pid).children(recursive=True) if _lives(each)]

    def run_dir(self):
        """The folder of socket files, from a child's command line."""
        for child in self.children():
            found = re.search(r"ipc://(\S+)", " ".join(child.cmdline()))
            if found:
                return found.group(1)
        raise RuntimeError("no child names a scheduler address")

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, decoded body, headers); a str or bytes body is sent as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                raw, status, got = response.read(), response.status, response.headers
        except urllib.error.HTTPError as error:
            raw, status, got = error.read(), error.code, error.headers
        try:
            return status, json.loads(raw), got
        except ValueError:
            return status, raw.decode("utf-8", "replace"), got

    def post(self, path, body, **kwargs):
        return self.request("POST", path, body, **kwargs)

    def get(self, path):
        return self.request("GET", path)

    def metric(self, name):
        """Sum of a metric's samples. What the scheduler counts is left out while it is slow to answer: asked again."""
        pattern = re.compile(rf"^{re.escape(name)}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", re.M)
        found = []

        def read():
            found[:] = pattern.findall(self.get("/metrics")[1])
            return found

        wait_until(read, f"/metrics has {name}", 60)
        return sum(map(float, found))

    def stop(self, signum=signal.SIGINT, timeout=60):
        """Signal the server and wait; returns its exit code and what was left behind: (code, pids, folder exists)."""
        children, folder = self.children(), self.run_dir()
        self.process.send_signal(signum)
        code = self.process.wait(timeout)
        _, alive = psutil.wait_procs(children, timeout=15)
        return code, [p.pid for p in alive], os.path.exists(folder)

    def close(self):
        if self.process.poll() is None:
            children = self.children()
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()
        self.log.close()
        os.unlink(self.log.name)


def thinking_demo(folder):
    """Flags of a server of the demo model whose template, put into ``folder``, opens a thought where it is told to."""
    home, template = Path(__file__).resolve().parents[2] / "demo_model", folder / "thinks.jinja"
    opening = "{%- if enable_thinking %}{{ '<think>\\n' }}{%- endif %}"
    template.write_text((home / "chat_template.jinja").read_text() + opening)
    return "--reasoning-parser=qwen3", f"--chat-template={template}"


def wait_until(condition, what, timeout=30.0):
    """Poll until ``condition()`` is true; a failure says what was waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout} s: {what}")
        time.sleep(0.05)


def free_port(count=1):
    """The first of ``count`` ports in a row that nobody has. They lie below those that the system itself hands out, so
    that no connection takes one before the process it is for, or while that one is started again."""
    rng = random.Random()
    while True:
        first = rng.randrange(20_000, 32_000)
        ports = set(range(first, first + count))
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports - _given:
                held.enter_context(socket.socket()).bind(("", port))
            if not ports & _given:
                _given.update(ports)
                return first
