"""The sampler: noise, filters, distribution, and that a draw depends on (seed, position, logits) alone."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sampler_rows import DEVICE, Request, state_of, step

from quire.gpu_worker.kernels import sampling
from quire.gpu_worker.sampling.sampler import greedy
from quire.gpu_worker.sampling.sampling_state import PLAIN, SamplingNeeds
from quire.proto.params import SamplingParams


def run(logits, params, seeds, positions, rows=None):
    """Sample one token for each row of ``logits`` through a fresh state; returns a list."""
    requests = [Request(p, seed) for p, seed in zip(params, seeds, strict=True)]
    state = state_of(requests, logits.shape[1], rows)
    before = logits.clone()
    tokens, logprobs, chosen, _ = step(state, logits.to(DEVICE), requests, rows, positions=positions)
    assert tokens.dtype == torch.int32 and logprobs is None
    if chosen is not None:
        assert np.array_equal(chosen, before.numpy()[np.arange(len(before)), tokens], equal_nan=True)
    return tokens.tolist()


def needs_of(state, *rows):
    return state.needs(np.array(rows, np.int64), np.full(len(rows), 1))


def philox_reference(counter, key):
    """Philox4x32-10 by the book, one counter at a time."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise_reference(seed, position, token):
    """G in double precision, from v held below one as documented."""
    seed %= 2**64
    x = philox_reference((position, token // 4, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
    v = min((float(np.float32(x)) + 0.5) * 2**-32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter, key, words):
    assert tuple(philox_reference(counter, key)) == words
    assert sampling.philox(*counter, *key) == words
    arrays = sampling.philox(*(np.array([c], dtype=np.uint64) for c in counter), *key)
    assert tuple(int(w[0]) for w in arrays) == words


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1, -7])
def test_noise_follows_the_formula(seed):
    tokens = [0, 1, 2, 3, 4, 1000, 151935]
    signed = (seed + 2**63) % 2**64 - 2**63
    for position in (0, 1, 70000):
        got = sampling.gumbel_torch(
            torch.full((len(tokens),), signed), torch.full((len(tokens),), position), torch.tensor(tokens)
        )
        want = [noise_reference(seed, position, t) for t in tokens]
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-6, atol=2e-6)


def test_noise_is_finite_at_the_ends():
    x = np.array([0, 1, 2**24 - 1, 2**31, 2**32 - 129, 2**32 - 1], dtype=np.uint64)
    got = sampling._noise(x.astype(np.float32))
    assert np.isfinite(got).all()
    assert got[0] == pytest.approx(33 * math.log(2), abs=1e-5)
    assert got[0] < sampling.MAX_NOISE
    assert (np.diff(got) <= 0).all()


def test_noise_of_some_tokens_is_the_noise_of_all():
    key, vocab = np.array([[12345, 99]], dtype=np.uint64), 50_003
    everything = sampling._noise(sampling._Every(vocab).words_of(key[0], 17))
    some = np.flatnonzero(np.arange(vocab) % 7 == 3)
    got = sampling._noise_of(key.repeat(len(some), 0), np.full(len(some), 17), some)
    assert np.array_equal(got, everything[some])


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-math.inf] * 4]).to(DEVICE)
    assert greedy(logits).tolist() == [1, 0, 0]
    zero = SamplingParams(temperature=0)
    assert run(logits[:2], [zero, zero], [1, 2], [0, 0]) == [1, 0]
    # The same rows beside one that draws.
    assert run(logits, [zero, zero, SamplingParams()], [1, 2, 3], [0, 0, 0])[:2] == [1, 0]


def test_needs():
    params = [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    state = state_of([Request(SamplingParams(**p)) for p in params], 9, max_rows=8)
    assert needs_of(state, 0) is needs_of(state) is PLAIN
    assert needs_of(state, 0, 1) == SamplingNeeds(random=True) and not needs_of(state, 0, 1).threshold
    assert needs_of(state, 2) == SamplingNeeds(random=True, top_k=True)
    assert needs_of(state, 3).top_p and needs_of(state, 4, 0).min_p and needs_of(state, 4, 0).threshold


MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
]


