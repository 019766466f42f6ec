"""Logprobs: values, strict ranks, order of ties, what each mode is of, and the groups by k."""

import math

import numpy as np
import pytest
import torch
from sampler_rows import DEVICE, Request, state_of, step

from quire.gpu_worker.sampling.logprobs import token_logprobs
from quire.proto.params import SamplingParams

VOCAB = 401


def some_logits(rows, ties=False, vocab=VOCAB, seed=0):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


def ordered(row, k):
    """The k best ids, equals by id: the oracle."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def check(ids, values, rank, logits, token, k, softmax=True):
    """One token's record against float64."""
    row = logits.double()
    want = [token, *ordered(row.tolist(), k)]
    assert ids.tolist() == want
    reference = row.log_softmax(-1) if softmax else row
    torch.testing.assert_close(values.double().cpu(), reference[want], rtol=1e-6, atol=3e-6)
    assert rank.item() == 1 + int((row > row[token]).sum())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [0, 1, 5, 64, 200, -1, 9999])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_token_logprobs(ties, k, mode):
    logits = some_logits(4, ties)
    tokens = torch.tensor([0, 17, VOCAB - 1, int(logits[3].argmax())])
    ids, values, ranks = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), k, mode)
    count = VOCAB if k < 0 else min(k, VOCAB)
    assert ids.dtype == ranks.dtype == torch.int32 and values.dtype == torch.float32
    assert ids.shape == values.shape == (4, count + 1)
    for row in range(4):
        softmax = mode == "raw_logprobs"
        check(ids[row], values[row], ranks[row], logits[row], tokens[row].item(), count, softmax)


def test_token_logprobs_of_a_large_vocabulary():
    """Shortcuts for large rows find the same tokens, where values all differ, tie, or are all one."""
    vocab = 151_936
    logits = some_logits(5, vocab=vocab)
    logits[1] = logits[1].round()
    logits[2] = 1.5
    logits[3] = -math.inf
    logits[3, 140_000:140_005] = 0.0
    logits[4, 7:] = 0.0
    tokens = torch.tensor([5, 6, 100_000, 140_004, 151_935])
    for k in (3, 20, 500):
        ids, values, ranks = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), k, "raw_logprobs")
        best = logits.sort(dim=1, descending=True, stable=True)
        assert torch.equal(ids[:, 1:].cpu().long(), best.indices[:, :k])
        want = torch.cat([logits.gather(1, tokens[:, None]), best.values[:, :k]], 1) - logits.logsumexp(1, True)
        torch.testing.assert_close(values.cpu(), want, rtol=1e-6, atol=3e-6)
        assert ranks.tolist() == [1 + int((row > row[t]).sum()) for row, t in zip(logits, tokens, strict=True)]


def test_logits_that_are_no_numbers():
    logits = some_logits(4)
    logits[0] = math.nan
    logits[1, 3:300] = math.nan
    logits[2] = -math.inf
    logits[3, 8] = math.inf
    tokens = torch.tensor([0, 400, 1, 8])
    ids, values, ranks = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), 4, "raw_logprobs")
    assert not values.isnan().any() and ((ids >= 0) & (ids < VOCAB)).all() and (ranks >= 1).all()
    want = torch.where(logits[1].isnan(), -math.inf, logits[1])
    check(ids[1], values[1], ranks[1], want, 400, 4)
    assert ids[2].tolist() == [1, 0, 1, 2, 3] and values[2].isneginf().all()


def collect(sampled):
    """slot -> (k, ids, values, rank)."""
    found = {}
    for slots, k, ids, values, ranks in sampled.logprobs or []:
        assert ids.shape == values.shape == (len(slots), k + 1) and list(slots) == sorted(slots)
        for at, slot in enumerate(slots.tolist()):
            assert slot not in found
            found[slot] = k, ids[at].cpu(), values[at].cpu(), ranks[at].cpu()
    return found


KS = [None, 0, 3, 5, 3, 100, -1, 0, 64, None]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("changes", [False, True])
def test_ks_mix(mode, changes):
    """Each slot gets its own k, of the logits as the model gave them, whatever is done to them afterwards."""
    requests = [Request(SamplingParams(logprobs=k, temperature=1.5, top_k=9), seed=s) for s, k in enumerate(KS)]
    if changes:
        requests[3].params.presence_penalty = 2.0
        requests[4].params.logit_bias = {7: 50.0}
        requests[0].params.allowed_token_ids = [1, 2]
    logits = some_logits(len(KS))
    got = step(state_of(requests, VOCAB, mode=mode), logits.clone().to(DEVICE), requests)
    found = collect(got)
    assert sorted(found) == [slot for slot, k in enumerate(KS) if k is not None]
    assert got.tokens[4] == 7 or not changes
    for slot, (k, ids, values, rank) in found.items():
        assert k == (VOCAB if KS[slot] == -1 else KS[slot])
        check(ids, values, rank, logits[slot], got.tokens[slot].item(), k, mode == "raw_logprobs")


