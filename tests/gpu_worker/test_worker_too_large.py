"""Flags of the scheduler's that are sound by themselves and ask for more than a worker's memory."""

import json
import subprocess
import sys

import pytest
import torch
from worker_fakes import TINY_LLAMA, FakeScheduler

from quire.gpu_worker.memory import out_of_memory
from quire.proto.messages import Assign, Hello


@pytest.mark.slow
def test_more_rows_than_there_is_memory_for_are_one_fatal_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with FakeScheduler() as scheduler:
        worker = subprocess.Popen(
            [sys.executable, "-m", "quire.gpu_worker", f"--scheduler={scheduler.address}", f"--model={tmp_path}",
             "--load-format=dummy", "--device=cpu"], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            peer, _ = scheduler.get(Hello)
            scheduler.send(peer, Assign(scheduler.lease(), 8, 2**31 - 1, 2**31 - 1))
            said = worker.communicate(timeout=120)[1]
        finally:
            worker.kill()
            worker.communicate()
    assert worker.returncode == 78 and "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("quire.gpu_worker: error: no memory for 2147483647 rows of up to 64 tokens")
    assert "lower `max_num_seqs`" in last


def test_what_says_that_memory_is_lacking():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value) and out_of_memory(MemoryError()) and out_of_memory(torch.OutOfMemoryError())
    for text in (
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: ...\nncclUnhandledCudaError: ...\nLast error:\nCuda failure 2 'out of memory'",
        "Last error:\nCuda failure 'out of memory'",  # of older versions
    ):
        assert out_of_memory(RuntimeError(text)), text
    assert not out_of_memory(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
