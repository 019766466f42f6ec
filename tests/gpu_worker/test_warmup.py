"""After the warm-up no step compiles a kernel, and one that is compiled all the same is told.

What a launch's key is, Triton computes itself, for a GPU that is not there (``tests/support/kernel_keys.py``).
"""

import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_toys import LEASE, ToyModel

from quire.gpu_worker import compilations, warmup
from quire.gpu_worker.batch import StepShape, idle_batch
from quire.gpu_worker.kernels import attention, attention_tiles, linear, moe
from quire.gpu_worker.kernels.card import KIB, Card
from quire.gpu_worker.parallel.parallel import Group
from quire.gpu_worker.worker import Phase, Worker
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import EngineArgs
from quire.proto.messages import Compiled

SUPPORT = Path(__file__).parents[1] / "support"
CPU = torch.device("cpu")


def serve(*cases):
    """What a worker of each case compiles: before Ready, in a trace of steps after it, and how many it told of."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, SUPPORT / "kernel_keys.py", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    return found


def closed(*cases):
    """No step of these cases compiles anything."""
    pytest.importorskip("triton")
    for found in serve(*cases):
        assert found["warm"]
        assert (found["late"], found["told"]) == ([], 0), found


LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128_256,
}  # fmt: skip


ODD = {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20}
"""Queries lie at multiples of 16 values between recorded pieces, and in other steps not."""


def test_nothing_is_compiled_after_the_warm_up():
    """For a model of usual size, experts, a rank of two that draws nothing, heads of an odd size, a classifier."""
    closed(
        {"family": "llama", "changes": LARGE},
        {"family": "experts, sinks, windows", "mode": "processed_logprobs", "dtype": "float16", "invariant": True},
        {"family": "experts", "rank": 1, "eager": True},
        {"family": "experts", "lora": True},
        {"family": "llama", "changes": ODD},
        {"family": "encoder that classifies"},
        {"family": "codes", "changes": LARGE},
        {"family": "experts of codes"},
        {"family": "int8 rows", "changes": LARGE},
    )


def test_without_a_warm_up_compilations_are_told():
    """The same steps compile much then; the scheduler is told of each, and the log names it with its constants."""
    (cold,) = serve({"family": "llama", "warmed": False})
    assert cold["told"] == len(cold["late"]) > 3
    assert any(kernel.startswith("attention_kernel(") and "BLOCK_M=" in kernel for kernel in cold["late"])


@pytest.mark.slow
def test_nothing_is_compiled_later_for_any_family():
    """In every type, mode of logprobs and place in a replica."""
    from fake_cuda_models import FAMILIES, POOLED

    types, modes = ("bfloat16", "float16", "float32"), ("raw_logprobs", "processed_logprobs", "raw_logits")
    cases = [
        {"family": family, "dtype": types[at % 3], "mode": modes[at // 3 % 3], "eager": at % 2 > 0, "seed": at}
        for at, family in enumerate(FAMILIES)
    ]
    cases += [{"family": family} for family in POOLED]
    more = [{"rank": 0}, {"rank": 1}, {"stage": 0}, {"stage": 1}, {"invariant": True}]
    more.append({"invariant": True, "dtype": "float32", "changes": LARGE})
    closed(*cases, *({"family": "llama", "seed": at, **values} for at, values in enumerate(more)))


LAYERS = {
    "8B": attention.LayerShape(32, 8, 128, None, torch.bfloat16, CPU),
    "70B in 8 processes": attention.LayerShape(8, 1, 128, None, torch.bfloat16, CPU),
    "window": attention.LayerShape(64, 8, 64, 128, torch.bfloat16, CPU),
    "float32": attention.LayerShape(8, 8, 80, None, torch.float32, CPU),
    "256 wide": attention.LayerShape(8, 4, 256, 4096, torch.float16, CPU),
    "experts": moe.ExpertsShape(8, 128, torch.bfloat16),
    "products": linear.ByRows(),
    "few experts": moe.ExpertsShape(2, 8, torch.float32),
}


@pytest.mark.parametrize("processors", [24, 132])
@pytest.mark.parametrize("limits", [(256, 8192, 40_000), (7, 100, 2000), (1, 64, 64), (16, 4096, 300)])
def test_every_choice_is_among_those_of_the_chosen_shapes(limits, processors, monkeypatch):
    """On large cards and small, for models of every kind: shapes of steps by chance."""
    card = Card("a card", "cuda", 90, processors, 227 * KIB, 228 * KIB)
    monkeypatch.setattr(attention_tiles, "card_of", lambda device: card)
    rows, tokens, length = limits
    state = SimpleNamespace(max_rows=rows, max_model_len=length, device=CPU)
    runner = SimpleNamespace(
        model=SimpleNamespace(choosers=lambda: set(LAYERS.values())), state=state, max_tokens=tokens, group=Group()
    )
    chosen = warmup.chosen_shapes(runner)
    assert len(chosen) < 60
    known = {name: set().union(*map(layer, chosen)) for name, layer in LAYERS.items()}
    rng = random.Random(0)
    for _ in range(3000):
        shape = by_chance(rng, rows, tokens, length)
        for name, layer in LAYERS.items():
            assert set(layer(shape)) <= known[name], (name, shape)


def by_chance(rng, rows, tokens, length):
    """A step of some decodes and some prompts' chunks."""
    count = rng.randint(1, min(rows, tokens))
    decodes = rng.choice((count, rng.randint(0, count)))
    chunks, left = [], min(tokens, int(2 ** rng.uniform(1, 16))) - decodes
    for more in range(count - decodes, 0, -1):
        if left >= 2:
            chunks.append(rng.randint(2, max(2, min(length, left - 2 * (more - 1)))))
            left -= chunks[-1]
    longest, decodes = max(chunks, default=1), decodes if decodes or chunks else 1
    context = min(length, max(longest, int(2 ** rng.uniform(0, 17))))
    return StepShape(decodes + len(chunks), decodes, decodes + sum(chunks), longest, context)


