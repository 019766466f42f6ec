"""Heads that go on from the target's hidden states: EAGLE, EAGLE-3 and layers that predict several tokens (MTP).

At position p a head is given a hidden state of p and the embedding of the token at p + 1, and makes a hidden state that
stands for position p + 1; its logits are of the token at p + 2. The three differ in their ends and in their first norm:

- EAGLE (arXiv 2401.15077): ``fc`` of [embedding, hidden]; one layer without a norm before its attention; the target's
  output layer.
- EAGLE-3 (arXiv 2503.01840): the hidden state is the residual; the attention reads [norm(embedding), norm(hidden)], so
  its projections have twice the inputs. Given the target, ``fc`` first makes one hidden state of three layers'. Its own
  norm and output layer, of a vocabulary of its own.
- MTP: a projection of [norm(hidden), norm(embedding)] (MiMo's order), a layer as the target's, a norm, and the target's
  output layer. The embedding behind position 0 counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch import StepBatch
from ..kv_cache import KVCache
from ..layers import dispatch
from ..layers.attention import StepContext
from ..layers.formats.table import Table, embedding
from ..layers.linear import Linear
from ..layers.norm import NoNorm, RMSNorm
from ..models.blocks import PreNorm, Step, Stream
from ..models.decoder import Decoder
from ..models.weights import Weights
from ..parallel.parallel import Group
from ..spec import DecoderSpec


@dataclass(frozen=True)
class HeadParts:
    """What a head has besides its layer.

    ``join`` projects the joined embedding and hidden state; None: the attention reads them joined (EAGLE-3).
    ``combine`` makes one hidden state of those of several layers. ``vocabulary`` int64: the target's id of each of the
    head's own tokens; None: they are the target's. ``embed_first``: the embedding's place in what is joined.
    """

    embed: Table
    embed_scale: float
    lm_head: Linear
    join: Linear | None = None
    combine: Linear | None = None
    embed_norm: RMSNorm | None = None
    hidden_norm: RMSNorm | None = None
    out_norm: RMSNorm | None = None
    norm_is_fed_back: bool = False
    vocabulary: torch.Tensor | None = None
    embed_first: bool = True
    zero_first: bool = False


class Joined(PreNorm):
    """EAGLE-3's layer: the attention reads the embedding and the hidden state side by side."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> Stream:
        x, residual = self.sampled(self.attend(x, step), step), self.sampled(residual, step)
        x, residual = self.mlp_norm.add(x, residual)
        return self.feed(x), residual


class Head(Decoder):
    """A head as a decoder of one layer that is given hidden states.

    ``target_vocab``: how many tokens the target has, of which logits are given.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, parts: HeadParts, max_model_len: int, target_vocab: int
    ) -> None:
        super().__init__(spec, weights, max_model_len, Group())
        self.parts, self.embed, self.embed_scale, self.lm_head = parts, parts.embed, parts.embed_scale, parts.lm_head
        self.target_vocab = target_vocab
        if parts.join is None:
            rotary = self._rotary([], spec.ropes[0], max_model_len)
            self.layers = [Joined(spec, 0, weights, rotary, Group())]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KVCache, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [S, hidden] to go on from; ``hidden`` [T, hidden] is what the batch's tokens are given."""
        if hidden is None:
            raise ValueError("a head is given hidden states")
        parts, step = self.parts, Step(batch, kv, None if dispatch.use_kernels(hidden) else StepContext(batch))
        embedded = embedding(batch.token_ids, parts.embed)
        if parts.embed_scale != 1.0:
            embedded = embedded * parts.embed_scale
        if parts.zero_first:
            embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0.0)
        embedded = (parts.embed_norm or NoNorm())(embedded)
        normed = (parts.hidden_norm or NoNorm())(hidden)
        joined = torch.cat((embedded, normed) if parts.embed_first else (normed, embedded), -1)
        residual: torch.Tensor | None
        if parts.join is None:
            x, residual = joined, hidden.clone()
        else:
            x, residual = parts.join(joined), None
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        x = x if residual is None else x + residual
        return parts.out_norm(x) if parts.out_norm is not None and parts.norm_is_fed_back else x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocabulary of the target] of what ``forward`` gave; -inf for tokens unknown to the head."""
        parts = self.parts
        if parts.out_norm is not None and not parts.norm_is_fed_back:
            hidden = parts.out_norm(hidden)
        return self.in_target(super().logits(hidden))

    def in_target(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, own vocabulary] -> [S, vocabulary of the target]."""
        if self.parts.vocabulary is None:
            return logits
        wide = logits.new_full((len(logits), self.target_vocab), -torch.inf)
        return wide.index_copy_(1, self.parts.vocabulary, logits)

    @torch.inference_mode()
    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target's hidden states [T, n * hidden] are to this head: [T, hidden]."""
        return hidden if self.parts.combine is None else self.parts.combine(hidden.to(self.dtype))
