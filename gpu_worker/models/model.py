"""What the runner knows of a model: its sizes, one step from token ids to hidden states, and logits of those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..batch import Chooser, StepBatch
from ..kernels.attention import LayerShape
from ..kernels.linear import ByRows
from ..kernels.lora import AdaptedRows
from ..kernels.narrow import is_narrow
from ..kv_cache import KVCache
from ..lora.slots import Slots
from ..parallel.parallel import Group
from ..spec import DecoderSpec
from .given import Given


class Model:
    """A loaded model, or the part of it that ``group.shard`` holds: quire's decoder, an encoder, or transformers' own.

    ``whole`` is the spec of all of it, ``spec`` of what this process has, ``vocabulary`` the ids that it has,
    ``cache_dtype`` the dtype of the KV cache.
    """

    capturable = True  # by CUDA graphs

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, group: Group | None = None) -> None:
        self.whole, self.group = spec, group or Group()
        self.spec, self.vocabulary = spec.local(self.group.shard), self.group.shard.share(spec.vocab_size)
        self.device, self.dtype = device, dtype
        self.products: frozenset[Chooser] = frozenset()
        """What is chosen for products whose format chooses otherwise than float weights' (``Linear.choosers``)."""
        self.cache_dtype = dtype
        self.given: Given | None = None
        """Where prompts may bring embeddings: those of the rows."""
        self.adapters: Slots | None = None
        """Where rows may have LoRA adapters: those that are served."""
        self.kv_scales: Sequence[tuple[float, float]] = [(1.0, 1.0)] * self.spec.num_layers

    def set_kv_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """The scales of an fp8 cache: of the keys and of the values of each layer of this process."""
        self.kv_scales = scales

    def forward(self, batch: StepBatch, kv: KVCache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states after the last norm, [T, hidden] or [S, hidden] of ``batch.outputs``; writes the cache.

        ``hidden`` [T, hidden] is what the stage before gave, for all stages but the first; all but the last return
        theirs, [T, hidden], without a norm.
        """
        raise NotImplementedError

    def choosers(self) -> set[Chooser]:
        """What chooses among kernels, or their tiles, by the shape of a step: those of attention and products, and of
        other layers those that the subclass adds."""
        spec = self.spec
        sizes = zip(spec.kv_heads, spec.windows, strict=False)
        of = self.dtype, self.device, is_narrow(self.cache_dtype)
        shapes = {LayerShape(spec.heads, kv, spec.head_dim, window, *of) for kv, window in sizes}
        return {ByRows(), *self.products, *shapes, *self._adapted()}

    def _adapted(self) -> Iterator[Chooser]:
        """What chooses among adapters' kernels."""
        if self.adapters is not None:
            dtype, moe = self.adapters.dtype, self.spec.moe
            yield AdaptedRows(dtype)
            if moe is not None:
                yield AdaptedRows(dtype, moe.top_k, moe.experts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab_size] of ``hidden`` [S, hidden], rows that ``forward`` gave: float32, or on a GPU of the
        model's type where the last product gave them so, as sampling widens what it reads.

        Of a model in several tensor ranks: those of ``vocabulary`` alone; of a classifier: those of its labels.
        """
        raise NotImplementedError
