"""--log-format json: every line that a whole server writes is an object, also while a process dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from stack import Server, wait_until

SECRET = "a prompt that nobody logs"


def test_every_line_is_an_object_and_says_whose_request_it_is_about() -> None:
    server = Server("--log-format=json", "--enable-log-requests", "--detokenizer-count=2")
    try:
        assert json.loads(server.ready_line)["process"] == "serve"
        body = {"prompt": SECRET, "max_tokens": 4}
        assert server.post("/v1/completions", body, headers={"X-Request-Id": "mine"})[0] == 200
        assert server.post("/v1/completions", {**body, "n": 0}, headers={"X-Request-Id": "bad"})[0] == 400
        worker = next(each for each in server.children() if "quire.gpu_worker" in " ".join(each.cmdline()))
        worker.kill()
        wait_until(lambda: "Starting another" in server.stderr(), "the supervisor says so", 60)
        wait_until(lambda: server.get("/health")[0] == 200, "the worker is back", 60)
        assert server.stop(signal.SIGTERM)[0] == 0
        lines = [json.loads(line) for line in server.stderr().splitlines()]
    finally:
        server.close()
    assert all({"time", "level", "process", "pid", "message"} <= set(line) for line in lines)
    said = {line["process"] for line in lines}
    assert said == {"serve", "frontend", "detokenizer", "scheduler", "gpu_worker"}
    about = [(line["request_id"], line["message"].split()[0]) for line in lines if "request_id" in line]
    assert about == [("mine", "Received"), ("mine", "Finished"), ("bad", "refused")]
    assert not any(SECRET in line["message"] or "%|" in line["message"] for line in lines)  # nor progress bars


def test_what_a_service_dies_of_is_an_object_too() -> None:
    command = [sys.executable, "-m", "quire.scheduler", "--log-format=json", "--scheduler=tcp://1.2.3.4:5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    line = json.loads(done.stderr)
    assert (done.returncode, line["level"], line["process"]) == (78, "critical", "scheduler")
    assert "--keys" in line["message"]
