"""Caches of 8 bits for tests: their definition, and a model over them and over floats that were rounded alike."""

from __future__ import annotations

import torch
from paged_runner import BLOCK, CPU, PagedRunner

from quire.gpu_worker.kernels import narrow
from quire.gpu_worker.kernels.narrow import FLOAT8
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.layers import attention

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def rounded(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """x [..., D] as a cache of ``dtype`` gives it back."""
    if dtype == torch.int8:
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        return torch.round(x / torch.where(scales == 0, 1.0, scales)) * scales
    most = torch.finfo(dtype).max
    return (x / scale).clamp(-most, most).to(dtype).to(x.dtype) * scale


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """Every number of an fp8 type, what lies halfway between neighbours and beside that, and what is none of them."""
    made = torch.arange(256, dtype=torch.uint8).view(dtype if dtype in FLOAT8 else torch.float8_e4m3fn).float()
    made = made[made.isfinite()].sort().values
    halves = (made[1:] + made[:-1]) / 2
    beside = torch.cat((halves.nextafter(torch.tensor(1e9)), halves.nextafter(torch.tensor(-1e9))))
    others = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 1e-40, -0.0, 0.0, 463.9, 464.1])
    found = torch.cat((made, halves, beside, others))
    return torch.cat((found, found.new_zeros(-len(found) % 48))).view(-1, 2, 24)


class NarrowRunner(PagedRunner):
    """Over a cache of ``dtype``; all of it holds garbage, though finite, where nothing was written."""

    def __init__(self, model, dtype: torch.dtype, blocks: int = 128, seed: int = 0):
        super().__init__(model, blocks, seed)
        kv = KVCache(model.spec, blocks, BLOCK, dtype, CPU)
        for cache in kv.k + kv.v:
            narrow.bits(cache).fill_(0x5A)
            if dtype == torch.int8:
                narrow.page_scales(cache).fill_(100.0)
        self.k, self.v, self.kv = kv.k, kv.v, kv


class RoundedRunner(PagedRunner):
    """Over float caches that are given rounded keys and values, each layer's by its ``scales``: the definition."""

    def __init__(self, model, dtype: torch.dtype, scales, monkeypatch):
        super().__init__(model)
        plain = attention.write_cache

        def write(cache, x, slots, written, scale=1.0):
            assert scale == 1.0
            own = {id(each): by[which] for which, caches in enumerate((self.k, self.v))
                   for each, by in zip(caches, scales, strict=True)}  # fmt: skip
            plain(cache, rounded(x, dtype, own[id(cache)]), slots, written)

        monkeypatch.setattr(attention, "write_cache", write)
