"""A hand-made runner: drives a Decoder over a paged cache, without the worker's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

BLOCK = 8
CPU = torch.device("cpu")


@dataclass
class Row:
    """One sequence: its tokens, how many are in the cache, its blocks."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedRunner:
    """A hand-made runner: drives a Decoder over rows with a shuffled pool of blocks."""

    def __init__(self, model, blocks: int = 128, seed: int = 0):
        spec = model.spec
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(blocks, generator=generator).tolist()
        shapes = [(heads, blocks, BLOCK, spec.head_dim) for heads in spec.kv_heads]
        # Garbage, though finite, where nothing was written: it must never be seen.
        self.k = [torch.full(shape, 1e4).permute(1, 2, 0, 3) for shape in shapes]
        self.v = [torch.full(shape, -1e4).permute(1, 2, 0, 3) for shape in shapes]

    def step(self, work: list[tuple[Row, int]]) -> torch.Tensor:
        """Run ``count`` more tokens of each row (decodes first); logits [T, vocab] of all of them."""
        work = sorted(work, key=lambda item: item[1] != 1)
        ids, positions, slots, starts, lens, tables = [], [], [], [0], [], []
        for row, count in work:
            end = row.computed + count
            while len(row.blocks) * BLOCK < end:
                row.blocks.append(self.free.pop())
            ids += row.tokens[row.computed : end]
            positions += range(row.computed, end)
            slots += [row.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(row.computed, end)]
            starts.append(len(ids))
            lens.append(end)
            tables.append(row.blocks)
            row.computed = end
        width = max(map(len, tables)) + 1
        batch = StepBatch(
            token_ids=torch.tensor(ids), positions=torch.tensor(positions), slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32), context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            num_decodes=sum(count == 1 for _, count in work), max_query_len=max(c for _, c in work),
            max_context_len=max(lens), block_size=BLOCK, host_query_starts=starts, host_context_lens=lens,
        )  # fmt: skip
        return self.model.logits(self.model.forward(batch, self))


def load(folder: Path, max_model_len: int | None = None):
    """The folder's model in float32 on the CPU."""
    return load_model(load_model_config(str(folder), max_model_len), torch.float32, CPU, "auto", 0, False)
