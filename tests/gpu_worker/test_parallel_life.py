"""Replicas of several processes from their start to their end, with real workers."""

import math
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
import tiny_models
from listeners import listeners
from stack import free_port, wait_until
from worker_fakes import FakeScheduler
from worker_steps import steps

from quire import LLM, SamplingParams
from quire.proto.messages import Assign, Bye, Configure, Drain, Hello, Ready
from quire.proto.wire.sockets import Keys


class Pair:
    """Both processes of one replica under a scheduler that the test plays; rank 0 leads."""

    def __init__(self, scheduler, model, *flags, own=((), ())):
        command = [sys.executable, "-m", "quire.gpu_worker", f"--scheduler={scheduler.address}", f"--model={model}",
                   "--load-format=dummy", "-tp=2", *flags]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen([*command, f"--rank={rank}", *own[rank]], stderr=subprocess.PIPE, text=True, env=env)
            for rank in (0, 1)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()

    def end(self, number, timeout=120):
        """(exit code, standard error)."""
        _, err = self.ranks[number].communicate(timeout=timeout)
        return self.ranks[number].returncode, err


@pytest.mark.slow
def test_a_whole_life(model):
    with FakeScheduler() as scheduler:
        meeting = f"--master-addr=ipc://{scheduler.folder}/replica"
        own = ((), ("--num-gpu-blocks-override=9",))  # the other's memory is smaller
        with Pair(scheduler, model, meeting, own=own) as pair:
            peer, hello = scheduler.get(Hello)
            assert hello.pid == pair.ranks[0].pid and hello.device.endswith("one of 2")
            lease, loaded = scheduler.assign(peer)
            assert loaded.num_blocks == 9
            scheduler.send(peer, Configure(lease, 9))
            scheduler.get(Ready, peer)
            tokens = steps(scheduler, peer, lease, 8)
            scheduler.restart()  # the next one finds the weights in both processes
            peer, hello, lease = scheduler.prepare()
            assert hello.loaded and steps(scheduler, peer, lease, 8) == tokens
            pair.ranks[1].send_signal(signal.SIGTERM)  # one is asked to end: the replica drains
            assert scheduler.get(Drain, peer)
            scheduler.send(peer, Drain())
            assert scheduler.get(Bye, peer)[1].reason == "drained"
            for number in (0, 1):
                code, err = pair.end(number)
                assert code == 0 and "Traceback" not in err, err


@pytest.mark.slow
def test_one_that_does_not_fit_and_one_that_is_stopped(model, tmp_path):
    keys = tmp_path / "key"
    Keys.generate().save(str(keys))
    with FakeScheduler() as scheduler, FakeScheduler() as other:
        small = Pair(
            scheduler, model, f"--master-addr=ipc://{scheduler.folder}/replica",
            own=((), ("--num-gpu-blocks-override=3",)),
        )  # fmt: skip
        with small, Pair(other, model, f"--master-port={free_port()}", f"--keys={keys}") as stopped:
            peer, _ = scheduler.get(Hello)
            scheduler.send(peer, Assign(scheduler.lease(), 8, 8, 128))
            codes, said = zip(*(small.end(number) for number in (0, 1)), strict=True)
            assert codes == (1, 78), said
            line = said[1].splitlines()[-1]
            assert line.startswith("quire.gpu_worker: error: The model's max seq len (64) is larger than the maximum")
            assert "process 1 of this replica has left: The model's max seq len (64)" in said[0].splitlines()[-1]

            peer, _, lease = other.prepare()
            assert len(steps(other, peer, lease, 4)) == 4
            here = listeners(rank.pid for rank in stopped.ranks)
            assert len(here) >= 2, here  # the link's port and the store's
            assert all(address.is_loopback for address, _ in here), here
            stopped.ranks[1].send_signal(signal.SIGSTOP)
            code, err = stopped.end(0)
            assert code == 1 and "process 1 of this replica is gone; ending" in err.splitlines()[-1]
            stopped.ranks[1].send_signal(signal.SIGCONT)
            code, err = stopped.end(1)
            assert code == 1 and "its leader is gone; ending" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_process_takes_its_replica_along_and_no_stream_notices(tmp_path):
    """Under load the processes of both replicas are killed, one after the other, once the leader, once the other."""
    folder = tiny_models.make("llama", tmp_path / "model", seed=5)
    prompts = tiny_models.random_prompts(8, seed=6, longest=40)
    kinds = [SamplingParams(temperature=0, max_tokens=150, ignore_eos=True),
             SamplingParams(temperature=0.9, seed=7, max_tokens=150, ignore_eos=True)]  # fmt: skip
    params = [kinds[i % 2] for i in range(len(prompts))]
    with LLM(
        str(folder), dtype="float32", max_model_len=256, num_gpu_blocks_override=200, max_num_seqs=16,
        data_parallel_size=2, tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        stack = llm._running.supervisor

        def generate():
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        def pids(replica):
            return [place.process.pid for place in stack._places if place.replica == replica]

        def lose(victim, rank):
            before, killed, got = (pids(victim), pids(1 - victim)), threading.Event(), []

            def work():
                while not killed.is_set():  # however soon one round is over: somebody works when the kill comes
                    got.append(generate())

            worker = threading.Thread(target=work)
            worker.start()
            try:
                wait_until(lambda: all(each.running for each in llm.stats().replicas), "both replicas are at work")
                os.kill(before[0][rank], signal.SIGKILL)
            finally:
                killed.set()
                worker.join(120)
            assert got and all(tokens == expected for tokens in got)
            wait_until(lambda: not set(before[0]) & set(pids(victim)), "both of its processes are new", 90)
            wait_until(lambda: len(ready(llm)) == 2, "the replica is back", 90)
            assert pids(1 - victim) == before[1]
            assert not any(psutil.pid_exists(pid) for pid in before[0])

        wait_until(lambda: len(ready(llm)) == 2, "both replicas are ready", 90)
        expected = generate()
        lose(victim=0, rank=1)
        lose(victim=1, rank=0)
        wait_until(lambda: all(place.heard < math.inf for place in stack._places), "every process serves again", 90)
        heard = {place: place.heard for place in stack._places}
        wait_until(lambda: all(place.heard > before for place, before in heard.items()), "and goes on pulsing")
        everyone = [*pids(0), *pids(1)]
    assert not any(psutil.pid_exists(pid) for pid in everyone)


def ready(llm):
    return [each for each in llm.stats().replicas if each.state == "ready"]
