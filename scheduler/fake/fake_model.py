"""What the fake worker answers with: hashes of everything a sequence has read back, and oracles for whole outputs.

A token is drawn by a hash of seed, position and context. Log-probabilities are pseudo-random numbers made from the
same context, few enough to tie now and then. The oracles compute what must come out, each in the plainest way.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from hashlib import blake2b

from ...proto.codec import f32, i32
from ...proto.messages import Finish, Logprobs
from ...proto.params import SamplingParams
from ...proto.pooling import PoolingParams

_EXP = [math.exp(eighths / 8) for eighths in range(64)]


def cell(position: int, token: int, adapter: int = 0) -> int:
    """What a page holds for one position, as an int64. ``adapter``: what ``tag`` says of the one it was made with."""
    return adapter << 50 | position << 32 | token


def tag(digest: bytes) -> int:
    """A number of 12 bits, and not 0, for an adapter: its keys and values are not those of another."""
    return 1 + int.from_bytes(digest[:2], "little") % 4095


def draw(seed: int, position: int, context: bytes, vocab_size: int) -> int:
    """The token for ``position`` after ``context`` (int64 cells)."""
    key = f"{seed}:{position}:".encode()
    return int.from_bytes(blake2b(key + context, digest_size=8).digest(), "little") % vocab_size


def distribution(context: bytes, vocab_size: int) -> list[float]:
    """Log-probability (float32) of every token after ``context`` (int64 cells)."""
    drawn = random.Random(blake2b(context, digest_size=8).digest()).random
    eighths = [int(drawn() * 64) for _ in range(vocab_size)]
    total = math.log(sum(map(_EXP.__getitem__, eighths)))
    return array("f", [weight / 8 - total for weight in eighths]).tolist()


def pooled(context: bytes, params: PoolingParams) -> tuple[int, bytes]:
    """What is pooled of ``context`` (int64 cells): rows and float32 data, as in SlotPooled."""
    ends = range(8, len(context) + 1, 8) if params.per_token else [len(context)]
    key = f"{params.task}:{params.pooling}:{params.dimensions}:".encode()
    found = [blake2b(key + context[:end], digest_size=8).digest() for end in ends]
    return len(found) * params.per_token, f32(byte / 256 for digest in found for byte in digest)


def record(values: list[float], token: int, k: int, named: list[int] | None = None) -> Logprobs:
    """The logprobs of one token: itself, then the k most likely (ties: lowest id first), of those ``named`` if any."""
    ids = [token, *sorted(named or range(len(values)), key=values.__getitem__, reverse=True)[:k]]
    rank = 1 + sum(map(values[token].__lt__, values))
    return Logprobs(i32(ids), f32([values[i] for i in ids]), i32([rank]))


def join(records: list[Logprobs]) -> Logprobs:
    """One record of all their tokens."""
    ids, values = b"".join(r.ids for r in records), b"".join(r.values for r in records)
    return Logprobs(ids, values, b"".join(r.ranks for r in records))


# ---------------------------------------------------------------- oracles


def expected_tokens(prompt: list[int], seed: int, count: int, vocab_size: int, adapter: int = 0) -> list[int]:
    """``count`` tokens as a worker with sound pages draws them, with an adapter of this ``tag``."""
    context = array("q", [cell(p, token, adapter) for p, token in enumerate(prompt)])
    out = []
    for position in range(len(prompt), len(prompt) + count):
        out.append(draw(seed, position, context.tobytes(), vocab_size))
        context.append(cell(position, out[-1], adapter))
    return out


def expected_logprobs(tokens: list[int], start: int, k: int, vocab_size: int) -> Logprobs:
    """Logprobs of ``tokens[start:]``, each after all before it; k of -1 is the whole vocabulary."""
    k = vocab_size if k < 0 else k
    context = array("q", [cell(p, token) for p, token in enumerate(tokens)]).tobytes()
    found = [distribution(context[: 8 * p], vocab_size) for p in range(start, len(tokens))]
    return join([record(values, tokens[start + i], k) for i, values in enumerate(found)])


def expected_beams(
    prompt: list[int], params: SamplingParams, eos: list[int], max_outputs: int, max_model_len: int, vocab_size: int,
    stopped: Callable[[list[int]], bool] = lambda outputs: False, adapter: int = 0,
) -> list[tuple[list[int], Finish, int]]:  # fmt: skip
    """A beam search's outputs, best first: tokens, finish, stop id. ``stopped``: a stop string ends these tokens."""
    width, penalty = params.width, params.length_penalty
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[float, list[int], Finish, int]] = []

    def score(tokens: list[int], total: float) -> float:
        return total / (len(prompt) + len(tokens) - (tokens[-1] in eos)) ** penalty

    def attainable(tokens: list[int], total: float) -> float:
        if params.early_stopping == "never" and penalty > 0:
            return total / max(len(prompt) + params.max_tokens, max_model_len) ** penalty  # type: ignore[operator]
        return score(tokens, total)

    while live:
        candidates = []
        for parent, (tokens, total) in enumerate(live):
            context = array("q", [cell(p, token, adapter) for p, token in enumerate(prompt + tokens)]).tobytes()
            for token, value in enumerate(distribution(context, vocab_size)):
                candidates.append((-(total + value), parent, token))
        children = []
        for minus, parent, token in sorted(candidates)[: 2 * width]:
            tokens = [*live[parent][0], token]
            early = len(tokens) < params.min_tokens
            if token in eos and not early:
                ended.append((score(tokens, -minus), tokens, Finish.STOP, -1))
            elif token in params.stop_token_ids and not early:  # type: ignore[operator]
                ended.append((score(tokens, -minus), tokens, Finish.STOP, token))
            elif stopped(tokens):
                ended.append((score(tokens, -minus), tokens, Finish.STOP, -1))
            elif len(tokens) == max_outputs:
                ended.append((score(tokens, -minus), tokens, Finish.LENGTH, -1))
            else:
                children.append((tokens, -minus))
        ended = sorted(ended, key=lambda end: -end[0])[:width]
        live = children[:width]
        full = live and len(ended) == width
        if full and (params.early_stopping is True or ended[-1][0] >= attainable(*live[0])):
            live = []
    return [(tokens, finish, stop) for _, tokens, finish, stop in ended[: params.n]]
