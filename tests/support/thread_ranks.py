"""A model of a folder and the hidden states it computes, in one process or in tensor ranks that are threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from paged_runner import CPU, PagedRunner, Row

from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config

PROMPT = list(range(3, 40))


def load(folder: Path, group: Group | None = None, load_format: str = "auto") -> Any:
    return load_model(load_model_config(str(folder), 64), torch.float32, CPU, load_format, group=group)


def hidden(model: Any) -> torch.Tensor:
    """Hidden states [T, hidden] of PROMPT."""
    runner, row = PagedRunner(model), Row(PROMPT)
    seen = []
    model.logits, logits = lambda x: seen.append(x) or torch.zeros(len(x), 1), model.logits
    runner.step([(row, len(PROMPT))])
    model.logits = logits
    return seen[0]


class Threads(Group):
    """Tensor ranks that are threads of this process, of which one runs at a time: scratch memory is the process's."""

    def __init__(self, shard: Shard, places: list[Any], barrier: threading.Barrier, turn: threading.Lock) -> None:
        super().__init__(shard)
        self.places, self.barrier, self.turn = places, barrier, turn

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.places[self.shard.rank] = x.clone()
        self._wait()  # until all have given theirs
        x.copy_(sum(self.places))
        self._wait()  # until all have taken the sum
        return x

    def _wait(self) -> None:
        self.turn.release()
        self.barrier.wait(60)
        self.turn.acquire()


def in_ranks(folder: Path, size: int) -> list[torch.Tensor]:
    """The hidden states that each rank has."""
    places, found = [None] * size, [None] * size
    barrier, turn = threading.Barrier(size), threading.Lock()

    def run(rank: int) -> None:
        with turn:
            found[rank] = hidden(load(folder, Threads(Shard(rank, size), places, barrier, turn)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]
