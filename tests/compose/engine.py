"""compose.yaml as a project of its own on a real Docker engine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE = "QUIRE_COMPOSE_BASE"
"""Environment variable: the image to build on."""
PROJECT = "quire-test"
FRONTENDS, DETOKENIZERS = 2, 2


def reason_to_skip() -> str | None:
    """Why no containers can be had here, or None."""
    if not os.environ.get(BASE):
        return f"{BASE} names no image to build on (python:3.12-slim, or one that tests/compose/base.py makes)"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{' '.join(command)}`: {error}"
        if done.returncode:
            return f"`{' '.join(command)}`: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return None


class Compose:
    """The project. Commands raise RuntimeError with what they printed."""

    def __init__(self, log: Path):
        self._log = log.open("w")
        self._began = time.monotonic()
        first = _free_ports(FRONTENDS)
        ports = f"{first}-{first + FRONTENDS - 1}"
        self._env = os.environ | {"BASE": os.environ[BASE], "QUIRE_PORT": ports, "COMPOSE_PROFILES": "cpu"}
        self.workers = 1

    def note(self, line: str) -> None:
        """A line of the report, with the seconds since the start."""
        self._log.write(f"{time.monotonic() - self._began:7.1f} s  {line}\n")
        self._log.flush()

    def run(self, *args: str) -> str:
        """``docker compose ARGS`` of this project."""
        return self._docker("compose", "-p", PROJECT, "-f", str(ROOT / "compose.yaml"), *args)

    def docker(self, *args: str) -> str:
        """``docker ARGS``, noted."""
        self.note(f"$ docker {' '.join(args)}")
        return self._docker(*args)

    def up(self) -> None:
        """Start what is missing and stop what is too much, leaving alone what runs."""
        self._up("--no-recreate", *self._scale(*self._counts))

    def up_again(self) -> None:
        """As ``up`` of an operator, who does not say that what runs is to be left alone."""
        self._up(*self._scale(*self._counts))

    def replace(self, service: str) -> None:
        """New containers for one service, as docs/upgrade.md has it. With ``--no-deps`` compose would take all services
        for changed at the next ``up``."""
        reached = self._counts if service == "frontend" else [service]
        self._up("--force-recreate", *self._scale(*reached), service)

    def _up(self, *args: str) -> None:
        self.note(f"$ docker compose up -d {' '.join(args)}")
        self.run("up", "-d", *args)

    @property
    def _counts(self) -> dict[str, int]:
        return {"gpu_worker": self.workers, "frontend": FRONTENDS, "detokenizer": DETOKENIZERS}

    def _scale(self, *services: str) -> list[str]:
        return [word for service in services for word in ("--scale", f"{service}={self._counts.get(service, 1)}")]

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        return self.run("ps", "-q", service).split()

    def name(self, container: str) -> str:
        """A container's name."""
        return str(self.inspect(container)["Name"]).removeprefix("/")

    def network(self) -> str:
        """The network that the services share."""
        return f"{PROJECT}_default"

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        return json.loads(self._docker("inspect", container))[0]

    def urls(self) -> list[str]:
        """Of the frontends, in the order of ``containers("frontend")``."""
        return [self.url(container) for container in self.containers("frontend")]

    def url(self, container: str) -> str:
        """Where a frontend's container is published."""
        port = self.inspect(container)["NetworkSettings"]["Ports"]["8000/tcp"][0]["HostPort"]
        return f"http://127.0.0.1:{port}"

    def metric(self, name: str) -> float:
        """A figure of /metrics, which is the scheduler's; NaN where no frontend answers."""
        for url in self.urls():
            try:
                with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                    if found := re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", answer.read().decode(), re.MULTILINE):
                        return float(found[1])
            except (urllib.error.URLError, OSError):
                continue
        return float("nan")

    def wait_metric(self, name: str, value: float, timeout: float = 180.0) -> None:
        """Return once a figure has this value. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (now := self.metric(name)) != value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is {now}, not {value}, after {timeout:g} s")
            time.sleep(0.3)
        self.note(f"{name} is {value:g}")

    def wait_ready(self, timeout: float = 180.0) -> None:
        """Return once every frontend is ready. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not all(map(_ready, urls := self.urls())) or len(urls) < FRONTENDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {timeout:g} s:\n{self.run('logs', '--tail', '20')}")
            time.sleep(0.3)

    def close(self) -> None:
        """Remove everything but the images."""
        self.run("down", "-v", "--timeout", "5")
        self._log.close()

    def _docker(self, *args: str) -> str:
        done = subprocess.run(["docker", *args], env=self._env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`docker {' '.join(args)}` ended with code {done.returncode}: {done.stderr[-4000:]}")
        return done.stdout


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    for first in range(18000, 19000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", port))
        except OSError:
            continue
        return first
    raise RuntimeError(f"no {count} free ports in a row from 18000 on")
