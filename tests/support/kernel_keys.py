"""Which kernels Triton would compile, without a GPU: a device whose launches go through Triton's own binder and cache.

Triton's ``JITFunction.run`` computes the key of a launch (types, specialisations, constants, options), looks it up and
compiles what is new. Here all of that runs but the compiler: each new key is told to Triton's hooks, and nothing is
launched. Import it where TRITON_INTERPRET is not set.

As a script it takes a JSON list of cases, and prints for each which kernels a worker's warm-up compiles and which the
steps of a random trace compile after it: see ``test_warmup.py``.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.compiler
from fake_cuda import CUDA, CudaTensor, FakeCuda
from fake_cuda_models import FAMILIES, POOLED
from lora_toys import install, random_adapter
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from worker_toys import GREEDY, LADDER, LEASE, Hand, Ladder, plan

from quire.gpu_worker import runner as runners
from quire.gpu_worker import warmup
from quire.gpu_worker import worker as workers
from quire.gpu_worker.kernels import company
from quire.gpu_worker.layers.formats import cuda, measured
from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.spec import Shard
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.checkpoint.pooler_config import pooler_of
from quire.proto.codec import from_i32, i32
from quire.proto.config import EngineArgs
from quire.proto.messages import Admit, Assign, Compiled, Configure, Lease, Ready
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Pool

BASE_ADDRESS = 1 << 20  # of every allocation: torch's allocator aligns them to 512 bytes


class Pointer:
    """What Triton looks at of a tensor."""

    def __init__(self, tensor: CudaTensor):
        self.dtype = tensor.dtype
        self._address = BASE_ADDRESS + tensor.meta.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


class KeyedCuda(FakeCuda):
    """A fake device whose launches reach Triton's cache of kernels."""

    def launch(self, interpret: Any, kernel: Any, args: Any, grid: Any, named: dict[str, Any]) -> None:
        super().launch(interpret, kernel, args, grid, named)
        args = [Pointer(each) if isinstance(each, CudaTensor) else each for each in args]
        interpret(kernel, *args, grid=grid, warmup=False, **named)


class Recorder:
    """In the place of ``graphs.CudaRecorder``: what a graph replays has been compiled when it was recorded."""

    def __call__(self, step: Any) -> Any:
        (replay,), hidden = self.pieces(lambda cut: step())
        return replay, hidden

    def pieces(self, step: Any) -> Any:
        replays = [lambda: None]
        hidden = step(lambda: replays.append(lambda: None))
        return replays, hidden


class Kernel:
    """In the place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        return None


class Link:
    """Keeps what a worker sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.last_step = 0

    def send(self, message: Any) -> None:
        self.sent.append(message)


