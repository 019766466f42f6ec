"""On a machine with a GPU: the same runner there, eager and with CUDA graphs, against the CPU. Skipped elsewhere."""

import math

import pytest
import tiny_models
import torch
from worker_toys import CPU, GREEDY, LADDER, LEASE, Hand, Ladder, plan, unpack

from quire.gpu_worker import compilations
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.memory import cuda_budget
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.outcome import FORBIDDEN, NAN
from quire.gpu_worker.warmup import every_stage, warm_up, warm_up_pieces, worst_case
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.messages import SlotFailed
from quire.proto.params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LIMITS = {"rows": 16, "length": 128, "block_size": 16, "blocks": 128, "max_tokens": 512, "vocab": tiny_models.VOCAB}
PARAMS = [GREEDY, SamplingParams(temperature=1.0), SamplingParams(top_p=0.8, top_k=40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same tiny checkpoint on the CPU and on the GPU, both in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = load_model_config(str(tiny_models.make("llama", tmp_path_factory.mktemp("model") / "llama")))
    return [load_model(config, torch.float32, device) for device in (CPU, torch.device("cuda", 0))]


def generate(hand, prompts, new, params=PARAMS):
    """Mixed steps: prompts are admitted one a step while earlier ones decode."""
    got = [[] for _ in prompts]
    for row, ids in enumerate(prompts):
        hand.admit(row, ids, params=params[row % len(params)], seed=row)
        for at, token in hand.run((row, len(ids)), *[(r, 1) for r in range(row)]).items():
            got[at].append(token)
    while min(map(len, got)) < new:
        for row, token in hand.run(*[(row, 1) for row in range(len(prompts)) if len(got[row]) < new]).items():
            got[row].append(token)
    return got


@pytest.mark.parametrize("graphs", [False, True])
def test_the_gpu_draws_what_the_cpu_draws(models, graphs):
    prompts = tiny_models.random_prompts(14, seed=4, longest=60)
    on_cpu, on_gpu = (Hand(model, device=model.device, **LIMITS) for model in models)
    if graphs:
        on_gpu.runner.capture(128, progress=False)
    assert generate(on_gpu, prompts, 20) == generate(on_cpu, prompts, 20)


def shy(output_ids, logits):
    """A user's processor: no token twice."""
    logits[output_ids] = -torch.inf
    return logits


@pytest.mark.parametrize("graphs", [False, True])
def test_every_feature_in_one_batch(models, graphs):
    """Structures, users' functions, penalties, logprobs and plain rows: as on the CPU, launched a step ahead or not."""
    params = [GREEDY, LADDER, SamplingParams(logits_processors=["shy"]), SamplingParams(logprobs=2, top_k=9),
              SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5, logprobs=0)]  # fmt: skip
    prompts = tiny_models.random_prompts(14, seed=6, longest=20)
    hands = []
    for model in models:
        functions = {"shy": lambda prompt_ids, output_ids, logits, extra: shy(output_ids, logits)}
        grammars = Ladder(tiny_models.VOCAB)
        hands.append(Hand(model, device=model.device, grammars=grammars, functions=functions, **LIMITS))
    if graphs:
        hands[1].runner.capture(128, progress=False)
    on_cpu, on_gpu = (generate(hand, prompts, 12, params) for hand in hands)
    assert on_gpu == on_cpu
    for row, ids in enumerate(prompts):
        if row % len(params) == 1:
            assert on_gpu[row] == list(range(len(ids), len(ids) + len(on_gpu[row])))


@pytest.mark.parametrize("k", [0, 5, -1])
def test_logprobs_equal_the_cpus(models, k, monkeypatch):
    """Of tokens and prompts, also where they outgrow the pinned buffers."""
    monkeypatch.setattr("quire.gpu_worker.transfer.PINNED_BYTES", 20_000)
    params = SamplingParams(temperature=0.0, logprobs=k, prompt_logprobs=k)
    hands = [Hand(model, device=model.device, **LIMITS) for model in models]
    for number, ids in enumerate(tiny_models.random_prompts(12, seed=7, longest=60)):
        results = []
        for hand in hands:
            hand.admit(number, ids, params=params, prompt_logprobs_from=0)
            hand.run((number, len(ids)))
            results.append([*hand.result.logprobs, *(chunk.logprobs for chunk in hand.result.prompts)])
        width = tiny_models.VOCAB if k < 0 else k
        for mine, its in zip(*results, strict=True):
            for (ids_1, values_1, rank_1), (ids_2, values_2, rank_2) in zip(
                unpack(mine, width), unpack(its, width), strict=True
            ):
                assert (ids_1[0], rank_1) == (ids_2[0], rank_2)
                assert values_1 == pytest.approx(values_2, abs=1e-3)


def test_nothing_is_compiled_after_the_warm_up(models, monkeypatch):
    runtime = pytest.importorskip("triton.knobs").runtime
    monkeypatch.setattr(runtime, "jit_cache_hook", None)
    monkeypatch.setattr(runtime, "jit_post_compile_hook", None)
    hand = Hand(models[1], device=models[1].device, grammars=Ladder(tiny_models.VOCAB), **LIMITS)
    warm_up(hand.runner, progress=False)
    hand.runner.capture(64, progress=False)
    warm_up_pieces(hand.runner)
    compiled = []
    compilations.watch(lambda kernel, seconds: compiled.append(kernel))
    params = [*PARAMS, LADDER, SamplingParams(min_p=0.1, logprobs=3), SamplingParams(top_k=5, presence_penalty=1.0)]
    generate(hand, tiny_models.random_prompts(14, seed=8, longest=110), 12, params)
    assert compiled == []


@pytest.mark.parametrize("filled", [math.nan, -math.inf])
def test_a_row_that_cannot_draw_fails_alone(models, monkeypatch, filled):
    """Its mark comes in the place of its token; the others draw on."""
    model = models[1]
    hand, prompts = Hand(model, device=model.device, **LIMITS), tiny_models.random_prompts(3, seed=9, longest=20)
    for row, ids in enumerate(prompts):
        hand.admit(row, ids, params=PARAMS[row])
    hand.run(*((row, len(ids)) for row, ids in enumerate(prompts)))
    assert not hand.result.failed
    logits = model.logits

    def poisoned(hidden):
        found = logits(hidden)
        found[1] = filled
        return found

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", poisoned)
        hand.run((0, 1), (1, 1), (2, 1))
    assert hand.result.failed == [SlotFailed(1, *(NAN if math.isnan(filled) else FORBIDDEN))]
    hand.drop(1)
    hand.run((0, 1), (2, 1))
    assert not hand.result.failed


def test_results_wait_for_their_own_step(models):
    """Two steps launched before the first is waited for, many times over: the ring's buffers are not mixed up."""
    hand = Hand(models[1], device=models[1].device, **LIMITS)
    ids = tiny_models.random_prompts(1, seed=5)[0]
    alone = hand.generate(0, ids, 30)
    hand.drop(0)
    hand.admit(1, ids)
    arrivals, launch = [], hand.runner.launch

    def later():
        hand.step += 1
        queued, hand.queue = hand.queue, {}
        arrivals.append(launch(plan(hand.step, **queued)))
        return [None] * len(queued["sample_rows"])

    hand.send = later
    hand.run((1, len(ids)))
    got = []
    for _ in range(29):
        hand.run((1, 1))
        got.append(int.from_bytes(arrivals.pop(0).arrival.wait(), "little"))
    got.append(int.from_bytes(arrivals.pop(0).arrival.wait(), "little"))
    assert got == alone


def test_a_structure_is_followed_two_plans_ahead(models):
    """Nobody waits for a step before the next is launched; the runner itself waits, where a grammar must know."""
    hand = Hand(models[1], device=models[1].device, grammars=Ladder(tiny_models.VOCAB), **LIMITS)
    ids = tiny_models.random_prompts(1, seed=5)[0][:9]
    hand.admit(0, ids, params=LADDER)
    outcomes, got = [], []

    def later():
        hand.step += 1
        queued, hand.queue = hand.queue, {}
        outcomes.append(hand.runner.launch(plan(hand.step, **queued)))
        if len(outcomes) > 1:
            got.append(int.from_bytes(outcomes.pop(0).result(LEASE, 0).tokens, "little"))
        return [None] * len(queued["sample_rows"])

    hand.send = later
    hand.run((0, len(ids)))
    for _ in range(19):
        hand.run((0, 1))
    assert got == list(range(len(ids), len(ids) + 19))


def test_the_worst_step_is_measured(models):
    hand = Hand(models[1], device=models[1].device, **{**LIMITS, "blocks": 1})
    worst = worst_case(hand.state, 512, every_stage(20))
    bytes_of = KVCache.block_bytes(models[1].spec, 16, torch.float32)
    budget = cuda_budget(lambda: hand.runner.launch(worst), int, bytes_of, 16, models[1].device)
    assert 0 < budget.used < budget.total
