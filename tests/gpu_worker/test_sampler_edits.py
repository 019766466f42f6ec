"""What changes logits: each operation against transformers' processor or plain torch, alone and combined."""

import math

import numpy as np
import pytest
import torch
import transformers
from sampler_rows import DEVICE, Request, bits_of, plain_penalties, state_of, step
from sampler_rows import real_logits as logits_of
from transformers.generation import logits_process as hf

from quire.proto.params import SamplingParams

VOCAB = 613
SOUND_ORACLE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)
"""Before, transformers' biases of sequences refuse token 0, and forget words where several apply."""


def real_logits(rows, seed=0):
    return logits_of(rows, VOCAB, seed)


def edited(requests, logits, mask=None, edit=None):
    """The logits as the draw gets them: every request greedy, so that nothing else happens to them."""
    logits = logits.clone().to(DEVICE)
    tokens = step(state_of(requests, logits.shape[1]), logits, requests, mask=mask, edit=edit).tokens
    assert torch.equal(tokens, logits.argmax(-1))
    return logits.cpu()


def greedy(**fields):
    return SamplingParams(temperature=0, max_tokens=None, **fields)


def tokens(count, seed, vocab=VOCAB):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("penalty", [0.4, 1.3, 5.0])
@pytest.mark.parametrize("split", [0, 20, 40])
def test_repetition_penalty(penalty, split):
    ids, logits = tokens(40, 1), real_logits(1)
    request = Request(greedy(repetition_penalty=penalty), prompt=ids[:split], outputs=ids[split:])
    want = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits.clone())
    assert torch.equal(edited([request], logits), want)


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.7}, {"frequency_penalty": -2.0}, {"presence_penalty": 1.5}, {"presence_penalty": -1.0},
        {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    ],
)  # fmt: skip
def test_penalties_count_the_output_alone(fields):
    logits = real_logits(1)
    request = Request(greedy(**fields), prompt=[5, 5, 6, 7], outputs=[6, 8, 8, 8, 9, *tokens(30, 2)])
    assert torch.equal(edited([request], logits)[0], plain_penalties(logits[0], request))


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_absurd_repetition_penalties_stay_numbers(penalty):
    logits = real_logits(1)
    logits[0, 3:6] = torch.tensor([0.0, -math.inf, 2.0])
    got = edited([Request(greedy(repetition_penalty=penalty), prompt=[3, 4, 5])], logits)[0]
    assert not got.isnan().any() and got[4] == -math.inf


def test_living_through_outputs_is_being_admitted_with_them():
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1, temperature=2.0)
    prompt = tokens(20, 3, 30)
    lived = Request(params, 7, prompt)
    state = state_of([lived], 30)
    for seed in range(25):
        logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
        fresh = state_of([lived], 30)
        assert torch.equal(fresh.counts.tensor, state.counts.tensor)
        got, again = (step(s, logits.clone().to(DEVICE), [lived]).tokens.item() for s in (state, fresh))
        assert got == again
        lived.outputs.append(got)
    assert len(set(lived.outputs)) < len(lived.outputs)
    # A new owner of the row finds nothing of the old.
    other = Request(params, 1, [1], [2, 2])
    state.admit(0, *other.admit())
    assert torch.equal(state.counts.tensor, state_of([other], 30).counts.tensor)


def test_counts_follow_forks_and_appends():
    params = SamplingParams(presence_penalty=1.0)
    beams = SamplingParams(temperature=0, use_beam_search=True, n=2, frequency_penalty=1.0)
    a, b, c = Request(params, 1, [1], [2, 3]), Request(params, 2, [4]), Request(SamplingParams(), 3)
    state = state_of([a, b, c], 10, max_rows=6)
    before = state.counts.tensor.clone()
    state.copy([0, 1, 0, 2], [1, 0, 3, 4], [5, 6, 7, 8])
    after = state.counts.tensor
    assert torch.equal(after[[0, 1, 3]], before[[1, 0, 0]]) and not after[4].any()
    beam = Request(beams, prompt=[1], outputs=[5])
    state.admit(5, *beam.admit())
    got = step(state, torch.zeros(1, 10).to(DEVICE), [beam], [5])
    assert got.tokens.item() == 0  # the best, which is not counted: 5 has been penalised
    assert state.counts.tensor[5].tolist() == counts_of(beam, 10)
    state.append(np.array([5, 4]), np.array([0, 1]))
    beam.outputs.append(0)
    assert state.counts.tensor[5].tolist() == counts_of(beam, 10) and not state.counts.tensor[4].any()


def counts_of(request, vocab):
    """What a row's counts must be."""
    return [request.outputs.count(t) + (1 << 30) * (t in request.prompt) for t in range(vocab)]


