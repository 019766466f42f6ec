"""``quire run-batch``: every request once and in order, whatever is killed; what it says of files that cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from stack import wait_until

from quire.cli.batch_remote import Remote, key_of
from quire.cli.errors import CommandError
from quire.cli.main import run
from quire.client.results import RequestError
from quire.frontend.batches.journal import Journal
from quire.frontend.batches.lines import Line, Lines
from quire.frontend.fake import FakeServer
from quire.proto.checkpoint.model_config import demo_model_path

COUNT = 60


def requests(path: Path) -> None:
    """Every third is a chat, every third a response, and one in twenty a mistake."""
    with path.open("w") as file:
        for n in range(COUNT):
            body: dict[str, Any] = {"temperature": 0 if n % 20 else -1}
            if n % 3 == 0:
                url, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"Hi {n}"}]}
            elif n % 3 == 1:
                url, body = "/v1/completions", {**body, "prompt": f"Hi {n}", "max_tokens": 4}
            else:
                url, body = "/v1/responses", {**body, "input": f"Hi {n}"}
            if n % 3 != 1:
                body["max_output_tokens" if n % 3 else "max_completion_tokens"] = 4
            file.write(json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}) + "\n")


QUIRE = """
import sys
from quire.cli.main import main
from quire.client.supervisor import launch

def command_of(service, args, command_of=launch.command_of):
    if service != "gpu_worker":
        return command_of(service, args)
    flags = [f"--scheduler={args.scheduler}", "--vocab-size=VOCAB", "--delay-ms", "STEP", "STEP"]
    return [sys.executable, "-m", "quire.scheduler.fake.fake_worker", *flags]

