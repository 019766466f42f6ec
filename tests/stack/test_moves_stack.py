"""Workers that leave while sixteen long sequences run there: blocks move, tokens stay, nothing is computed again."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
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


def run(server: Server) -> list[Future[tuple[int, object]]]:
    """All prompts at once, once they run."""
    begun = server.metric("quire:generation_tokens")
    pool = ThreadPoolExecutor(16)
    answers = [pool.submit(ask, server, prompt) for prompt in PROMPTS]
    pool.shutdown(wait=False)
    wait_until(lambda: server.metric("quire:generation_tokens") > begun + 16 * 40, "they run")
    return answers


def results(answers: list[Future[tuple[int, object]]]) -> list[tuple[int, object]]:
    return [answer.result() for answer in answers]


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def test_sixteen_long_sequences_move_and_nothing_is_computed_again() -> None:
    server = Server("--dtype=float32", "--data-parallel-size=2", "--max-num-seqs=32")
    try:
        wait_until(lambda: server.metric("quire:replicas") == 2, "two workers", 60)
        expected = results(run(server))
        answers = run(server)
        processes(server, "gpu_worker")[0].send_signal(signal.SIGTERM)  # it asks to be drained
        assert results(answers) == expected
        assert server.metric("quire:kv_moves") > 0, server.stderr()
        assert server.metric("quire:kv_moved_tokens") > 200
        assert server.metric("quire:recomputed_tokens") == 0, server.stderr()
    finally:
        server.close()


def test_whoever_is_killed_while_they_move_changes_no_token() -> None:
    """The giver, which is started again; then the scheduler and a detokenizer, each beside a worker that leaves."""
    server = Server("--dtype=float32", "--data-parallel-size=3", "--max-num-seqs=32")
    try:
        wait_until(lambda: server.metric("quire:replicas") == 3, "three workers", 60)
        expected, workers = results(run(server)), 3
        for victim in ("gpu_worker", "scheduler", "detokenizer"):
            moved = server.metric("quire:kv_moves")
            answers = run(server)
            giver = processes(server, "gpu_worker")[0]
            (victims := processes(server, victim)).sort(key=lambda each: each != giver)
            giver.send_signal(signal.SIGTERM)
            wait_until(lambda: server.metric("quire:kv_moves") > moved or answers[0].done(), "one has moved")  # noqa: B023
            kill(victims[0])
            assert results(answers) == expected, victim
            workers -= victim != "gpu_worker"
            wait_until(lambda: server.metric("quire:replicas") == workers, "the others are there", 60)  # noqa: B023
    finally:
        server.close()