def test_a_draw_does_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    count, vocab = 24, 3001
    logits = torch.randn(count, vocab, generator=generator) * 3
    params = [MIXED[i % len(MIXED)] for i in range(count)]
    seeds = [i * 7919 + 2**40 for i in range(count)]
    positions = [i * 3 for i in range(count)]
    together = run(logits, params, seeds, positions)
    for i in range(count):
        assert run(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]], rows=[5]) == [together[i]]
    order = torch.randperm(count, generator=generator).tolist()
    rows = torch.randperm(100, generator=generator)[:count].tolist()
    shuffled = run(
        logits[order], [params[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order], rows
    )
    assert shuffled == [together[i] for i in order]


def test_seed_and_position_matter():
    logits = torch.zeros(64, 1000)
    same = run(logits, [SamplingParams()] * 64, [5] * 64, [9] * 64)
    assert len(set(same)) == 1
    assert len(set(run(logits, [SamplingParams()] * 64, range(64), [9] * 64))) > 50
    assert len(set(run(logits, [SamplingParams()] * 64, [5] * 64, range(64)))) > 50
    high = run(logits[:2], [SamplingParams()] * 2, [5, 5 + 2**32], [9, 9])
    assert high[0] != high[1]


def test_fork_copies_parameters_with_new_seeds():
    drawn, greedy_ = SamplingParams(temperature=0.5, top_k=7), SamplingParams(temperature=0)
    state = state_of([Request(drawn, 100), Request(greedy_)], 500, max_rows=6)
    state.copy([0, 0, 1], [1, 2, 0], [101, 102, 0])
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = step(state, logits, [Request()] * 3, [1, 2, 0], positions=[0, 0, 0]).tokens
    assert got.tolist() == run(logits, [drawn, drawn, greedy_], [101, 102, 0], [0, 0, 0])


def keep_by_sorting(logits, p):
    """Which tokens may be drawn, by plain float64 sorting: the oracle of the threshold."""
    scaled = logits.double() / p.temperature
    keep = torch.ones(len(scaled), dtype=torch.bool)
    if p.min_p:
        keep &= scaled.exp() >= p.min_p * scaled.max().exp()
    if p.top_k:
        keep &= scaled >= scaled.sort(descending=True).values[min(p.top_k, len(scaled)) - 1]
    if p.top_p < 1:
        probs = torch.where(keep, scaled.exp(), 0.0)
        probs /= probs.sum()
        above = torch.stack([probs[scaled > s].sum() for s in scaled])
        keep &= above < p.top_p
    return keep


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("ties", [False, True])
def test_cut_keeps_what_sorting_keeps(spread, ties):
    logits = torch.randn(6, 401, generator=torch.Generator().manual_seed(3)) * spread
    if ties:
        logits = logits.round(decimals=1)
    grid = [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 400}, {"top_k": 1000}, {"top_p": 0.1}, {"top_p": 0.77},
        {"top_p": 0.999}, {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 30, "top_p": 0.6}, {"min_p": 0.02, "top_p": 0.5},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.9, "temperature": 1.7},
    ]  # fmt: skip
    for fields in grid:
        p = SamplingParams(**fields)
        state = state_of([Request(p)] * 6, 401, device="cpu")
        thresholds = sampling.threshold_numpy(logits, state.packed, p.min_p > 0, p.top_k > 0, p.top_p < 1)
        for row, lowest in zip(logits, thresholds, strict=True):
            kept = row * torch.tensor(1 / p.temperature, dtype=torch.float32) >= lowest
            assert torch.equal(kept, keep_by_sorting(row, p)), fields


