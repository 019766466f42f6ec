"""The oracle against rules worked out by hand, and against a whole cluster in which nothing goes wrong."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.scheduler.fake.fake_model import expected_tokens
from simulation import toy
from simulation.asks import Ask
from simulation.oracle import Stop, answer_to, first_stop, prompt_of

SHAPE = SimpleNamespace(max_model_len=30, pools="", whole=False)


def ids(*pieces: str | bytes) -> list[int]:
    """The tokens of these pieces."""
    return [toy.PIECES.index(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces]


def test_the_toys_text_is_its_tokenizers() -> None:
    rng = random.Random(1)
    for _ in range(500):
        tokens = [rng.randrange(toy.VOCAB) for _ in range(rng.randrange(20))]
        for skip in (True, False):
            assert toy.text_of(tokens, skip) == toy.TOKENIZER.decode(tokens, skip)
    assert toy.ids_of("ab é", True) == tuple(ids("<s>", "ab", " ", "é"))


@pytest.mark.parametrize(
    ("tokens", "stop", "min_tokens", "found"),
    [
        (ids("a", "b", "c"), ["bc"], 0, Stop(3, "bc", 3)),
        (ids("abc", "a"), ["bc"], 0, Stop(3, "bc", 1)),
        (ids("a", "abc"), ["ab", "aab"], 0, Stop(3, "aab", 2)),  # they end together: the longest
        (ids("abc"), ["abc", "b"], 0, Stop(2, "b", 1)),  # the first to be complete, whatever the list says
        (ids(b"a\xc3", b"\xa9a"), ["é"], 0, Stop(2, "é", 2)),
        (ids("d", "e"), ["ab"], 0, None),
        (ids("ab", "ab"), ["ab"], 1, Stop(4, "ab", 2)),  # the first is text
        (ids("a", "b"), ["ab"], 1, Stop(2, "ab", 2)),  # it begins too early, and ends in time
        (ids("a", "a", "a"), ["aa"], 2, Stop(3, "aa", 3)),  # they overlap
        (ids("</s>", "a"), ["</s>"], 0, None),  # special tokens have no text
    ],
)
def test_a_stop_string_is_found_where_it_is_complete(
    tokens: list[int], stop: list[str], min_tokens: int, found: Stop | None
) -> None:
    assert first_stop(tokens, SamplingParams(stop=stop, min_tokens=min_tokens)) == found


def test_a_child_draws_with_a_seed_of_its_own_and_is_cut_where_it_ends() -> None:
    prompt = ids("ab", "c")
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    answer = answer_to(Ask(name="", ids=prompt, params=params), 2**64 - 1, SHAPE)
    for child, seed in zip(answer.children, (2**64 - 1, 0), strict=True):
        drawn = expected_tokens(prompt, seed, 20, toy.VOCAB)
        assert (child.tokens, child.finish, child.text) == (drawn, Finish.LENGTH, toy.text_of(drawn, True))
    stopped = drawn[drawn.index(drawn[7])]  # wherever it comes first
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stopped])
    (child,) = answer_to(Ask(name="", ids=prompt, params=params), 0, SHAPE).children
    at = drawn.index(stopped)
    assert (child.tokens, child.reason, child.finish) == (drawn[: at + 1], stopped, Finish.STOP)
    assert child.text == toy.text_of(drawn[:at], True)


def test_an_eos_token_ends_with_no_reason_and_only_after_min_tokens() -> None:
    for seed in range(200):
        drawn = expected_tokens(ids("a"), seed, 25, toy.VOCAB)
        if toy.EOS in drawn[:-1] and toy.MORE_EOS[0] not in drawn:
            break
    at = drawn.index(toy.EOS) + 1
    for min_tokens, length in ((0, at), (at, at), (at + 1, None)):
        params = SamplingParams(max_tokens=25, min_tokens=min_tokens)
        (child,) = answer_to(Ask(name="", ids=ids("a"), params=params), seed, SHAPE).children
        if length is not None:
            assert (len(child.tokens), child.finish, child.reason) == (length, Finish.STOP, None)
        else:
            assert len(child.tokens) > at


def test_of_best_of_the_likeliest_are_returned_and_logprobs_only_where_asked_for() -> None:
    params = {"n": 2, "best_of": 4, "max_tokens": 5}
    plain = answer_to(Ask(name="", params=SamplingParams(n=4, max_tokens=5, logprobs=0)), 3, SHAPE).children
    best = answer_to(Ask(name="", params=SamplingParams(**params)), 3, SHAPE).children
    sums = sorted((sum(each.values[0] for each in child.logprobs) for child in plain), reverse=True)
    assert [child.cumulative for child in best] == sums[:2]
    assert all(child.logprobs == [] for child in best)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "ab"}, (ids("<s>", "ab"), "ab")),
        ({"text": "ab", "add_special_tokens": False}, (ids("ab"), "ab")),
        ({"text": "a", "chat": True}, (list(toy.ids_of("u.a\na.", False)), "u.a\na.")),
        ({"ids": ids("a", "<s>"), "echo": True}, (ids("a", "<s>"), "a<s>")),
        ({"text": "abcabc", "params": SamplingParams(truncate_prompt_tokens=2)}, (ids("<s>", "abc"), "abcabc")),
        ({"ids": ids("a", "b"), "params": SamplingParams(truncate_prompt_tokens=1)}, (ids("b"), None)),
        (
            {"text": "a", "pair": "b", "pooling": PoolingParams(task="score")},
            (ids("<s>", "a", "</s>", "b"), "a"),
        ),
    ],
)
def test_a_prompt_is_what_the_tokenizer_and_truncation_make_of_it(
    fields: dict[str, object], expected: tuple[list[int], str | None]
) -> None:
    assert prompt_of(Ask(name="", **fields), SHAPE) == expected  # type: ignore[arg-type]
