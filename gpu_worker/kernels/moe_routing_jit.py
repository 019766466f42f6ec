"""Triton code of ``moe_routing``."""

import triton
import triton.language as tl

_FREE = tl.constexpr(0x7FFFFFFF)
"""Larger than any number of an expert."""
_GONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Less than any key."""


@triton.jit
def _keys(values, at):
    """int64 in the order of the float32 ``values``, and of equal ones the lower of ``at`` (int32, from 0 on) is larger.

    So one maximum finds both the best value and its place, the same whatever the order in which threads compare.
    """
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 is no less than 0.0
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (at ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _in_best_groups(choice, group, place, TWO: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Which rows of ``choice`` [groups, size] are among the best TOP_GROUPS: by the sum of their TWO best values, or by
    their best one."""
    worth = tl.max(choice, 1)
    if TWO:
        first = tl.min(tl.where(choice == worth[:, None], place[None, :], _FREE), 1)
        worth += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), choice), 1)
    keys = tl.where(group < GROUPS, _keys(worth, group), _GONE)
    for _ in range(TOP_GROUPS):
        keys = tl.where(keys == tl.max(keys, 0), _GONE, keys)
    return (keys == _GONE) & (group < GROUPS)


@triton.jit
def route_kernel(
    logits, logits_row, correction, weights, ids, scale,
    SCORING: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS_P: tl.constexpr, SIZE_P: tl.constexpr, TOP_K_P: tl.constexpr,
):  # fmt: skip
    """One token: GROUPS groups of SIZE experts. GROUPS_P, SIZE_P and TOP_K_P are the powers of two from those on."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P)
    place = tl.arange(0, SIZE_P)
    inside = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    at = group[:, None] * SIZE + place[None, :]
    scores = tl.load(logits + token * logits_row + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    elif SCORING == "sigmoid":
        scores = tl.sigmoid(scores)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + at, mask=inside, other=0.0)
    choice = tl.where(choice != choice, float("inf"), choice)  # NaN shows in the weights
    if GROUPS > 1:
        choice = tl.where(inside, choice, float("-inf"))
        best = _in_best_groups(choice, group, place, SCORING == "sigmoid", GROUPS, TOP_GROUPS)
        choice = tl.where(best[:, None], choice, float("-inf"))
    at = tl.where(inside, at, _FREE)
    keys = tl.reshape(tl.where(inside, _keys(choice, at), _GONE), (GROUPS_P * SIZE_P,))
    at = tl.reshape(at, (GROUPS_P * SIZE_P,))
    scores = tl.reshape(scores, (GROUPS_P * SIZE_P,))

    slot = tl.arange(0, TOP_K_P)
    chosen = tl.zeros((TOP_K_P,), dtype=tl.int32)
    weight = tl.full((TOP_K_P,), float("-inf") if SCORING == "topk_softmax" else 0.0, dtype=tl.float32)
    for n in range(TOP_K):
        key = tl.max(keys, 0)
        keys = tl.where(keys == key, _GONE, keys)
        expert = (key & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
        chosen = tl.where(slot == n, expert, chosen)
        weight = tl.where(slot == n, tl.sum(tl.where(at == expert, scores, 0.0), 0), weight)
    if SCORING == "topk_softmax":
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    elif RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, chosen.to(tl.int64), mask=slot < TOP_K)
