"""Run the commands of a page of the documents, as its reader would: one folder, one shell after the other.

A fenced block below ``<!-- run -->`` is run, below ``<!-- run: serve -->`` it is started and stays until the page ends
(Ctrl-C), and each line of one below ``<!-- prints -->`` must be in what the block before it printed, in that order;
``...`` in a line stands for anything. What a block exports the next ones have. The ports 8000 and 8001 are replaced by
free ones, and where a command leaves them to the default they are said.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from stack import BIN, free_port

FENCE = re.compile(r"^<!-- (run|run: serve|prints) -->\n```(\w+)\n(.*?)^```$", re.M | re.S)
DEFAULTS = {
    "quire serve": "--host 127.0.0.1 --port 8000",
    "quire chat": "--url http://localhost:8000/v1",
    "quire complete": "--url http://localhost:8000/v1",
    "quire bench serve": "--port 8000",
}
READY, START_S, BLOCK_S, END_S = "quire is ready", 60.0, 60.0, 40.0


class Block(NamedTuple):
    """One marked block: what is to become of it, its language, its text."""

    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, in their order."""
    found = [Block(*match) for match in FENCE.findall(page.read_text("utf-8"))]
    marks = len(re.findall(r"^<!-- (?:run|prints)", page.read_text("utf-8"), re.M))
    if marks != len(found):
        raise AssertionError(f"{page.name}: {marks} marks, but {len(found)} of them stand right above a fenced block")
    return found


REPLICA = re.compile(r"replica \d+ is ready")


class Reader:
    """Somebody who does what a page says. ``close`` ends what still runs and removes the folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="qdoc-", dir="/tmp"))  # short: sockets lie below it
        self._ports = [free_port() for _ in range(2)]
        self._servers: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._exports = self.folder / ".exports"
        self._exports.write_text("")
        tmp = self.folder / "tmp"
        tmp.mkdir()
        path = f"{BIN}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "TMPDIR": str(tmp), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._printed = ""

    def follow(self, block: Block) -> None:
        """Do what one block says. Raises AssertionError where it fails or prints something else."""
        if block.mark == "prints":
            self._compare(block.text)
        elif block.mark == "run: serve":
            self._serve(self._explicit(block.text))
        else:
            self._printed = self._run(self._explicit(block.text), block.language)

    def close(self) -> None:
        for process, _ in reversed(self._servers):
            self._end(process)
        shutil.rmtree(self.folder)

    def _explicit(self, text: str) -> str:
        """A block with ports of ours, said where defaults lead to them. A flag of the page comes later and wins."""
        for command, flags in DEFAULTS.items():
            text = re.sub(rf"\b{command}\b", f"{command} {flags}", text)
        return re.sub(r"\b800([01])\b", lambda match: str(self._ports[int(match[1])]), text)

    def _script(self, text: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", f"source {self._exports}\n{text}\nexport -p > {self._exports}"]

    def _run(self, text: str, language: str) -> str:
        command = [sys.executable, "-c", text] if language == "python" else self._script(text)
        done = subprocess.run(
            command, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=BLOCK_S, text=True,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"code {done.returncode} of\n{text}\nwhich printed\n{done.stdout}{self._logs()}")
        return done.stdout

    def _serve(self, text: str) -> None:
        log = self.folder / f".serve-{len(self._servers)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-euc", f"source {self._exports}\n{text}"], cwd=self.folder, env=self._env,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._servers.append((process, log))
        deadline = time.monotonic() + START_S
        # It answers when its first worker is there; a page that starts several goes on to list them.
        several = re.search(r"--data-parallel-size (\d+)", text)
        workers = int(several[1]) if several else 0
        while READY not in (said := log.read_text("utf-8")) or len(REPLICA.findall(said)) < workers:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"never ready:\n{text}{self._logs()}")
            time.sleep(0.05)
        self._printed = log.read_text("utf-8")

    def _compare(self, text: str) -> None:
        at = 0
        for line in text.splitlines():
            wanted = ".*?".join(re.escape(part) for part in line.split("..."))
            found = re.compile(wanted).search(self._printed, at)
            if found is None:
                raise AssertionError(f"not printed, or not in this order: {line!r}; what was printed:\n{self._printed}")
            at = found.end()

    def _logs(self) -> str:
        return "".join(f"\n--- a server:\n{log.read_text('utf-8')[-3000:]}" for _, log in self._servers)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Ctrl-C, as in a terminal: to the whole group."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
