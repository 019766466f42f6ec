"""What goes wrong, one fault at a time, at moments that a seeded generator chooses."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from chaos.cluster import Cluster, Member, until
from quire.cli.errors import CommandError
from quire.cli.workers import Operator

KILLS = ("kill worker", "kill detokenizer", "kill scheduler", "kill frontend")
PAUSES = ("pause worker", "pause detokenizer", "pause scheduler")
SOCKETS = ("reset connection", "hold connections")
WORKERS = ("worker joins", "worker drains")
DRAIN_S = 60.0


@dataclass
class Fault:
    """One that happened. ``ports``: the connections that went with a killed frontend, ``over`` when it was gone."""

    kind: str
    at: float
    ports: set[int] = field(default_factory=set)
    over: float = math.inf


class Faults:
    """Does things to a cluster. Pauses go on in the background until ``heal``."""

    def __init__(self, cluster: Cluster, rng: random.Random, longest_pause: float):
        self.cluster, self.rng, self.longest_pause = cluster, rng, longest_pause
        self.done: Counter[str] = Counter()
        self.history: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.drain_codes: list[int] = []
        self.spared: set[str] = set()  # names of members to which nothing happens

    async def do(self, kind: str) -> Fault | None:
        """Let ``kind`` happen; None where there is nobody it can happen to now."""
        verb, _, what = kind.partition(" ")
        fault = Fault(kind, time.monotonic())
        if verb == "kill":
            happened = self._kill(what, fault)
        elif verb == "pause":
            happened = self._pause(what)
        elif kind == "reset connection":
            happened = self.rng.choice(self.cluster.proxies).reset(self.rng)
        elif kind == "hold connections":
            proxy = self.rng.choice(self.cluster.proxies)
            happened = self._background(proxy.hold(self._seconds()))
        elif kind == "worker joins":
            happened = self._join()
        else:
            happened = self._drain()
        if not happened:
            return None
        self.done[kind] += 1
        self.history.append(fault)
        return fault

    @property
    def kills(self) -> int:
        return sum(self.done[kind] for kind in KILLS)

    async def heal(self) -> None:
        """No more of it: what is stopped goes on, and what was begun has ended."""
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # ------------------------------------------------------------ one of each

    def _seconds(self) -> float:
        """From 0.1 to ``longest_pause``, each scale as likely as another."""
        return 0.1 * (self.longest_pause / 0.1) ** self.rng.random()

    def _choose(self, service: str) -> Member | None:
        found = [m for m in self.cluster.of(service) if not m.stopped and m.name not in self.spared]
        return self.rng.choice(found) if found else None

    def _kill(self, service: str, fault: Fault) -> bool:
        if service == "frontend" and len(self.cluster.of("frontend")) < 2:
            return False
        member = self._choose(service)
        if member is None:
            return False
        if service == "frontend":
            os.kill(member.pid, signal.SIGSTOP)  # it takes no more connections while they are counted
            fault.ports = _ports_of(member.pid)
        for each in self.cluster.together(member):
            each.told_to_end = True
        os.kill(member.pid, signal.SIGKILL)
        if service == "frontend":
            self._background(self._note_end(member, fault))
        return True

    async def _note_end(self, member: Member, fault: Fault) -> None:
        """Until a killed process is gone its port takes connections, which go with it."""
        process = member.process
        assert process is not None
        if await until(lambda: process.poll() is not None, DRAIN_S):
            fault.over = time.monotonic()

    def _pause(self, service: str) -> bool:
        member = self._choose(service)
        return member is not None and self._background(self._stop_and_go(member, self._seconds()))

    async def _stop_and_go(self, member: Member, seconds: float) -> None:
        pid = member.pid
        os.kill(pid, signal.SIGSTOP)
        member.stopped = True
        for each in self.cluster.together(member):  # taken for hung, it is sent away, and ends when it hears of it
            each.told_to_end = True
        try:
            await asyncio.sleep(seconds)
        finally:
            if member.pid == pid and member.alive:
                os.kill(pid, signal.SIGCONT)
                member.stopped = False
        await asyncio.sleep(3.0)
        if member.pid == pid and member.alive:
            for each in self.cluster.together(member):
                each.told_to_end = False

    def _join(self) -> bool:
        if len(self.cluster.of("worker")) > self.cluster.shape.workers * self.cluster.shape.ranks:
            return False
        self.cluster.add_worker(kept=False)
        return True

    def _drain(self) -> bool:
        member = self._choose("worker")
        if member is None or time.monotonic() - member.started < 2.0:
            return False
        if len(self.cluster.of("worker")) < 2 * self.cluster.shape.ranks:
            return False
        return self._background(self._drained(member))

    async def _drained(self, member: Member) -> None:
        for each in self.cluster.together(member):
            each.told_to_end = True
        process = member.process
        assert process is not None
        if self.rng.random() < 0.5 or not await asyncio.to_thread(self._ask_to_drain, process.pid):
            process.terminate()
        if await until(lambda: process.poll() is not None, DRAIN_S):
            self.drain_codes.append(process.returncode)
        else:
            self.cluster.surprises.append(f"{member.name} did not drain within {DRAIN_S:g} s")
            process.kill()

    def _ask_to_drain(self, pid: int) -> bool:
        """As `quire workers drain` does; False where the scheduler does not know the worker now, or is stopped."""
        keys = str(self.cluster.folder / "keys") if self.cluster.keys else None
        operator = Operator(self.cluster.address, keys)
        try:
            found = [worker.worker for worker in operator.ask("list").workers if worker.pid == pid]
            return bool(found) and not operator.ask("drain", found[0]).error
        except CommandError:
            return False
        finally:
            operator.close()

    def _background(self, work: object) -> bool:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True


def _ports_of(pid: int) -> set[int]:
    """The far ends of a process's TCP connections."""
    with contextlib.suppress(psutil.Error):
        return {c.raddr.port for c in psutil.Process(pid).net_connections("tcp") if c.raddr}
    return set()
