"""Batches of 32 different requests: each row has, bit for bit, what it has alone. And what draws follow."""

import math

import numpy as np
import pytest
import torch
from sampler_rows import DEVICE, Request, bits_of, plain_penalties, real_logits, state_of, step

from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import PLAIN, SamplingNeeds
from quire.proto.params import SamplingParams

VOCAB = 997
FIELDS = [
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.8, "temperature": 1.4},
    {"presence_penalty": 1.2},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.2, "presence_penalty": -0.3, "top_p": 0.9},
    {"logit_bias": {1: 4.0, 2: -4.0}},
    {"allowed_token_ids": [1, 2, 3, 500]},
    {"min_tokens": 3},
    {"min_tokens": 30},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": -1, "temperature": 0},
    {"logprobs": 20, "top_p": 0.5, "presence_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {7: 30.0}, "logprobs": 2},
    {"temperature": 0, "allowed_token_ids": list(range(0, VOCAB, 3)), "frequency_penalty": 2.0},
    {"temperature": 0, "use_beam_search": True, "n": 4},
    {"temperature": 0, "use_beam_search": True, "n": 2, "logprobs": 9, "repetition_penalty": 1.1},
    {"temperature": 2.0, "logprobs": 5, "allowed_token_ids": [5, 6, 7]},
    {"temperature": 0.3, "top_k": 3, "logprobs": 3},
    {"top_p": 1e-5, "logprobs": 1},
    {"min_p": 1.0},
    {"top_k": 10**6, "min_tokens": 2, "logit_bias": {0: -100.0}},
    {"temperature": 0, "min_tokens": 9, "presence_penalty": 0.5},
]


def requests_of(vocab, with_words=True):
    """32 of them, each with its own history; every third with bad words that its history begins."""
    generator = np.random.default_rng(5)
    found = []
    for seed, fields in enumerate(FIELDS):
        prompt, outputs = (generator.integers(0, vocab, n).tolist() for n in (7 + seed % 5, seed % 9))
        suppressed = [2, 3] if fields.get("min_tokens") else []
        request = Request(SamplingParams(**fields, max_tokens=None), seed * 7919, prompt, outputs, suppressed)
        if with_words and seed % 3 == 0:
            request.bad_words = [[seed], [*outputs[-2:], seed + 1], [*outputs[-1:], seed + 2], [1, 2, 3]]
        found.append(request)
    return found


def edit(logits):
    """A row's own processor would look at its row alone; so does this."""
    logits += 0.125


