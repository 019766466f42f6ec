"""Every field of SamplingParams: its default, values on the good side of each bound, and bad ones with what is said.

One table for the class itself, for HTTP and for LLM. A value may need others beside it (``use_beam_search`` needs a width): a
``With`` names it. Where HTTP spells a field otherwise, or cannot hold a value at all (JSON has no NaN), a row says so.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from quire.proto.params import RequestOutputKind
from quire.proto.structured import StructuredOutputsParams

NAN, INF = math.nan, math.inf
BIG = 2**31 - 1


@dataclass(frozen=True)
class With:
    """A value, and the fields it is given with."""

    value: Any
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """``bad``: (value, part of the message). ``http``: the field exists there under its own name."""

    default: Any
    good: list[Any]
    bad: list[tuple[Any, str]]
    http: bool = True


NUMBER = "a number"
BEAMS = {"use_beam_search": True, "best_of": 2, "temperature": 0}


def number(name: str, low: str) -> list[tuple[Any, str]]:
    """Bad values of any field that holds a number in the range ``low``."""
    said = f"{name} must be in {low}"
    return [(NAN, said), (INF, said), (-INF, said), ("1", NUMBER), (True, NUMBER), (None, NUMBER), ([1], NUMBER)]


def integer(name: str) -> list[tuple[Any, str]]:
    """Bad values of any field that holds an integer."""
    said = f"{name} must be an integer"
    return [(1.5, said), (NAN, said), (INF, said), ("1", said), (True, said), ([1], said)]


def flag(name: str) -> list[tuple[Any, str]]:
    """Bad values of any field that is true or false."""
    said = f"{name} must be true or false"
    return [(0, said), (1, said), ("true", said), (None, said), (NAN, said)]


def ids(name: str) -> list[tuple[Any, str]]:
    """Bad values of any field that holds token ids."""
    said = f"{name} must be a list of token ids"
    long = f"{name} must have at most 262144 token ids"
    return [
        ([5] * (2**18 + 1), long),
        ([-1], said),
        ([2**31], said),
        (["1"], said),
        ([1.0], said),
        ([True], said),
        (5, said),
        ([NAN], said),
    ]


ROWS: dict[str, Row] = {
    "n": Row(1, [1, 2, 16384], [(0, "n must be at least 1, got 0."), (16385, "at most 16384"), (None, "n must be an"),
             (With(2, {"temperature": 0}), "n must be 1 when using greedy sampling"), *integer("n")]),
    "best_of": Row(None, [None, 1, With(3, {"n": 2}), 16384], [
        (0, "best_of must be at least 1"), (With(1, {"n": 2}), "greater than or equal to n, got n=2 and best_of=1"),
        (With(2, {"temperature": 0}), "best_of must be 1 when using greedy sampling."), (16385, "at most 16384"),
        *integer("best_of")]),
    "presence_penalty": Row(0.0, [-2, 2.0, 0.5], [(-2.01, "[-2, 2]"), (2.01, "[-2, 2]"),
                            *number("presence_penalty", "[-2, 2]")]),
    "frequency_penalty": Row(0.0, [-2.0, 2, 0.5], [(-2.01, "[-2, 2]"), (2.01, "[-2, 2]"),
                             *number("frequency_penalty", "[-2, 2]")]),
    "repetition_penalty": Row(1.0, [0.01, 1, 2.0, 50.0], [(0, "(0, inf]"), (-1.0, "(0, inf]"),
                              *number("repetition_penalty", "(0, inf]")]),
    "temperature": Row(1.0, [0, 0.0, 0.5, 2, 2.01, 1e300], [(-0.01, "[0, inf]"),
                       *number("temperature", "[0, inf]")]),
    "top_p": Row(1.0, [1e-6, 1], [(0, "(0, 1]"), (-0.1, "(0, 1]"), (1.01, "(0, 1]"), *number("top_p", "(0, 1]")]),
    "top_k": Row(0, [-1, 0, 1, BIG], [(-2, "0 or -1"), (2**31, "at most"), (None, "top_k must be an"),
                 *integer("top_k")]),
    "min_p": Row(0.0, [0, 1.0], [(-0.01, "[0, 1]"), (1.01, "[0, 1]"), *number("min_p", "[0, 1]")]),
    "seed": Row(None, [None, -1, 0, -(2**63), 2**64 - 1], [(2**64, "at most"), (-(2**63) - 1, "at least"),
                *integer("seed")]),
    "use_beam_search": Row(False, [With(True, {"n": 2, "temperature": 0}), With(True, {"best_of": 64, "temperature": 0}),
                             With(True, {"temperature": 0, "length_penalty": 2.0})], [
        (With(True, {"temperature": 0.5}), "temperature must be 0 when using beam search."),
        (With(True, {"n": 2, "temperature": 0.5}), "temperature must be 0 when using beam search."),
        (With(True, {**BEAMS, "top_p": 0.5}), "top_p must be 1 when using beam search."),
        (With(True, {**BEAMS, "top_k": 5}), "top_k must be -1 when using beam search."),
        (With(True, {**BEAMS, "min_p": 0.5}), "min_p must be 0 when using beam search."),
        (With(True, {"best_of": 65, "temperature": 0}), "best_of must be at most 64 when using beam search"),
        *flag("use_beam_search")]),
    "length_penalty": Row(1.0, [1, With(0.0, BEAMS), With(-2.5, BEAMS)], [
        (2.0, "length_penalty is not effective and must be the default value of 1.0 when not using beam search."),
        *[(With(value, BEAMS), said) for value, said in number("length_penalty", "[-inf, inf]")]]),
    "early_stopping": Row(False, [False, With(True, BEAMS), With("never", BEAMS)], [
        (True, "early_stopping is not effective and must be False when not using beam search."),
        (With("always", BEAMS), "early_stopping must be True, False, or 'never', got 'always'."),
        (With(1, BEAMS), "early_stopping must be"), (With(None, BEAMS), "early_stopping must be")]),
    "stop": Row([], [None, "x", [], ["a", "b"], ["x"] * 64], [("", "empty string"), (["a", ""], "empty string"),
                ([1], "list of strings"), (5, "list of strings"), (["x"] * 65, "at most 64"), (NAN, "list of strings"),
                (With("x", {"detokenize": False}), "Set detokenize=True to use stop.")]),
    "stop_token_ids": Row([], [None, [], [0, 7]], ids("stop_token_ids")),
    "bad_words": Row([], [None, [], ["a", " b c", "\n", " "]], [([""], "empty"), (["a", ""], "empty"), ("a", "list of strings"),
                     ([1], "list of strings"), (["x"] * 1025, "at most 1024"), (NAN, "list of strings")]),
    "include_stop_str_in_output": Row(False, [True, False], flag("include_stop_str_in_output")),
    "ignore_eos": Row(False, [True, False], flag("ignore_eos")),
    "max_tokens": Row(16, [1, None, 16], [(0, "at least 1"), (-1, "at least 1"), (2**31, "at most"),
                      *integer("max_tokens")]),
    "min_tokens": Row(0, [0, 16, With(99, {"max_tokens": None})], [
        (-1, "at least 0"), (17, "less than or equal to max_tokens=16"), (None, "min_tokens must be an"),
        *integer("min_tokens")]),
    "thinking_token_budget": Row(None, [None, -1], [(-2, "at least 0"), *integer("thinking_token_budget")]),
    "logprobs": Row(None, [None, 0, 1, 20, True, False], [(-2, "at least -1"), *integer("logprobs")[:4]], http=False),
    "prompt_logprobs": Row(None, [None, 0, 1, 20, True], [(-2, "at least -1"), *integer("prompt_logprobs")[:4]]),
    "detokenize": Row(True, [True, False], flag("detokenize")),
    "skip_special_tokens": Row(True, [True, False], flag("skip_special_tokens")),
    "spaces_between_special_tokens": Row(True, [True, False], flag("spaces_between_special_tokens")),
    "truncate_prompt_tokens": Row(None, [None, 1, -1], [(0, "at least 1"), (-2, "at least 1"),
                                  *integer("truncate_prompt_tokens")]),
    "extra_args": Row(None, [None, {}, {"a": [1, "b"]}], [(["a"], "extra_args must be a dict by strings"), ("a", "dict by"),
                      ({1: 2}, "dict by strings")], http=False),
    "logprob_token_ids": Row(None, [None, [], [1, 2, 2]], [("a", "list of token ids"), ([-1], "list of token ids"),
                              (list(range(129)), "at most 128 token ids")], http=False),
    "flat_logprobs": Row(False, [True, False], flag("flat_logprobs"), http=False),
    "truncation_side": Row(None, [None, "left", "right"], [("middle", "left or right"), (1, "truncation_side"),
                           (NAN, "left or right")]),
    "logits_processors": Row(None, [None, []], [
        (len, "logits_processors holds a Python callable"), ([len], "logits_processors holds a Python callable"),
        ("a:b", "list of names"), ([1], "list of names"), ([""], "list of names"), (["a:b"] * 65, "at most 64 names")]),
    "output_kind": Row(RequestOutputKind.CUMULATIVE, [1, RequestOutputKind.FINAL_ONLY], [
        (3, "output_kind must be one of"), ("all", "output_kind must be one of"), (None, "output_kind must be one of"),
        ], http=False),
    "structured_outputs": Row(None, [None, StructuredOutputsParams(regex="a+")], [
        ({"regex": "a"}, "structured_outputs must be StructuredOutputsParams"), ("a", "structured_outputs must be")],
        http=False),
    "guided_decoding": Row(None, [None, StructuredOutputsParams(json_object=True)], [
        (With(StructuredOutputsParams(regex="a"), {"structured_outputs": StructuredOutputsParams(regex="b")}), "not both"),
        ("a", "structured_outputs must be")], http=False),
    "logit_bias": Row(None, [None, {}, {0: -100}, {"7": 100.0}, {5: 1000}], [
        ([1], "map token ids"), ({"x": 1}, "no token id"), ({"1_0": 1}, "no token id"), ({" 5": 1}, "no token id"), ({-1: 1}, "no token id"), ({2**31: 1}, "no token id"),
        ({1: "2"}, "number in [-100, 100]"), ({1: True}, "number in [-100, 100]"), ({1: NAN}, "number in [-100, 100]"),
        ({1: INF}, "number in [-100, 100]"), ({1: None}, "number in [-100, 100]")]),
    "allowed_token_ids": Row(None, [None, [0], [7, 7]], [([], "allowed_token_ids is empty"), *ids("allowed_token_ids")]),
    "skip_reading_prefix_cache": Row(None, [None, True, False], [(1, "true or false"), ("x", "true or false")]),
}  # fmt: skip


STRUCTURED = Row(None, [
    {"json": {"type": "object"}}, {"json": '{"type": "integer"}'}, {"json": True}, {"regex": "[0-9]+"},
    {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}, {"json_object": True},
    {"json": {}, "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json": {}, "whitespace_pattern": "[ ]?"},
], [
    ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
    ({"json_object": False}, "got none"), ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json": 5}, "json must be a JSON schema"), ({"regex": ""}, "regex must be a string that is not empty"),
    ({"regex": 5}, "regex must be"), ({"choice": []}, "choice must be"), ({"choice": [""]}, "choice must be"),
    ({"choice": "ab"}, "choice must be"), ({"grammar": ""}, "grammar must be"), ({"json_object": 1}, "json_object must be"),
    ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
    ({"regex": "a" * (2**18 + 1)}, "over the limit of 262144"),
    ({"json": "{}", "whitespace_pattern": "a" * 2**18}, "over the limit of 262144"),
    ({"json": {"enum": ["x" * 2**18]}}, "over the limit of 262144"),
])  # fmt: skip


def given(name: str, value: Any) -> dict[str, Any]:
    """Keyword arguments of one cell of the table."""
    return {**value.others, name: value.value} if isinstance(value, With) else {name: value}


def cells(kind: str) -> list[Any]:
    """All (name, value) or (name, value, said)."""
    if kind == "good":
        return [(name, value) for name, row in ROWS.items() for value in row.good]
    return [(name, value, said) for name, row in ROWS.items() for value, said in row.bad]
