"""What must come of a request, from its prompt, its parameters and its seed alone, each in the plainest way.

Tokens, logprobs and vectors are those of the fake worker's model (``scheduler/fake/fake_model.py``); where an output
ends, what its text is and which outputs are returned is said here a second time, as README.md and ``docs/`` say it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.client.results import TokenLogprobs
from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.scheduler.fake.fake_model import cell, distribution, draw, expected_beams, pooled, record, tag

from . import toy
from .asks import Ask, adapter_named

NOT_TEXT = "\ufffd"


class Stop(NamedTuple):
    """Where a stop string ends a text: so many characters, it included, that took so many tokens."""

    end: int
    string: str
    used: int


class Output(NamedTuple):
    """One child. ``logprobs`` has one entry for each token where they were asked for."""

    tokens: list[int]
    text: str
    finish: Finish
    reason: int | str | None
    logprobs: list[TokenLogprobs]
    cumulative: float | None


@dataclass(slots=True)
class Answer:
    """All of a request. ``pooled`` is its vectors' rows and float32 bytes."""

    prompt_ids: list[int]
    prompt: str | None
    children: list[Output]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: tuple[int, bytes] | None = None


def answer_to(ask: Ask, seed: int, shape: Any) -> Answer:
    """What ``ask`` comes to in a cluster of ``shape``. ``seed``: the one that it was sent with."""
    ids, text = prompt_of(ask, shape)
    adapter = tag(adapter_named(ask.adapter).digest) if ask.adapter else 0
    if ask.pooling is not None:
        params = toy.pooler(shape.pools, shape.whole).resolve(ask.pooling)
        return Answer(ids, text, [], pooled=pooled(_context(ids, adapter), params))
    params = ask.params
    room = shape.max_model_len - len(ids)
    room = room if params.max_tokens is None else min(room, params.max_tokens)
    if params.use_beam_search:
        children = _beams(ids, params, room, shape, adapter)
    else:
        children = _children(ids, params, room, seed, adapter)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    if params.prompt_logprobs is not None:
        prompt_logprobs = [None, *_logprobs(ids, 1, params.prompt_logprobs, params.detokenize, adapter)]
    return Answer(ids, text, children, prompt_logprobs)


# ---------------------------------------------------------------- the prompt


def prompt_of(ask: Ask, shape: Any) -> tuple[list[int], str | None]:
    """The ids that are run, and the text that is shown with them."""
    whole, text, _ = _whole_prompt(ask)
    ids = prompt_ids(ask, shape)
    if ask.echo and ask.pooling is None and (text is None or len(ids) < len(whole)):
        text = toy.text_of(ids, ask.params.skip_special_tokens and text is not None)
    return ids, text


def prompt_ids(ask: Ask, shape: Any) -> list[int]:
    """The ids that are run; also of a request that is refused for them."""
    whole, text, special = _whole_prompt(ask)
    if ask.pooling is not None:
        keep = ask.pooling.truncate_prompt_tokens
        return whole[: shape.max_model_len if keep == -1 else keep]
    keep = ask.params.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, shape.max_model_len - max(1, ask.params.min_tokens))
    if keep is None or len(whole) <= keep:
        return whole
    if text is not None and special and keep > 1:  # what was put before the text stays
        return [whole[0], *whole[1 - keep :]]
    return whole[-keep:]


def _whole_prompt(ask: Ask) -> tuple[list[int], str | None, bool]:
    """Before anything is cut off: ids, text, and whether special tokens are put around it."""
    if ask.chat:
        text = f"u.{ask.text}\na."
        return list(toy.ids_of(text, False)), text, False
    if not ask.text:
        return list(ask.ids), None, False
    special = ask.add_special_tokens
    if ask.pair is not None:
        return [*toy.ids_of(ask.text, True), toy.EOS, *toy.ids_of(ask.pair, False)], ask.text, special
    return list(toy.ids_of(ask.text, special)), ask.text, special


# ---------------------------------------------------------------- outputs


def _children(prompt: list[int], params: SamplingParams, room: int, seed: int, adapter: int) -> list[Output]:
    """n independent draws; of best_of draws those of the highest summed log-probability."""
    summed = params.best_of is not None
    outputs = []
    for index in range(params.width):
        tokens, finish, stop_id = _drawn(prompt, params, room, (seed + index) % 2**64, adapter)
        outputs.append(_output(prompt, tokens, finish, stop_id, params, summed, adapter))
    if summed:
        best = sorted(range(len(outputs)), key=lambda index: (-(outputs[index].cumulative or 0.0), index))
        outputs = [outputs[index] for index in best[: params.n]]
    return outputs


