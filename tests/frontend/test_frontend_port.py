"""Who shares a frontend's port: real processes of two schedulers, none of which is running."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack import free_port, wait_until

from quire.frontend.port import claim
from quire.proto.config import ConfigError
from quire.proto.listening import listen

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets are Linux's")
ONE, OTHER = "tcp://127.0.0.1:5600", "tcp://127.0.0.1:5700"


class Frontend:
    """A process of a scheduler at ``port``, which may be refused."""

    def __init__(self, scheduler: str, port: int):
        command = [sys.executable, "-P", "-m", "quire.frontend", f"--scheduler={scheduler}", "--host=127.0.0.1"]
        self.scheduler = scheduler
        self.process = subprocess.Popen(
            [*command, f"--port={port}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def listens(self) -> bool:
        """Whether it came to listen; where it did not, it has ended as it must."""
        assert self.process.stdout is not None
        if self.process.stdout.readline().startswith("listening on http://127.0.0.1:"):
            return True
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 78
        (line,) = (line for line in said.splitlines() if "error" in line)
        assert "is served by a frontend of another scheduler (process " in line and "choose another --port" in line
        assert "Traceback" not in said
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[[str, int], Frontend]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Frontend] = []

    def one(scheduler: str, port: int) -> Frontend:
        running.append(frontend := Frontend(scheduler, port))
        return frontend

    yield one
    for frontend in running:
        frontend.end()


@pytest.mark.slow
def test_a_frontend_of_another_scheduler_is_refused_for_as_long_as_the_port_is_taken(
    start: Start,
) -> None:
    port = free_port()
    owner = start(ONE, port)
    assert owner.listens()
    assert not start(OTHER, port).listens()
    assert start("tcp://localhost:5600", port).listens()  # the same, written otherwise
    owner.process.send_signal(signal.SIGSTOP)  # hung, it is asked nothing
    second = start(ONE, port)
    assert second.listens() and not start(OTHER, port).listens()
    owner.end()
    assert not start(OTHER, port).listens()  # the others are still there


@pytest.mark.slow
def test_a_port_whose_owner_was_killed_is_free(start: Start) -> None:
    port = free_port()
    owner = start(ONE, port)
    assert owner.listens()
    owner.end()
    assert start(OTHER, port).listens()


def test_one_that_is_ending_gives_its_port_up_when_it_closes_it(start: Start) -> None:
    port = free_port()
    owner = start(ONE, port)
    assert owner.listens()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(f"{head}Content-Length: 10\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # it waits for the body, and its end for that
        owner.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED

        wait_until(refused, "it has closed its port")
        assert start(OTHER, port).listens() and owner.process.poll() is None


@pytest.mark.slow
def test_of_two_schedulers_frontends_that_start_at_once_one_schedulers_share_the_port(
    start: Start,
) -> None:
    port = free_port()
    frontends = [start(scheduler, port) for scheduler in (ONE, OTHER) * 3]
    assert len({frontend.scheduler for frontend in frontends if frontend.listens()}) == 1


def test_hosts_that_no_connection_can_reach_both_of_may_have_different_schedulers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "b")
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        first = claim(sock, f"ipc://{tmp_path}/a")
        assert first is not None
        with listen("127.0.0.2", port) as beside, first:
            second = claim(beside, ONE)
            assert second is not None
            second.close()
            with listen("0.0.0.0", port) as over:
                with pytest.raises(ConfigError, match=f"port {port} on 0.0.0.0 is served .*process {os.getpid()}"):
                    claim(over, ONE)
                third = claim(over, f"ipc://{tmp_path}/b")
                assert third is not None
                third.close()


def test_an_address_of_version_four_is_the_same_in_the_form_of_version_six() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        first = claim(sock, ONE)
        assert first is not None
        refused = pytest.raises(ConfigError, match=f"port {port} on ::ffff:127.0.0.1 is served .*{os.getpid()}")
        with listen("::ffff:127.0.0.1", port) as mapped, refused:
            claim(mapped, OTHER)
        with first, listen("::ffff:127.0.0.2", port) as beside:
            second = claim(beside, OTHER)
            assert second is not None
            second.close()
