"""deploy/grafana, deploy/prometheus: a real Prometheus asks a real server, and every query of theirs has an answer."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapter_folders import demo_adapter
from stack import Server, free_port, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAME = re.compile(r"\b((?:vllm:|quire:|http_re)\w+)")
FILLED = {"$__rate_interval": "10s", "$job": ".*", "$model": ".*"}
"""What Grafana puts in the place of its variables."""


def panels() -> dict[str, str]:
    """Every query of the dashboard, and the panel that asks it."""
    board = json.loads((DEPLOY / "grafana/quire.json").read_text())
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in FILLED.items():
                query = query.replace(name, value)
            found[query] = panel["title"]
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that has all there is: adapters, drafts, and blocks in memory and on disk."""
    adapter, disk = demo_adapter(tmp_path_factory.mktemp("adapter"), 1), tmp_path_factory.mktemp("disk")
    running = Server(
        "--num-gpu-blocks-override=24", "--max-num-seqs=4", "--max-model-len=256", "--swap-space=0.01",
        f"--kv-disk-path={disk}", "--kv-disk-size=0.01", "--enable-lora", f"--lora-modules=tuned={adapter}",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}',
        "--kv-cache-metrics", "--kv-cache-metrics-sample=1",
    )  # fmt: skip
    yield running
    running.close()


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has deploy/prometheus, but for where the server is and how often it asks."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no program `prometheus` here (Debian's package prometheus)")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = (DEPLOY / "prometheus/prometheus.yaml").read_text()
    config = config.replace("localhost:8000", server.url.removeprefix("http://")).replace(
        "_interval: 15s", "_interval: 1s"
    )
    (folder / "prometheus.yaml").write_text(config)
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", folder)
    command = [
        program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def asked(prometheus: str, path: str, **form: str) -> Any:
    """``data`` of an answer; None while it does not listen yet, or is not ready to answer, as on a busy machine."""
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(form)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        pytest.fail(f"{form}: {error.read().decode()}")
    except urllib.error.URLError:
        return None


def traffic(server: Server, turn: int) -> None:
    """Something for each figure: long prompts that come again, drafts, an adapter, and what is refused."""
    for of in ("tuned", None):
        for number in range(2):
            said = f"{turn % 4} {number} " + "one two three four five " * 12
            body = {"prompt": said, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            assert server.post("/v1/completions", body | ({"model": of} if of else {}))[0] == 200
    assert server.post("/v1/completions", {"prompt": "x", "n": 0})[0] == 400


def test_the_dashboard_is_what_its_script_writes() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana/make_dashboard.py"))
    assert (DEPLOY / "grafana/quire.json").read_text() == made["text"](), "run python deploy/grafana/make_dashboard.py"


def test_a_server_has_every_figure_that_is_asked_for(server: Server) -> None:
    traffic(server, 0)
    server.metric("quire:scheduler_steps")  # the scheduler's part is there
    there = set(re.findall(r"^([\w:]+)", server.get("/metrics")[1], re.M))
    board = (DEPLOY / "grafana/quire.json").read_text()
    named = set(NAME.findall(board)) | {name for rule in rules() for name in NAME.findall(rule["expr"])}
    assert len(named) > 40 and named - there == set()


def test_prometheus_answers_every_query_with_numbers(server: Server, prometheus: str) -> None:
    """Each has an answer while requests come: a ratio, and a quantile, of nothing is no number."""
    open_queries, turns = panels(), iter(range(1000))

    def answered() -> bool:
        traffic(server, next(turns))
        for query in list(open_queries):
            data = asked(prometheus, "query", query=query)
            if data and any(not math.isnan(float(each["value"][1])) for each in data["result"]):
                del open_queries[query]
        return not open_queries

    assert len(open_queries) > 60
    try:
        wait_until(answered, "numbers for every query", 60)
    except TimeoutError:
        pytest.fail(f"no number for {open_queries}")


def test_prometheus_takes_the_rules(server: Server, prometheus: str) -> None:
    def told() -> list[dict[str, Any]]:
        groups = (asked(prometheus, "rules") or {"groups": []})["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in told()) and told(), "the rules were tried")
    assert {rule["name"]: rule["health"] for rule in told()} == {rule["alert"]: "ok" for rule in rules()}
    assert [rule["name"] for rule in told() if rule["state"] == "firing"] == []  # all is well
