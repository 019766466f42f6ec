"""`quire bench`: flags, load and results, against a small HTTP server and a stand-in for LLM."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from quire.cli import bench_results, bench_serve, bench_sweep
from quire.cli.main import run


class Server:
    """Streams ``max_tokens`` chunks for each request and keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        self.fail_first = 0
        self.fail_every = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(60)

    def _run(self, ready: threading.Event) -> None:
        async def start() -> None:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/{kind:.*}", self._answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.add(request.path)
        self.keys.add(request.headers.get("Authorization"))
        number = len(self.bodies)
        if number <= self.fail_first or (self.fail_every and number % self.fail_every == 0):
            return web.json_response({"error": {"message": "not ready"}}, status=503)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(body["max_tokens"]):
            await stream.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"]}
        await stream.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return stream

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def serve(server: Server, *flags: str) -> int:
    return run(["bench", "serve", "--port", str(server.port), "--random-input-len", "20", "--random-output-len", "4",
                "--num-prompts", "12", *flags])  # fmt: skip


def test_serve_counts_and_times(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--ignore-eos", "--goodput", "ttft:100000", "e2el:100000", "--max-concurrency", "3", "--api-key", "sk"]
    assert serve(server, *flags, "--output-json", str(out)) == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 48)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= result[f"median_{name}_ms"] <= result[f"p99_{name}_ms"]
    assert "api_key" not in result["args"] and server.keys == {"Bearer sk"}
    assert len(server.bodies) == 13 and server.paths == {"/v1/completions"}  # one is not measured
    body = server.bodies[1]
    assert len(body["prompt"]) == 20 and body["model"] == "some-model" and body["ignore_eos"] is True
    assert len({tuple(b["prompt"]) for b in server.bodies}) == 12
    assert "Median TTFT (ms):" in capsys.readouterr().out


def test_serve_chats_at_a_rate_with_lengths_around(server: Server) -> None:
    flags = [
        "--endpoint",
        "/v1/chat/completions",
        "--request-rate",
        "500",
        "--random-range-ratio",
        "0.5",
        "--model",
        "m",
    ]
    assert serve(server, *flags, "--random-prefix-len", "3", "--temperature", "0") == 0
    texts = [body["messages"][0]["content"].split() for body in server.bodies]
    assert {len(words) for words in texts} <= set(range(13, 34)) and len({len(words) for words in texts}) > 3
    assert len({tuple(words[:3]) for words in texts}) == 1 and server.bodies[0]["temperature"] == 0


def test_serve_waits_for_the_server_and_reports_failures(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_first, server.fail_every = 1, 5
    assert serve(server) == 0
    out = capsys.readouterr().out
    assert "Failed requests:                           2" in out and "503" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--goodput", "itl:5"], "must look like ttft:200"),
        (["--goodput", "ttft"], "must look like ttft:200"),
        (["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0"], "is the server running"),
        (["--url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0"], "http://127.0.0.1:1"),
        (["--base-url", "http://127.0.0.1:1", "--model", "x", "--ready-check-timeout-sec", "0"], "first request"),
    ],
)
def test_serve_faults_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--num-prompts", "2", *flags]) == 78
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- sweep


def sweep(server: Server, folder: Path, *flags: str) -> int:
    return run(["bench", "sweep", "--port", str(server.port), "--random-input-len", "5", "--random-output-len", "2",
                "--num-prompts", "4", "-o", str(folder), *flags])  # fmt: skip


def test_a_sweep_goes_on_where_it_was(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--no-plots", "--goodput", "ttft:100000", "--max-concurrencies", "2", "1", "--request-rates", "500")
    assert sweep(server, tmp_path, *flags) == 0
    names = ["concurrency-1-run-0.json", "concurrency-2-run-0.json", "rate-500-run-0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names and len(server.bodies) == 3 * 5
    assert json.loads((tmp_path / names[2]).read_text())["args"]["request_rate"] == 500
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 3 * 4  # none of another point's, which a prefix cache would know; the first is not measured
    (tmp_path / names[1]).unlink()
    assert sweep(server, tmp_path, *flags) == 78 and "--resume" in capsys.readouterr().err
    assert sweep(server, tmp_path, *flags, "--resume") == 0 and len(server.bodies) == 4 * 5
    assert sweep(server, tmp_path, *flags, "--resume", "--ignore-eos") == 78
    assert "was measured with ignore_eos False" in capsys.readouterr().err
    assert sweep(server, tmp_path, *flags, "--resume", "--seed", "7") == 78
    assert "was measured with seed 0, and 7 is asked for" in capsys.readouterr().err
    server.fail_every = 1
    assert sweep(server, tmp_path, *flags, "--resume", "--num-runs", "2", "--ready-check-timeout-sec", "0") == 78
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_sweep_is_drawn(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need quire[bench]")
    flags = ("--goodput", "ttft:100000", "--max-concurrencies", "1", "2", "--request-rates", "500", "--num-runs", "2")
    assert sweep(server, tmp_path, *flags) == 0
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"throughput.png", "latency.png", "goodput-concurrency.png", "goodput-rate.png"}
    points = [bench_sweep.Point("concurrency", value, number) for value in (1, 2) for number in (0, 1)]
    found = bench_sweep.lines(tmp_path, points, "concurrency", ("output_throughput", "no_such"))
    assert [at for at, _ in found.pop("output_throughput")] == [1, 2] and not found


def test_faults_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["bench", "sweep"]) == 78 and "--max-concurrencies" in capsys.readouterr().err
    assert run(["bench", "sweep", "--no-plots", "--request-rates", "0"]) == 78
    assert "above 0" in capsys.readouterr().err
    monkeypatch.setattr(bench_sweep.importlib.util, "find_spec", lambda name: None)
    assert run(["bench", "sweep", "--max-concurrencies", "1", "-o", str(tmp_path)]) == 78
    assert "pip install 'quire[bench]'" in capsys.readouterr().err
    assert run(["bench", "sweep", "--max-concurrencies", "1", "--no-plots", "--dry-run", "-o", str(tmp_path)]) == 0
    assert "would run" in capsys.readouterr().out and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- offline


class FakeLLM:
    """Gives every request the tokens it asks for."""

    made: list[dict[str, Any]]
    calls: list[tuple[list[list[int]], Any]]

    def __init__(self, **kwargs: Any):
        self.made.append(kwargs)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, prompt_token_ids: list[list[int]], sampling_params: Any, use_tqdm: bool = True) -> list[Any]:
        self.calls.append((prompt_token_ids, sampling_params))
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompt_token_ids)
        return [
            SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=[1] * p.max_tokens)] * p.n)
            for ids, p in zip(prompt_token_ids, each, strict=True)
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    import quire.client.offline.llm

    FakeLLM.made, FakeLLM.calls = [], []
    monkeypatch.setattr(quire.client.offline.llm, "LLM", FakeLLM)
    return FakeLLM


