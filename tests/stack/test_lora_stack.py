"""Adapters through a whole server: processes that are killed, more adapters than slots, names that come and go."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import adapter_folder, demo_adapter
from safetensors.numpy import load_file, save_file
from stack import Server, wait_until

from quire import LLM, LoRARequest, SamplingParams

COUNT, SLOTS = 5, 2
KEY = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for number in range(COUNT + 1):
        demo_adapter(root / f"a{number}", number)
    return root


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    modules = [f"--lora-modules=a{number}={folders}/a{number}" for number in range(COUNT)]
    running = Server(
        "--enable-lora", f"--max-loras={SLOTS}", f"--lora-root={folders}", "--admin-api-key=admin", "--max-num-seqs=8",
        *modules,
    )  # fmt: skip
    yield running
    running.close()


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 40, "seed": 7, "ignore_eos": True, **more}


def answers(server: Server, models: list[str], first: Any = None) -> list[str]:
    """What each model says, all asked at once. ``first`` is called when a stream of the first has begun."""
    found: dict[int, str] = {}

    def ask(place: int, model: str) -> None:
        status, answer, _ = server.post("/v1/completions", body(model), timeout=120)
        found[place] = answer["choices"][0]["text"] if status == 200 else str(answer)

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(models)]
    for thread in threads:
        thread.start()
    if first is not None:
        first(server, models[0])
    for thread in threads:
        thread.join()
    return [found[place] for place in range(len(models))]


def strike(kind: str) -> Any:
    """Kill a process of this kind once a stream of 300 tokens has begun; the whole stream must be there."""

    def first(server: Server, model: str) -> None:
        longer = body(model, seed=8, max_tokens=300)
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps({**longer, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        (victim,) = [each for each in server.children() if f"quire.{kind}" in " ".join(each.cmdline())]
        pieces: list[str] = []
        with urllib.request.urlopen(request, timeout=120) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(pieces) == 1:
                        os.kill(victim.pid, signal.SIGKILL)
        whole = server.post("/v1/completions", longer)[1]["choices"][0]["text"]
        assert len(pieces) > 1 and "".join(pieces) == whole

    return first


def test_streams_are_the_same_whoever_is_killed(server: Server) -> None:
    models = [f"a{number}" for number in range(COUNT)] + [server.get("/v1/models")[1]["data"][0]["id"]]
    expected = answers(server, models)
    assert len(set(expected)) == len(models)
    for kind in ("gpu_worker", "detokenizer", "scheduler"):
        assert answers(server, models, strike(kind)) == expected, kind


def test_names_come_and_go_and_outlive_the_scheduler(server: Server, folders: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert server.post(load, {"lora_name": "new", "lora_path": f"a{COUNT}"})[0] == 401
    assert server.post(load, {"lora_name": "new", "lora_path": f"a{COUNT}"}, headers=KEY)[0] == 200
    said = server.post("/v1/completions", body("new"))[1]["choices"][0]["text"]
    (victim,) = [each for each in server.children() if "quire.scheduler" in " ".join(each.cmdline())]
    victim.kill()
    victim.wait(20)
    wait_until(lambda: server.post("/v1/completions", body("new"))[0] == 200, "the new scheduler serves")
    assert server.post("/v1/completions", body("new"))[1]["choices"][0]["text"] == said
    listed = {each["id"]: each["parent"] for each in server.get("/v1/models")[1]["data"]}
    assert set(listed) > {"new", "a0"} and listed["new"] == next(iter(listed))
    assert server.post(unload, {"lora_name": "new"}, headers=KEY)[0] == 200
    assert server.post("/v1/completions", body("new"))[0] == 404
    assert "quire:lora_requests_info{" in server.get("/metrics")[1]

    bad = demo_adapter(folders / "bad", 9)
    tensors = load_file(bad / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: np.zeros((3, 5), np.float32)}, bad / "adapter_model.safetensors")
    status, answer, _ = server.post(load, {"lora_name": "bad", "lora_path": "bad"}, headers=KEY)
    assert status == 400 and name in answer["error"]["message"]
    adapter_folder(folders / "dora", use_dora=True)
    status, answer, _ = server.post(load, {"lora_name": "dora", "lora_path": "dora"}, headers=KEY)
    assert status == 400 and "DoRA" in answer["error"]["message"]


def test_many_adapters_through_few_slots_and_files_that_change(folders: Path, tmp_path: Path) -> None:
    many = [LoRARequest(f"m{n}", n + 1, str(demo_adapter(tmp_path / f"m{n}", n, rank=1))) for n in range(40)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(enable_lora=True, max_loras=4, max_num_seqs=16) as llm:

        def run(requests: list[LoRARequest | None]) -> list[list[int]]:
            outputs = llm.generate(["Once upon a time"] * len(requests), params, lora_request=requests, use_tqdm=False)
            assert [output.lora_request for output in outputs] == requests
            return [output.outputs[0].token_ids for output in outputs]

        together = run([*many, None])
        assert run([many[3], None, many[20]]) == [together[3], together[40], together[20]]
        assert len({tuple(tokens) for tokens in together}) > 20
        demo_adapter(tmp_path / "m3", 1000, rank=1, size=1.0)
        assert run([many[3]]) != [together[3]]
        (tmp_path / "m3" / "adapter_model.safetensors").write_bytes(b"nothing")
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
            run([many[3]])
        assert run([many[20]]) == [together[20]]
