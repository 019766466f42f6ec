"""What the launcher makes of children that die: while the server starts, while they load, and once they had served."""

import math
import os
import resource
import signal
import sys
import threading
import time

import pytest
from stack import wait_until

from quire.client.supervisor import commands, decision, launch, watch
from quire.client.supervisor.child import OPEN_FILES, Child
from quire.client.supervisor.launch import Supervisor
from quire.client.supervisor.place import START_S, Place, State
from quire.client.supervisor.watch import LaunchError
from quire.proto.config import EngineArgs
from quire.proto.process import EXIT_CONFIG, PARENT_FD

SLEEP = "import time; time.sleep(600)"
SERVES = "from quire.proto.process import tell_ready; tell_ready();"


@pytest.fixture
def make_stack(monkeypatch):
    """A started Supervisor of small programs: make_stack(("scheduler", code), ("gpu_worker", code, 0))."""
    monkeypatch.setattr(decision, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(launch, "cpu_count", lambda: 8)
    stacks = []

    def make(*programs):
        def plan(self):
            environment = dict(os.environ, **{PARENT_FD: str(self._read_end)})
            return [Place(service, [sys.executable, "-c", code], environment, *replica)
                    for service, code, *replica in programs]  # fmt: skip

        monkeypatch.setattr(Supervisor, "_plan", plan)
        stacks.append(stack := Supervisor(EngineArgs()))
        stack.start()
        return stack

    yield make
    for stack in stacks:
        stack.close()


def pid_of(stack, service):
    return next(pid for pid, name in stack.pids.items() if name == service)


def test_what_is_killed_while_the_server_starts_is_started_again(make_stack):
    stack = make_stack(("scheduler", SLEEP), ("gpu_worker", SLEEP), ("detokenizer", SLEEP))
    before = set(stack.pids)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    stack.wait_ready(60, lambda: len(stack.pids) == 3 and not before & set(stack.pids))


def test_no_more_load_at_once_than_there_are_cores(make_stack, monkeypatch, tmp_path):
    """The frontend waits until the scheduler serves. One beside the workers may always load."""
    serves = tmp_path / "serves"
    gate = f"import os, time\nwhile not os.path.exists({str(serves)!r}): time.sleep(0.01)\n{SERVES}{SLEEP}"
    programs = ("gpu_worker", SLEEP), ("gpu_worker", SLEEP), ("scheduler", gate), ("frontend", SLEEP)
    for cores, at_first in ((1, 3), (2, 3), (3, 3), (4, 4)):
        monkeypatch.setattr(launch, "cpu_count", lambda cores=cores: cores)
        serves.unlink(missing_ok=True)
        stack = make_stack(*programs)
        stack.check(starting=True)
        assert list(stack.pids.values()) == [service for service, _ in programs[:at_first]]
        serves.touch()
        wait_until(lambda stack=stack: stack.check(starting=True) or len(stack.pids) == 4, "all are started", 60)
        stack.close()


def test_what_was_not_started_yet_is_not_waited_for_at_the_end(make_stack, monkeypatch):
    monkeypatch.setattr(launch, "cpu_count", lambda: 1)
    stack = make_stack(("scheduler", SLEEP), ("frontend", SLEEP))
    scheduler, frontend = stack._places
    stack.close()
    assert scheduler.state is State.ENDED and frontend.state is State.NEW and frontend.process is None


def test_a_detokenizer_that_was_not_started_yet_gets_the_new_tokenizer_as_well(make_stack, monkeypatch):
    monkeypatch.setattr(launch, "cpu_count", lambda: 1)
    sleep = [sys.executable, "-c", SLEEP]
    monkeypatch.setattr(launch, "command_of", lambda service, args: [*sleep, *args.argv_for(service)])
    stack = make_stack(("detokenizer", SLEEP), ("detokenizer", SLEEP))
    first, second = stack._places
    assert second.state is State.NEW
    stack.set_tokenizer("/some/folder")
    assert all("--tokenizer=/some/folder" in place.command and place.running for place in (first, second))


def test_the_rest_of_a_replica_that_was_killed_is_no_reason_either(make_stack):
    """One of two that work together is killed, the other ends because of that."""
    ends = "import sys, time; time.sleep(0.3); print('quire.gpu_worker: error: link broke', file=sys.stderr); exit(1)"
    stack = make_stack(("gpu_worker", SLEEP, 0), ("gpu_worker", ends, 0))
    killed = next(iter(stack.pids))
    os.kill(killed, signal.SIGKILL)
    stack.wait_ready(60, lambda: killed not in stack.pids and len(stack.pids) == 2)


@pytest.mark.parametrize(("quick", "when"), [(10.0, "within 10 s of its start"), (0.0, "before it had begun to serve")])
def test_what_is_killed_again_and_again_ends_the_start(make_stack, monkeypatch, quick, when):
    monkeypatch.setattr(decision, "QUICK_S", quick)
    stack = make_stack(("gpu_worker", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(LaunchError, match=rf"ended 5 times {when}: .* killed by signal 9, probably out of memory"):
        stack.wait_ready(60, lambda: False)


def killed_in_turn(tmp_path, *lives):
    """A program that is killed once for each of ``lives``, "serves" or "loads", and then goes on, loading."""
    code = f"""if True:
        import os, time
        number = len(os.listdir({str(tmp_path)!r}))
        open(os.path.join({str(tmp_path)!r}, str(number)), "w").close()
        life = {lives!r}[number:number + 1]
        if life == ("serves",):
            {SERVES}
        if life:
            os.kill(os.getpid(), 9)
        time.sleep(600)
    """
    return code, lambda: len(os.listdir(tmp_path))


def test_one_that_is_killed_while_it_loads_may_have_been_killed_often_after_it_served(make_stack, tmp_path):
    """Quick deaths of workers that had served are counted apart from those of workers that had not."""
    code, starts = killed_in_turn(tmp_path, *["serves"] * 7, "loads", "loads")
    stack = make_stack(("gpu_worker", code))
    stack._was_ready = True
    wait_until(lambda: stack.check() or starts() == 10, "it was started after each of nine deaths", 60)
    (place,) = stack._places
    assert [exit.served for exit in place.history] == [True] * 7 + [False] * 2


def test_what_is_killed_before_the_server_was_ready_ends_the_start_however_long_it_served(make_stack, monkeypatch):
    """Such a server would begin anew for ever: what serves at once, as a frontend, is no exception."""
    monkeypatch.setattr(decision, "QUICK_S", 0.0)
    stack = make_stack(("frontend", f"import os; {SERVES} os.kill(os.getpid(), 9)"))
    with pytest.raises(LaunchError, match="ended 5 times before it had begun to serve: "):
        stack.wait_ready(60, lambda: False)


def test_who_was_killed_by_nobody_here_was_probably_out_of_memory(make_stack, caplog):
    stack = make_stack(("scheduler", SLEEP), ("gpu_worker", SLEEP))
    scheduler, worker = stack._places
    stack.watch.kill(scheduler)
    os.kill(worker.process.pid, signal.SIGKILL)
    wait_until(lambda: stack.check() or caplog.text.count("Starting another") == 2, "both are started again")
    assert "quire.scheduler was killed by signal 9; what it said" in caplog.text
    assert "quire.gpu_worker was killed by signal 9, probably out of memory; what it said" in caplog.text


def test_what_is_printed_is_passed_on_after_its_reader_stood_still(make_stack, monkeypatch):
    """Two end at once; while nobody reads what is said of the first, another takes the second one's place."""
    gates, calls = [threading.Event(), threading.Event()], []

    def say(data):
        calls.append(data)
        if len(calls) <= len(gates):
            gates[len(calls) - 1].wait(60)

    monkeypatch.setattr(launch, "say", say)
    stack = make_stack(
        ("frontend", f"import os; os.write(1, b'a word'); {SLEEP}"), ("scheduler", SLEEP), ("detokenizer", SLEEP)
    )
    talks, *others = stack._places
    wait_until(lambda: len(calls) == 1, "a word is being passed on", 60)
    for place in others:
        stack.watch.kill(place)
    wait_until(lambda: all(stack.watch.dead(place) for place in others), "both have ended", 60)
    gates[0].set()
    wait_until(lambda: len(calls) == 2, "the end of one is being passed on", 60)
    wait_until(lambda: stack.check() or all(place.state is State.LOADING for place in others), "both are replaced", 60)
    gates[1].set()
    stack.watch.kill(talks)
    wait_until(lambda: stack.check() or calls.count(b"a word") == 2, "another word is passed on", 60)


def test_of_a_replica_the_one_that_failed_is_named_and_not_the_rest_that_was_killed_for_it(make_stack, monkeypatch):
    monkeypatch.setattr(watch, "REPLICA_S", 0.1)
    stack = make_stack(("gpu_worker", SLEEP, 0), ("gpu_worker", "import sys; sys.exit(3)", 0))
    with pytest.raises(LaunchError, match=r"quire\.gpu_worker ended with code 3"):
        stack.wait_ready(60, lambda: False)


def test_what_fails_beside_one_that_is_killed_ends_the_start(make_stack):
    stack = make_stack(("scheduler", "import os; os.kill(os.getpid(), 9)"), ("gpu_worker", "import sys; sys.exit(3)"))
    with pytest.raises(LaunchError, match=r"quire\.gpu_worker ended with code 3"):
        stack.wait_ready(60, lambda: False)


def test_what_never_serves_is_given_up_however_long_it_loads(make_stack, monkeypatch):
    monkeypatch.setattr(decision, "QUICK_S", 0.0)
    stack = make_stack(("gpu_worker", "import sys; sys.exit(3)"))
    with pytest.raises(LaunchError, match="ended 5 times before it had begun to serve: "):
        stack.supervise(threading.Event())


def test_what_never_serves_ends_no_server_in_which_a_frontend_has_a_request(make_stack, monkeypatch, tmp_path, caplog):
    """Until it has none any more."""
    monkeypatch.setattr(decision, "HOPELESS_PAUSE_S", 0.01)
    open_request = tmp_path / "open"
    open_request.touch()
    frontend = f"""if True:
        import os, time
        from quire.proto import process
        process.HEARTBEAT_S = 0.01
        process.tell_ready()
        while True:
            process.heartbeat(needed=os.path.exists({str(open_request)!r}))
            time.sleep(0.02)
    """
    code = f"import os, sys, time; sys.exit(3) if os.path.exists({str(tmp_path / 'dies')!r}) else time.sleep(600)"
    stack = make_stack(("frontend", frontend), ("gpu_worker", code))
    wait_until(lambda: stack.check() or stack._places[0].process.needed, "the frontend says that it is needed")
    (tmp_path / "dies").touch()
    os.kill(pid_of(stack, "gpu_worker"), signal.SIGKILL)
    wait_until(lambda: stack.check() or stack.watch.restarts["gpu_worker"] > 7, "it is started often", 60)
    assert "quire.gpu_worker ended 5 times within 10 s of its start; the server goes on without it" in caplog.text
    assert stack.watch.failing() == {"gpu_worker": 1}
    open_request.unlink()
    with pytest.raises(LaunchError, match=r"quire\.gpu_worker ended with code 3"):
        stack.supervise(threading.Event())


def test_what_has_served_may_fail_as_if_it_could_never_work(make_stack, tmp_path):
    """Its device's memory may not be free again yet: that is not the end of a server that has worked."""
    mark = tmp_path / "mark"
    code = f"""if True:
        import os, sys, time
        {SERVES}
        if not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(600)
    """
    refused = f"import os, sys; sys.exit({EXIT_CONFIG}) if os.path.exists({str(mark)!r}) else None\n"
    stack = make_stack(("gpu_worker", code))
    (place,) = stack._places
    wait_until(lambda: stack.watch.fallen(place), "it dies, having served")
    place.command[-1] = refused  # what comes after it
    stack.check()
    assert place.history[-1].served and place.state is State.WAITING
    with pytest.raises(LaunchError, match="ended 5 times ") as caught:
        stack.supervise(threading.Event())
    assert caught.value.code == EXIT_CONFIG


def turn(stack, seconds):
    """So much more passes since its children were last heard, while the supervisor looks as often as it should."""
    for place in stack._places:
        place.heard -= seconds
    stack.watch._standstill._turn = math.inf
    stack.check()


def test_what_has_served_and_then_stands_still_is_killed_and_started_again(make_stack, caplog):
    stack = make_stack(("detokenizer", SERVES + SLEEP), ("gpu_worker", SLEEP))
    (place, loads) = stack._places
    silent, other = place.process.pid, loads.process.pid
    wait_until(lambda: stack.watch.silence(place) and place.served, "it serves")
    turn(stack, watch.SILENCE_S / 2)
    assert not stack.watch.dead(place) and "no sign of life" not in caplog.text
    turn(stack, watch.SILENCE_S)
    assert f"quire.detokenizer (pid {silent}) has shown no sign of life for 60 s; killing it." in caplog.text
    wait_until(lambda: stack.check() or (silent not in stack.pids and len(stack.pids) == 2), "another is in its place")
    assert pid_of(stack, "gpu_worker") == other  # what loads is waited for


def test_a_heartbeat_ends_a_silence_and_so_does_a_standstill_of_the_supervisor_itself(make_stack, tmp_path, caplog):
    code = f"""if True:
        {SERVES}
        import os, time
        from quire.proto.process import heartbeat
        while not os.path.exists({str(tmp_path / "mark")!r}):
            time.sleep(0.02)
        heartbeat()
        time.sleep(600)
    """
    stack = make_stack(("frontend", code))
    (place,) = stack._places
    wait_until(lambda: stack.watch.silence(place) and place.served, "it serves")
    place.heard -= 1000
    stack.watch._standstill._turn -= 1000
    stack.check()
    assert stack.watch.silence(place) < 1000
    place.heard = before = time.monotonic() - 1000
    (tmp_path / "mark").touch()
    wait_until(lambda: stack.watch.silence(place) is not None and place.heard > before, "it is heard again")
    stack.check()
    assert not stack.watch.dead(place) and "no sign of life" not in caplog.text
    assert [record.name for record in caplog.records] == ["quire.proto.standstill"]


def test_children_may_hold_more_connections_than_a_shell_allows(make_stack):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most - 1), hard))
    try:
        stack = make_stack(("frontend", SLEEP))
        (pid,) = stack.pids
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_scheduler_has_less_time_to_begin(make_stack, caplog):
    stack = make_stack(("scheduler", SLEEP))
    (pid,) = stack.pids
    turn(stack, watch.SILENCE_S)
    assert not caplog.text
    turn(stack, START_S)
    assert f"quire.scheduler (pid {pid}) has shown no sign of life" in caplog.text
    wait_until(lambda: stack.check() or pid not in stack.pids, "it is killed")


@pytest.mark.parametrize("service", ["scheduler", "detokenizer", "frontend"])
def test_each_service_says_that_it_serves(service, monkeypatch):
    """So that requests which end it do not end the server."""
    supervisor = Supervisor(EngineArgs(host="127.0.0.1", port=0), http=True)
    folder = supervisor.make_run_dir()
    supervisor.args.scheduler = f"ipc://{folder}"
    read_end, alive = os.pipe()
    environment = dict(os.environ, **{PARENT_FD: str(read_end)})
    child = Child(commands.command_of(service, supervisor.args), environment, read_end)
    try:
        wait_until(child.heard, "it says that it serves", 60)
    finally:
        os.close(alive)
        os.close(read_end)
        wait_until(lambda: child.ended() is not None, "it ends with its parent")
        child.drained.set()  # nobody reads what it prints
        child.close()
        supervisor.close()