launch.command_of = command_of
main()
"""
"""The command with a worker that starts at once, for it has no model, and whose steps take as long as is wanted."""


def start(folder: Path, step_ms: int) -> subprocess.Popen[bytes]:
    vocabulary = json.loads((Path(demo_model_path()) / "config.json").read_text())["vocab_size"]
    asked = ["run-batch", "-i", folder / "in", "-o", folder / "out", "--max-batch-concurrency=3"]
    program = QUIRE.replace("VOCAB", str(vocabulary)).replace("STEP", str(step_ms))
    command = [sys.executable, "-c", program, *asked]
    return subprocess.Popen(command, stderr=(folder / "log").open("ab"))


def kept(folder: Path) -> int:
    journal = folder / "out.journal"
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_every_line_once_and_in_order_whatever_is_killed(tmp_path: Path) -> None:
    requests(tmp_path / "in")
    process = start(tmp_path, 50)
    try:
        wait_until(lambda: kept(tmp_path) >= 10 or process.poll() is not None, "ten answers", 60)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()  # no process has the time to say anything
        process.wait()
        assert not psutil.wait_procs(children, timeout=30)[1]
        before = kept(tmp_path)
        assert 10 <= before < COUNT and not (tmp_path / "out").exists()
        process = start(tmp_path, 15)
        wait_until(lambda: kept(tmp_path) >= before + 5 or process.poll() is not None, "five more", 60)
        children = psutil.Process(process.pid).children(recursive=True)
        (scheduler,) = [each for each in children if "quire.scheduler" in each.cmdline()]
        scheduler.kill()
        assert process.wait(60) == 0
    finally:
        process.kill()
    rows = [json.loads(row) for row in (tmp_path / "out").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"r{n}" for n in range(COUNT)]
    for n, row in enumerate(rows):
        if n % 20:
            assert row["error"] is None and row["response"]["status_code"] == 200 and row["response"]["body"]["usage"]
        else:  # as `vllm run-batch` tells it
            assert row["response"]["status_code"] == 400 and row["response"]["body"] is None
            assert row["error"]["error"]["param"] == "temperature"
    assert f"{before} of {COUNT} requests have been answered before" in (tmp_path / "log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "log", "out"]


def test_what_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, pipe, link = (tmp_path / name for name in ("in", "out", "pipe", "link"))
    os.mkfifo(pipe)
    link.symlink_to(out)
    for asked, words in [
        ((source, out), "No such file"),
        ((source, tmp_path), "must be a file in a folder that exists"),
        ((source, tmp_path / "no" / "out"), "must be a file in a folder that exists"),
        ((source, source), "is the input file"),
        ((source, pipe), "must be a file in a folder that exists"),  # as /dev/null is none
        (("http://127.0.0.1:9/in", out), "cannot be fetched"),
    ]:
        assert run(["run-batch", "-i", str(asked[0]), "-o", str(asked[1])]) == 78
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    source.write_text("")
    assert run(["run-batch", "-i", str(source), "-o", str(link)]) == 0  # nothing to do, and nothing is started
    assert link.is_symlink() and out.read_bytes() == b"" and "0 requests" in capsys.readouterr().err
    (tmp_path / "out.journal").write_text("another's\n")
    assert run(["run-batch", "-i", str(source), "-o", str(out)]) == 78
    assert "no journal" in capsys.readouterr().err


def answered_by(body: bytes, status: int = 200, asked: bytes = b"{}") -> tuple[int, Any, int]:
    """The status and the object that become of a line, and how often its server was asked."""
    answer = AsyncMock(status=status, read=AsyncMock(return_value=body), content_type="text/html")
    answer.__aenter__.return_value = answer
    post = Mock(return_value=answer)
    remote = Remote("http://localhost", Mock(post=post))
    told, found = asyncio.run(remote.answer(Line("a", "/v1/completions", asked)))
    return told, json.loads(found), post.call_count


def test_an_answer_of_another_server_that_is_no_line_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered_by(b'{"a": 1}') == (200, {"a": 1}, 1)
    for body in (b"{\n", b"", b'{"a": "\xff"}', b"<html>", b"[" * 5000):
        for status, told in ((200, 400), (413, 413)):
            found, error, _ = answered_by(body, status)
            assert found == told and "text/html" in error["error"]["message"]
    for name in ("stream", "background"):  # as a server of its own refuses them: the answer would not come whole
        found, error, asked = answered_by(b"{}", asked=b'{"%b": true}' % name.encode())
        assert (found, error["error"]["param"], asked) == (400, name, 0)
    monkeypatch.setenv("VLLM_API_KEY", "one two")
    assert (key_of(None), key_of("three,four")) == ("one", "three")


def test_a_run_that_was_killed_at_its_very_end_ends(tmp_path: Path) -> None:
    """All is answered, and the output is there or not: nothing is started to put it in place."""
    source, out = tmp_path / "in", tmp_path / "out"
    requests(source)
    lines = Lines(source, 1000)
    journal = Journal(tmp_path / "out.journal", {"input": lines.digest, "model": "quire-demo"})
    journal.append([(n, True, b'{"n": %d}' % n) for n in reversed(range(COUNT))])
    journal.close()
    kept = journal.path.read_bytes()
    for _ in range(2):
        (tmp_path / "out.partial").write_text("half of it")
        journal.path.write_bytes(kept)
        assert run(["run-batch", "-i", str(source), "-o", str(out)]) == 0
        assert out.read_text() == "".join(f'{{"n": {n}}}\n' for n in range(COUNT))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    journal.path.write_bytes(kept)
    assert run(["run-batch", "--model", "another", "-i", str(source), "-o", str(out)]) == 78


def test_patience_with_another_server_begins_where_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take longer than that, and nothing else be asked meanwhile."""
    now, asked = [0.0], list[float]()

    def post(*args: Any, **kwargs: Any) -> Any:
        asked.append(now[0])
        now[0] += 1000 if len(asked) == 1 else 100
        raise TimeoutError("gone")

    monkeypatch.setattr("quire.cli.batch_remote.time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr("quire.cli.batch_remote.AGAIN_S", 0.0)
    remote = Remote("http://localhost", Mock(post=post))
    with pytest.raises(CommandError, match="has answered nothing for 300 s: gone"):
        asyncio.run(remote.answer(Line("a", "/v1/completions", b"{}")))
    assert asked == [0.0, 1000.0, 1100.0, 1200.0, 1300.0]


class Web(BaseHTTPRequestHandler):
    """Gives a batch of two requests, and takes what is put."""

    put: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        asked = b'"url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 2}'
        body = b"".join(
            b'{"custom_id": "%b", "method": "POST", %b}\n' % (each, asked) for each in (b"a", b"b", b"a")
        )  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.put.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_urls_and_a_server_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quire.cli.batch_remote.LONGEST_S", 0.01)
    refused: list[Any] = []

    def refuse(request: Any) -> RequestError | None:
        refused.append(request)
        return RequestError(429, "later", retry_after=0.0) if len(refused) == 1 else None

    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as web, FakeServer(api_key="secret") as server:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        server.engine.refuse = refuse
        url = f"http://127.0.0.1:{web.server_port}"
        asked = ["run-batch", "-i", url + "/in", "-o", url + "/out", "--base-url", server.url + "/v1"]
        assert run([*asked, "--api-key", "secret", "--model", "x"]) == 0
        web.shutdown()
    rows = [json.loads(row) for row in Web.put[0].splitlines()]
    assert [(row["custom_id"], row["response"]["body"]["choices"][0]["text"]) for row in rows] == [
        ("a", " 0.0 0.1"), ("b", " 0.0 0.1"), ("a", " 0.0 0.1"),
    ]  # fmt: skip
    assert len(refused) == 4  # one was asked again
    told = capsys.readouterr().err
    assert "warning: line 3: custom_id 'a'" in told and "3 requests: 3 answered" in told
    assert not list(tmp_path.iterdir())
