"""The threshold and the draw: Triton against the twins. Compiled where there is a GPU, else interpreted."""

import pytest
import torch
from kernel_device import DEVICE
from sampler_rows import Request, state_of

pytest.importorskip("triton")

from quire.gpu_worker.kernels import sampling
from quire.proto.params import SamplingParams

MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=2.0, top_k=10**6, top_p=0.999),
]

pytestmark = pytest.mark.slow


def packed(params):
    """The parameter rows of a state, on the device under test."""
    requests = [Request(p, 2**63 + row * 0x123456789) for row, p in enumerate(params)]
    return state_of(requests, 9, device=DEVICE).of(torch.arange(len(params), device=DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [5, 4099])
@pytest.mark.parametrize("ties", [False, True])
def test_draw(vocab, ties):
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = (logits.round() if ties else logits).to(DEVICE)
    params = packed(MIXED)
    positions = (torch.arange(len(MIXED)) * 1000).to(DEVICE)
    assert torch.equal(
        sampling.draw(logits, params, positions, None), sampling.draw_numpy(logits, params, positions, None)
    )
    thresholds = sampling.threshold_numpy(logits, params, True, True, True)
    assert torch.equal(
        sampling.draw(logits, params, positions, thresholds), sampling.draw_numpy(logits, params, positions, thresholds)
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [5, 4099])
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("ties", [False, True])
def test_cut(vocab, spread, ties):
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits = (logits.round() if ties else logits).to(DEVICE)
    params = packed(MIXED)
    got = sampling.threshold(logits, params, True, True, True)
    assert torch.equal(got, sampling.threshold_numpy(logits, params, True, True, True))


def test_stages_may_be_left_out():
    """A flag that is off leaves its filter out in the kernel as in the twin."""
    logits = torch.randn(len(MIXED), 300, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    params = packed(MIXED)
    for flags in ((True, False, False), (False, True, False), (False, False, True)):
        assert torch.equal(sampling.threshold(logits, params, *flags), sampling.threshold_numpy(logits, params, *flags))


def test_extreme_logits():
    """-inf, equal and very large logits end the search and name valid tokens."""
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    logits[0] = -float("inf")
    logits[1] = 0.0
    logits[2, :69] = -float("inf")
    logits[3] *= 1e30
    logits[4] = float("nan")
    logits[5, ::2] = -float("inf")
    logits = logits.to(DEVICE)
    params = packed([SamplingParams(top_k=3, top_p=0.5, min_p=0.1)] * 6)
    positions = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    thresholds = sampling.threshold(logits, params, True, True, True)
    tokens = sampling.draw(logits, params, positions, thresholds)
    assert ((tokens >= 0) & (tokens < 70)).all()
    want = sampling.draw_numpy(logits, params, positions, sampling.threshold_numpy(logits, params, True, True, True))
    assert tokens[[1, 2, 3, 5]].tolist() == want[[1, 2, 3, 5]].tolist()
    assert tokens[2] == 69 and tokens[5] % 2 == 1


def test_padded_rows_of_logits():
    """Rows may be wider apart than the vocabulary; what lies beyond is never drawn."""
    wide = torch.full((3, 640), 100.0, device=DEVICE)
    wide[:, :600] = torch.randn(3, 600, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits, params = wide[:, :600], packed(MIXED[:3])
    positions = torch.arange(3, device=DEVICE)
    got = sampling.draw(logits, params, positions, None)
    assert torch.equal(got, sampling.draw_numpy(logits, params, positions, None))
