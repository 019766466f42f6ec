"""The whole stack as real processes, started as a user starts it, with the demo model."""

import concurrent.futures
import json
import os
import pickle
import random
import signal
import socket
import stat
import subprocess
import sys
import urllib.parse
from pathlib import Path

import openai
import psutil
import pytest
import zmq
from stack import BIN, Server, wait_until

SERVICES = ("quire.frontend", "quire.detokenizer", "quire.scheduler", "quire.gpu_worker")


@pytest.fixture(scope="module")
def server():
    """Ctrl-C after all that is done to it leaves nothing behind; ``test_frontends_shared`` ends one with SIGTERM."""
    server = Server()
    try:
        yield server
        assert server.stop(signal.SIGINT) == (0, [], False)
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0, timeout=60) as client:
        yield client


def test_one_ready_line_and_a_process_for_each_service(server):
    assert server.url in server.ready_line
    commands = [" ".join(child.cmdline()) for child in server.children()]
    for service in SERVICES:
        assert len([c for c in commands if f"-m {service}" in c]) == 1, (service, commands)


def test_only_the_http_port_listens_and_sockets_are_their_owners(server):
    processes = [psutil.Process(server.process.pid), *server.children()]
    found = {c.laddr for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert found == {("127.0.0.1", int(server.url.rpartition(":")[2]))}
    assert stat.S_IMODE(os.stat(server.run_dir()).st_mode) == 0o700


def test_the_curl_examples_of_the_documents(server):
    status, models, _ = server.get("/v1/models")
    assert (status, models["object"], models["data"][0]["id"]) == (200, "list", "quire-demo")
    body = {"model": "quire-demo", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
    status, done, _ = server.post("/v1/completions", body)
    assert (status, done["object"], done["choices"][0]["finish_reason"]) == (200, "text_completion", "length")
    assert done["usage"]["completion_tokens"] == 7
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who won the world series in 2020?"},
    ]
    status, chat, _ = server.post(
        "/v1/chat/completions", {"model": "quire-demo", "messages": messages, "temperature": 0}
    )
    assert (status, chat["object"], chat["choices"][0]["finish_reason"]) == (200, "chat.completion", "stop")
    assert "Dodgers" in chat["choices"][0]["message"]["content"]


def test_the_demo_model_is_sensible(client):
    done = client.completions.create(model="quire-demo", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert done.choices[0].text.startswith(" Paris")


def test_streamed_text_is_the_whole_text(client):
    for n in (1, 3):
        ask = {"model": "quire-demo", "prompt": "The future of AI is", "max_tokens": 40, "seed": 11, "n": n}
        whole = client.completions.create(**ask)
        texts, finishes, usage = [""] * n, [None] * n, None
        for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                finishes[choice.index] = choice.finish_reason or finishes[choice.index]
        assert texts == [choice.text for choice in sorted(whole.choices, key=lambda c: c.index)]
        assert finishes == [choice.finish_reason for choice in whole.choices]
        assert usage == whole.usage


def test_chat_streams(client):
    chunks = list(
        client.chat.completions.create(
            model="quire-demo", messages=[{"role": "user", "content": "Tell me a joke."}], stream=True, temperature=0
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text.strip()[-1] in ".!?\"'"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_strings_and_echo(client):
    ask = {"model": "quire-demo", "prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    free = client.completions.create(**ask).choices[0].text
    stop = free[5:8]
    cut = client.completions.create(**ask, stop=stop, echo=True).choices[0]
    assert cut.text == ask["prompt"] + free[: free.index(stop)]
    assert cut.finish_reason == "stop"
    ids = client.completions.create(**{**ask, "prompt": [417, 33, 90]}, echo=True).choices[0].text
    alone = client.completions.create(**{**ask, "prompt": [417, 33, 90]}).choices[0].text
    assert ids.endswith(alone) and len(ids) > len(alone)


def test_prompt_forms_agree(client):
    def text(prompt):
        done = client.completions.create(model="quire-demo", prompt=prompt, max_tokens=5, temperature=0)
        return [choice.text for choice in done.choices]

    ids = [5, 17, 300, 41]
    assert text([ids, ids]) == text(ids) * 2
    assert text(["Hello", "The capital"]) == text("Hello") + text("The capital")


BAD = [
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": "abc"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**6]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [5] * 5000}, 400, None),
    ("/v1/completions", {"prompt": "word " * 5000}, 400, None),
    ("/v1/completions", {"prompt": "x", "model": "nope"}, 404, "model"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, None),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", b'{"messages": [', 400, None),
    ("/v1/completions", b"\xff\xfe", 400, None),
    ("/v1/completions", json.dumps({"prompt": "x" * 10_000_000}).encode(), 413, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=range(len(BAD)))
def test_bad_input_is_a_4xx_that_names_the_field_and_harms_nobody(server, path, body, status, param):
    got, answer, _ = server.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert error["code"] == status and error["message"] and error["type"]
    if param is not None:
        assert error["param"] == param, error
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200


def hang_up_after(server, body, seconds):
    """Send a request on a raw socket and cut the connection after a while."""
    url = urllib.parse.urlsplit(server.url)
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""])
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        connection.settimeout(seconds)
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            pass


def test_clients_that_leave_free_their_blocks(server):
    rng = random.Random(7)

    def one(i):
        body = {
            "prompt": f"Story {i}: " + "once upon a time " * rng.randrange(1, 20), "max_tokens": rng.randrange(1, 300),
            "ignore_eos": True, "n": rng.choice([1, 1, 2]), "stream": rng.random() < 0.7, "temperature": 1.0,
        }  # fmt: skip
        if i % 2:
            hang_up_after(server, body, rng.uniform(0.0, 1.5))
            return None
        body["max_tokens"] = min(body["max_tokens"], 20)
        return server.post("/v1/completions", body)[0]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(one, range(200)))
    assert {s for s in statuses if s is not None} == {200}
    wait_until(lambda: server.metric("quire:num_requests_running") == 0, "no request running")
    wait_until(lambda: server.metric("quire:kv_blocks_in_use") == 0, "blocks in use back to 0")


def test_garbage_on_every_internal_socket_is_dropped_and_counted(server):
    folder = server.run_dir()
    sockets = [path.name for path in Path(folder).iterdir() if path.is_socket()]
    assert len(sockets) >= 3
    rng = random.Random(3)
    before = server.metric("quire:bad_frames")
    with zmq.Context() as context:
        for name in sockets:
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(f"{folder}/{name}")
            raw.sendall(rng.randbytes(500))
            raw.close()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"ipc://{folder}/{name}")
            for frames in (
                [b""],
                [pickle.dumps({"x": 1})],
                [rng.randbytes(300)],
                [b"a", b"b"],
                [b"\x93\xa6Submit\x01\x02"],
            ):
                dealer.send_multipart(frames)
            dealer.close(linger=60_000)
    wait_until(lambda: server.metric("quire:bad_frames") >= before + 5 * len(sockets), "every bad frame counted")
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3})[0] == 200
    assert server.process.poll() is None


def test_four_shells_build_the_stack_by_hand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("q")
    folder.chmod(0o700)
    address = f"--scheduler=ipc://{folder}"
    started = []
    try:
        for service in reversed(SERVICES):  # in any order
            extra = ["--port=0", "--host=127.0.0.1"] if service == "quire.frontend" else []
            command = [sys.executable, "-P", "-m", service, address, *extra]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        line = started[-1].stdout.readline()
        url = line.split()[-1]
        server = Server.__new__(Server)
        server.url = url
        wait_until(lambda: server.get("/health")[0] == 200, "the hand-made stack is ready", 120)
        assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3})[0] == 200
        for process in started:
            process.terminate()
        assert [process.wait(60) for process in started] == [0, 0, 0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_start_that_cannot_work_ends_with_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "vocab_size": 8}')
    before = {p.pid for p in psutil.process_iter()}
    done = subprocess.run(
        [str(BIN / "quire"), "serve", str(tmp_path), "--port=0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode not in (0, None)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert errors and not any("Traceback" in line for line in done.stderr.splitlines())
    left = [p for p in psutil.process_iter(["pid", "cmdline"]) if p.pid not in before]
    assert not [p for p in left if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
