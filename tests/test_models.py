"""Every family against transformers: logits and greedy tokens through a shuffled paged cache, in mixed steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny_models
import torch

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.models.loader import load_model
from quire.proto.model_config import load_model_config

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


@torch.no_grad()
def expected_logits(reference, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [T, vocab] of one sequence."""
    return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("row", tiny_models.ROWS)
def test_family_equals_transformers(row: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = tiny_models.make(row, tmp_path, seed=3)
    # The original length of the longrope rows: both sides then use the short factors.
    runner = PagedRunner(load(folder, 256 if "longrope" in row else None))
    reference = tiny_models.reference(folder)
    rows = [Row(list(prompt)) for prompt in tiny_models.random_prompts(6, seed=5, shortest=1, longest=75)]
    chunks = [7, 75, 16, 33, 75, 1]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    generated = [0] * len(rows)
    while min(generated) < 6:
        work = []
        for row_, chunk in zip(rows, chunks, strict=True):
            left = len(row_.tokens) - row_.computed
            work.append((row_, min(left, chunk)))
        order = sorted(range(len(rows)), key=lambda i: work[i][1] != 1)
        out = runner.step(work)
        at = 0
        for i in order:
            count = work[i][1]
            logits[i].append(out[at : at + count])
            at += count
            if rows[i].computed == len(rows[i].tokens):
                rows[i].tokens.append(int(logits[i][-1][-1].argmax()))
                generated[i] += 1
    for row_, seen in zip(rows, logits, strict=True):
        got = torch.cat(seen)
        want = expected_logits(reference, row_.tokens[:-1])
        assert want.std() > 0.3
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
        assert got.argmax(-1).tolist() == want.argmax(-1).tolist()