def test_raw_is_after_the_grammar_and_before_the_rest():
    logits, banned = some_logits(1), list(range(100, 200))
    mask = np.packbits(~np.isin(np.arange(416), banned), bitorder="little").view(np.int32)[None]
    request = Request(SamplingParams(logprobs=4, logit_bias={3: 80.0}))

    def edit(x):
        x[:, 9] += 200.0

    got = step(
        state_of([request], VOCAB), logits.clone().to(DEVICE), [request], mask=torch.tensor(mask).to(DEVICE), edit=edit
    )
    logits[:, banned] = -math.inf
    assert got.tokens.tolist() == [9]
    _, ids, values, rank = collect(got)[0]
    check(ids, values, rank, logits[0], 9, 4)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_processed_is_what_is_drawn_from(mode):
    fields = [
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 0, "presence_penalty": 1.0},
        {"top_p": 0.6, "logit_bias": {5: 2.0}},
    ]
    requests = [Request(SamplingParams(logprobs=VOCAB, **f), seed=3, outputs=[4]) for f in fields]
    logits = some_logits(4)
    got = step(state_of(requests, VOCAB, mode=mode), logits.clone().to(DEVICE), requests)
    want = logits.clone()
    want[2, 4] -= 1.0
    want[3, 5] += 2.0
    want[0] /= 0.5
    want[1] /= 2.0
    want[1, want[1] < want[1].sort().values[-5]] = -math.inf
    order = want[3].sort(descending=True)
    mass = order.values.softmax(-1).cumsum(-1)
    want[3, order.indices[1 + int((mass < 0.6).sum()) :]] = -math.inf
    for slot, (k, ids, values, rank) in collect(got).items():
        check(ids, values, rank, want[slot], got.tokens[slot].item(), k, mode == "processed_logprobs")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_beams(mode):
    """Always log-softmax after masks and penalties, of max(2 * width, logprobs) tokens; others keep their mode."""

    def beam(**fields):
        return Request(SamplingParams(temperature=0, use_beam_search=True, **fields), prompt=[1], outputs=[2])

    requests = [beam(n=3), beam(n=2, logprobs=7, frequency_penalty=2.0, logit_bias={9: 1.0}), beam(n=2, logprobs=1),
                Request(SamplingParams(logprobs=4)), beam(n=2, logprobs=-1)]  # fmt: skip
    state = state_of(requests, VOCAB, mode=mode)
    logits = some_logits(5)
    counts = state.counts.tensor.clone()
    got = step(state, logits.clone().to(DEVICE), requests)
    assert torch.equal(counts, state.counts.tensor)
    edited = logits.clone()
    edited[1, 2] -= 2.0
    edited[1, 9] += 1.0
    found = collect(got)
    assert [found[slot][0] for slot in range(5)] == [6, 7, 4, 4, VOCAB]
    for slot, (k, ids, values, rank) in found.items():
        token = got.tokens[slot].item()
        assert slot == 3 or token == edited[slot].argmax()
        check(ids, values, rank, edited[slot], token, k, slot != 3 or mode == "raw_logprobs")
    assert collect(step(state_of(requests[:1], 4), some_logits(1, vocab=4).to(DEVICE), requests[:1]))[0][0] == 4


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_named_ids_beside_rows_of_other_kinds(mode):
    """The named ids alone, best first, with the values they have anyway; a fork copies them, a dropped row forgets."""
    named = [90, 3, 41]
    asked = [{"logprobs": 4}, {"logprob_token_ids": named}, {}, {"logprob_token_ids": [7]}]
    logits = some_logits(4)

    def told(fields):
        requests = [Request(SamplingParams(temperature=1.5, **each), seed=s) for s, each in enumerate(fields)]
        state = state_of(requests, VOCAB, mode=mode)
        return state, collect(step(state, logits.clone().to(DEVICE), requests))

    whole, (state, found) = told([{"logprobs": -1}] * 4)[1], told(asked)
    assert sorted(found) == [0, 1, 3]
    for slot, ids in ((1, named), (3, [7])):
        values = dict(zip(whole[slot][1].tolist(), whole[slot][2].tolist(), strict=True))
        mine = dict(zip(found[slot][1][1:].tolist(), found[slot][2][1:].tolist(), strict=True))
        assert list(mine) == sorted(ids, key=values.__getitem__, reverse=True)
        assert mine == pytest.approx({each: values[each] for each in ids}, abs=1e-5)
        assert found[slot][3] == whole[slot][3] and found[slot][1][0] == whole[slot][1][0]
    state.copy([1], [0], [5])
    state.drop([1])
    assert state.listed(np.array([0, 1]))[0].tolist() == named and 1 not in state.listed(np.array([0, 1]))