def _drawn(
    prompt: list[int], params: SamplingParams, room: int, seed: int, adapter: int
) -> tuple[list[int], Finish, int]:
    """Tokens up to the first that ends them: an EOS token, a stop token, or the last there is room for."""
    eos, stops = ends_of(params)
    context = _context(prompt, adapter)
    tokens: list[int] = []
    while True:
        position = len(prompt) + len(tokens)
        token = draw(seed, position, context, toy.VOCAB)
        context += cell(position, token, adapter).to_bytes(8, "little")
        tokens.append(token)
        if len(tokens) >= params.min_tokens and token in eos:
            return tokens, Finish.STOP, -1
        if len(tokens) >= params.min_tokens and token in stops:
            return tokens, Finish.STOP, token
        if len(tokens) == room:
            return tokens, Finish.LENGTH, -1


def ends_of(params: SamplingParams) -> tuple[list[int], list[int]]:
    """Ids that end an output with no reason, and those that are named as the reason."""
    stops = list(params.stop_token_ids or ())
    return ([], stops) if params.ignore_eos else ([toy.EOS], [*stops, *toy.MORE_EOS])


def _beams(prompt: list[int], params: SamplingParams, room: int, shape: Any, adapter: int) -> list[Output]:
    """A beam search's best n."""
    eos, stops = ends_of(params)
    searched = SamplingParams(
        use_beam_search=True, temperature=0.0, n=params.n, best_of=params.best_of, max_tokens=room,
        min_tokens=params.min_tokens, stop_token_ids=stops, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )  # fmt: skip
    found = expected_beams(
        prompt, searched, eos, room, shape.max_model_len, toy.VOCAB,
        (lambda tokens: first_stop(tokens, params) is not None) if params.stop else lambda tokens: False,
        adapter,
    )  # fmt: skip
    return [
        _output(prompt, tokens, finish, stop_id, params, True, adapter, finish is Finish.STOP and tokens[-1] not in eos)
        for tokens, finish, stop_id in found
    ]


def _output(
    prompt: list[int], tokens: list[int], finish: Finish, stop_id: int, params: SamplingParams, summed: bool,
    adapter: int, by_string: bool = False,
) -> Output:  # fmt: skip
    """``tokens`` with their text, cut by the first stop string. The text of a token that ends an output is not shown,
    unless it is asked for, or (of a beam, ``by_string``) no token did."""
    by_token = finish is Finish.STOP and (stop_id >= 0 or not by_string)
    shown = tokens[:-1] if by_token and not params.include_stop_str_in_output else tokens
    text = toy.text_of(shown, params.skip_special_tokens) if params.detokenize else ""
    reason: int | str | None = stop_id if finish is Finish.STOP and stop_id >= 0 else None
    stop = first_stop(shown, params)
    if stop is not None:
        tokens, finish, reason = tokens[: stop.used], Finish.STOP, stop.string
        text = text[: stop.end if params.include_stop_str_in_output else stop.end - len(stop.string)]
    found, total = [], None
    if params.logprobs is not None or summed:
        found = _logprobs([*prompt, *tokens], len(prompt), params.logprobs or 0, params.detokenize, adapter)
        total = 0.0
        for each in found:
            total += each.values[0]
    return Output(tokens, text, finish, reason, found if params.logprobs is not None else [], total)


def first_stop(tokens: list[int], params: SamplingParams) -> Stop | None:
    """The stop string that is complete first, of several that end together the longest. One counts where its last
    character comes with a token after the first ``min_tokens``."""
    if not params.stop or not params.detokenize:
        return None
    text = toy.text_of(tokens, params.skip_special_tokens)
    for end in range(1, len(text) + 1):
        hits = [string for string in params.stop if text.endswith(string, 0, end)]
        if not hits:
            continue
        used = next(n for n in range(len(tokens) + 1) if _has(tokens[:n], text[:end], params.skip_special_tokens))
        if used > params.min_tokens:
            return Stop(end, max(hits, key=len), used)
    return None


def _has(tokens: list[int], text: str, skip: bool) -> bool:
    return toy.text_of(tokens, skip).startswith(text)


# ---------------------------------------------------------------- log-probabilities


def _logprobs(tokens: list[int], start: int, k: int, texts: bool, adapter: int) -> list[TokenLogprobs]:
    """Of ``tokens[start:]``, each after all before it: the token's own, then the ``k`` likeliest."""
    context, found = _context(tokens, adapter), []
    for position in range(start, len(tokens)):
        values = distribution(context[: 8 * position], toy.VOCAB)
        one = record(values, tokens[position], k)
        ids, (rank,) = array("i", one.ids).tolist(), array("i", one.ranks)
        found.append(TokenLogprobs(ids, array("f", one.values).tolist(), rank, *(_texts(ids) if texts else ([], {}))))
    return found


def _texts(ids: list[int]) -> tuple[list[str], dict[int, bytes]]:
    """What each token adds to a text, and the bytes of those that are no whole characters."""
    pieces = [toy.PIECES[token] for token in ids]
    texts = [piece.decode("utf-8", "replace") for piece in pieces]
    return texts, {at: piece for at, piece in enumerate(pieces) if NOT_TEXT in texts[at]}


def _context(tokens: list[int], adapter: int) -> bytes:
    return array("q", [cell(position, token, adapter) for position, token in enumerate(tokens)]).tobytes()
