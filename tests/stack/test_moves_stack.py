"""Workers that leave while sixteen long sequences run there: blocks move, tokens stay, nothing is computed again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from stack import BIN, Server, wait_until

PROMPTS = [[5 + number, *range(20, 220)] for number in range(16)]
TOKENS = 1200


def processes(server: Server, service: str) -> list[psutil.Process]:
    found = []
    for each in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"quire.{service}" in " ".join(each.cmdline()):
                found.append(each)
    return found


def ask(server: Server, prompt: list[int]) -> tuple[int, object]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    status, answer, _ = server.post("/v1/completions", body, timeout=300)
    return status, answer["choices"] if status == 200 else answer


def workers(server: Server, *words: str) -> str:
    command = [BIN / "quire", "workers", *words, f"--scheduler=ipc://{server.run_dir()}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def server():
    made = Server("--dtype=float32", "--data-parallel-size=2", "--max-num-seqs=32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(server: Server) -> list:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))


@pytest.mark.parametrize("how", ["drain", "term", "kill the taker", "kill the giver"])
def test_sixteen_long_sequences_move(server: Server, expected: list, how: str) -> None:
    wait_until(lambda: server.metric("quire:replicas") == 2, "two workers", 60)
    moves, again = (server.metric(f"quire:{name}") for name in ("kv_moves", "recomputed_tokens"))
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
        begun = server.metric("quire:generation_tokens")
        wait_until(lambda: server.metric("quire:generation_tokens") > begun + 16 * 40, "they run")
        giver, taker = processes(server, "gpu_worker")
        if how == "term":
            giver.send_signal(signal.SIGTERM)
        else:
            workers(server, "drain", "0")
        if how.startswith("kill"):
            wait_until(lambda: server.metric("quire:kv_moves") > moves, "one has moved")
            (giver if how == "kill the giver" else taker).kill()
        found = [answer.result() for answer in answers]
    assert found == expected
    assert server.metric("quire:kv_moves") > moves
    if not how.startswith("kill"):
        assert server.metric("quire:recomputed_tokens") == again
