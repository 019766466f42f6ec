"""The scales of an fp8 cache: those of the checkpoint, or measured while the model is loaded.

A measured scale must come out the same in a worker that is started again, in all replicas and in all tensor ranks: keys
that one has written with it are written again by another, and no stream may change by that. vLLM measures at the first
request it gets, which differs from worker to worker. Here each worker runs the same made-up prompt before it serves,
the ranks of a layer take the largest of theirs, and a scale is rounded up to a power of two, so that neither the number
of threads nor another processor's order of sums shows in it. fp8 numbers lose nothing by that.
"""

from __future__ import annotations

import logging
import math
import re

import numpy as np
import torch

from ...proto.config import ConfigError
from ..batch import StepBatch
from ..kernels.narrow import FLOAT8
from ..kv_cache import KVCache
from ..spec import WeightNames
from .files import Entry
from .model import Model

log = logging.getLogger(__name__)

Scales = tuple[float, float]
"""Of one layer's keys and values."""

K_RANGE, V_RANGE = 200.0, 100.0
"""What the largest key and value that are measured are stored as, at most: vLLM's. e4m3 reaches 448."""
_TOKENS = 512
_BLOCK = 16
_SEED = 0

_TAIL = re.compile(
    r"(?:\w+\.)*(?:(?P<one>[kv])_scale|(?P<both>kv_scale)|(?P<out>[kv])_proj\.output_scale"
    r"|(?P<unused>(?:q|prob|q_proj\.output|prob_output)_scale))"
)


class CheckpointScales:
    """What the checkpoint says of the scales, while it is read.

    ``wanted``: the cache is fp8, and they are not measured; else they are only known, so that they are not left over.
    """

    def __init__(self, wanted: bool = False) -> None:
        self._wanted = wanted
        self._found: dict[tuple[int, str], float] = {}

    def take(self, name: str, entry: Entry, names: WeightNames) -> bool:
        """Whether the tensor ``name`` is one of them. Raises ConfigError for one that is no number above 0."""
        if not name.endswith("_scale"):
            return False
        before, after = map(re.escape, names.layer_prefix.split("{}"))
        for full in (name, names.prefix + name):
            start = re.match(before + r"(\d{1,6})" + after, full)
            tail = start and _TAIL.fullmatch(full, start.end())
            if start and tail:
                break
        else:
            return False
        if self._wanted and tail["unused"] is None:
            layer, value = int(start[1]), _number(entry)
            for which in "kv" if tail["both"] else tail["one"] or tail["out"]:
                self._found[layer, which] = value
        return True

    def of(self, layers: range) -> list[Scales]:
        """Of ``layers`` of the whole model. One of the two stands for the other; 1 where there is neither."""
        scales, missing = [], 0
        for layer in layers:
            k, v = (self._found.get((layer, which)) for which in "kv")
            missing += k is None and v is None
            scales.append(((k or v or 1.0), (v or k or 1.0)))
        if missing and self._wanted:
            log.warning(
                "%d of %d layers have no scales for an fp8 KV cache in the checkpoint: 1.0 is used, which may cost "
                "accuracy; --calculate-kv-scales measures them", missing, len(layers),
            )  # fmt: skip
        return scales


def _number(entry: Entry) -> float:
    if math.prod(entry.shape) == 1:
        value = float(entry.read().float())
        if 0 < value < math.inf:
            return value
    told = f"shape {entry.shape}" if math.prod(entry.shape) != 1 else f"the value {value}"
    raise ConfigError(
        f"{entry.file}: {entry.name} has {told}, where the KV cache takes one number above 0 for a layer; use "
        "--calculate-kv-scales, or --kv-cache-dtype with the model's dtype."
    )


def scales_to_read(dtype: torch.dtype, measure: bool) -> CheckpointScales:
    """What takes the checkpoint's scales for a cache of ``dtype``."""
    return CheckpointScales(dtype in FLOAT8 and not measure)


@torch.inference_mode()
def measure_scales(model: Model, max_model_len: int) -> list[Scales]:
    """Scales of the layers of this process, from the keys and values of one prompt in a cache of the model's dtype.

    All processes of a group call it together. Raises ConfigError where they are not finite.
    """
    count = min(_TOKENS, max_model_len)
    batch = _prompt(model, count)
    kv = KVCache(model.spec, -(-count // _BLOCK), _BLOCK, model.dtype, model.device)
    group, hidden = model.group, None
    if not group.shard.first:
        hidden = group.receive_hidden(count, model.spec.hidden_size, model.dtype)
    hidden = model.forward(batch, kv, hidden)
    if not group.shard.last:
        group.send_hidden(hidden)
    largest = torch.stack([torch.stack((k.abs().amax(), v.abs().amax())) for k, v in zip(kv.k, kv.v, strict=True)])
    peaks: list[list[float]] = group.maximum(largest.float()).tolist()
    if not all(math.isfinite(peak) for both in peaks for peak in both):
        raise ConfigError(
            "calculate_kv_scales: keys or values of the prompt that measures them are not finite; use another --dtype, "
            "or leave it out."
        )
    return [(_power(k / K_RANGE), _power(v / V_RANGE)) for k, v in peaks]


def _power(least: float) -> float:
    """The power of two that is at least ``least``; 1 of 0."""
    return 2.0 ** math.ceil(math.log2(least)) if least else 1.0


def _prompt(model: Model, count: int) -> StepBatch:
    """One row of ``count`` token ids of chance, always the same."""
    ids = np.random.default_rng(_SEED).integers(0, model.whole.vocab_size, count)
    places = torch.arange(count, device=model.device)
    blocks = torch.arange(-(-count // _BLOCK), device=model.device)
    ends = torch.tensor([0, count], device=model.device).int()
    return StepBatch(
        token_ids=torch.from_numpy(ids).to(model.device), positions=places, slots=places,
        query_starts=ends, context_lens=ends[1:],
        block_tables=blocks.int()[None], num_decodes=int(count == 1),
        max_query_len=count, max_context_len=count, block_size=_BLOCK,
        host_query_starts=[0, count], host_context_lens=[count],
    )  # fmt: skip


def set_scales(model: Model, dtype: torch.dtype, measure: bool, found: CheckpointScales, max_model_len: int) -> None:
    """Give ``model`` the dtype of its cache and, of fp8, the scales: those measured, or ``found``."""
    model.cache_dtype = dtype
    if dtype not in FLOAT8 or not model.spec.kv_heads:
        if measure:
            log.warning(
                "calculate_kv_scales changes nothing: this KV cache (%s) has no scales by layer", str(dtype)[6:]
            )
        return
    layers = model.group.shard.layers(model.whole.num_layers)
    scales = measure_scales(model, max_model_len) if measure else found.of(layers)
    model.set_kv_scales(scales)
    source, told = "measured" if measure else "given", " ".join(f"({k:g}, {v:g})" for k, v in scales)
    log.info("scales of keys and values, %s, of layers %d to %d: %s", source, layers.start, layers.stop - 1, told)