@pytest.mark.skipif(not SOUND_ORACLE, reason="transformers before 5.18 refuses token 0")
def test_logit_bias():
    bias = {0: 100.0, 5: -100.0, 7: 0.25, VOCAB - 1: -1.5, VOCAB + 3: 9.0}
    logits = real_logits(2)
    got = edited([Request(greedy(logit_bias=dict(bias))), Request(greedy())], logits)
    sequence = hf.SequenceBiasLogitsProcessor([[[t], v] for t, v in bias.items() if t < VOCAB])
    assert torch.equal(got[:1], sequence(torch.tensor([[0]]), logits[:1].clone()))
    assert torch.equal(got[1], logits[1])


def test_allowed_token_ids():
    logits = real_logits(2)
    allowed = [3, 31, 32, 400, VOCAB - 1]
    got = edited([Request(greedy(allowed_token_ids=[*allowed, VOCAB + 1])), Request(greedy())], logits)
    want = hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1)(torch.tensor([[0]]), logits[:1].clone())
    assert torch.equal(got[:1], want) and torch.equal(got[1], logits[1])


WORDS = [[7], [7, 8], [8, 9, 10], [9, 10, 11], [10, 12], [3, 3, 3], [5, 6, 5, 6, 13], [20, 14], [30, 31, 15]]


@pytest.mark.parametrize(
    ("outputs", "banned"),
    [
        ([], {7}),
        ([7], {7, 8}),
        ([8, 9], {7, 10}),
        ([8, 9, 10], {7, 11, 12}),
        ([3], {7}),
        ([3, 3], {7, 3}),
        ([1, 5, 6, 5, 6], {7, 13}),
        ([5, 6, 5], {7}),
        ([6, 5, 6], {7}),
        ([1, 20], {7, 14}),
        ([31], {7}),
    ],
)
def test_bad_words(outputs, banned):
    """The prompt, which ends in beginnings of words, is no part of a match."""
    logits = real_logits(2)
    requests = [Request(greedy(), prompt=[5, 6, 5, 3, 30, 20], outputs=outputs, bad_words=WORDS), Request(greedy())]
    got = edited(requests, logits)
    assert set(np.flatnonzero(got[0].isneginf())) == banned
    kept = sorted(set(range(VOCAB)) - banned)
    assert torch.equal(got[0, kept], logits[0, kept]) and torch.equal(got[1], logits[1])

    if outputs and SOUND_ORACLE:
        processor = hf.NoBadWordsLogitsProcessor(WORDS, eos_token_id=None)
        want = processor(torch.tensor([outputs]), logits[:1].clone())
        assert torch.equal(want, got[:1])


def test_bad_words_of_many_rows_and_lengths():
    generator = np.random.default_rng(0)
    requests = []
    for _ in range(20):
        words = [generator.integers(0, 3, generator.integers(1, 6)).tolist() for _ in range(30)]
        outputs = generator.integers(0, 3, generator.integers(0, 9)).tolist()
        requests.append(Request(greedy(), prompt=[0, 1, 2, 0], outputs=outputs, bad_words=words))
    logits = real_logits(len(requests))
    got = edited(requests, logits)
    for row, request in enumerate(requests):
        want = logits[row].clone()
        for *prefix, last in request.bad_words:
            if not prefix or request.outputs[-len(prefix) :] == prefix:
                want[last] = -math.inf
        assert torch.equal(got[row], want)


def test_bad_words_outside_the_vocabulary_change_nothing():
    logits = real_logits(1)
    request = Request(greedy(), outputs=[1], bad_words=[[VOCAB], [1, VOCAB + 7], [VOCAB, 2], []])
    assert torch.equal(edited([request], logits), logits)


def test_min_tokens_ends_at_its_boundary():
    logits, eos = real_logits(1), [2, 9, VOCAB]
    for count in range(5):
        request = Request(greedy(min_tokens=3), prompt=[1, 1, 1], outputs=[4] * count, suppressed=eos)
        want = hf.MinNewTokensLengthLogitsProcessor(3, 3, [2, 9])(torch.tensor([request.ids]), logits.clone())
        assert torch.equal(edited([request], logits), want), count
        assert want[0, 2].isneginf() == (count < 3)


def test_min_tokens_in_one_row_that_lives():
    """The lists that are kept from step to step change when the row's time is over, beside a row whose do not."""
    waits = Request(greedy(min_tokens=2, logit_bias={9: 1.0}), suppressed=[2, 9])
    other = Request(greedy(logit_bias={1: 2.0}))
    state = state_of([waits, other], VOCAB)
    for count in range(4):
        logits = real_logits(2).to(DEVICE)
        before = logits.clone()
        step(state, logits, [waits, other])
        changed = (logits != before).nonzero().tolist()
        assert changed == ([[0, 2], [0, 9], [1, 1]] if count < 2 else [[0, 9], [1, 1]])
        assert logits[0, 9].isneginf().item() == (count < 2)
        waits.outputs.append(5)