def test_ranks_run_the_steps_that_any_of_them_needs():
    """They add up what they compute, so all run the same, whatever is chosen where."""
    shapes = list(warmup.step_shapes(4, 64, 64))

    class Pair(Group):
        def all_reduce(self, x):
            x[7] += 1
            return x

    group = Pair(SimpleNamespace(size=2, last=True, rank=0))
    model = SimpleNamespace(choosers=lambda: {LAYERS["few experts"]})
    state = SimpleNamespace(max_rows=4, max_model_len=64, device=CPU)
    mine = SimpleNamespace(model=model, state=state, max_tokens=64, group=group)
    alone = SimpleNamespace(model=model, state=state, max_tokens=64, group=Group())
    assert set(warmup.chosen_shapes(mine)) == {*warmup.chosen_shapes(alone), shapes[7]}


def test_a_batch_of_padding_has_its_shape():
    batch = idle_batch(StepShape(5, 2, 30, 12, 100), 16, CPU)
    assert batch.query_starts.tolist() == batch.host_query_starts == [0, 1, 2, 14, 26, 30]
    assert batch.block_tables.shape == (5, 7) and len(batch.token_ids) == 30
    assert not batch.context_lens.any() and (batch.slots == -1).all()
    assert (batch.num_decodes, batch.max_query_len, batch.max_context_len) == (2, 12, 100)


def told(**more):
    """What Triton's hook is given: of 3.4, of the newest, or less."""
    return {"key": "k", "repr": "draw_kernel[num_warps=4](logits: *fp32)", "is_manual_warmup": False} | more


def test_what_is_compiled_is_named_with_its_constants(monkeypatch):
    runtime = pytest.importorskip("triton.knobs").runtime
    monkeypatch.setattr(runtime, "jit_cache_hook", None)
    seen, also = [], []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **told: also.append(told["key"]))
    compilations.watch(lambda kernel, seconds: seen.append((kernel, seconds >= 0)))
    params = [SimpleNamespace(name=name) for name in ("logits", "vocab", "BLOCK")]
    function = SimpleNamespace(name="draw_kernel", jit_function=SimpleNamespace(params=params))
    signature = {"logits": "*fp32", "vocab": "i32", "BLOCK": "constexpr"}
    whole = {"constants": {(2,): 2048}, "signature": signature, "num_warps": 4, "num_stages": 3}
    whole["configs"] = [{(1,): [["tt.divisibility", 16]]}]
    for more in ({"fn": function, "compile": whole}, {"fn": function, "compile": {}}, {}):
        assert not runtime.jit_cache_hook(**told(**more))  # or Triton would not compile
        runtime.jit_post_compile_hook(**told(**more))
    assert seen == [
        ("draw_kernel(*fp32, i32) with BLOCK=2048, num_warps=4, num_stages=3, multiples of 16: vocab", True),
        ("draw_kernel[num_warps=4](logits: *fp32)", True),
        ("draw_kernel[num_warps=4](logits: *fp32)", True),
    ]
    assert also == ["k", "k", "k"]


def test_an_old_triton_is_borne(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    compilations.watch(lambda kernel, seconds: None)
    assert "does not tell" in caplog.text


def test_only_what_is_compiled_while_serving_is_told(caplog):
    worker = Worker(EngineArgs(model="m"), ModelConfig("m", {}, 64, 97), ToyModel(), torch.float32, CPU)
    sent = []
    worker._link = SimpleNamespace(send=sent.append)
    for lease, phase in ((None, Phase.UNASSIGNED), (LEASE, Phase.ASSIGNED), (LEASE, Phase.READY)):
        worker._lease, worker._phase = lease, phase
        worker._compiled(f"a kernel compiled when {phase.name}", 2.0)
    assert sent == [Compiled(LEASE)]
    assert "READY" in caplog.text and "ASSIGNED" not in caplog.text


def test_no_kernel_takes_an_argument_that_triton_would_hide():
    """Triton writes a function for each kernel that binds its arguments, and that has names of its own: an argument
    ``params`` is a dict there, and each launch fails (3.4 to 3.9). No interpreter shows it."""
    taken = {
        "params",
        "specialization",
        "options",
        "backend",
        "specialize_impl",
        "JITCallable",
        "grid",
        "warmup",
        "self",
    }
    files = sorted(Path(attention.__file__).parent.glob("*_jit.py"))
    functions = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 20
    assert {node.name for node in functions if taken & {each.arg for each in node.args.args}} == set()