def record(sampled, logits):
    """slot -> everything that came of it."""
    found = {slot: [logits[slot].cpu(), token] for slot, token in enumerate(sampled.tokens.tolist())}
    for slots, k, ids, values, ranks in sampled.logprobs or []:
        for at, slot in enumerate(slots.tolist()):
            found[slot] += [k, ids[at].cpu(), values[at].cpu(), ranks[at].cpu()]
    return found


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("extras", [False, True])
def test_32_different_rows_are_what_each_is_alone(mode, extras):
    requests, logits = requests_of(VOCAB), real_logits(len(FIELDS), VOCAB, seed=8)
    free = range(-(-VOCAB // 32) * 32)
    allowed = [range(slot, VOCAB, 2) if slot % 4 == 1 else free for slot in range(len(FIELDS))]
    mask = bits_of(allowed, -(-VOCAB // 32)) if extras else None
    hook = edit if extras else None
    order = np.random.default_rng(1).permutation(100)[: len(FIELDS)].tolist()
    mixed = logits.clone().to(DEVICE)
    state = state_of(requests, VOCAB, order, 100, mode=mode)
    together = record(step(state, mixed, requests, order, mask, hook), mixed)
    for slot, request in enumerate(requests):
        alone = logits[slot : slot + 1].clone().to(DEVICE)
        own = state_of([request], VOCAB, [0], mode=mode)
        own_mask = None if mask is None else mask[slot : slot + 1]
        assert same(record(step(own, alone, [request], [0], own_mask, hook), alone)[0], together[slot]), FIELDS[slot]
        if request.params.presence_penalty or request.params.repetition_penalty != 1:
            assert torch.equal(own.counts.tensor[0], state.counts.tensor[order[slot]])


def test_a_large_vocabulary_once():
    """Real sizes: rows alone and together, and a filtered row against sorting."""
    vocab = 151_936
    picked = [8, 12, 20, 21, 26, 1]
    requests = [requests_of(VOCAB)[slot] for slot in picked]
    logits = real_logits(len(picked), vocab, seed=9)
    mixed = logits.clone().to(DEVICE)
    together = record(step(state_of(requests, vocab), mixed, requests), mixed)
    for slot, request in enumerate(requests):
        alone = logits[slot : slot + 1].clone().to(DEVICE)
        assert same(record(step(state_of([request], vocab), alone, [request]), alone)[0], together[slot])
        if not request.bad_words and request.params.allowed_token_ids is None:
            assert torch.equal(alone[0].cpu(), plain_penalties(logits[slot], request))


def test_what_nobody_uses_is_not_needed():
    """Each feature raises its own flag and no other."""
    flags = {
        "random": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.5}, "min_p": {"min_p": 0.5},
        "allowed": {"allowed_token_ids": [1]}, "edits": {"logit_bias": {1: 1.0}},
        "penalties": {"repetition_penalty": 1.1}, "logprobs": {"logprobs": 0},
    }  # fmt: skip
    requests = [Request(SamplingParams(**fields)) for fields in flags.values()]
    requests += [Request(bad_words=[[1, 2]]), Request(bad_words=[[1]]), Request(SamplingParams(temperature=0)),
                 Request(SamplingParams(temperature=0, n=2, use_beam_search=True)),
                 Request(SamplingParams(min_tokens=2), outputs=[1], suppressed=[2])]  # fmt: skip
    state = state_of(requests, VOCAB)

    def needs(row, position=1):
        return state.needs(np.array([row]), np.array([position]))

    for row, flag in enumerate(flags):
        assert needs(row) == SamplingNeeds(**{"random": True, flag: True})
    assert needs(8) == SamplingNeeds(random=True, words=True) and needs(9) == SamplingNeeds(random=True, edits=True)
    assert needs(10) is PLAIN and needs(11) == SamplingNeeds(logprobs=True)
    assert needs(12, 2) == SamplingNeeds(random=True, edits=True) and needs(12, 3) == SamplingNeeds(random=True)
    state.drop(range(len(requests)))
    assert needs(3) is PLAIN


def test_forks_carry_everything():
    """A fork draws what a row admitted with the same history and the fork's seed draws; a permutation too."""
    requests = requests_of(VOCAB)
    count = len(requests)
    state = state_of(requests, VOCAB, max_rows=count + 5)
    source = np.random.default_rng(2).permutation(count).tolist()
    seeds = [slot + 10**6 for slot in range(count)]
    state.copy(source, list(range(count)), seeds)
    children = [Request(**{**vars(requests[s]), "seed": seed}) for s, seed in zip(source, seeds, strict=True)]
    logits = real_logits(count, VOCAB, seed=10)
    forked, fresh = logits.clone().to(DEVICE), logits.clone().to(DEVICE)
    got = record(step(state, forked, children), forked)
    want = record(step(state_of(children, VOCAB), fresh, children), fresh)
    assert all(same(got[slot], want[slot]) for slot in range(count))


CHI = [
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "top_p": 0.95},
    {"logit_bias": {3: 2.0, 4: -1.0}, "allowed_token_ids": [1, 3, 4, 5, 9, 12], "temperature": 0.8},
    {"min_tokens": 9, "top_k": 6},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", CHI)
def test_draws_follow_the_reference_distribution(fields):
    """20,000 draws against a distribution made by plain torch in float64: chi-square below its 1 - 1e-6 quantile."""
    vocab, draws = 16, 20_000
    params = SamplingParams(**fields, max_tokens=None)
    request = Request(params, 42, [1, 2], [3, 3, 5], [0, 7], [[5, 12], [6]])
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(6)) * 1.5
    state = state_of([request], vocab)
    places = np.arange(5, draws + 5)
    counts, once = torch.zeros(vocab, dtype=torch.float64), state.counts.tensor.clone()
    for start in range(0, draws, 2000):
        # One row drawn at 2,000 positions: rows of a step are different, but only counting would mind.
        at = places[start : start + 2000]
        state.counts.tensor.copy_(once)
        tokens = step_at(state, row.repeat(len(at), 1), request, at)
        counts += torch.bincount(tokens.cpu(), minlength=vocab)
    want = reference(row, request)
    keep = want > 0
    assert counts[~keep].sum() == 0
    want = want * draws
    chi = (((counts - want) ** 2)[keep] / want[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    # Wilson-Hilferty's approximation of the quantile; 4.75 is the normal's at 1e-6.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit, (chi, limit)


def step_at(state, logits, request, positions):
    """Draws of one request at many positions, as if its last outputs were the same at each."""
    rows = np.zeros(len(positions), np.int64)
    ids = torch.tensor(request.ids, dtype=torch.int32)
    history = ids[-1].repeat(1, int(positions[-1]) + 1).to(DEVICE)
    early = np.full(len(positions), len(request.ids))
    needs = state.needs(rows, early)
    batch = SampleBatch(
        torch.tensor(rows, device=DEVICE), torch.tensor(positions, device=DEVICE), rows, early, history, needs
    )
    return sample(logits.to(DEVICE), state, batch).tokens


def reference(row, request):
    """The distribution of ``request`` by its definition, float64."""
    p, x = request.params, row.clone()
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -math.inf
    x[[6, 12]] = -math.inf  # its bad words, as its last output is 5
    if p.min_tokens:
        x[request.suppressed] = -math.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    x = plain_penalties(x, request).double() / p.temperature
    probs = x.softmax(-1)
    keep = probs >= p.min_p * probs.max()
    if p.top_k:
        keep &= x >= x.sort(descending=True).values[p.top_k - 1]
    probs = torch.where(keep, probs, 0.0) / probs[keep].sum()
    above = torch.stack([probs[probs > q].sum() for q in probs])
    probs = torch.where(above < p.top_p, probs, 0.0)
    return probs / probs.sum()
