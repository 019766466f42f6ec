"""The launcher with small programs in place of the services."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from quire.client.supervisor import commands, decision, launch, rundir
from quire.client.supervisor.child import Child, without_errors
from quire.client.supervisor.launch import Supervisor
from quire.client.supervisor.place import Place, State
from quire.client.supervisor.watch import LaunchError
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.process import EXIT_CONFIG, FEW_BESIDE, PARENT_FD, STARTED_AGAIN

SLEEP = "import time; time.sleep(600)"
DIES = "import sys; from quire.proto.process import die; die('gpu_worker', 'no memory: 3 GiB wanted, 2 free.', {})"


def program(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def make_stack(monkeypatch):
    """A Supervisor whose children run the given programs: make_stack(scheduler="...", gpu_worker="...")."""
    monkeypatch.setattr(launch, "cpu_count", lambda: 8)
    stacks = []

    def make(**programs):
        def plan(self):
            environment = dict(os.environ, **{PARENT_FD: str(self._read_end)})
            return [Place(service, program(code), environment) for service, code in programs.items()]

        monkeypatch.setattr(Supervisor, "_plan", plan)
        stack = Supervisor(EngineArgs())
        stacks.append(stack)
        stack.start()
        return stack

    yield make
    for stack in stacks:
        stack.close()


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_close_ends_all_and_removes_the_folder(make_stack):
    stack = make_stack(scheduler=SLEEP, gpu_worker=SLEEP)
    pids, folder = stack.pids, Path(stack.run_dir)
    assert sorted(pids.values()) == ["gpu_worker", "scheduler"] and stack.address == f"ipc://{folder}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(os.getsid(pid) == pid for pid in pids)  # a Ctrl-C at the terminal does not reach them
    stack.close()
    stack.close()
    assert all(map(gone, pids)) and not folder.exists() and stack.pids == {}


def test_a_failing_start_says_why_in_one_line(make_stack, capfd):
    stack = make_stack(scheduler=SLEEP, gpu_worker="print('loading');" + DIES.format(EXIT_CONFIG))
    with pytest.raises(LaunchError, match="no memory: 3 GiB wanted, 2 free") as caught:
        stack.wait_ready(120, lambda: False)
    assert caught.value.code == EXIT_CONFIG and "\n" not in str(caught.value)
    stack.close()
    shown = capfd.readouterr().err
    assert "loading" in shown and "no memory" not in shown  # whoever catches the error says it


def test_a_crash_at_start_is_named_and_its_output_passed_on(make_stack, capfd):
    stack = make_stack(scheduler=SLEEP, detokenizer="raise RuntimeError('oh no')")
    with pytest.raises(LaunchError, match=r"quire\.detokenizer ended with code 1"):
        stack.wait_ready(120, lambda: False)
    stack.close()
    assert "RuntimeError: oh no" in capfd.readouterr().err


def test_not_ready_in_time(make_stack):
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        make_stack(scheduler=SLEEP).wait_ready(0.1, lambda: False)


def test_a_killed_child_is_started_again(make_stack):
    stack = make_stack(scheduler=SLEEP, gpu_worker=SLEEP)
    before = {service: pid for pid, service in stack.pids.items()}
    stop = threading.Event()
    watcher = threading.Thread(target=stack.supervise, args=(stop,))
    watcher.start()
    os.kill(before["gpu_worker"], signal.SIGKILL)
    wait_for(lambda: len(stack.pids) == 2 and before["gpu_worker"] not in stack.pids)
    after = {service: pid for pid, service in stack.pids.items()}
    assert after["scheduler"] == before["scheduler"]
    stop.set()
    watcher.join()


def test_a_new_tokenizer_replaces_the_detokenizers_alone(make_stack, monkeypatch):
    monkeypatch.setattr(launch, "command_of", lambda service, args: program(SLEEP) + args.argv_for(service))
    stack = make_stack(scheduler=SLEEP, detokenizer=SLEEP, gpu_worker=SLEEP)
    (place,) = [place for place in stack._places if place.service == "detokenizer"]
    before = {service: pid for pid, service in stack.pids.items()}
    stop = threading.Event()
    watcher = threading.Thread(target=stack.supervise, args=(stop,))
    watcher.start()
    stack.set_tokenizer("/some/folder")
    after = {service: pid for pid, service in stack.pids.items()}
    assert gone(before["detokenizer"]) and after["detokenizer"] != before["detokenizer"]
    assert (after["scheduler"], after["gpu_worker"]) == (before["scheduler"], before["gpu_worker"])
    assert "--tokenizer=/some/folder" in place.command and place.history == []
    stop.set()
    watcher.join()


def test_what_dies_again_and_again_is_given_up(make_stack, monkeypatch):
    monkeypatch.setattr(decision, "MAX_PAUSE_S", 0.01)
    stack = make_stack(detokenizer="import sys; sys.exit(3)")
    with pytest.raises(LaunchError, match="ended 5 times within 10 s") as caught:
        stack.supervise(threading.Event())
    assert caught.value.code == 3


def test_what_had_begun_to_serve_is_given_up_later(make_stack, monkeypatch):
    """Requests that end workers, sent again and again, end the server only after many."""
    monkeypatch.setattr(decision, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(decision, "QUICK_EXITS", 8)
    stack = make_stack(gpu_worker="import sys; from quire.proto.process import tell_ready; tell_ready(); sys.exit(3)")
    with pytest.raises(LaunchError, match="ended 8 times within 10 s"):
        stack.supervise(threading.Event())


def test_what_can_never_work_is_not_restarted(make_stack):
    stack = make_stack(gpu_worker=DIES.format(EXIT_CONFIG))
    with pytest.raises(LaunchError, match="no memory"):
        stack.supervise(threading.Event())


def test_a_worker_that_left_on_purpose_is_not_started_again(make_stack, caplog):
    drains = "import signal, time\nsignal.signal(15, lambda *_: exit(0))\nwhile True: time.sleep(0.05)"
    stack = make_stack(scheduler=SLEEP, gpu_worker=drains)  # a long sleep could begin after the signal
    (worker,) = [place for place in stack._places if place.service == "gpu_worker"]
    before = worker.process.pid
    wait_for(lambda: signal.SIGTERM in _signals(before, "SigCgt"))
    worker.process.terminate()
    wait_for(lambda: stack.watch.dead(worker))
    for _ in range(3):
        stack.check()
    assert worker.state is State.LEFT and worker.process.pid == before and list(stack.pids.values()) == ["scheduler"]
    assert "left on purpose and is not started again; 0 of" in caplog.text
    stack.close()


def test_what_dies_while_frontends_end_is_started_again_and_a_second_signal_ends_all(make_stack):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    stack = make_stack(frontend=deaf, detokenizer=SLEEP)
    pids = {service: pid for pid, service in stack.pids.items()}
    wait_for(lambda: signal.SIGTERM in _signals(pids["frontend"], "SigIgn"))
    closing = threading.Thread(target=stack.close)
    closing.start()
    wait_for(lambda: stack.closed)
    os.kill(pids["detokenizer"], signal.SIGKILL)
    wait_for(lambda: len(stack.pids) == 2 and pids["detokenizer"] not in stack.pids)
    assert closing.is_alive()  # a frontend has --shutdown-timeout
    stack.hurry.set()
    closing.join(120)
    assert not closing.is_alive() and stack.pids == {} and gone(pids["frontend"])


def test_what_does_not_end_is_killed(make_stack, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", dict.fromkeys(launch.GRACE_S, 0.2))
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    stack = make_stack(scheduler=deaf)
    (pid,) = stack.pids
    wait_for(lambda: signal.SIGTERM in _signals(pid, "SigIgn"))
    stack.close()
    assert gone(pid)


def _signals(pid, kind):
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(kind))
    bits = int(mask.split()[1], 16)
    return {signum for signum in range(1, 64) if bits >> (signum - 1) & 1}


def test_children_end_when_the_parent_is_killed():
    code = f"""if True:
        import os, sys, time
        from quire.client.supervisor.launch import Supervisor
        from quire.client.supervisor.place import Place
        from quire.proto.config import EngineArgs
        from quire.proto.process import PARENT_FD
        child = "from quire.proto.process import watch_parent as w; w(); import time; time.sleep(600)"
        Supervisor._plan = lambda self: [
            Place("scheduler", [sys.executable, "-c", child], dict(os.environ, **{{PARENT_FD: str(self._read_end)}}))]
        stack = Supervisor(EngineArgs())
        stack.start()
        copy = os.fork()  # a forked copy must not keep the pipe open, nor end the children itself
        if copy == 0:
            stack.close()
            {SLEEP}
        print(*stack.pids, copy, stack.run_dir, flush=True)
        {SLEEP}
    """
    parent = subprocess.Popen(program(code), stdout=subprocess.PIPE, text=True)
    *pids, folder = parent.stdout.readline().split()
    pid, copy = map(int, pids)
    try:
        assert not gone(pid)
        parent.kill()
        parent.wait()
        wait_for(lambda: gone(pid))
        wait_for(lambda: not os.path.exists(folder))  # nobody was left to remove it but the kernel's count
    finally:
        os.kill(copy, signal.SIGKILL)
        parent.stdout.close()


def test_folders_of_killed_launchers_are_swept():
    kept, fd = rundir.make_run_dir()
    stale = Path(rundir.tempfile.mkdtemp(prefix="quire-run-", dir=Path(kept).parent))
    other = Path(rundir.tempfile.mkdtemp(prefix="quire-other-", dir=Path(kept).parent))
    try:
        for path in (kept, stale, other):
            os.utime(path, (0, 0))
        second, second_fd = rundir.make_run_dir()
        assert os.path.exists(kept) and other.exists() and not stale.exists()
        os.close(second_fd)
        shutil.rmtree(second)
    finally:
        os.close(fd)
        shutil.rmtree(kept)
        other.rmdir()


def test_a_taken_port_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        stack = Supervisor(EngineArgs(host="127.0.0.1", port=taken.getsockname()[1]), http=True)
        with pytest.raises(ConfigError, match="choose another --port"):
            stack.start()
        assert stack.run_dir is None


def test_a_bad_host_is_named():
    for host in ("999.1.1.1", "x" * 70):
        with pytest.raises(ConfigError, match=r"choose another with --host\."):
            commands.free_port(host, 8000)


@pytest.mark.parametrize(
    ("told", "there", "device", "given"),
    [(None, 0, "auto", ["0", "1"]), (None, 8, "auto", ["0", "1"]), (None, 1, "auto", 1), (None, 1, "cpu", []),
     ("3, 5,7", 8, "auto", ["3", "5"]), ("GPU-aa", 8, "cuda", 1), ("", 8, "auto", []), ("-1", 8, "auto", []),
     ("2,-1,3", 8, "auto", 1)],
)  # fmt: skip
def test_each_worker_has_a_gpu_of_its_own(monkeypatch, told, there, device, given):
    monkeypatch.setattr(commands.glob, "glob", lambda pattern: [pattern] * there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    if isinstance(given, int):
        with pytest.raises(ConfigError, match=f"2 workers need a GPU each, and there are {given}; lower data_parallel"):
            commands.devices_of(2, device)
    else:
        assert commands.devices_of(2, device) == given


def test_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    args = EngineArgs(data_parallel_size=2, detokenizer_count=2, api_key="secret", port=1, scheduler="ipc:///x")
    args.admin_api_key, args.metrics_key = "secret-a", "secret-m"
    stack = Supervisor(args, http=True)
    places = stack._plan()
    services = [place.service for place in places]
    assert services == ["gpu_worker", "gpu_worker", "scheduler", "frontend", "detokenizer", "detokenizer"]
    for place in places:
        assert place.command[:4] == [sys.executable, "-P", "-m", f"quire.{place.service}"]
        assert "--scheduler=ipc:///x" in place.command and "secret" not in " ".join(place.command)
    keys = [places[3].environment[f"QUIRE_{name}"] for name in ("API_KEY", "ADMIN_API_KEY", "METRICS_KEY")]
    assert keys == ["secret", "secret-a", "secret-m"]
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in places[:2]] == ["0", "1"]
    assert any(word.endswith("/demo_model") for word in places[0].command)
    assert "--served-model-name=quire-demo" in places[3].command
    assert "--served-model-root=quire-demo" in places[3].command  # as it was named, and not the folder that was found
    assert places[0].environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    named = Supervisor(EngineArgs(logits_processor=["a:f", "b:g"], skip_tokenizer_init=True, max_logprobs=5))
    command = {place.service: place for place in named._plan()}
    assert {"--logits-processor=a:f", "--logits-processor=b:g"} <= set(command["gpu_worker"].command)
    assert set(map(os.path.abspath, sys.path)) == set(command["gpu_worker"].environment["PYTHONPATH"].split(":"))
    assert {"--skip-tokenizer-init", "--max-logprobs=5"} <= set(command["detokenizer"].command)
    with pytest.raises(ConfigError, match="does not exist"):
        Supervisor(EngineArgs(model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="key file"):
        Supervisor(EngineArgs(keys=str(tmp_path / "nothing")))


def test_error_lines_are_held_back_and_the_rest_passes_as_it_is():
    child = Child(program(""), {}, 0)
    bar = "Loading: 50%|█████     |\r".encode()
    assert without_errors(child, bar + b"quire.gpu_wor") == bar
    assert without_errors(child, b"ker: error: one\nplain") == b"plain"
    assert child.error == "one"
    assert without_errors(child, b" text\nquire.scheduler: error: two\nquire.\n") == b" text\nquire.\n"
    assert child.error == "two"
    wait_for(lambda: child.ended() is not None)
    child.drained.set()
    child.close()


def test_a_process_in_the_place_of_another_is_told_so(monkeypatch):
    started = []

    def child(command, environment, *held):
        started.append(environment)
        return SimpleNamespace(stream=None, close_ready=lambda: None)

    monkeypatch.setattr(launch, "Child", child)
    selector = SimpleNamespace(register=lambda *given: None, unregister=lambda *given: None)
    args = SimpleNamespace(log_format="text")
    held = SimpleNamespace(_selector=selector, _held_fd=-1, _read_end=0, args=args)
    place = SimpleNamespace(service="frontend", process=None, command=(), environment={"A": "1"})
    for _ in range(2):
        place.process = Supervisor._spawn(held, place)
    assert started == [{"A": "1"}, {"A": "1", STARTED_AGAIN: "1"}]


def test_workers_alone_for_a_server_elsewhere(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "before")
    args = EngineArgs(headless=True, scheduler="tcp://127.0.0.1:5600", data_parallel_size=2, hf_token="secret").check()
    places = Supervisor(args, http=True)._plan()
    assert [place.service for place in places] == ["gpu_worker", "gpu_worker"]
    assert all("--scheduler=tcp://127.0.0.1:5600" in place.command for place in places)
    assert not any("secret" in word for place in places for word in place.command)  # who lists processes sees them
    assert all(place.environment["HF_TOKEN"] == "secret" for place in places)


@pytest.mark.parametrize("http", [True, False])
def test_a_worker_without_a_frontend_beside_is_told(http):
    for place in Supervisor(EngineArgs(), http=http)._plan():
        assert place.environment.get(FEW_BESIDE) == ("1" if place.service == "gpu_worker" and not http else None)


def test_a_frontend_finds_the_middlewares_of_the_folder_it_is_started_in(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    places = Supervisor(EngineArgs(middleware=["a.b"]), http=True)._plan()
    found = {place.service: str(tmp_path) in place.environment.get("PYTHONPATH", "") for place in places}
    assert found == {"gpu_worker": False, "scheduler": False, "frontend": True, "detokenizer": False}


def test_a_servers_unix_socket_is_asked(tmp_path):
    path = str(tmp_path / "s")
    with pytest.raises(OSError):
        commands.connect(EngineArgs(uds=path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        commands.connect(EngineArgs(uds=path)).close()