def test_a_ban_beats_a_bias():
    request = Request(greedy(logit_bias={3: 100.0, 4: 100.0, 5: 100.0}, min_tokens=1, allowed_token_ids=[2, 3, 4]))
    request.bad_words, request.suppressed = [[3]], [4]
    got = edited([request], real_logits(1))
    assert got[0, 3:6].isneginf().all() and got[0].argmax() == 2


def test_grammar_mask_and_processors_at_their_places():
    logits = real_logits(3)
    seen = []

    def edit(x):
        seen.append(x.cpu().clone())
        x[1] *= 2
        x[0, 77] = 50.0

    ids = [5, 9]
    requests = [
        Request(greedy(logit_bias={7: 1.0}, repetition_penalty=2.0), prompt=ids),
        Request(greedy()),
        Request(greedy(presence_penalty=1.0), outputs=[6]),
    ]
    everything = range(-(-VOCAB // 32) * 32)
    got = edited(requests, logits, bits_of([[5, 7, 9, 77], everything, everything], -(-VOCAB // 32)), edit)
    want = torch.full_like(logits[0], -math.inf)
    want[[5, 7, 9, 77]] = logits[0, [5, 7, 9, 77]]
    want[7] += 1.0
    assert torch.equal(seen[0][0], want) and torch.equal(seen[0][1:], logits[1:])
    want[77] = 50.0
    want = hf.RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([ids]), want[None])
    assert torch.equal(got[:1], want)
    assert torch.equal(got[1], logits[1] * 2) and (got[2] != logits[2]).nonzero().tolist() == [[6]]


def test_contradictions_name_a_token():
    nothing = Request(SamplingParams(allowed_token_ids=[4], logprobs=3), bad_words=[[4]])
    greedy_ = Request(greedy(allowed_token_ids=[4], logprobs=3), bad_words=[[4]])
    filtered = Request(SamplingParams(allowed_token_ids=[4], top_k=2, top_p=0.5, min_p=0.1), bad_words=[[4]])
    requests = [nothing, greedy_, filtered]
    for mode in ("raw_logprobs", "processed_logprobs", "processed_logits"):
        got = step(state_of(requests, VOCAB, mode=mode), real_logits(3).to(DEVICE), requests)
        assert got.tokens.tolist() == [0, 0, 0]
        assert not any(group.values.isnan().any() for group in got.logprobs)


def test_combined_as_transformers_chains_them():
    """bias, bad words, min_tokens, repetition penalty; then temperature, min_p, top_k, top_p in one distribution."""
    logits, ids = real_logits(1, seed=4), tokens(30, 5)
    fields = {"logit_bias": {11: 3.0, 400: -2.0}, "min_tokens": 40, "repetition_penalty": 1.4, "temperature": 0.8,
              "top_k": 60, "top_p": 0.85, "min_p": 0.001}  # fmt: skip
    params = SamplingParams(**fields, max_tokens=None, logprobs=VOCAB)
    request = Request(params, prompt=ids[:10], outputs=ids[10:], suppressed=[2, 17], bad_words=[[ids[-1], 19], [18]])
    chain = [
        hf.NoBadWordsLogitsProcessor(request.bad_words, eos_token_id=None),
        hf.MinNewTokensLengthLogitsProcessor(10, 40, [2, 17]),
        hf.SequenceBiasLogitsProcessor([[[11], 3.0], [[400], -2.0]]),
        hf.RepetitionPenaltyLogitsProcessor(1.4),
        hf.TemperatureLogitsWarper(0.8),
        hf.MinPLogitsWarper(0.001),
        hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.85),
    ]
    want = logits.clone()
    for each in chain:
        want = each(torch.tensor([ids]), want)
    got = step(state_of([request], VOCAB, mode="processed_logprobs"), logits.clone().to(DEVICE), [request])
    (group,) = got.logprobs
    values = torch.full((VOCAB,), math.nan)
    values[group.ids[0, 1:].cpu().long()] = group.values[0, 1:].cpu()
    reference = want[0].log_softmax(-1)
    assert torch.equal(values.isneginf(), reference.isneginf())
    torch.testing.assert_close(values, reference, rtol=0, atol=2e-5)


def test_nothing_is_allocated_before_it_is_used():
    state = state_of([Request(SamplingParams(top_p=0.5, logprobs=2, logit_bias={1: 1.0}), bad_words=[[1, 2]])], VOCAB)
    assert state.counts._tensor is None and state.allowed._tensor is None
    state.drop([0])
    assert not state._edits