@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_cut_of_a_large_vocabulary(spread):
    """The shortcuts for large vocabularies (a guess from a sample) find the exact values."""
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(4)) * spread
    for fields in ({"top_k": 1}, {"top_k": 50}, {"top_k": 40_000}, {"top_p": 0.5}, {"top_p": 0.95}):
        p = SamplingParams(**fields)
        state = state_of([Request(p)] * 2, 50_000, device="cpu")
        thresholds = sampling.threshold_numpy(logits, state.packed, False, p.top_k > 0, p.top_p < 1)
        for row, lowest in zip(logits, thresholds.tolist(), strict=True):
            ordered = row.sort(descending=True).values
            if p.top_k:
                want = ordered[p.top_k - 1]
            else:
                mass = ordered.double().exp().cumsum(0)
                want = ordered[int((mass < p.top_p * mass[-1]).sum())]
            assert lowest == want.item(), fields


def test_pruned_and_full_draws_agree():
    """Noise computed for likely tokens only gives the draw that noise for all tokens gives."""
    generator = torch.Generator().manual_seed(5)
    vocab = 12_000
    for spread in (1.0, 6.0, 12.0):
        logits = torch.randn(20, vocab, generator=generator) * spread
        got = run(logits, [SamplingParams()] * 20, range(20), range(20))
        tokens = torch.arange(vocab)
        for i, row in enumerate(logits):
            noise = sampling.gumbel_torch(torch.full_like(tokens, i), torch.full_like(tokens, i), tokens)
            assert got[i] == int((row + noise).argmax())


@pytest.mark.parametrize("allowed", [1, 3, 700, 4999, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.05, 4.0])
def test_bounds_find_the_winner_above_a_cut(allowed, spread):
    """Noise computed for the highest bounds first: also where few tokens, or none of those, may be drawn."""
    row = np.random.default_rng(8).standard_normal(5000).astype(np.float32) * np.float32(spread)
    lowest = np.sort(row)[-allowed]
    every = sampling._Every(len(row))
    for position in range(6):
        noise = sampling._noise(every.words_of(np.array([5, 6], np.uint64), position).copy())
        want = np.where(row >= lowest, row + noise, -np.inf).argmax()
        assert every.winner(row, row.max(), lowest) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.6, "top_k": 9, "top_p": 0.9}]
)
def test_draws_follow_the_distribution(fields):
    """20,000 draws against softmax over the kept tokens: chi-square below its 1 - 1e-6 quantile."""
    vocab, draws = 16, 20_000
    p = SamplingParams(**fields)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(6)) * 1.5
    tokens = run(row.repeat(draws, 1), [p] * draws, [42] * draws, range(draws))
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    keep = keep_by_sorting(row, p)
    assert counts[~keep].sum() == 0
    want = torch.where(keep, (row.double() / p.temperature).exp(), 0.0)
    want = want / want.sum() * draws
    chi = (((counts - want) ** 2)[keep] / want[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    # Wilson-Hilferty's approximation of the quantile; 4.75 is the normal's at 1e-6.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi < limit, (chi, limit)


def test_a_lone_allowed_token_is_always_drawn():
    logits = torch.full((500, 9), -math.inf)
    logits[:, 7] = 0.0
    assert run(logits, [SamplingParams()] * 500, range(500), range(500)) == [7] * 500


def test_tokens_stay_inside_the_vocabulary():
    """Whatever the logits, NaN included, the token is a valid index."""
    logits = torch.full((3, 10), math.nan)
    logits[1] = -math.inf
    logits[2] = math.inf
    for p in (SamplingParams(), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)):
        assert all(0 <= t < 10 for t in run(logits, [p] * 3, [1, 2, 3], [0, 1, 2]))


@pytest.mark.slow
def test_the_cpu_path_never_imports_triton():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import torch; from sampler_rows import *\n"
        "every = dict(top_k=2, logprobs=2, presence_penalty=1, allowed_token_ids=[1, 2], logit_bias={1: 2})\n"
        "r = [Request(SamplingParams(**every), bad_words=[[1, 2]])]\n"
        "step(state_of(r, 9), torch.zeros(1, 9), r); sys.exit('triton' in sys.modules)"
    )
    here = str(Path(__file__).parents[1] / "support")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([sys.executable, "-c", code, here], check=False, timeout=120, env=env).returncode == 0
