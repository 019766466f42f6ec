"""``quire workers`` against a real server: workers started by hand join it, drain under load, and are removed."""

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from stack import BIN, Server, wait_until

from quire.cli.errors import CommandError

BODY = {"max_tokens": 120, "temperature": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    server = Server("--cpu-threads=1", "--dtype=float32", "--worker-timeout=60", "--max-num-seqs=8")
    yield server
    server.close()


def workers(*args):
    done = subprocess.run([str(BIN / "quire"), "workers", *args], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def listed(server):
    code, out, err = workers("list", f"--scheduler=ipc://{server.run_dir()}")
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["REPLICA", "WORKER", "STATE", "RUNNING", "BLOCKS", "STEP", "PID", "DEVICE"]
    return [row.split() for row in rows]


def start_worker(server):
    """Another one, as a person starts it."""
    command = [sys.executable, "-P", "-m", "quire.gpu_worker", f"--scheduler=ipc://{server.run_dir()}"]
    return subprocess.Popen([*command, "--cpu-threads=1", "--dtype=float32"], stderr=subprocess.PIPE, text=True)


def complete(server, seed):
    status, body, _ = server.post("/v1/completions", {**BODY, "prompt": f"Once {seed}", "seed": seed})
    assert status == 200, body
    return body["choices"][0]["text"]


@pytest.mark.slow
def test_workers_join_drain_under_load_and_are_removed(server):
    alone = {seed: complete(server, seed) for seed in range(6)}
    hands = [start_worker(server) for _ in range(2)]
    try:
        wait_until(lambda: [row[2] for row in listed(server)] == ["ready"] * 3, "three workers are ready", 180)
        rows = {int(row[6]): row for row in listed(server)}
        assert {row[0] for row in rows.values()} == {"0", "1", "2"}
        assert all(hand.pid in rows for hand in hands)

        over, answers = threading.Event(), []

        def keep_asking(worker):
            seed = worker
            while not over.is_set():
                answers.append((seed % 6, complete(server, seed % 6)))
                seed += 5

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            clients = [pool.submit(keep_asking, number) for number in range(12)]
            try:
                first = rows[hands[0].pid]
                wait_until(lambda: int({r[1]: r[3] for r in listed(server)}[first[1]]) > 0, "load on the first", 120)
                code, out, err = workers("drain", first[0], f"--scheduler=ipc://{server.run_dir()}")
                assert (code, err) == (0, "")
                assert re.match(rf"gpu_worker-{first[1]}\w+ \(replica {first[0]}\) drains: \d+ sequences", out)
                assert "it has left; 2 workers stay" in out
                assert hands[0].wait(120) == 0

                second = rows[hands[1].pid]
                code, out, _ = workers("remove", second[1], f"--scheduler=ipc://{server.run_dir()}")
                assert code == 0 and "it has left; 1 workers stay" in out
                assert hands[1].wait(120) == 0
                before = len(answers)
                wait_until(lambda: len(answers) > before + 12, "answers of the last worker", 120)
            finally:
                over.set()
            for client in clients:
                client.result(120)
        assert all(text == alone[seed] for seed, text in answers)
        assert len(listed(server)) == 1
    finally:
        for hand in hands:
            if hand.poll() is None:
                hand.kill()
            hand.communicate()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_drains_is_not_said_to_have_left(server):
    hand = start_worker(server)
    try:
        wait_until(lambda: [row[2] for row in listed(server)] == ["ready"] * 2, "both workers are ready", 180)
        (row,) = (row for row in listed(server) if int(row[6]) == hand.pid)
        hand.send_signal(signal.SIGSTOP)  # so that it cannot leave
        command = [str(BIN / "quire"), "workers", "drain", row[1], f"--scheduler=ipc://{server.run_dir()}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as drain:
            assert f"gpu_worker-{row[1]}" in drain.stdout.readline()
            hand.kill()
            out, err = drain.communicate(timeout=120)
        assert (drain.returncode, out) == (1, "")
        assert re.fullmatch(rf"quire: error: gpu_worker-{row[1]}\w+ did not leave: it is gone: .* drain that\.\n", err)
    finally:
        hand.kill()
        hand.communicate()


def test_mistakes_are_one_line(server, tmp_path):
    address = f"--scheduler=ipc://{server.run_dir()}"
    code, out, err = workers("drain", "7", address)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"quire: error: no worker '7' is here; name one of: 0 \(\w{8}\)\.\n", err)
    assert workers("drain", "0", "--timeout=soon", address)[0] == 2
    folder = tmp_path / "empty"
    folder.mkdir(mode=0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    code = (
        "import sys; from quire.cli import main, serving, workers;"
        "workers.ANSWER_S = 0.3; serving.SHARED_TMP = sys.argv[1];"
        "sys.exit(main.run(['workers', 'list', *sys.argv[2:]]))"
    )

    def tell(*args):
        command = [sys.executable, "-c", code, str(folder), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        return done.returncode, done.stderr

    assert tell(f"--scheduler=ipc://{folder}") == (
        1, f"quire: error: no answer from the scheduler at ipc://{folder} in 0.3 s; is the address right, and --keys?\n"
    )  # fmt: skip
    status, error = tell()
    assert status == 1 and error.startswith("quire: error: no server of this user runs here; name one")


def test_the_running_server_is_found(server, monkeypatch):
    from quire.cli import serving
    from quire.cli import workers as command

    folder, port = server.run_dir(), int(server.url.rpartition(":")[2])
    assert folder in serving.serving_folders()
    assert serving.named(folder) == f"ipc://{folder} (port {port}, model quire-demo)"
    assert command.find_scheduler(port) == f"ipc://{folder}"  # whoever else serves
    with pytest.raises(CommandError, match=rf"no server of this user is at port 1 here; there run .*port {port},"):
        command.find_scheduler(1)
    monkeypatch.setattr(serving, "RUN_DIRS", os.path.basename(folder))  # others' may start at any moment
    monkeypatch.setattr(serving, "default_run_dir", lambda: folder)
    assert command.find_scheduler() == f"ipc://{folder}"


def test_top_shows_the_workers_of_a_server_of_this_machine(server):
    shown = subprocess.run(
        [str(BIN / "quire"), "top", "--once", "--url", server.url, "--interval", "0.2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.replace(",", "")
    assert "quire-demo  ready" in words and re.search(r"\n0 +ready +\d+ +\d+/\d+ +\d+\.\d\d GiB +\d+ +cpu", words)
