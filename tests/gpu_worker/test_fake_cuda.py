"""The worker's steps on a GPU that is not there (``tests/support/fake_cuda.py``): every feature, without the host
waiting for the device, and what each step asks of the device in numbers.

``launches.json`` has the numbers: a step that launches more, copies more or waits more fails here. Where they are meant
to change, ``pytest tests/gpu_worker/test_fake_cuda.py --rewrite-launches`` writes them anew; read the difference before
it is committed. ``layer`` is the middle one of three; torch's operations count as one launch each, though some of them
(sort, cumsum) are several on a card.
"""

import json
from pathlib import Path

import lora_toys
import numpy as np
import pytest
import torch
from fake_cuda import CUDA, Violation
from fake_cuda_models import FAMILIES, POOLED, VOCAB, CountingHand, fake_device, make, ranks, signatures, summary
from worker_toys import GREEDY, LADDER, Ladder

from quire.gpu_worker.kernels import company
from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.memory import cuda_budget
from quire.gpu_worker.models.kv_scales import scales_to_read, set_scales
from quire.gpu_worker.warmup import every_stage, worst_case
from quire.proto.codec import i32
from quire.proto.params import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: test_worker_gpu runs on it")
VERSION = ".".join(torch.__version__.split(".")[:2])
KEPT = ("up", "down", "waits", "pinned", "graphs")
GOLDEN = Path(__file__).parent / "launches.json"
PROMPT = list(range(5, 45))


@pytest.fixture
def device():
    with fake_device() as made:
        yield made


@pytest.fixture(scope="session")
def rewrite(request):
    return request.config.getoption("--rewrite-launches")


def check(rewrite, part, name, found):
    """``found`` is what the golden file has for it, or (--rewrite-launches) is written there."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if rewrite:
        golden.setdefault(part, {})[name] = found
        golden["written with"] = {"torch": {"version": VERSION}}
        GOLDEN.write_text(written(golden))
    expected = golden.get(part, {}).get(name)
    if golden["written with"]["torch"]["version"] != VERSION:
        expected, found = of_triton(expected), of_triton(found)
    assert expected == found


def of_triton(told):
    """Without numbers of torch's own operations: another version makes them of others."""
    if isinstance(told, dict):
        return {
            key: of_triton(value) for key, value in told.items()
            if key not in ("launches", "in a layer") and (not isinstance(value, int) or key in KEPT or "kernel" in key)
        }  # fmt: skip
    return told


def written(golden):
    """One line for each step, so that a difference is easy to read."""
    parts = []
    for part in sorted(golden):
        names = []
        for name in sorted(golden[part]):
            lines = ",\n".join(
                f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in golden[part][name].items()
            )
            names.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(names) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def usual(hand, params=GREEDY, count=3, **more):
    """A prompt, one in chunks beside its decodes, then decodes alone; the second of two like steps is kept."""
    for row in range(count):
        hand.admit(row, PROMPT, params=params, seed=row, **more)
    hand.called("prefill").run(*[(row, 40) for row in range(count)])
    hand.admit(count, PROMPT, params=params, seed=count, **more)
    decodes = [(row, 1) for row in range(count)]
    hand.run((count, 16), *decodes)
    hand.called("decodes and a chunk").run((count, 24), *decodes)
    for _ in range(2):
        hand.run(*decodes, (count, 1))
    hand.called("decode").run(*decodes, (count, 1))
    return hand.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, device, rewrite, tmp_path):
    model, _ = make(tmp_path, FAMILIES[family])
    hand = CountingHand(device, model)
    found = usual(hand)
    hand.runner.capture(128, progress=False)
    hand.called("decode, replayed").run(*[(row, 1) for row in range(4)])
    hand.admit(4, PROMPT)
    hand.called("decodes and a chunk, in pieces").run((4, 40), *[(row, 1) for row in range(4)])
    found |= {"captured": summary(device.graphs[-1].notes)}
    check(rewrite, "families", family, found)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_asks_for_nothing_more(cache, device, tmp_path):
    found = []
    for dtype in (torch.bfloat16, cache):
        model, _ = make(tmp_path, FAMILIES["window"])
        set_scales(model, dtype, False, scales_to_read(dtype, False), 128)
        hand = CountingHand(device, model)
        assert {each.dtype for each in hand.kv.k + hand.kv.v} == {dtype}
        seen = usual(hand)
        hand.fork(0, 5, seed=9)
        hand.tables[5], hand.lengths[5], hand.done[5] = list(hand.tables[0]), hand.lengths[0], hand.done[0]
        hand.copy_block(5, len(hand.tables[5]) - 1)
        hand.called("fork").run((0, 1), (5, 1))
        hand.runner.capture(128, progress=False)
        hand.called("decode, replayed").run(*[(row, 1) for row in range(4)])
        found.append({**seen, **hand.seen})
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_launches(dtype, device, rewrite, tmp_path):
    """The types of what each kernel is given: another one would be compiled, or be wrong."""
    notes = []
    for family in FAMILIES if dtype == torch.bfloat16 else ("llama", "ALiBi", "experts, sinks, windows"):
        device.take()
        hand = CountingHand(device, make(tmp_path, FAMILIES[family], dtype)[0])
        take, device.take = device.take, list
        usual(hand, SamplingParams(top_p=0.9, logprobs=2, frequency_penalty=0.5), 1, bad_words=[[3], [4, 5]])
        device.take = take
        notes += device.take()
    check(rewrite, "types", str(dtype).removeprefix("torch."), signatures(notes))


