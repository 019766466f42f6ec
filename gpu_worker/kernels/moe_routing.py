"""Which experts each token goes to, and the weights of what they give: the families' rules, in one launch a layer."""

from __future__ import annotations

import torch

from ..spec import MoESpec
from .card import card_of


def route(
    logits: torch.Tensor, spec: MoESpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, best first, and the weights of their outputs.

    Args:
        logits: [T, experts] in any float type, last axis contiguous; read as float32.
        correction: float32 [experts], added to the scores when experts are chosen and left out of their weights.

    Returns:
        weights: float32 [T, top_k].
        ids: int64 [T, top_k]. Of equal scores the lower id is chosen; NaN is larger than any score.
    """
    from . import moe_routing_jit

    tokens, top_k, groups = len(logits), spec.top_k, spec.groups or 1
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    if not tokens:
        return weights, ids
    size = spec.experts // groups
    # With less than 128 places or in one wavefront, Triton 3.9's compiler for AMD ends in the middle (3.6's does not).
    amd = card_of(logits.device).backend == "hip"
    padded = max(_power(size), 128 // _power(groups)) if amd else _power(size)
    places = _power(groups) * padded
    moe_routing_jit.route_kernel[(tokens,)](
        logits, logits.stride(0), weights if correction is None else correction, weights, ids, spec.scale,
        SCORING=spec.scoring, CORRECTED=correction is not None and spec.scoring != "topk_softmax", GROUPS=groups,
        TOP_GROUPS=spec.topk_groups, SIZE=size, TOP_K=top_k, RENORMALISE=spec.renormalise,
        GROUPS_P=_power(groups), SIZE_P=padded, TOP_K_P=_power(top_k), num_warps=(1 + amd) if places <= 256 else 4,
    )  # fmt: skip
    return weights, ids


def route_torch(
    logits: torch.Tensor, spec: MoESpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of ``route``, and what a CPU computes."""
    logits = logits.float()
    if spec.scoring == "topk_softmax":
        best, ids = _best(logits, spec.top_k)
        return best.softmax(-1) * spec.scale, ids
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if spec.groups:
        choice = _within_best_groups(choice, spec)
    ids = _best(choice, spec.top_k)[1]
    weights = scores.gather(1, ids)
    if spec.renormalise:
        # Sigmoids of very low logits may all be zero.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * spec.scale, ids


def _best(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # torch.topk leaves open which of equal values it takes.
    values, ids = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count].contiguous()


def _within_best_groups(choice: torch.Tensor, spec: MoESpec) -> torch.Tensor:
    """``choice`` with -inf outside each token's best groups.

    A group is worth its two best experts' sum (DeepSeek-V3), where scores are softmax its best one's (DeepSeek-V2).
    """
    groups = choice.unflatten(1, (spec.groups, -1))
    worth = groups.topk(2 if spec.scoring == "sigmoid" else 1, dim=-1)[0].sum(-1)
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, _best(worth, spec.topk_groups)[1], False)
    return groups.masked_fill(outside[..., None], float("-inf")).flatten(1)


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
