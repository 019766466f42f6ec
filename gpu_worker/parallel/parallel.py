"""The processes that hold one model together, and the tensors they exchange.

A replica of ``size`` tensor ranks in each of ``stages`` stages is size * stages processes. Within a stage each has a
share of every layer's heads, MLP, experts and of the vocabulary, and what they compute is added up; a stage has some of
the layers and hands hidden states to the next. Process number = stage * size + rank. The **leader**, rank 0 of the
last stage, draws the tokens.

Only tensors are exchanged, through torch.distributed: NCCL between GPUs, gloo between CPUs. Its object collectives,
which pickle, are never used. Nothing here is encrypted.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...proto.config import ConfigError
from ...proto.flag_checks import check_split
from ..kernels.company import batch_invariant
from ..spec import WHOLE, DecoderSpec, Shard
from .one_shot import OneShot, one_shot_of

TIMEOUT = timedelta(hours=1)
"""Longest wait within one exchange. What is dead is found by the links long before (``group_link.py``)."""


class Group:
    """One process's place among them, and what they exchange. This one is alone; ``Ranks`` are many."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard = shard

    @property
    def leader(self) -> bool:
        """Whether this process draws the tokens, and speaks for all."""
        return self.shard.last and self.shard.rank == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the tensor ranks of this stage: in place, or a new tensor."""
        return x

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of each entry of ``x`` over the tensor ranks of this stage: in place."""
        return x

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the same tensor rank of the next stage; for all stages but the last."""
        raise NotImplementedError

    def receive_hidden(self, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, width] of the same tensor rank of the stage before; for all stages but the first."""
        raise NotImplementedError

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The leader's ``tokens`` in all processes of all stages: written over what the others give, of one shape."""
        return tokens

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """[S, vocab_size] on the leader, of each tensor rank's share of the vocabulary; None on the others."""
        return logits

    def best(self, values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each tensor rank's best (value float32 [S], token int64 [S]) the largest, the lowest token of equals;
        NaN is larger than any. The same in all tensor ranks of the stage."""
        return values, tokens


class Ranks(Group):
    """One of several processes. Every method that exchanges is called by all whom it concerns, in one order."""

    def __init__(self, shard: Shard, store: dist.Store, device: torch.device, one_shot: bool = True) -> None:
        """Meets the others at ``store``. Raises RuntimeError where that fails.

        ``one_shot``: whether GPUs may sum small tensors by another way than NCCL's (``one_shot.py``).
        """
        super().__init__(shard)
        self.device = device
        number, count = number_of(shard), shard.size * shard.stages
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=number, world_size=count, timeout=TIMEOUT,
            device_id=device if cuda else None,
        )  # fmt: skip
        self._tensor: dist.ProcessGroup | None = None
        if shard.size > 1:  # every process makes every group
            groups = [
                dist.new_group(list(range(at, at + shard.size)), timeout=TIMEOUT) for at in range(0, count, shard.size)
            ]
            self._tensor = groups[shard.stage]
        self._one_shot: OneShot | None = None
        if cuda and self._tensor is not None and one_shot and not batch_invariant():
            self._one_shot = one_shot_of(self._tensor, store, shard, device)
        self._leader = leader_of(shard.size, shard.stages)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._tensor is None:
            return x
        if batch_invariant():
            return self._ordered_sum(x)
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot(x)
        dist.all_reduce(x, group=self._tensor)
        return x

    def _ordered_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum in float32, from the first rank on. The order of an all-reduce hangs on its size."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        dist.all_gather(parts, x, group=self._tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        if self._tensor is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self._tensor)
        return x

    def send_hidden(self, hidden: torch.Tensor) -> None:
        dist.send(hidden.contiguous(), number_of(self.shard) + self.shard.size)

    def receive_hidden(self, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        hidden = torch.empty((tokens, width), dtype=dtype, device=self.device)
        dist.recv(hidden, number_of(self.shard) - self.shard.size)
        return hidden

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tokens, self._leader)
        return tokens

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        shard = self.shard
        if shard.size == 1:
            return logits
        widest = -(-vocab_size // shard.size)
        mine = F.pad(logits, (0, widest - logits.shape[1])) if logits.shape[1] < widest else logits.contiguous()
        parts = [torch.empty_like(mine) for _ in range(shard.size)] if self.leader else None
        dist.gather(mine, parts, dst=self._leader, group=self._tensor)
        if parts is None:
            return None
        shares = (len(Shard(rank, shard.size).share(vocab_size)) for rank in range(shard.size))
        return torch.cat([part[:, :width] for part, width in zip(parts, shares, strict=True)], dim=1)

    def best(self, values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.stack((values.view(torch.int32), tokens.to(torch.int32)))
        pairs = [torch.empty_like(mine) for _ in range(self.shard.size)]
        dist.all_gather(pairs, mine, group=self._tensor)
        value, token = pairs[0][0].view(torch.float32), pairs[0][1]
        for pair in pairs[1:]:  # shares of the vocabulary rise with the rank
            other = pair[0].view(torch.float32)
            better = (other > value) | (other.isnan() & ~value.isnan())
            value, token = torch.where(better, other, value), torch.where(better, pair[1], token)
        return value, token.long()


def number_of(shard: Shard) -> int:
    """The process's number within its replica."""
    return shard.stage * shard.size + shard.rank


def leader_of(size: int, stages: int) -> int:
    """The number of the process that draws."""
    return (stages - 1) * size


def shard_of(number: int, size: int, stages: int) -> Shard:
    """The place of process ``number``."""
    return Shard(number % size, size, number // size, stages)


def check_shards(spec: DecoderSpec, size: int, stages: int) -> None:
    """Raises ConfigError where the model cannot be shared out so."""
    check_split(spec.heads, spec.num_layers, size, stages)
    for kv_heads in set(spec.kv_heads):
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"Total number of key/value heads ({kv_heads}) must be divisible by tensor parallel size ({size}), or "
                "divide it."
            )
