"""``quire restart`` of a real server while requests run: nobody notices."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess

import aiohttp
import psutil
import pytest
from stack import BIN, Server

from quire.cli.serving import serving, serving_folders

STREAMS = 64
BODY = {"max_tokens": 100, "temperature": 0.9, "ignore_eos": True, "stream": True}


async def stream(session: aiohttp.ClientSession, url: str, seed: int) -> str:
    """The text of one stream. Raises where it is refused or broken."""
    body = {**BODY, "prompt": f"Once upon {seed % 7}", "seed": seed}
    text, ended = "", False
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    assert ended, f"stream {seed} was cut short"
    return text


async def knock(host: str, port: int, over: asyncio.Event, statuses: list[bytes]) -> None:
    """A new connection every 20 ms."""
    while not over.is_set():
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        statuses.append((await reader.readline()).split()[1])
        writer.close()
        await asyncio.sleep(0.02)


async def disturbed(url: str, expected: list[str], restart: list[str]) -> tuple[int, str, int, list[bytes]]:
    """All streams, again and again, until the command has ended: its exit code and output, how many streams ran, what
    new connections were answered."""
    over, statuses, ran = asyncio.Event(), list[bytes](), 0
    host, port = url.removeprefix("http://").split(":")

    async def again(session: aiohttp.ClientSession, seed: int) -> None:
        nonlocal ran
        while not over.is_set():
            assert await stream(session, url, seed) == expected[seed]
            ran += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for seed in range(STREAMS):
            group.create_task(again(session, seed))
        group.create_task(knock(host, int(port), over, statuses))
        process = await asyncio.create_subprocess_exec(
            *restart, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        over.set()
    return process.returncode or 0, out.decode(), ran, statuses


async def undisturbed(url: str) -> list[str]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(stream(session, url, seed) for seed in range(STREAMS)))


def restart(server: Server, *services: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "quire"), "restart", *services, f"--port={server.url.rpartition(':')[2]}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def services(server: Server) -> set[int]:
    """The numbers of its processes."""
    return {each.pid for each in server.children() if "-m quire." in " ".join(each.cmdline())}


@pytest.mark.slow
def test_every_process_is_replaced_under_load_and_no_stream_is_the_worse_for_it() -> None:
    server = Server("--cpu-threads=1", "--dtype=float32", "--detokenizer-count=2", "--worker-timeout=60")
    try:
        before = services(server)
        expected = asyncio.run(undisturbed(server.url))
        command = [str(BIN / "quire"), "restart", f"--port={server.url.rpartition(':')[2]}"]
        code, out, ran, statuses = asyncio.run(disturbed(server.url, expected, command))
        assert code == 0, out
        assert re.findall(r"^(\w+ \d of \d): .*; done in [\d.]+ s$", out, re.M) == [
            "scheduler 1 of 1", "detokenizer 1 of 2", "detokenizer 2 of 2", "gpu_worker 1 of 1", "frontend 1 of 1",
        ]  # fmt: skip
        assert "frontend 1 of 1: successor listens; " in out
        assert len(before) == len(services(server)) == 5 and not before & services(server)
        assert ran >= STREAMS and set(statuses) == {b"200"} and len(statuses) > 50
        assert "of --shutdown-timeout" not in server.stderr()

        done = restart(server, "worker")
        assert (done.returncode, done.stdout) == (2, "") and "did you mean gpu_worker? name some of" in done.stderr
        code, left, exists = server.stop()
        assert (code, left, exists) == (0, [], False)
    finally:
        server.close()


@pytest.mark.slow
def test_a_frontend_at_a_unix_socket_and_a_successor_that_fails(tmp_path: object) -> None:
    path = f"{tmp_path}/quire.sock"
    command = [str(BIN / "quire"), "serve", f"--uds={path}", "--cpu-threads=1", f"--chat-template={tmp_path}/t.jinja"]
    with open(f"{tmp_path}/t.jinja", "w") as template:
        template.write("{{ messages }}")
    with open(f"{tmp_path}/log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None and "ready" in process.stdout.readline()
        (folder,) = [each for each in serving_folders() if serving(each).pid == process.pid]

        def run(service: str) -> subprocess.CompletedProcess[str]:
            command = [str(BIN / "quire"), "restart", service, f"--scheduler=ipc://{folder}"]
            return subprocess.run(command, capture_output=True, text=True, timeout=300)

        def frontends() -> list[psutil.Process]:
            children = psutil.Process(process.pid).children()
            return [each for each in children if "quire.frontend" in each.cmdline()]

        before = frontends()
        done = run("frontend")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert len(frontends()) == 1 and before != frontends()

        os.unlink(f"{tmp_path}/t.jinja")
        before = frontends()
        done = run("detokenizer")
        assert done.returncode == 1
        assert "detokenizer 1 of 1: its successor failed, and the old one goes on: " in done.stderr
        assert "t.jinja" in done.stderr and before == frontends()
        asyncio.run(_answers(path))
        process.terminate()
        assert process.wait(60) == 0 and not os.path.exists(path)
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


async def _answers(path: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        await stream(session, "http://localhost", 1)
