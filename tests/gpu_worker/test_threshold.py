"""The threshold's passes: by every way the twin's value, to the bit, and few readings of the logits."""

import math
import random

import numpy as np
import pytest
import torch
from kernel_device import DEVICE
from sampler_rows import Request, real_logits, state_of, step

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode

from quire.gpu_worker.kernels import marks, sampling, threshold
from quire.gpu_worker.kernels.columns import INV_T
from quire.gpu_worker.layers import dispatch
from quire.proto.params import SamplingParams

ROWS = [
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=900),
    SamplingParams(temperature=1.0, top_k=900, top_p=0.5),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=0.6, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.0),
]
ALL = (True, True, True)


def params_of(rows):
    return state_of([Request(p, 7 + i) for i, p in enumerate(rows)], 9, device=DEVICE).of(
        torch.arange(len(rows), device=DEVICE)
    )


def logits_of(kind, vocab):
    """Logits as models give them, nearly equal ones, few in a masked row, all equal ones, and outliers on both ends."""
    rows = len(ROWS)
    draw = torch.Generator().manual_seed(vocab)
    flat = torch.randn(rows, vocab, generator=draw) * 0.05
    real = real_logits(rows, vocab)
    few = torch.full((rows, vocab), -math.inf)
    few[:, vocab // 2 : vocab // 2 + 7] = real[:, :7]
    wild = real.clone()
    wild[:, 5], wild[:, 9:40], wild[:, 77] = -1e30, -1e4, real.max() + 30
    return {"real": real, "flat": flat, "few": few, "equal": torch.ones(rows, vocab), "wild": wild}[kind].to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "flat", "few", "equal", "wild"])
def test_every_way_gives_the_same(monkeypatch, kind):
    """Few candidates or many, one pass or two, one chunk or several: the twin's bits, which no sum's order changes."""
    logits, packed = logits_of(kind, 3001), params_of(ROWS)
    want = sampling.threshold_numpy(logits, packed, *ALL)
    for chunk, room in ((8192, 8192), (1024, 64)):
        monkeypatch.setattr(threshold, "CHUNK", chunk)
        monkeypatch.setattr(threshold, "ROOM", room)
        for name in ("PEAKS_BLOCK", "SEARCH_BLOCK", "GATHER_BLOCK"):
            monkeypatch.setattr(threshold, name, 512)
        got = threshold.threshold(logits, packed, *ALL)
        assert torch.equal(got, want), (chunk, room)


def exact(scaled, p):
    """The definition on one row of scaled logits, float32 [V], with masses as integers: nothing is rounded but exp."""
    scaled = np.sort(scaled)[::-1]
    top, lowest = scaled[0], np.float32(-np.inf)
    if p.min_p > 0:
        lowest = top + np.float32(np.log(p.min_p))
    if 0 < p.top_k < len(scaled):
        lowest = max(lowest, scaled[p.top_k - 1])
    if p.top_p < 1:
        left = scaled[scaled >= lowest]
        masses = (np.exp(left - top) * np.float32(2**42)).astype(np.int64)
        share = max(int(np.float64(masses.sum()) * np.float64(np.float32(p.top_p))), 1)
        lowest = max(lowest, left[int(np.searchsorted(masses.cumsum(), share))])
    return lowest


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="exp is numpy's in the interpreter")
@pytest.mark.parametrize("seed", range(6))
def test_any_row_has_the_exact_threshold(monkeypatch, seed):
    """Random rows, filters, chunks and numbers of candidates, where a sum that was rounded would show."""
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    monkeypatch.setattr(threshold, "CHUNK", choose.choice([512, 1024]))
    monkeypatch.setattr(threshold, "ROOM", choose.choice([16, 128, 1024]))
    for name in ("PEAKS_BLOCK", "SEARCH_BLOCK", "GATHER_BLOCK"):
        monkeypatch.setattr(threshold, name, 512)
    rows = [
        SamplingParams(
            temperature=choose.choice([0.01, 0.5, 1.0, 2.0]), top_k=choose.choice([0, 1, 20, 700]),
            top_p=choose.choice([1.0, 1e-9, 0.5, 0.9, 0.9999999]), min_p=choose.choice([0.0, 0.0, 0.001, 1.0]),
        )
        for _ in range(6)
    ]  # fmt: skip
    logits = torch.randn(6, choose.choice([1, 300, 1100, 1500]), generator=draw) * choose.choice(
        [1e-6, 0.05, 5.0, 1e20]
    )
    logits = choose.choice([logits, logits.bfloat16().float(), logits.round()])
    logits[1::2] = logits[1::2].masked_fill(torch.rand(logits[1::2].shape, generator=draw) < 0.9, -math.inf)
    packed = params_of(rows)
    scaled = logits * packed.view(torch.float32)[:, [INV_T]]
    sound = scaled.max(-1).values.isfinite().tolist()
    got = threshold.threshold(logits, packed, *ALL).tolist()
    for p, row, value, finite in zip(rows, scaled.numpy(), got, sound, strict=True):
        assert not finite or value == exact(row, p), p


