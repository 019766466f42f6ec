"""quire's processes, one by one, and a keeper that starts another in the place of one that ended.

It is the supervisor of these tests. `quire serve` gives up what dies again and again, as it should; here processes
die on purpose, again and again. What ends without having been told to is remembered in ``surprises``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stack import free_port

from chaos.proxy import Proxy
from quire.proto.process import PARENT_FD
from quire.proto.wire.sockets import Keys

POLL_S = 0.03
RESTART_S = (0.05, 0.5)
"""How long the keeper takes to notice, at least and at most."""


@dataclass
class Member:
    """A place in the cluster, and the process that fills it now."""

    service: str  # scheduler, worker, detokenizer, frontend
    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    kept: bool = True  # another is started when it ends
    told_to_end: bool = False  # or killed
    stopped: bool = False
    due: float | None = None
    started: float = 0.0
    starts: int = 0
    proxy: Proxy | None = None
    replica: int = 0  # of several processes, which end and are started together; 0: it is one alone
    codes: list[int] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0


@dataclass
class Shape:
    """How many of what. ``fake``: workers without a model, with a page store. ``tcp``: over proxies, with keys where
    the workers are real; else socket files."""

    fake: bool = True
    tcp: bool = False
    workers: int = 2
    ranks: int = 1  # processes of each worker, among which its model is split
    detokenizers: int = 2
    frontends: int = 2
    scheduler_flags: list[str] = field(default_factory=list)
    worker_flags: list[str] = field(default_factory=list)
    frontend_flags: list[str] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)  # by service, in place of `python -m quire...`
    record: Path | None = None  # a folder for the flight recordings of all schedulers, each in a file of its own


class Cluster:
    """One scheduler and what belongs to it. ``async with`` starts and ends it; ``rng`` decides the keeper's delays."""

    def __init__(self, shape: Shape, rng: random.Random):
        self.shape, self.rng = shape, rng
        self.members: list[Member] = []
        self.surprises: list[str] = []
        self.keys: Keys | None = None
        self.proxies: list[Proxy] = []
        self._folder = tempfile.TemporaryDirectory(prefix="qc-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o700)
        self._read_end, self._alive_fd = os.pipe()
        self._keeper: asyncio.Task[None] | None = None
        self._count = 0
        self._flags: list[str] = []
        self._direct = self.address = ""  # the scheduler's own address, and the one that others use
        self.port = free_port()

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _start(self) -> None:
        shape = self.shape
        if shape.tcp:
            near, far = free_port(2), free_port(2)
            self._direct, self.address = f"tcp://127.0.0.1:{far}", f"tcp://127.0.0.1:{near}"
            for offset in (0, 1):
                await self._add_proxy(near + offset, far + offset)
            if not shape.fake:
                self.keys = Keys.generate()
                self.keys.save(str(self.folder / "keys"))
                self._flags = [f"--keys={self.folder / 'keys'}"]
        else:
            (self.folder / "s").mkdir(mode=0o700)
            self._direct = self.address = f"ipc://{self.folder / 's'}"
        self.add("scheduler", [*self._command("scheduler"), f"--scheduler={self._direct}", *shape.scheduler_flags])
        for _ in range(shape.workers):
            self.add_worker()
        for _ in range(shape.detokenizers):
            await self._add_detokenizer()
        for _ in range(shape.frontends):
            flags = [f"--port={self.port}", "--host=127.0.0.1", *shape.frontend_flags]
            self.add("frontend", [*self._command("frontend"), f"--scheduler={self.address}", *flags])
        self._keeper = asyncio.ensure_future(self._keep())

    async def _add_proxy(self, port: int, target: int) -> Proxy:
        proxy = Proxy(port, target)
        await proxy.start()
        self.proxies.append(proxy)
        return proxy

    async def _add_detokenizer(self) -> None:
        command = [*self._command("detokenizer"), f"--scheduler={self.address}"]
        if self.shape.tcp:
            own, shown = free_port(), free_port()
            await self._add_proxy(shown, own)
            command += [f"--bind=tcp://127.0.0.1:{own}", f"--advertise=tcp://127.0.0.1:{shown}"]
        self.add("detokenizer", command)

    def add_worker(self, kept: bool = True) -> Member:
        """Start one more."""
        command = self._command("worker", "scheduler.fake.fake_worker" if self.shape.fake else "gpu_worker")
        own = [f"--seed={self._count}"] if self.shape.fake else []
        command += [f"--scheduler={self.address}", *own, *self.shape.worker_flags]
        if self.shape.ranks == 1:
            member = self.add("worker", command)
            member.kept = kept
            return member
        replica = self._count + 1
        command += [f"-tp={self.shape.ranks}", f"--master-addr=ipc://{self.folder}/replica{replica}"]
        for rank in range(self.shape.ranks):
            member = self.add("worker", [*command, f"--rank={rank}"], replica)
            member.kept = kept
        return member

    def together(self, member: Member) -> list[Member]:
        """Those that end and are started with ``member``, and itself."""
        return [m for m in self.members if m is member or (m.replica and m.replica == member.replica)]

    def add(self, service: str, command: list[str], replica: int = 0) -> Member:
        """One more process, started now."""
        self._count += 1
        fake = service == "worker" and self.shape.fake
        name = f"{service}-{self._count}"
        member = Member(
            service, name, command + ([] if fake else self._flags), self.folder / f"{name}.log", replica=replica
        )
        self.members.append(member)
        self._spawn(member)
        return member

    def _command(self, service: str, module: str = "") -> list[str]:
        return self.shape.commands.get(service) or [sys.executable, "-P", "-m", f"quire.{module or service}"]

    def of(self, service: str) -> list[Member]:
        """The living processes of one service that have not been told to end."""
        return [m for m in self.members if m.service == service and m.alive and not m.told_to_end]

    def resident(self) -> dict[str, int]:
        """Resident bytes by member."""
        found = {}
        for member in self.members:
            if member.alive:
                with contextlib.suppress(OSError, IndexError):
                    pages = int(Path(f"/proc/{member.pid}/statm").read_text().split()[1])
                    found[member.name] = pages * os.sysconf("SC_PAGE_SIZE")
        return found

    def logs(self, last: int = 40) -> str:
        """The ends of all logs, for a failed test."""
        return "\n".join(f"--- {p.name}\n" + "\n".join(p.read_text("utf-8", "replace").splitlines()[-last:])
                         for p in sorted(self.folder.glob("*.log")))  # fmt: skip

    def errors(self) -> list[str]:
        """What no fault excuses: tracebacks, by the line they end with, and messages that made no sense."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            inside = False
            for line in path.read_text("utf-8", "replace").splitlines():
                inside = inside or line.startswith("Traceback")
                if inside and not line.startswith((" ", "Traceback")):
                    found.append(f"{path.name}: {line}")
                    inside = False
                elif "dropped a" in line:
                    found.append(f"{path.name}: {line}")
        return found

    # ------------------------------------------------------------ processes

    def _spawn(self, member: Member) -> None:
        environment = dict(os.environ, **{PARENT_FD: str(self._read_end), "OMP_NUM_THREADS": "1"})
        command = member.command
        if member.service == "scheduler" and self.shape.record is not None:
            command = [*command, f"--flight-recorder={self.shape.record / f'scheduler-{member.starts + 1:03}.rec'}"]
        with open(member.log, "ab") as log:
            member.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=(self._read_end,), start_new_session=True,
            )  # fmt: skip
        member.started, member.due, member.told_to_end, member.stopped = time.monotonic(), None, False, False
        member.starts += 1

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for member in list(self.members):
                if member.due is None and not member.alive and member.process is not None:
                    self._bury(member)
                if member.due is not None and time.monotonic() >= member.due:
                    self._spawn(member)

    def _bury(self, member: Member) -> None:
        assert member.process is not None
        mates = [mate for mate in self.together(member) if mate is not member]
        if any(mate.alive for mate in mates):
            return
        code = member.process.returncode
        member.codes.append(code)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, signal.SIGKILL)  # what it had started
        if not member.told_to_end:
            lines = member.log.read_text("utf-8", "replace").splitlines()[-1:]
            self.surprises.append(f"{member.name} ended with code {code}: {lines}")
        if member.kept:
            waits = next((mate.due for mate in mates if mate.due is not None), None)
            member.due = waits or time.monotonic() + self.rng.uniform(*RESTART_S)
        else:
            self.members.remove(member)

    async def close(self) -> None:
        """End every process at once."""
        if self._keeper is not None:
            self._keeper.cancel()
        for proxy in self.proxies:
            await proxy.close()
        for member in self.members:
            if member.process is not None and member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.process.pid, signal.SIGKILL)
        for member in self.members:
            if member.process is not None:
                member.process.wait()
        os.close(self._alive_fd)
        os.close(self._read_end)
        self._folder.cleanup()


async def until(happened: Callable[[], bool], seconds: float, every: float = 0.02) -> bool:
    """Wait for it; False where it has not happened in time."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every)
    return True
