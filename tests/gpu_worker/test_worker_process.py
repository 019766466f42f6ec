"""``python -m quire.gpu_worker`` as a process, against a scheduler played by the test."""

import os
import signal
import subprocess
import sys
import time

import pytest
from stack import wait_until
from worker_fakes import FakeScheduler
from worker_steps import steps
from worker_toys import plan

from quire.proto.codec import from_i32, i32
from quire.proto.messages import Admit, Assign, Bye, Drain, Heartbeat, Hello, StepFailed, StepResult
from quire.proto.params import SamplingParams
from quire.proto.work import Generate


class Process:
    """A worker; ended, if it still runs, when the test is over."""

    def __init__(self, scheduler, model, *flags, path=""):
        command = [sys.executable, "-m", "quire.gpu_worker", f"--scheduler={scheduler.address}", f"--model={model}",
                   "--load-format=dummy", *flags]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(path)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def end(self):
        """(exit code, last line of its standard error)."""
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, (err.splitlines() or [""])[-1]


@pytest.mark.slow
def test_a_whole_life(model, tmp_path):
    (tmp_path / "my_words.py").write_text(
        "def say(prompt_ids, output_ids, logits):\n"
        "    logits[:] = float('-inf')\n"
        "    logits[len(prompt_ids) + len(output_ids)] = 0\n"
        "    return logits\n"
    )
    flag = "--logits-processor=my_words:say"
    with FakeScheduler() as scheduler, Process(scheduler, model, flag, path=tmp_path) as worker:
        first, hello, lease = scheduler.prepare()
        assert hello.pid == worker.process.pid and hello.device.startswith("cpu") and hello.incarnation == first
        tokens = steps(scheduler, first, lease, 6)

        for garbage in (b"", b"\x80\x04\x95pickle.", b"\xff" * 40, b"\x92\xa8StepPlan"):
            scheduler.router.socket.send_multipart([first.encode(), garbage])
        while scheduler.get(Heartbeat)[1].bad_frames < 4:
            pass
        scheduler.restart()  # the connection breaks: a fresh identity, weights still loaded
        second, hello, lease = scheduler.prepare()
        assert second != first and hello.loaded
        assert steps(scheduler, second, lease, 6) == tokens

        scheduler.send(second, plan(99, lease))
        assert scheduler.get(StepFailed, second)[1].step == 99
        third, hello, lease = scheduler.prepare()
        assert third not in (first, second) and hello.loaded
        assert steps(scheduler, third, lease, 6) == tokens
        assert scheduler.heartbeats[-1].memory > 0

        params = SamplingParams(temperature=1.0, logits_processors=["my_words:say"])
        scheduler.send(third, plan(
            8, lease, admits=[Admit(1, 2, 0, i32([5, 6, 7]), 2, Generate(params, 0))],
            delta_rows=[1], delta_slots=[0], delta_blocks=[3],
            rows=[1], starts=[0], counts=[3], sample_src=[0], sample_rows=[1],
        ))  # fmt: skip
        assert from_i32(scheduler.get(StepResult, third)[1].tokens) == [3]

        worker.process.send_signal(signal.SIGSTOP)
        scheduler.send(third, Bye("it was silent", again=True))  # as a scheduler does whose patience has ended
        worker.process.send_signal(signal.SIGCONT)
        fourth, hello, lease = scheduler.prepare()
        assert fourth != third and hello.loaded and hello.pid == worker.process.pid
        assert steps(scheduler, fourth, lease, 6) == tokens

        worker.process.send_signal(signal.SIGTERM)
        scheduler.get(Drain, fourth)
        scheduler.send(fourth, plan(8, lease))  # it goes on working until it is let go
        assert scheduler.get(StepResult, fourth)[1].step == 8
        scheduler.send(fourth, Drain())
        scheduler.get(Bye, fourth)
        assert worker.end()[0] == 0


@pytest.mark.slow
def test_a_second_sigterm_or_a_scheduler_that_breaks_off_end_it_at_once(model):
    for second in (True, False):
        with FakeScheduler() as scheduler, Process(scheduler, model) as worker:
            peer, _, _ = scheduler.prepare()
            worker.process.send_signal(signal.SIGTERM)
            scheduler.get(Drain, peer)
            if second:
                worker.process.send_signal(signal.SIGTERM)
                scheduler.get(Bye, peer)
            else:
                scheduler.restart()
            assert worker.end()[0] == 0


@pytest.mark.slow
def test_an_idle_worker_sleeps_and_a_drained_one_ends(model):
    with FakeScheduler() as scheduler, Process(scheduler, model) as worker:
        peer, _, lease = scheduler.prepare()
        steps(scheduler, peer, lease, 3)
        wait_until(lambda: _sleeps(worker.process.pid), "it sleeps when it has done what its start left to be done")
        scheduler.send(peer, Drain("enough"))
        scheduler.get(Bye, peer)
        assert worker.end()[0] == 0


def _sleeps(pid):
    before = _cpu_ticks(pid)
    time.sleep(1.5)
    return _cpu_ticks(pid) - before < 30  # of 150: a spinning thread would take them all


def _cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num-gpu-blocks-override=3"], "The model's max seq len (64) is larger than the maximum number of tokens "
         "that can be stored in KV cache (24). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`"),
        (["--gpu-memory-utilization=0.0000001"], "No available memory for the cache blocks. Try increasing "
         "`gpu_memory_utilization` when initializing the engine."),
    ],
    ids=["too few blocks", "no room"],
)  # fmt: skip
def test_too_little_memory_is_one_fatal_line(model, flags, line):
    with FakeScheduler() as scheduler, Process(scheduler, model, *flags) as worker:
        peer, _ = scheduler.get(Hello)
        scheduler.send(peer, Assign(scheduler.lease(), 8, 8, 64))
        code, last = worker.end()
        assert code == 78
        assert last.startswith("quire.gpu_worker: error: " + line) and "needs" in last


@pytest.mark.slow
def test_a_scheduler_of_another_protocol_sends_it_away(model):
    with FakeScheduler() as scheduler, Process(scheduler, model) as worker:
        peer, _ = scheduler.get(Hello)
        scheduler.send(peer, Bye("this gpu_worker speaks protocol 1 and the scheduler 2"))
        code, last = worker.end()
        assert code == 78 and last.endswith("speaks protocol 1 and the scheduler 2")


@pytest.mark.slow
def test_configuration_errors_end_it_before_anything_else(model, tmp_path):
    with FakeScheduler() as scheduler:
        with Process(scheduler, tmp_path / "nowhere") as worker:
            code, last = worker.end()
            assert code == 78 and "nowhere" in last
        with Process(scheduler, model, "--logits-processor=no.such:fn") as worker:
            code, last = worker.end()
            assert code == 78 and "'no.such:fn' cannot be imported" in last and "PYTHONPATH" in last
        with Process(scheduler, tmp_path, "--gpu-memory-utilization=2") as worker:
            assert worker.end()[0] == 2
