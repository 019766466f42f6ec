"""A vocabulary in parts: the best of the parts is what is drawn of the whole."""

import numpy as np
import pytest
import torch
from kernel_device import DEVICE
from sampler_rows import Request, state_of

from quire.gpu_worker.kernels import sampling
from quire.gpu_worker.parallel.parallel import Ranks
from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample, sample_share
from quire.gpu_worker.spec import Shard
from quire.proto.params import SamplingParams

PLAIN = [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.3, 2.0, 0.7, 0.0)]


def best(monkeypatch, pairs):
    """``Ranks.best`` of what each rank found."""
    ranks = Ranks.__new__(Ranks)
    ranks.shard, ranks._tensor = Shard(0, len(pairs)), None
    stacked = [torch.stack((values.view(torch.int32), tokens.to(torch.int32))) for values, tokens in pairs]

    def all_gather(into, mine, group):
        for place, pair in zip(into, stacked, strict=True):
            place.copy_(pair)

    monkeypatch.setattr("quire.gpu_worker.parallel.parallel.dist.all_gather", all_gather)
    return ranks.best(*pairs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "count", "flat", "kernel"),
    [
        (4099, 2, False, False),
        (4099, 3, True, False),
        (50, 7, False, False),
        (4399, 2, False, True),
        (50, 7, True, True),
    ],
)
def test_parts_draw_as_the_whole(monkeypatch, vocab, count, flat, kernel):
    if kernel:
        pytest.importorskip("triton")
    logits = torch.randn(len(PLAIN), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = (logits * 0.01 if flat else logits.round()).to(DEVICE)  # flat: every token gets noise; round: ties
    logits[4] = -float("inf")
    logits[4, vocab - 2] = 1.0
    state = state_of([Request(p, 2**63 + row * 0x123456789) for row, p in enumerate(PLAIN)], 6, device=DEVICE)
    params = state.of(torch.arange(len(PLAIN), device=DEVICE))
    positions = (torch.arange(len(PLAIN)) * 1000).to(DEVICE)
    draw = sampling.draw_part if kernel else sampling.draw_part_numpy
    shares = [Shard(rank, count).share(vocab) for rank in range(count)]
    pairs = [draw(logits[:, share.start : share.stop].contiguous(), params, positions, share.start)
             for share in shares]  # fmt: skip
    values, tokens = best(monkeypatch, pairs)
    assert torch.equal(tokens, sampling.draw_numpy(logits, params, positions, None))
    assert values.isfinite().all()


@pytest.mark.parametrize("random", [True, False])
def test_the_samplers_of_shares_draw_what_one_of_all_draws(monkeypatch, random):
    plain = PLAIN if random else PLAIN[1::4]
    logits = torch.randn(len(plain), 1000, generator=torch.Generator().manual_seed(3)) * 2
    logits[1, :500] = -float("inf")  # nothing of the first share
    state = state_of([Request(p, 77 + row) for row, p in enumerate(plain)], 1000)
    rows, positions = np.arange(len(plain)), np.arange(len(plain)) * 100
    on_device = [torch.from_numpy(x).to(DEVICE) for x in (rows, positions)]
    batch = SampleBatch(*on_device, rows, positions, on_device[0][:, None].int(), state.needs(rows, positions))
    shares = [Shard(rank, 2).share(1000) for rank in range(2)]
    pairs = [sample_share(logits[:, part.start : part.stop].contiguous().to(DEVICE), state, batch, part.start)
             for part in shares]  # fmt: skip
    assert torch.equal(best(monkeypatch, pairs)[1].int(), sample(logits.to(DEVICE), state, batch).tokens)


def test_the_largest_wins_the_lowest_of_equals_and_nan_over_all(monkeypatch):
    nan = float("nan")
    pairs = [
        (torch.tensor([1.0, 2.0, nan, 3.0, -float("inf")]), torch.tensor([1, 2, 3, 4, 0])),
        (torch.tensor([2.0, 2.0, 9.0, nan, -float("inf")]), torch.tensor([11, 12, 13, 14, 10])),
    ]
    values, tokens = best(monkeypatch, pairs)
    assert tokens.tolist() == [11, 2, 3, 14, 0]
    assert values.isnan().tolist() == [False, False, True, True, False]