@pytest.mark.parametrize("family", ["llama", "experts"])
def test_adapters(family, device, rewrite, tmp_path):
    """Rows with adapters, eager and replayed; a step in which no row has one asks for what it does without any."""
    hand = CountingHand(device, make(tmp_path, FAMILIES[family])[0])
    hand.admit(0, PROMPT)
    hand.run((0, 40))
    plain = hand.called("decode").run((0, 1)) and hand.seen.pop("decode")
    model, _ = make(tmp_path, FAMILIES[family], lora=LoraSpec(3, 16))
    lora_toys.install(model, 0, lora_toys.random_adapter(model, 8, 0))
    lora_toys.install(model, 2, lora_toys.random_adapter(model, 16, 1, lambda name: name.endswith("qkv")))
    hand = CountingHand(device, model)
    for row, slot in enumerate((0, -1, 2)):
        hand.admit(row, PROMPT, slot=slot)
    hand.called("prefill").run((0, 40), (1, 40), (2, 40))
    hand.called("decode without").run((1, 1))
    assert hand.seen.pop("decode without") == plain
    hand.called("decode").run((0, 1), (1, 1), (2, 1))
    hand.called("of one product alone").run((1, 1), (2, 1))
    hand.runner.capture(128, progress=False)
    hand.called("decode, replayed").run((0, 1), (1, 1), (2, 1))
    hand.admit(3, PROMPT, slot=2)
    hand.called("a decode and a chunk, in pieces").run((0, 1), (3, 40))
    check(rewrite, "adapters", family, hand.seen)


def test_few_rows_by_tiles(device, rewrite, tmp_path):
    """Where Triton's products of few rows are faster than the library's."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"], tiles=True)[0])
    check(rewrite, "rows", "products of few rows", usual(hand))


def test_batch_invariant(device, rewrite, tmp_path, monkeypatch):
    monkeypatch.setattr(company, "_invariant", True)
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    check(rewrite, "rows", "--batch-invariant", usual(hand))


@pytest.mark.parametrize("family", ["llama", "experts", "norms of all heads"])
def test_tensor_ranks(family, device, rewrite, tmp_path):
    """The leader of two: what it exchanges within a layer, and for a draw from shares of the vocabulary or from all."""
    with ranks(device, 2, one_shot=family == "llama") as group:
        hand = CountingHand(device, make(tmp_path, FAMILIES[family], group=group)[0])
        found = usual(hand)
        hand.runner.capture(128, progress=False)
        hand.called("decode, replayed").run(*[(row, 1) for row in range(4)])
        hand.admit(4, PROMPT, params=SAMPLING["every filter"])
        hand.called("drawn by the leader").run((4, 40))
    check(rewrite, "ranks", family, found)


def test_a_long_context_is_split(device, rewrite, tmp_path):
    """Decodes over many keys: attention in shares and a launch that joins them, alone and in a mixed step."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0], length=512, max_tokens=512)
    hand.admit(0, PROMPT * 8)
    hand.run((0, 320))
    hand.called("decode").run((0, 1))
    hand.admit(1, PROMPT)
    hand.called("decodes and a chunk").run((0, 1), (1, 40))
    hand.runner.capture(512, progress=False)
    # The shares' memory is the graphs' own: a replay over what only the run before the capture had is a Violation.
    hand.called("decode, replayed").run((0, 1), (1, 1))
    check(rewrite, "rows", "long", hand.seen)


