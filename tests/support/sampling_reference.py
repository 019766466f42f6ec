"""Sampling written out plainly, one row at a time: transformers' logits processors where they mean the same.

The noise is Philox4x32-10 in Python integers, so that nothing here is shared with what it checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & MASK, (p >> 32) ^ c3 ^ k1, p & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def noise(seed: int, position: int, vocab: int) -> torch.Tensor:
    """Gumbel noise of each token id, float64 [vocab]."""
    seed %= 2**64
    words: list[int] = []
    for block in range(-(-vocab // 4)):
        words += philox((position, block, 0, 0), (seed & MASK, seed >> 32))
    return torch.tensor([-math.log(-math.log1p(-min((w + 0.5) * 2**-32, 1 - 2**-24))) for w in words[:vocab]]).double()


def processed(logits: torch.Tensor, params: Any, prompt: list[int], outputs: list[int], ctx: dict[str, Any]) -> Any:
    """Logits [vocab] after masks, bias and penalties: what a greedy row takes the best of.

    ``ctx``: ``eos`` ids and ``bad_words`` as lists of token ids.
    """
    row = logits.clone().float()[None]
    everything, drawn = torch.tensor([prompt + outputs]), torch.tensor([outputs], dtype=torch.long)
    if params.allowed_token_ids is not None:
        closed = torch.ones_like(row, dtype=torch.bool)
        closed[0, params.allowed_token_ids] = False
        row = row.masked_fill(closed, -math.inf)
    for word in ctx.get("bad_words", []):
        # transformers' own looks for the word in the prompt too, and not before as many tokens are there as it has
        start = len(outputs) - len(word) + 1
        if start >= 0 and outputs[start:] == word[:-1]:
            row[0, word[-1]] = -math.inf
    if params.min_tokens:
        stops = sorted({*ctx.get("eos", []), *params.stop_token_ids})
        row = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops, device="cpu")(everything, row)
    if params.logit_bias:
        row = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items() if bias])(
            everything, row
        )
    if params.repetition_penalty != 1.0:
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(everything, row)
    counts = torch.bincount(drawn[0], minlength=row.shape[1]).float()
    row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return row[0]


def filtered(row: torch.Tensor, params: Any) -> torch.Tensor:
    """Scaled logits [vocab], -inf where min_p, top_k or top_p (in this order) leave a token out."""
    row, none = row[None], torch.zeros(1, 0, dtype=torch.long)
    row = TemperatureLogitsWarper(float(params.temperature))(none, row)
    if params.min_p > 0:
        row = MinPLogitsWarper(params.min_p)(none, row)
    if params.top_k > 0:
        row = TopKLogitsWarper(params.top_k)(none, row)
    if params.top_p < 1:
        row = TopPLogitsWarper(params.top_p)(none, row)
    return row[0]


def draw(row: torch.Tensor, params: Any, seed: int, position: int) -> int:
    """The token drawn from processed logits [vocab] at an absolute position."""
    if params.greedy:
        return int(row.argmax())
    scaled = filtered(row, params).double()
    return int((scaled + noise(seed, position, len(row))).argmax())


def generate(model: Any, params: Any, prompt: list[int], seed: int, ctx: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Output tokens of one request (until EOS, a stop id or max_tokens) and the raw logits [vocab] of each step."""
    outputs: list[int] = []
    steps = []
    past, feed = None, prompt
    while len(outputs) < params.max_tokens:
        with torch.inference_mode():
            out = model(torch.tensor([feed]), past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1].clone()
        steps.append(logits)
        token = draw(processed(logits, params, prompt, outputs, ctx), params, seed, len(prompt) + len(outputs))
        outputs.append(token)
        feed = [token]
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else ctx.get("eos", []))]
        if len(outputs) >= params.min_tokens and token in ends:
            break
    return outputs, steps
