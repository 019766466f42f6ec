"""A model of a folder and the hidden states it computes, in one process or in tensor ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        self.places[self.shard.rank] = x.clone()
        self._wait()
        x.copy_(torch.stack(self.places).amax(0))
        self._wait()
        return x

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        self.places[self.shard.rank] = tokens
        self._wait()
        tokens.copy_(self.places[0].clone())
        self._wait()
        return tokens

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        whole = self.all_columns(logits)
        assert whole.shape[1] == vocab_size
        return whole if self.leader else None

    def best(self, values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every, ids = self.all_columns(values[:, None]), self.all_columns(tokens[:, None])
        best = every.argmax(-1, keepdim=True)
        return every.gather(-1, best)[:, 0], ids.gather(-1, best)[:, 0]

    def all_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' columns side by side, on each of them."""
        self.places[self.shard.rank] = x
        self._wait()
        whole = torch.cat(self.places, -1)
        self._wait()
        return whole

    def _wait(self) -> None:
        self.turn.release()
        self.barrier.wait(60)
        self.turn.acquire()


def in_ranks(folder: Path, size: int) -> list[torch.Tensor]:
    """The hidden states that each rank has."""
    return on_ranks(size, lambda group: hidden(load(folder, group)))


def on_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """What ``work`` gives on each of ``size`` ranks. Raises what the first that failed raised."""
    places, found, failed = [None] * size, [None] * size, []
    barrier, turn = threading.Barrier(size), threading.Lock()

    def run(rank: int) -> None:
        with turn:
            try:
                found[rank] = work(Threads(Shard(rank, size), places, barrier, turn))
            except threading.BrokenBarrierError:
                pass  # another rank failed
            except Exception as error:  # noqa: BLE001  raised below, in the test's own thread
                failed.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]
    return found
