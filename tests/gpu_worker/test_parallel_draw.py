"""A vocabulary in parts: the best of the parts is what is drawn of the whole."""

import pytest
import torch
from kernel_device import DEVICE
from sampler_rows import Request, state_of

from quire.gpu_worker.kernels import sampling
from quire.gpu_worker.parallel.parallel import Ranks
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


def test_the_largest_wins_the_lowest_of_equals_and_nan_over_all(monkeypatch):
    nan = float("nan")
    pairs = [
        (torch.tensor([1.0, 2.0, nan, 3.0, -float("inf")]), torch.tensor([1, 2, 3, 4, 0])),
        (torch.tensor([2.0, 2.0, 9.0, nan, -float("inf")]), torch.tensor([11, 12, 13, 14, 10])),
    ]
    values, tokens = best(monkeypatch, pairs)
    assert tokens.tolist() == [11, 2, 3, 14, 0]
    assert values.isnan().tolist() == [False, False, True, True, False]