class OneOfTwo(Group):
    """One of two processes: a tensor rank whose other one says the same, or a stage."""

    def send_hidden(self, hidden: torch.Tensor) -> None:
        pass

    def receive_hidden(self, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((tokens, width), dtype=dtype, device=CUDA)

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        if self.shard.size == 1:
            return logits
        return torch.cat((logits, logits), dim=1)[:, :vocab_size] if self.leader else None


class Anything(Ladder):
    """Every token is right, and each masks another one."""

    def advance(self, rows: Any, tokens: Any) -> None:
        pass


class WorkersHand(Hand):
    """Steps of a worker's own runner; nobody waits for their results."""

    def __init__(self, worker: Any, blocks: int, block_size: int):
        self.state, self.runner, self.block_size = worker._state, worker._runner, block_size
        self.kv = self.runner.kv
        self.free = list(range(blocks))[::-1]
        self.tables, self.lengths, self.done, self.queue, self.step = {}, {}, {}, {}, 0
        self.drawn_elsewhere = not self.runner.group.leader

    def send(self) -> list[int]:
        self.step += 1
        queued, self.queue = self.queue, {}
        self.result = self.runner.launch(plan(self.step, **queued)).result(LEASE, self.step)
        return from_i32(self.result.tokens)


def shy(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
    """A user's function."""
    logits[3] = -torch.inf
    return logits


LORA = LoraSpec(2, 16)
FUNCTIONS = {"shy": shy}
FEATURES: list[tuple[SamplingParams, dict[str, Any]]] = [
    (GREEDY, {}),
    (SamplingParams(temperature=0.7), {}),
    (SamplingParams(top_k=5), {}),
    (SamplingParams(top_p=0.9), {}),
    (SamplingParams(min_p=0.1), {}),
    (SamplingParams(top_k=9, top_p=0.9), {}),
    (SamplingParams(min_p=0.1, top_p=0.9), {}),
    (SamplingParams(min_p=0.1, top_k=3), {}),
    (SamplingParams(top_k=9, top_p=0.9, min_p=0.1), {}),
    (SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1), {}),
    (SamplingParams(temperature=0.0, logit_bias={3: 1.0, 5: -2.0}), {}),
    (SamplingParams(temperature=0.0, allowed_token_ids=[0, 1, 2]), {}),
    (SamplingParams(temperature=0.0, min_tokens=5), {"suppressed_ids": i32([7])}),
    (SamplingParams(temperature=0.0), {"bad_words": [[3], [4, 5], [6, 7, 8]]}),
    (SamplingParams(temperature=0.5), {"bad_words": [[4, 5]]}),
    (SamplingParams(temperature=0.0, logprobs=0), {}),
    (SamplingParams(logprobs=3, top_p=0.9), {}),
    (SamplingParams(logprobs=2, presence_penalty=0.5), {}),
    (SamplingParams(temperature=0.0, prompt_logprobs=2), {"prompt_logprobs_from": 0}),
    (SamplingParams(temperature=0.0, use_beam_search=True, best_of=2), {}),
    (LADDER, {}),
    (SamplingParams(top_p=0.5, logits_processors=["shy"]), {}),
]
"""What requests of a trace ask for."""


def trace(hand: WorkersHand, rng: random.Random, steps: int, rows: int, max_tokens: int, max_len: int) -> None:
    """Steps as a scheduler plans them: prompts in chunks of any size, decodes beside them, rows that come and go."""
    beams, vocab = set[int](), hand.state.vocab_size
    adapters = 0 if hand.runner.slots is None else hand.runner.slots.count
    for _ in range(steps):
        for row in [row for row in hand.lengths if hand.lengths[row] > max_len - 2 or rng.random() < 0.05]:
            hand.drop(row)
            beams.discard(row)
        while len(hand.lengths) < rows and rng.random() < 0.6:
            row = next(row for row in range(rows) if row not in hand.lengths)
            length = min(max_len - 3, int(2 ** rng.uniform(0, 12)))
            blocks = -(-max_len // hand.block_size)
            if len(hand.free) - sum(blocks - len(table) for table in hand.tables.values()) < blocks:
                break
            params, more = rng.choice(FEATURES)
            ids = [rng.randrange(hand.state.vocab_size) for _ in range(length)]
            hand.admit(row, ids, params=params, seed=row, slot=rng.randint(-1, adapters - 1), **more)
            if params.use_beam_search:
                beams.add(row)
        left, chunks = max_tokens, []
        for row in rng.sample(sorted(hand.lengths), len(hand.lengths)):
            wanted = hand.lengths[row] - hand.done[row]
            if not wanted and row in beams:
                hand.append(row, rng.randrange(vocab))
                wanted = 1
            count = min(wanted, left, int(2 ** rng.uniform(0, 12)) if rng.random() < 0.7 else wanted)
            if count > 0 and rng.random() < 0.9:
                chunks.append((row, count))
                left -= count
        if chunks:
            hand.run(*chunks)


def pooling_trace(hand: WorkersHand, rng: random.Random, steps: int, rows: int, max_tokens: int, whole: bool) -> None:
    """Prompts that are pooled in each way: ``whole`` ones in one step, others also in chunks."""
    task, sizes = hand.runner.pooler.config.convert, dict[int, int]()
    for _ in range(steps):
        for row in [row for row in hand.lengths if hand.done[row] == sizes[row]]:
            hand.drop(row)
        while len(hand.lengths) < rows and rng.random() < 0.7:
            row = next(row for row in range(rows) if row not in hand.lengths)
            ids, kind = [0] * int(2 ** rng.uniform(0, 7)), rng.choice(("LAST", "MEAN", "CLS", "ALL"))
            hand.admit(row, ids)
            sizes[row] = len(ids)
            params = PoolingParams(task=f"token_{task}" if kind == "ALL" else task, pooling=kind)
            hand.queue["admits"][-1] = Admit(row, row, 0, i32(ids), len(ids), Pool(params))
        left, chunks = max_tokens, []
        for row in hand.lengths:
            count = sizes[row] - hand.done[row]
            count = count if whole else rng.randint(1, count)
            if count <= left:
                chunks.append((row, count))
                left -= count
        if chunks:
            hand.run(*chunks)


def by_chance(device: torch.device) -> measured.Table:
    """Products whose times are drawn, so that for some rows the library is taken and for others some tiles."""
    rng = random.Random(1)
    return measured.Table(measured.card_of(device), lambda call: rng.random(), None)


def served(case: dict[str, Any], device: KeyedCuda) -> dict[str, Any]:
    """A worker of ``case`` from Assign to Ready, then a trace: what was compiled before and after."""
    rows, max_tokens, max_len, blocks, size = 12, 900, 3000, 1200, 16
    compiled: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        values = {**FAMILIES, **POOLED}[case["family"]] | case.get("changes", {})
        Path(folder, "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        flags = {"logprobs_mode": case.get("mode", "raw_logprobs"), "enforce_eager": case.get("eager", False)}
        pools = {"runner": "pooling", "convert": "auto"} if case["family"] in POOLED else {}
        args = EngineArgs(model=folder, device="cuda", **flags, **pools)
        config = load_model_config(folder)
        pooler = pooler_of(config, args) if pools else None
        group = Group()
        if "rank" in case:
            group = OneOfTwo(Shard(case["rank"], 2))
        elif "stage" in case:
            group = OneOfTwo(Shard(0, 1, case["stage"], 2))
        dtype = getattr(torch, case.get("dtype", "bfloat16"))
        model = load_model(config, dtype, CUDA, "dummy", group=group, pooler=pooler, lora=case.get("lora") and LORA)
        config.max_model_len = max_len if pooler is None else 128
        grammars = Anything(config.vocab_size)
        worker = workers.Worker(args, config, model, dtype, CUDA, grammars, FUNCTIONS, group, pooler=pooler)
        worker._link = link = Link()
        worker._results = SimpleNamespace(drain=lambda: None)
        compilations = workers.compilations
        compilations.watch(worker._compiled)
        compilations.watch(lambda kernel, seconds: compiled.append(kernel))
        lease = Lease(0, 0, 1)
        worker._open(Assign(lease, size, rows, max_tokens))
        worker._num_blocks = blocks
        worker._configure(Configure(lease, blocks))
        assert isinstance(link.sent[-1], Ready), link.sent
        before = len(compiled)
        hand = WorkersHand(worker, blocks, size)
        if model.adapters is not None:
            install(model, 0, random_adapter(model, 5, 0))
            install(model, 1, random_adapter(model, 16, 1, lambda name: "qkv" in name))
        rng, steps = random.Random(case.get("seed", 0)), case.get("steps", 50)
        if pooler is None:
            trace(hand, rng, steps, rows, max_tokens, max_len)
        else:
            pooling_trace(hand, rng, steps, rows, max_tokens, pooler.whole)
    told = sum(isinstance(message, Compiled) for message in link.sent)
    return {"warm": compiled[:before], "late": compiled[before:], "told": told}


def main() -> None:
    """Serve each case of argv[1]."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )  # fmt: skip
    triton.compiler.compile = lambda *args, **named: Kernel()
    cuda.table_of, runners.CudaRecorder = by_chance, Recorder
    # The ranks' sum of what each needs is a value of the device, which this one does not have.
    warmup._of_any_rank = lambda shapes, wanted, *_: [shapes[at] for at in wanted.nonzero()[0]]
    for case in json.loads(sys.argv[1]):
        company.set_batch_invariant(case.get("invariant", False))
        from triton.knobs import runtime

        runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
        for kernel in kernels():
            kernel.device_caches.clear()
        with ExitStack() as stack:
            if not case.get("warmed", True):
                for name in ("warm_up", "warm_up_pieces"):
                    stack.enter_context(mock.patch.object(workers, name, lambda *args, **named: None))
            print(json.dumps(case | served(case, stack.enter_context(KeyedCuda()))), flush=True)


def kernels() -> list[Any]:
    """Every kernel that has been imported."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("quire.gpu_worker.")]
    return [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]


if __name__ == "__main__":
    main()