def test_throughput(llm: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--input-len", "10", "--output-len", "5", "--num-prompts", "7", "--n", "2", "--load-format", "dummy",
             "--cpu-threads", "1", "--seed", "3", "--output-json", str(out)]  # fmt: skip
    assert run(["bench", "throughput", *flags]) == 0
    result = json.loads(out.read_text())
    assert (result["total_num_tokens"], result["total_output_tokens"]) == (7 * 10 + 70, 70)
    assert result["output_tokens_per_second"] == pytest.approx(70 / result["elapsed_time"])
    assert llm.made == [{"load_format": "dummy", "cpu_threads": 1, "seed": 3}]
    (_, warm), (prompts, params) = llm.calls
    assert warm.max_tokens == 5 and [len(p) for p in prompts] == [10] * 7
    assert all(p.ignore_eos and p.max_tokens == 5 and p.n == 2 for p in params)
    assert "total tokens/s" in capsys.readouterr().out
    first = prompts
    assert run(["bench", "throughput", *flags]) == 0
    assert llm.calls[3][0] == first  # the same seed, the same prompts


def test_latency(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "latency", "--batch-size", "3", "--num-iters", "4", "--num-iters-warmup", "1"]) == 0
    assert len(llm.calls) == 5 and all(len(prompts) == 3 for prompts, _ in llm.calls)
    assert "Avg latency:" in capsys.readouterr().out and llm.calls[0][0] != llm.calls[1][0]


def test_what_cannot_fit_is_refused_before_anything_starts(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "throughput", "--input-len", "100000"]) == 78
    assert run(["bench", "latency", "--model", "/nowhere"]) == 78
    assert run(["bench", "latency", "--max-num-seqs", "0"]) == 78
    assert run(["bench", "throughput", "--n", "2", "--temperature", "0"]) == 78
    assert not llm.made
    err = capsys.readouterr().err
    assert "lower --input-len or --output-len" in err and "does not exist" in err and "max_num_seqs" in err
    assert "n must be 1 when using greedy sampling" in err


def test_a_stack_that_cannot_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import quire.client.offline.llm
    from quire.client.supervisor.launch import LaunchError

    def fails(**kwargs: Any) -> None:
        raise LaunchError("nothing fits", 78)

    monkeypatch.setattr(quire.client.offline.llm, "LLM", fails)
    assert run(["bench", "latency"]) == 78
    assert capsys.readouterr().err == "quire: error: nothing fits\n"


@pytest.mark.slow
def test_control_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run(["bench", "control-plane", "--num-seqs", "8", "--steps", "20", "--output-json", str(out)]) == 0
    assert json.loads(out.read_text())["mean_us"] > 0 and "mean_us" in capsys.readouterr().out
    assert run(["bench", "control-plane", "--steps", "1", "--num-seqs", "1", "--output-json", "/nowhere/x"]) == 78


def test_numbers() -> None:
    assert bench_results.percentile([], 99) == 0 and bench_results.percentile([3.0], 10) == 3
    assert bench_results.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5 and bench_results.percentile([4.0, 1.0], 100) == 4
    draw = random.Random(0)
    assert {bench_results.spread(draw, 10, 0.0) for _ in range(9)} == {10} and bench_results.spread(draw, 1, 0.9) >= 1
    assert all(100 <= i < 500 for i in bench_results.random_ids(draw, 200, 500)) and bench_results.random_ids(
        draw, 3, 1
    ) == [0, 0, 0]
    one = bench_serve.Outcome(ok=True, output_tokens=5, ttft=0.1, e2el=0.5)
    assert one.tpot == pytest.approx(0.1) and bench_serve.Outcome(output_tokens=1).tpot == 0
    slow = bench_serve.summary([one, bench_serve.Outcome()], 2.0, {"ttft": 50.0})
    assert slow["request_goodput"] == 0 and slow["failed"] == 1 and slow["request_throughput"] == 0.5
