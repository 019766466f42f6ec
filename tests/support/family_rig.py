"""The real scheduler over the real runner, in one process, for tests that drive a whole model without sockets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scheduler_rig import Rig

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.state import RowState
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.messages import PromptLogprobs, StepPlan, StepResult
from quire.scheduler.replica import Replica

CPU = torch.device("cpu")
ROWS, BUDGET, BLOCK, LENGTH = 16, 40, 8, 256


class Worker:
    """What a worker's compute thread does: a plan in, its result out. ``chunks`` counts rows that were cut short."""

    def __init__(self, runner: Runner):
        self.runner, self.chunks = runner, 0

    def run(self, plan: StepPlan) -> StepResult:
        self.chunks += len(plan.rows) // 4 - len(plan.sample_rows) // 4
        return self.runner.launch(plan).result(plan.lease, plan.step)


class FamilyRig(Rig):
    """A model folder in float32 on the CPU: at most ``ROWS`` sequences, steps of ``BUDGET`` tokens, prefix caching.

    ``blocks``: pages of BLOCK tokens; with few of them sequences are preempted.
    """

    def __init__(self, folder: Path, blocks: int = ROWS * LENGTH // BLOCK):
        self.model_config = load_model_config(str(folder), LENGTH)
        self.model = load_model(self.model_config, torch.float32, CPU)
        super().__init__(
            blocks, LENGTH, self.model.whole.vocab_size, block_size=BLOCK, max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
        )  # fmt: skip

    def add(self, number: int, blocks: int) -> Replica:
        replica = super().add(number, blocks)
        # Prompt logprobs are raw logits in this mode, which differ even where a softmax would not.
        state = RowState(ROWS, LENGTH, BLOCK, self.vocab, CPU, "raw_logits")
        kv = KVCache(self.model.spec, blocks, BLOCK, torch.float32, CPU)
        for page in kv.k + kv.v:  # garbage, though finite, where nothing was written: it must never be seen
            page.fill_(1e4)
        self.worker = self.stores[number] = Worker(Runner(self.model, state, kv, BUDGET))  # type: ignore[assignment]
        return replica

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """``count`` greedy tokens of each prompt, all at once."""
        uids = [self.submit(prompt, temperature=0.0, max_tokens=count) for prompt in prompts]
        self.run(2000)
        return [self.tokens[uid, 0] for uid in uids]

    def prompt_logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Logits [len(prompt) - 1, vocab] of each prompt's tokens but the last, all at once."""
        uids = [self.submit(prompt, temperature=0.0, max_tokens=1, prompt_logprobs=self.vocab) for prompt in prompts]
        self.run(2000)
        return [
            torch.cat([self._logits(part) for part in sorted(self.prompts[uid], key=lambda part: part.start)])
            for uid in uids
        ]

    def _logits(self, part: PromptLogprobs) -> torch.Tensor:
        shape = (-1, self.vocab + 1)
        ids = np.frombuffer(part.logprobs.ids, np.int32).reshape(shape)[:, 1:]  # without the prompt's own token
        values = np.frombuffer(part.logprobs.values, np.float32).reshape(shape)[:, 1:]
        logits = np.full(ids.shape, np.nan, np.float32)
        np.put_along_axis(logits, ids.astype(np.int64), values, axis=1)
        return torch.from_numpy(logits)

    @property
    def hits(self) -> int:
        """Prompt tokens that were found in the cache."""
        return sum(self.started.values())
