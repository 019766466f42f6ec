"""Workers that leave while sixteen long sequences run there: blocks move, tokens stay, nothing is computed again."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from stack import Server, wait_until

PROMPTS = [[5 + number, *range(20, 220)] for number in range(16)]
TOKENS = 500


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


@pytest.fixture
def server():
    made = Server("--dtype=float32", "--data-parallel-size=2", "--max-num-seqs=32")
    yield made
    made.close()


@pytest.mark.parametrize("how", ["drain", "kill the giver"])
def test_sixteen_long_sequences_move(server: Server, how: str) -> None:
    wait_until(lambda: server.metric("quire:replicas") == 2, "two workers", 60)
    with ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))
        begun = server.metric("quire:generation_tokens")
        answers = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
        wait_until(lambda: server.metric("quire:generation_tokens") > begun + 16 * 40, "they run")
        giver = processes(server, "gpu_worker")[0]
        giver.send_signal(signal.SIGTERM)  # it asks to be drained
        if how == "kill the giver":
            wait_until(lambda: server.metric("quire:kv_moves"), "one has moved")
            with contextlib.suppress(psutil.NoSuchProcess):
                giver.kill()
        found = [answer.result() for answer in answers]
    assert found == expected
    assert server.metric("quire:kv_moves") > 0, server.stderr()
    if how == "drain":
        assert server.metric("quire:kv_moved_tokens") > 200
        assert server.metric("quire:recomputed_tokens") == 0, server.stderr()
