"""Masks, bad words, penalties, logprobs: Triton against the twins. Compiled where there is a GPU, else interpreted."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_device import DEVICE

pytest.importorskip("triton")

from sampler_rows import Request, state_of

from quire.gpu_worker.kernels import columns, logprobs, masks, penalties, sampling
from quire.gpu_worker.kernels.logprobs import Source
from quire.proto.params import SamplingParams

ROWS = [4, 1, 5, 0, 2]
FIELDS = [
    {"repetition_penalty": 1.3, "allowed_token_ids": [0, 31, 32, 40, 4098]},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": -0.25},
    {"top_k": 5, "temperature": 0.7},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.1, "presence_penalty": 1.0, "top_p": 0.9},
    {"temperature": 0, "allowed_token_ids": [3]},
]


class Case:
    """A step of five rows, on the host and on the device under test."""

    def __init__(self, vocab):
        generator = np.random.default_rng(vocab)
        ids = [generator.integers(0, vocab, 40).tolist() for _ in FIELDS]
        words = [[[int(t) for t in generator.integers(0, 3, n)] for n in (2, 3, 3, 4, 45)] for _ in FIELDS]
        self.requests = [
            Request(SamplingParams(**fields), 7, own[:25], [*own[25:], 0, 1, 2, 0], bad_words=some)
            for fields, own, some in zip(FIELDS, ids, words, strict=True)
        ]
        self.states = [state_of(self.requests, vocab, ROWS, device=device) for device in ("cpu", DEVICE)]
        self.rows = [torch.tensor(ROWS, device=device) for device in ("cpu", DEVICE)]
        self.params = [state.of(rows) for state, rows in zip(self.states, self.rows, strict=True)]
        wide = torch.randn(len(ROWS), vocab + 29, generator=torch.Generator().manual_seed(vocab)) * 3
        wide[:, 1] = 0.0
        wide[1, 2:4] = -math.inf
        wide[2] = wide[2].round()
        self.logits = [wide.clone().to(device)[:, :vocab] for device in ("cpu", DEVICE)]
        self.wide = wide

    def check(self):
        """The logits are the same on both sides, and so is what lies between the rows."""
        a, b = self.logits
        assert torch.equal(a, b.cpu())
        tail = b.as_strided((len(ROWS) - 1, 29), (b.stride(0), 1), b.shape[1])
        assert torch.equal(tail.cpu(), self.wide[:-1, -29:])
        assert not torch.equal(a, self.wide[:, : a.shape[1]])


SIZES = pytest.mark.parametrize("vocab", [5, 64, 4099])


@SIZES
def test_mask_bits_by_slot(vocab):
    case = Case(vocab)
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (len(ROWS), -(-vocab // 32) + 1)).astype(np.int32)
    words[2] = -1
    masks.mask_bits_numpy(case.logits[0], torch.from_numpy(words))
    masks.mask_bits(case.logits[1], torch.from_numpy(words).to(DEVICE))
    case.check()
    assert torch.equal(case.logits[0][2], case.wide[2, :vocab])


@SIZES
def test_mask_bits_by_row(vocab):
    case = Case(vocab)
    host, device = (state.allowed.tensor for state in case.states)
    masks.mask_bits_numpy(case.logits[0], host, case.rows[0], case.params[0])
    masks.mask_bits(case.logits[1], device, case.rows[1], case.params[1])
    case.check()
    assert torch.equal(case.logits[0][1], case.wide[1, :vocab])
    assert (~case.logits[0][4].isneginf()).nonzero().flatten().tolist() == [3]


@SIZES
def test_ban_words(vocab):
    case = Case(vocab)
    history = torch.full((max(ROWS) + 1, 60), -1, dtype=torch.int32)
    for row, request in zip(ROWS, case.requests, strict=True):
        history[row, : len(request.ids)] = torch.tensor(request.ids)
    for side, ban in enumerate((masks.ban_words_numpy, masks.ban_words)):
        device = case.rows[side].device
        words = case.states[side].step_words(np.array(ROWS))
        # Of growing outputs, so that some words do not fit in yet.
        places = torch.tensor([44, 43, 28, 26, 25], device=device)
        ban(case.logits[side], words, history.to(device), case.rows[side], places, case.params[side])
    case.check()


@SIZES
def test_penalise(vocab):
    case = Case(vocab)
    host, device = (state.counts.tensor for state in case.states)
    assert torch.equal(host, device.cpu())
    penalties.penalise_numpy(case.logits[0], host, case.rows[0], case.params[0])
    penalties.penalise(case.logits[1], device, case.rows[1], case.params[1])
    case.check()
    assert torch.equal(case.logits[0][[2, 4]], case.wide[[2, 4], :vocab])


def test_counts_on_the_device():
    case = Case(64)
    tokens = torch.tensor([3, 3, 9, 63, 0])
    for state, rows, params in zip(case.states, case.rows, case.params, strict=True):
        before = state.counts.tensor.clone()
        state.counts.count(rows, tokens.to(rows.device), params)
        changed = (state.counts.tensor - before).nonzero().tolist()
        assert changed == sorted([[4, 3], [1, 3], [0, 63]])


@SIZES
@pytest.mark.parametrize("processed", [False, True])
def test_stats_and_best(vocab, processed):
    case = Case(vocab)
    case.logits[0][3] = -math.inf
    case.logits[0][4, :3] = math.nan
    case.logits[1].copy_(case.logits[0])
    slots, tokens = torch.tensor([2, 0, 3, 4, 1]), torch.tensor([1, vocab - 1, 2, 0, 4])
    thresholds = sampling.threshold_numpy(case.logits[0][:3], case.params[0][:3], True, True, True)
    thresholds = torch.cat([thresholds, torch.full((2,), -math.inf)])
    sources = [
        Source(logits, slots.to(params.device), *((params, thresholds.to(params.device)) if processed else ()))
        for logits, params in zip(case.logits, case.params, strict=True)
    ]
    host = logprobs.stats_numpy(sources[0], tokens)
    device = logprobs.stats(sources[1], tokens.to(DEVICE))
    assert torch.equal(host[0], device[0].cpu()) and torch.equal(host[2], device[2].cpu())
    torch.testing.assert_close(host[1], device[1].cpu(), rtol=1e-6, atol=1e-6)
    for k in sorted({1, 4, vocab}):
        ids, values = logprobs.best_numpy(sources[0], k)
        got_ids, got_values = logprobs.best(sources[1], k)
        assert torch.equal(ids, got_ids.cpu()) and torch.equal(values, got_values.cpu())


def test_best_in_slices(monkeypatch):
    monkeypatch.setattr(logprobs, "_KEYS_AT_ONCE", 200)
    case = Case(64)
    host, device = (Source(x, torch.arange(5, device=x.device)) for x in case.logits)
    for a, b in zip(logprobs.best_numpy(host, 7), logprobs.best(device, 7), strict=True):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("nan", [9, sampling.DRAW_BLOCK + 9])
@pytest.mark.parametrize("cut", [False, True])
def test_nan_is_seen_behind_infinity(nan, cut):
    """In one block or in another, drawn or greedy: the row is refused, as the host's is."""
    logits = torch.zeros((2, sampling.DRAW_BLOCK + 20), device=DEVICE)
    logits[:, 5], logits[:, nan] = math.inf, math.nan
    rows = torch.arange(2, device=DEVICE)
    params = state_of([Request(SamplingParams(temperature=t)) for t in (1.0, 0.0)], 9, device=DEVICE).of(rows)
    thresholds = torch.full((2,), -math.inf, device=DEVICE) if cut else None
    for draw in (sampling.draw, sampling.draw_numpy):
        assert draw(logits, params, rows, thresholds).tolist() == [nan] * 2
    values, tokens = sampling.draw_part(logits, params, rows, 6)
    assert values.isnan().all() and tokens.tolist() == [nan + 6] * 2
    # Infinity wins over the largest number, and of two the first.
    logits[:, 3], logits[:, nan] = torch.finfo(torch.float32).max, math.inf
    assert sampling.draw(logits, params, rows, thresholds).tolist() == [5, 5]
    assert sampling.draw_part(logits, params, rows, 6)[0].tolist() == [math.inf] * 2


def test_no_kernel_reads_a_global_that_differs_from_itself():
    """At every launch Triton compares the globals that a kernel was compiled with: NaN never equals NaN, and the second
    launch fails."""
    import importlib

    from triton.language import constexpr

    from quire.gpu_worker import kernels

    names = sorted(path.stem for path in Path(kernels.__file__).parent.glob("*_jit.py"))
    found = []
    for name in names:
        module = importlib.import_module(f"{kernels.__name__}.{name}")
        values = {at: each.value for at, each in vars(module).items() if isinstance(each, constexpr)}
        found += values
        assert [at for at, value in values.items() if value != value] == [], name
    assert len(names) > 10 and len(found) > 10


def test_columns_have_one_layout():
    from quire.gpu_worker.kernels import logprobs_jit, masks_jit, penalties_jit, sampling_jit, threshold_jit

    for module in (sampling_jit, threshold_jit, masks_jit, penalties_jit, logprobs_jit):
        names = [name for name in vars(columns) if name.isupper() and hasattr(module, name)]
        assert names
        for name in names:
            assert getattr(module, name).value == getattr(columns, name), (module.__name__, name)
    assert penalties_jit.SEEN.value == penalties.SEEN
