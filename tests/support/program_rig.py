"""A decoder's program over rows and pages of its own, for tests that compare it with torch and with itself."""

from __future__ import annotations

import numpy as np
import torch

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.device import LongSteps
from quire.gpu_worker.kernels.narrow import bits
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.decoder import Decoder
from quire.gpu_worker.models.program import Program

ROWS, LENGTH, BLOCK, BLOCKS = 16, 448, 8, 600
CPU = torch.device("cpu")


class ProgramRig:
    """``ROWS`` rows whose blocks are scattered over the cache in an order drawn from ``seed``."""

    def __init__(self, model: Decoder, seed: int = 0, long: LongSteps | None = None) -> None:
        self.model = model
        self.kv = KVCache(model.spec, BLOCKS, BLOCK, model.cache_dtype, CPU)
        for page in self.kv.k + self.kv.v:  # garbage, though finite, where nothing was written: it must never be seen
            bits(page).fill_(1e4 if page.is_floating_point() and page.itemsize > 1 else 0x5A)
        self.tokens = torch.zeros((ROWS, LENGTH + 1), dtype=torch.int32)
        self.tables = torch.zeros((ROWS, LENGTH // BLOCK), dtype=torch.int32)
        self.free = np.random.default_rng(seed).permutation(BLOCKS).tolist()
        self.program = Program(model, self.kv, self.tokens, self.tables, ROWS, long)

    def admit(self, row: int, ids: list[int]) -> None:
        """Let ``row`` hold ``ids``, in other blocks than before."""
        self.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        count = -(-len(ids) // BLOCK)
        self.tables[row, :count] = torch.tensor([self.free.pop() for _ in range(count)], dtype=torch.int32)

    def columns(self, work: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """(row, start, count) of each sequence as the program takes them."""
        return [np.array(column, np.int64) for column in zip(*work, strict=True)]

    def logits(self, work: list[tuple[int, int, int]], outputs: list[int] | None = None) -> torch.Tensor:
        """Logits of each sequence's last token, or of ``outputs``."""
        rows, starts, counts = self.columns(work)
        last = np.cumsum(counts) - 1 if outputs is None else np.array(outputs, np.int64)
        return self.program.logits(rows, starts, counts, last).clone()

    def every(self, work: list[tuple[int, int, int]]) -> torch.Tensor:
        """Logits of every token, [T, vocabulary], by way of hidden states."""
        rows, starts, counts = self.columns(work)
        hidden = self.program.hidden(rows, starts, counts, np.arange(counts.sum()))
        return torch.cat([self.program.head(part).clone() for part in hidden.split(ROWS)])

    def by_torch(self, work: list[tuple[int, int, int]]) -> torch.Tensor:
        """``every`` by the model's own forward. Decodes come first in ``work``."""
        rows, starts, counts = self.columns(work)
        ends = starts + counts
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        of_rows = np.repeat(rows, counts)
        slots = self.tables.numpy()[of_rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        query_starts = [0, *np.cumsum(counts).tolist()]
        batch = StepBatch(
            token_ids=self.tokens[torch.from_numpy(of_rows), torch.from_numpy(positions)].long(),
            positions=torch.from_numpy(positions), slots=torch.from_numpy(slots),
            query_starts=torch.tensor(query_starts, dtype=torch.int32),
            context_lens=torch.from_numpy(ends.astype(np.int32)), block_tables=self.tables[torch.from_numpy(rows)],
            num_decodes=int((counts == 1).sum()), max_query_len=int(counts.max()), max_context_len=int(ends.max()),
            block_size=BLOCK, host_query_starts=query_starts, host_context_lens=ends.tolist(),
        )  # fmt: skip
        return self.model.logits(self.model.forward(batch, self.kv))