def test_a_min_p_of_the_company_is_not_looked_at():
    """A row without a min_p draws its infinite logit beside one that has a min_p, as it does alone."""
    logits = torch.zeros((2, 9), device=DEVICE)
    logits[0, 5] = math.inf
    packed, positions = params_of([SamplingParams(), SamplingParams(min_p=0.1)]), torch.arange(2, device=DEVICE)
    for find in (threshold.threshold, sampling.threshold_numpy):
        found = find(logits, packed, True, False, False)
        assert found[0] == -math.inf and found[1] > -math.inf
        assert sampling.draw(logits, packed, positions, found)[0] == 5


def test_bfloat16_is_read_as_it_is():
    """Logits of two bytes give what their float32 copies give: the threshold and the draw."""
    logits, packed = logits_of("real", 2050)[:4].bfloat16(), params_of(ROWS[:4])
    positions = torch.arange(4, device=DEVICE)
    found = threshold.threshold(logits, packed, *ALL)
    assert torch.equal(found, threshold.threshold(logits.float(), packed, *ALL))
    tokens = sampling.draw(logits, packed, positions, found)
    assert torch.equal(tokens, sampling.draw(logits.float(), packed, positions, found))
    for a, b in zip(marks.marked(logits, tokens), marks.marked(logits.float(), tokens), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE == "cuda", reason="counted in the interpreter")
@pytest.mark.parametrize(("at", "most"), [(0, 4), (1, 4), (2, 1), (3, 4), (6, 4)])
def test_rows_are_read_few_times(monkeypatch, at, most):
    """Each reading of a row is one of memory on a GPU: a bisection took 15 to 25."""
    from triton.runtime.interpreter import InterpreterBuilder

    vocab, read = 9001, 0
    logits, params = logits_of("real", vocab)[:1], ROWS[at]
    first, load = logits.data_ptr(), InterpreterBuilder.create_masked_load

    def counted(self, ptrs, mask, *rest):
        nonlocal read
        inside = (ptrs.data >= first) & (ptrs.data < first + vocab * logits.itemsize)
        read += int((inside & mask.data).sum())
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    sampling.threshold(logits, params_of([params]), params.min_p > 0, params.top_k > 0, params.top_p < 1)
    assert vocab <= read <= most * vocab


@pytest.mark.skipif(DEVICE == "cuda", reason="looked at in the interpreter")
@pytest.mark.parametrize("at", [0, 1])
def test_what_the_search_found_too_high_is_not_looked_at_again(monkeypatch, at):
    """All values from the lower bound up were gathered; the edge is looked for below the upper bound all the same."""
    from quire.gpu_worker.kernels import threshold_jit

    seen, real = [], threshold_jit._edge_among

    def noted(keys, weights, base, lo, hi, target):
        seen.append(int((keys.handle.data >= hi.handle.data).sum()))
        return real(keys, weights, base, lo, hi, target)

    monkeypatch.setattr(threshold_jit, "_edge_among", noted)
    threshold.threshold(logits_of("real", 900)[:1], params_of(ROWS[at : at + 1]), False, at == 0, at == 1)
    assert len(seen) == 1 and seen[0] > 0


class Copies(TorchDispatchMode):
    """Sees whether anything is converted to a float32 tensor of ``size`` elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.float32:
            self.seen += out.numel() >= self.size
        return out


FIELDS = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    {"temperature": 0.8, "presence_penalty": 0.5, "allowed_token_ids": [*range(40)]},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {3: 4.5}},
]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3), slice(0, 5), slice(3, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpus_step_widens_where_it_must_alone(monkeypatch, rows, masked):
    """bfloat16 logits give a CPU's tokens of the same logits; only edits and logprobs make a float32 copy."""
    vocab, fields = 600, FIELDS[rows]
    requests = [Request(SamplingParams(**f), 5 + i, [1, 2, 3]) for i, f in enumerate(fields)]
    logits = real_logits(len(fields), vocab).bfloat16()
    bits = torch.full((len(fields), -(-vocab // 32)), 0x5555_5555, dtype=torch.int32) if masked else None
    want = step(state_of(requests, vocab, device="cpu"), logits.float(), requests, mask=bits)
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    state = state_of(requests, vocab, device=DEVICE)
    logits, bits = logits.to(DEVICE), None if bits is None else bits.to(DEVICE)
    with Copies(logits.numel()) as copies:
        got = step(state, logits, requests, mask=bits)
    assert torch.equal(got.tokens.cpu(), want.tokens)
    assert torch.equal(got.told.cpu(), want.tokens)
    assert copies.seen == (rows.stop == 5)


def test_no_vocabulary_has_a_mass_that_wraps():
    assert threshold.MOST_TOKENS * 2**42 < 2**63


def test_too_large_a_vocabulary_is_refused():
    logits = torch.zeros(1, 1).expand(1, threshold.MOST_TOKENS + 1)
    with pytest.raises(ValueError, match=str(threshold.MOST_TOKENS)):
        threshold.threshold(logits, params_of(ROWS[:1]), *ALL)