SAMPLING = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.9),
    "min_p": SamplingParams(min_p=0.1),
    "every filter": SamplingParams(top_k=9, top_p=0.9, min_p=0.1),
    "penalties": SamplingParams(frequency_penalty=0.5, presence_penalty=0.1, repetition_penalty=1.1),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={3: 1.0, 5: -2.0}),
    "allowed_token_ids": SamplingParams(temperature=0.0, allowed_token_ids=[0, 1, 2]),
    "logprobs 0": SamplingParams(logprobs=0),
    "logprobs 5": SamplingParams(logprobs=5, top_p=0.9),
    "all logprobs": SamplingParams(logprobs=-1),
    "logprobs and penalties": SamplingParams(logprobs=2, frequency_penalty=0.5),
    "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling(name, device, rewrite, tmp_path):
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    told = {"prompt_logprobs_from": 0} if name == "prompt_logprobs" else {}
    check(rewrite, "sampling", name, steps_of(usual(hand, SAMPLING[name], **told)))


def steps_of(seen):
    """Without the layers, which are as in ``families``."""
    return {name: {key: value for key, value in told.items() if "layer" not in key} for name, told in seen.items()}


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_modes_of_logprobs(mode, device, rewrite, tmp_path):
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0], mode=mode)
    check(rewrite, "sampling", mode, steps_of(usual(hand, SamplingParams(logprobs=3, top_k=8, presence_penalty=0.1))))


def test_bad_words_and_min_tokens(device, rewrite, tmp_path):
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    params = SamplingParams(temperature=0.0, min_tokens=40, max_tokens=50)
    seen = usual(hand, params, suppressed_ids=i32([7, 8]), bad_words=[[3], [4, 5], [6, 7, 8]])
    check(rewrite, "sampling", "bad words, min_tokens", steps_of(seen))


def test_rows_that_ask_for_different_things(device, rewrite, tmp_path):
    """Logprobs of several sizes, beams and every stage in one step."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    beams = SamplingParams(temperature=0.0, use_beam_search=True, best_of=2)
    asked = [*SAMPLING.values()][1:7] + [beams, SamplingParams(logprobs=3)]
    for row, params in enumerate(asked):
        hand.admit(row, PROMPT[:9], params=params)
    hand.called("prefill").run(*[(row, 9) for row in range(8)])
    for _ in range(3):
        hand.called("decode").run(*[(row, 1) for row in range(8) if row != 6])
    check(rewrite, "sampling", "all at once", steps_of(hand.seen))


class Anything(Ladder):
    """Every token is right, and each masks another one."""

    def advance(self, rows, tokens):
        pass


def test_structures(device, rewrite, tmp_path):
    """A step with a grammar waits for the tokens of the step before, once, with the forward pass launched."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0], grammars=Anything(VOCAB))
    hand.runner.capture(128, progress=False)
    check(rewrite, "sampling", "structures", steps_of(usual(hand, LADDER)))


def test_users_functions(device, rewrite, tmp_path):
    def function(prompt_ids, output_ids, logits, extra):
        logits[3] = -torch.inf
        return logits

    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0], functions={"function": function})
    check(
        rewrite, "sampling", "logits processors", steps_of(usual(hand, SamplingParams(logits_processors=["function"])))
    )


