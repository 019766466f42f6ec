"""A scheduler whose workers pool: fake ones, or the real runner with a model folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scheduler_rig import Rig

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.pooling import Pooler
from quire.gpu_worker.runner import Runner
from quire.gpu_worker.state import RowState
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.checkpoint.pooler_config import pooler_of
from quire.proto.codec import i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks
from quire.proto.messages import Pooled, Submit
from quire.proto.pooling import PoolingParams
from quire.proto.work import Pool
from quire.scheduler.fake.fake_model import cell, pooled
from quire.scheduler.replica import Replica

CPU = torch.device("cpu")


class PoolRig(Rig):
    """Workers that pool."""

    def __init__(self, *args, whole=False, **flags):
        self.whole = whole
        super().__init__(*args, **flags)

    def add(self, number, blocks):
        replica = super().add(number, blocks)
        config = self.core.config
        self.stores[number].whole = self.whole
        fresh = Replica(
            number, replica.lease, f"w{number}", config.max_num_seqs, blocks, config.block_size, self.max_model_len,
            self.vocab, config.enable_prefix_caching, self.device, pools=True, whole=self.whole,
        )  # fmt: skip
        self.core.add_replica(fresh)
        return fresh

    def pool(self, prompt, *, uid=0, attempt=0, losses=0, pooling="LAST", token_type_start=-1, **params):
        self.last_uid += 1
        uid = uid or self.last_uid
        prompt = self.prompt(prompt, uid) if isinstance(prompt, int) else prompt
        self.asked = getattr(self, "asked", {})
        asked = PoolingParams(pooling=pooling, **params)
        self.asked[uid] = (prompt, asked)
        ids = i32(prompt)
        hashes = b"".join(hash_blocks(ids, self.core.config.block_size))
        work = Pool(asked, token_type_start=token_type_start)
        self.core.submit("detok", Submit(uid, attempt, ids, hashes, work, float(self.last_uid), losses=losses))
        return uid

    def answers(self):
        """The Pooled that came, each compared with what it must be."""
        self.receive()
        found = {message.uid: message for message in self.other if isinstance(message, Pooled)}
        for uid, message in found.items():
            prompt, asked = self.asked[uid]
            context = b"".join(cell(p, t).to_bytes(8, "little") for p, t in enumerate(prompt))
            assert (message.rows, message.data) == pooled(context, asked)
        return found


class ModelRig(PoolRig):
    """A model folder in float32 on the CPU, in steps of ``budget`` tokens. ``args``: flags of the model."""

    def __init__(self, folder: Path, budget: int = 24, args: EngineArgs | None = None, load_format: str = "auto"):
        self.model_config = load_model_config(str(folder))
        self.pooler = pooler_of(self.model_config, args or EngineArgs())
        self.model = load_model(self.model_config, torch.float32, CPU, load_format, pooler=self.pooler)
        super().__init__(
            64, self.model_config.max_model_len, self.model_config.vocab_size, whole=self.pooler.whole,
            max_num_batched_tokens=budget,
        )  # fmt: skip

    def add(self, number, blocks):
        replica = super().add(number, blocks)
        config = self.core.config
        rows, size, budget = config.max_num_seqs, config.block_size, config.max_num_batched_tokens
        state = RowState(rows, self.max_model_len, size, self.vocab, CPU)
        kv = KVCache(self.model.spec, blocks, size, torch.float32, CPU)
        self.stores[number] = _Worker(Runner(self.model, state, kv, budget, Pooler(self.pooler, self.model)))
        return replica

    def vectors(self, prompts, *, type_starts=None, **params):
        """What each prompt is pooled to, all at once: float32 [size], or [tokens, size]."""
        asked = self.pooler.resolve(PoolingParams(**params))
        fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
        uids = [self.pool(prompt, token_type_start=start, **fields)
                for prompt, start in zip(prompts, type_starts or [-1] * len(prompts), strict=True)]  # fmt: skip
        self.run()
        found = {message.uid: message for message in self.other if isinstance(message, Pooled)}
        failed = [message for message in self.other if not isinstance(message, Pooled)]
        assert not failed, failed
        arrays = [np.frombuffer(found[uid].data, np.float32) for uid in uids]
        return [a.reshape(found[uid].rows, -1) if found[uid].rows else a for uid, a in zip(uids, arrays, strict=True)]


class _Worker:
    """What a worker's compute thread does."""

    def __init__(self, runner: Runner):
        self.runner, self.chunks = runner, 0

    def run(self, plan):
        self.chunks += len(plan.rows) // 4 - len(plan.sample_rows) // 4
        return self.runner.launch(plan).result(plan.lease, plan.step)
