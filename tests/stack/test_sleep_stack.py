"""A whole server that sleeps: memory is given back, requests wait, and whoever is killed meanwhile changes nothing."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from pathlib import Path

import psutil
import pytest
from stack import Server, wait_until

from quire import LLM, SamplingParams

KEY = {"Authorization": "Bearer secret"}
ASK = {"prompt": [1, 2, 3, 4], "max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
CACHE = 512 * 2 * 4 * 4 * 32 * 16 * 4
"""Bytes of the KV cache of the demo model in float32. They are resident once written, so the test fills them."""


@pytest.fixture(scope="module")
def server():
    made = Server("--admin-api-key=secret", "--dtype=float32", "--num-gpu-blocks-override=512")
    yield made
    made.close()


def processes(server: Server, service: str) -> list[psutil.Process]:
    """Those that live."""
    found = []
    for each in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one of these
            if f"quire.{service}" in " ".join(each.cmdline()):
                found.append(each)
    return found


def process(server: Server, service: str) -> psutil.Process:
    (found,) = processes(server, service)
    return found


def replaced(server: Server, service: str, old: psutil.Process) -> bool:
    """Another process is there in its place."""
    now = processes(server, service)
    return bool(now) and old not in now


def admin(server: Server, method: str, path: str):
    status, body, _ = server.request(method, path, None if method == "GET" else b"", KEY, timeout=120)
    assert status == 200, body
    return body


def fill(server: Server) -> None:
    """Write most of the cache once, so that its memory is resident."""
    prompts = [[7 + n] * 1900 for n in range(4)]
    assert server.post("/v1/completions", {"prompt": prompts, "max_tokens": 1})[0] == 200


def test_steps_are_profiled_where_a_folder_is_named(server: Server, tmp_path: Path) -> None:
    status, body, _ = server.request("POST", "/start_profile", b"", KEY)
    assert status == 400 and "--profiler-config" in body["error"]["message"]
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")})
    with LLM(profiler_config=config, tensor_parallel_size=2) as llm:
        for _ in range(2):
            llm.start_profile()
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
            llm.stop_profile()
        names = sorted(path.name.split("-")[1] for path in (tmp_path / "traces").iterdir())
        assert names == ["rank0", "rank0", "rank1", "rank1"]
        for path in (tmp_path / "traces").iterdir():
            assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_routes_of_administrators_ask_for_their_key(server: Server) -> None:
    posts = [("POST", path) for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile")]
    for method, path in (*posts, ("GET", "/is_sleeping")):
        assert server.request(method, path)[0] == 401
    assert admin(server, "GET", "/is_sleeping") == {"is_sleeping": False, "tags": []}
    asked = {"prompt": [3] * 40, "max_tokens": 1}
    server.post("/v1/completions", asked)
    hits = server.metric("quire:prefix_cache_hits_total")
    assert admin(server, "POST", "/reset_prefix_cache") == {"success": True}
    server.post("/v1/completions", asked)
    assert server.metric("quire:prefix_cache_hits_total") == hits
    status, body, _ = server.request("POST", "/sleep?level=3", b"", KEY)
    assert (status, body["error"]["message"]) == (400, "level must be 1 or 2, got 3.")


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_taken_again(server: Server, level: int) -> None:
    fill(server)
    worker = process(server, "gpu_worker")
    want, before = server.post("/v1/completions", ASK)[1]["choices"], worker.memory_info().rss
    blocks = server.metric("quire:kv_blocks")
    admin(server, "POST", f"/sleep?level={level}")
    asleep = worker.memory_info().rss
    assert admin(server, "GET", "/is_sleeping") == {"is_sleeping": True, "tags": ["weights", "kv_cache"]}
    assert before - asleep > 0.7 * CACHE
    admin(server, "POST", "/wake_up")
    assert worker.is_running() and server.metric("quire:kv_blocks") == blocks
    assert server.post("/v1/completions", ASK)[1]["choices"] == want


def test_requests_wait_and_a_killed_worker_and_scheduler_sleep_on(server: Server) -> None:
    want = server.post("/v1/completions", ASK)[1]["choices"]
    answers: list = []
    asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", ASK, timeout=300)))
    asking.start()
    wait_until(lambda: server.metric("quire:num_requests_running") or answers, "the request runs")
    admin(server, "POST", "/sleep?level=2")
    for service in ("gpu_worker", "scheduler"):
        old, said = process(server, service), server.stderr().count("and sleeps")
        old.kill()
        wait_until(lambda service=service, old=old: replaced(server, service, old), f"{service} is replaced")
        wait_until(lambda said=said: server.stderr().count("and sleeps") > said, "the worker is told to sleep on", 60)
        assert admin(server, "GET", "/is_sleeping")["is_sleeping"]
    assert asking.is_alive()
    admin(server, "POST", "/wake_up")
    asking.join(120)
    assert answers[0][1]["choices"] == want