def test_children_and_beams(device, rewrite, tmp_path):
    """Forks, copies of blocks, tokens that the scheduler chose, drops, rows that go on from outputs."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    params = SamplingParams(n=3, frequency_penalty=0.5, allowed_token_ids=[1, 2, 3])
    hand.admit(0, PROMPT, params=params)
    hand.run((0, 39))
    for child in (1, 2):
        hand.fork(0, child, child)
        hand.lengths[child] = len(PROMPT)
    hand.called("a prompt's children").run((0, 1), samples=[(0, 0), (0, 1), (0, 2)])
    for child in (1, 2):
        hand.tables[child], hand.done[child] = [*hand.tables[0]], len(PROMPT)
        hand.copy_block(child, 2)
    hand.called("copies of blocks").run((0, 1), (1, 1), (2, 1))
    beams = SamplingParams(temperature=0.0, use_beam_search=True, best_of=2, frequency_penalty=0.5)
    for row in (3, 4):
        hand.admit(row, PROMPT[:9], params=beams, prompt_len=5)
    hand.called("beams").run((3, 9), (4, 9))
    hand.append(3, 7)
    hand.append(4, 8)
    hand.called("beams go on").run((3, 1), (4, 1))
    for src, dst in ((3, 4), (4, 3)):
        hand.fork(src, dst)
    hand.append(3, 7)
    hand.append(4, 8)
    hand.called("beams change places").run((3, 1), (4, 1))
    hand.drop(0)
    hand.called("a drop").run((1, 1))
    check(rewrite, "rows", "children and beams", steps_of(hand.seen))


@pytest.mark.parametrize("kind", POOLED)
def test_pooling(kind, device, rewrite, tmp_path):
    model, pooler = make(tmp_path, POOLED[kind], pools=True)
    hand = CountingHand(device, model, pooler)
    task = "classify" if "classif" in kind else "embed"
    for row, pooling in enumerate(("LAST", "MEAN", "CLS")):
        hand.pool(row, PROMPT, task=task, pooling=pooling)
    hand.pool(3, PROMPT[:9], task=f"token_{task}", pooling="ALL")
    hand.called("prompts").run((0, 40), (1, 40), (2, 40), (3, 9))
    if not pooler.whole:
        for row, pooling in enumerate(("LAST", "MEAN", "CLS", "ALL")):
            hand.pool(row, PROMPT, task=task if pooling != "ALL" else f"token_{task}", pooling=pooling)
        hand.called("chunks").run(*[(row, 20) for row in range(4)])
        hand.called("their ends").run(*[(row, 20) for row in range(4)])
    check(rewrite, "pooling", kind, hand.seen)


def test_the_worst_case_is_measured(device, tmp_path):
    """What ``worker._measure`` runs, and the memory that it takes: some for the step, none left behind."""
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    worst = worst_case(hand.state, 256, every_stage(20))
    with device.step():
        hand.runner.launch(worst)
    before = device.allocated
    budget = cuda_budget(lambda: hand.runner.launch(worst), int, 1 << 20, 16, CUDA)
    assert device.allocated == before and before < budget.used < before + (4 << 20)


def test_an_answer_over_the_pinned_buffers_holds_its_step_up(device, tmp_path, monkeypatch):
    """The one copy of a step that is planned to wait."""
    monkeypatch.setattr("quire.gpu_worker.transfer.PINNED_BYTES", 1000)
    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    with pytest.raises(Violation, match="not pinned"):
        usual(hand, SAMPLING["all logprobs"])
    device.planned = True
    hand.drop(0)
    usual(hand, SAMPLING["all logprobs"])
    assert hand.seen["decode"]["down"] == 4


def test_the_golden_file_has_nothing_else(rewrite):
    golden = json.loads(GOLDEN.read_text())
    assert golden["families"].keys() == FAMILIES.keys()
    assert golden["pooling"].keys() == POOLED.keys()
    assert golden.keys() == {"adapters", "families", "pooling", "ranks", "rows", "sampling", "types", "written with"}


# ---------------------------------------------------------------- that it sees what it is there to see


SYNCS = {
    "item": lambda x: x.flatten()[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x < 0).any()),
    "int": lambda x: int(x.flatten()[0]),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask written by": lambda x: x.index_put_((x > 0,), x),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.flatten().repeat_interleave(x.flatten().long()),
    "torch.tensor to the device": lambda x: torch.tensor([1, 2], device=x.device),
    "a list as an index": lambda x: x[[0, 0]],
    "numpy as an index": lambda x: x[np.array([0])],
    "both devices": lambda x: x.flatten()[:2] + torch.tensor([1.0, 2.0]),
    "both devices, the same shape": lambda x: torch.cat([x.flatten()[:2].float(), torch.zeros(2)]),
    "pageable memory": lambda x: torch.zeros(8).to(x.device, non_blocking=True),
    "pinned memory, and waiting": lambda x: torch.zeros(8).pin_memory().to(x.device),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", SYNCS)
def test_a_step_that_waits_fails(what, device, tmp_path, monkeypatch):
    """In the sampler, one line that has the host wait."""
    from quire.gpu_worker.sampling import sampler

    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    usual(hand)
    choose = sampler._choose

    def spoiled(*args):
        SYNCS[what](args[0])
        return choose(*args)

    monkeypatch.setattr(sampler, "_choose", spoiled)
    with pytest.raises(Violation):
        hand.run((0, 1))


CAPTURED = {
    "a host copy": lambda x: torch.zeros(8).pin_memory().to(x.device, non_blocking=True),
    "a copy to the host": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x, non_blocking=True),
    "pinned memory": lambda x: torch.empty(8, pin_memory=True),
    "a wait": lambda x: torch.cuda.current_stream().synchronize(),
    "an event": lambda x: torch.cuda.Event().synchronize(),
    "a read": lambda x: x.sum().item(),
}


@pytest.mark.parametrize("what", CAPTURED)
def test_a_capture_that_asks_the_host_fails(what, device, tmp_path, monkeypatch):
    model = make(tmp_path, FAMILIES["llama"])[0]
    hand, forward = CountingHand(device, model), model.forward
    seen = []

    def spoiled(batch, kv):
        hidden = forward(batch, kv)
        if device.capturing is not None:
            seen.append(what)
            CAPTURED[what](hidden)
        return hidden

    monkeypatch.setattr(model, "forward", spoiled)
    with pytest.raises(Violation):
        hand.runner.capture(128, progress=False)
    assert seen


def test_a_graph_over_memory_that_is_gone_fails(device, tmp_path):
    model = make(tmp_path, FAMILIES["llama"])[0]
    hand = CountingHand(device, model)
    hand.admit(0, PROMPT)
    hand.run((0, 40))
    hand.runner.capture(128, progress=False)
    hand.run((0, 1))
    hand.runner.graphs._slots = torch.zeros_like(hand.runner.graphs._slots)
    with pytest.raises(Violation, match="freed"):
        hand.run((0, 1))


def test_a_launch_of_the_wrong_tensors_fails(device):
    from quire.gpu_worker.kernels.norm import rms_norm
    from quire.gpu_worker.kernels.sampling import threshold

    x = torch.empty((4, 64), device=CUDA)
    rms_norm(x, x[0], 1e-5)
    with pytest.raises(Violation, match="weight on the host"):
        rms_norm(x, torch.empty(64), 1e-5)
    with pytest.raises(Violation, match="strides"):
        rms_norm(x, torch.empty((64, 2), device=CUDA)[:, 0], 1e-5)
    with pytest.raises(Violation, match=r"packed .* of strides"):
        threshold(x, torch.empty((4, 40), dtype=torch.int32, device=CUDA)[:, :16], True, True, True)


def test_another_type_is_seen(device, tmp_path, monkeypatch):
    """The types in the golden file are of what runs: a kernel that is given others has no such line."""
    from quire.gpu_worker.kernels import rope

    golden = json.loads(GOLDEN.read_text())["types"]["bfloat16"]["rope_write_kernel"]
    write, hand = rope.rope_write, CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    for to in (torch.int64, torch.int32):
        narrow = lambda *args, to=to: write(*args[:5], args[5].to(to), *args[6:])  # noqa: E731
        monkeypatch.setattr(rope, "rope_write", narrow)
        hand.admit(0, PROMPT)
        take, device.take = device.take, list
        hand.run((0, 40))
        device.take = take
        found = signatures(device.take())["rope_write_kernel"]
        assert set(found) <= set(golden) if to == torch.int64 else not set(found) & set(golden)


def test_one_launch_more_is_seen(device, tmp_path, monkeypatch):
    """The golden numbers are of what runs: a copy more in each layer is one launch more in each layer."""
    from quire.gpu_worker.layers.attention import Attention

    hand = CountingHand(device, make(tmp_path, FAMILIES["llama"])[0])
    before = usual(hand)["decode"]
    kernels = Attention._kernels
    monkeypatch.setattr(Attention, "_kernels", lambda self, q, *rest: kernels(self, q.clone(), *rest))
    after = hand.called("decode").run(*[(row, 1) for row in range(4)]) and hand.seen["decode"]
    assert after["in a layer"] == before["in a layer"] + 1 and after["layer"]["clone"] == 1
    golden = json.loads(GOLDEN.read_text())["families"]["llama"]["decode"]
    assert before == golden != after
