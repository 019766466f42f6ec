"""A server on a Unix socket, and workers that join it from another ``quire serve``."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
from pathlib import Path

from stack import BIN, wait_until


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path):
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def asked(path: Path, method: str, route: str, body: bytes | None = None) -> bytes:
    connection = Unix(path)
    try:
        connection.request(method, route, body, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def serve(log: Path, *flags: str) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen([BIN / "quire", "serve", *flags], stdout=subprocess.PIPE, stderr=errors, text=True)


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("quire is ready"))


def test_a_unix_socket_and_workers_of_another_server(tmp_path: Path) -> None:
    path, run = tmp_path / "quire.sock", tmp_path / "run"
    run.mkdir(mode=0o700)
    address = f"--scheduler=ipc://{run}"
    log, others = tmp_path / "log", tmp_path / "others"
    served = serve(log, f"--uds={path}", address, "-O3", "--enable-log-requests", "--sse-keep-alive-interval=5")
    joined = serve(others, "--headless", address)  # which waits for the scheduler
    try:
        assert ready(served).startswith(f"quire is ready: unix:{path} (")
        assert b'"choices"' in asked(path, "POST", "/v1/completions", b'{"prompt": "The", "max_tokens": 2}')
        assert ready(joined).startswith(f"quire is ready: workers of ipc://{run} (")
        wait_until(lambda: b'quire:replicas{model_name="quire-demo"} 2.0' in asked(path, "GET", "/metrics"), "two", 60)
        for process in (joined, served):
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        assert not path.exists() and run.exists()
        text = log.read_text()
        assert "-O changes nothing here: kernels are compiled before" in text
        assert "Received request " in text and "Finished request " in text
        assert "scheduler[" not in others.read_text() and os.listdir(run) == ["scheduler.lock"]
    finally:
        for process in (served, joined):
            if process.poll() is None:
                process.kill()
