"""Structured outputs: every form as a grammar, and the worker's matchers over rows, forks and replays."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from json_schemas import schemas
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.detokenizer.grammar_helper import compiled
from quire.frontend.tools.forms import FORMS as CALL_FORMS
from quire.frontend.tools.forms import demanded
from quire.gpu_worker.sampling.grammar import Grammars
from quire.proto.checkpoint.model_config import ModelConfig, demo_model_path, load_model_config
from quire.proto.codec import i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.grammars import grammar as proto_grammar
from quire.proto.grammars.grammar import GrammarError, grammar_of, start_matcher, token_table
from quire.proto.grammars.structural_tags import placed
from quire.proto.grammars.thought_formats import after_thought, free_after_thought, headed, structural
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.thinking import Thinking
from quire.proto.work import Generate, ThinkingGenerate

END = 256
"""EOS of the byte-level tokenizer, whose ids below are bytes. 257 is a second EOS, 258 another special token."""


def spec(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


def byte_folder(folder: Path, marked: bool = True) -> str:
    """A tokenizer of single bytes. Not ``marked``: its special tokens are in the vocabulary like any other."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: i for i, letter in zip(_byte_values(alphabet), alphabet, strict=True)}
    specials = {"</s>": END, "<|end|>": END + 1, "<pad>": END + 2}
    tokenizer = Tokenizer(models.BPE({**letters, **({} if marked else specials)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if marked:
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    return str(folder)


def _byte_values(alphabet: list[str]) -> list[int]:
    """The byte that each letter of the byte-level alphabet stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [ord(a) if ord(a) < 256 else hidden[ord(a) - 256] for a in alphabet]


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = byte_folder(tmp_path_factory.mktemp("bytes"))
    return ModelConfig(folder, {}, 512, vocab_size=300, eos_token_ids=[END, END + 1])


@pytest.fixture
def grammars(bytes_model: ModelConfig) -> Grammars:
    return Grammars(bytes_model, EngineArgs())


@pytest.fixture(scope="module")
def table(bytes_model: ModelConfig) -> Any:
    return token_table(bytes_model.path, bytes_model)


def accepts(table: Any, form: StructuredOutputsParams, text: str) -> bool:
    """Whether ``text`` as a whole is of the form."""
    matcher = start_matcher(table, grammar_of(form))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def admit(
    grammars: Grammars, row: int, form: StructuredOutputsParams, outputs: bytes | list[int] = b"", **params: Any
) -> None:
    suppressed = i32([END, END + 1]) if params.get("min_tokens") else b""
    ids = np.array([1, 2, 3, *outputs], np.int32)
    params = {"max_tokens": 400, **params}
    sampling = SamplingParams(structured_outputs=form, **params)
    grammars.admit(row, Generate(sampling, 0, suppressed_ids=suppressed), 3, ids)


def allowed(grammars: Grammars, row: int) -> list[int]:
    """The token ids that a row may draw; its slot must not fail."""
    mask, failed = grammars.fill([row])
    assert not failed
    return _ids(mask[0])


def _ids(mask: np.ndarray) -> list[int]:
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist()


def write(grammars: Grammars, row: int, text: str) -> None:
    for byte in text.encode():
        grammars.advance([row], [byte])


# ---------------------------------------------------------------- forms

CALL = {"begin": '<f>{"name": "é", "arguments": ', "content": {"type": "json_schema", "json_schema": {
    "$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
    "additionalProperties": False}}, "end": "}</f>"}  # fmt: skip
LOOSE = {
    "begin": "<g>",
    "content": {"type": "json_schema", "json_schema": {"uniqueItems": True}, "strict": False},
    "end": "</g>",
}
ONE = '<f>{"name": "é", "arguments": {"a": 1}}</f>'


def tags(kind: str, **more: Any) -> dict[str, Any]:
    format = {"type": kind, "triggers": ["<f>", "<g>"], "tags": [CALL, LOOSE], **more}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": format})}


def free(reasoning: str, once: bool = False) -> dict[str, Any]:
    format = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [CALL], "stop_after_first": once}
    return {"structural_tag": structural(free_after_thought(format, reasoning))}


def after(format: dict[str, Any], reasoning: str) -> dict[str, Any]:
    return {"structural_tag": structural(after_thought(format, reasoning))}


def begun(form: dict[str, Any], tail: str) -> dict[str, Any]:
    """``form`` behind a prompt that ends with ``tail``."""
    return {"structural_tag": placed(form["structural_tag"], tail)}


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json_object": True}, ["{}", '{"a": [1, null]}', '{ "a" : 1 }'], ["[]", "1", '{"a"}', ""]),
    ({"json_object": True}, ['{\n    "a": 1,\n\t"b": 2\n}', '{\r\n}'], ['{"a":  1}', '{\n\n}', '{"a" \n: 1}']),
    ({"json_object": True, "whitespace_pattern": r"\s+"}, ['{"a":  1}', "{\n\n\n}"], []),
    ({"json": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}, ["0.1", "0.5"], ["0", "0.0", "-0", "0.6"]),
    ({"json": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}}, ["1.1", "1.5"], ["1", "1.0", "1.6"]),
    ({"json": {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}}, ["-1.5", "-1.1"], ["-1", "-1.6"]),
    ({"json": {"type": "number", "minimum": -0.5, "maximum": 0, "exclusiveMaximum": True}}, ["-0.1"], ["0", "-0"]),
    ({"json_object": True, "disable_any_whitespace": True}, ['{"a":[1,2]}'], ['{"a": 1}', "{ }", '{"a":1} ']),
    ({"json_object": True, "whitespace_pattern": " ?"}, ['{"a": 1}', "{}"], ['{"a":  1}', '{"a":\n1}']),
    ({"json": True}, ["1", "[]", '"x"'], ["x", ""]),
    ({"json": '{"type": "integer"}'}, ["0", "-12"], ["1.5", "01", '"1"']),
    ({"json": {"type": "integer", "minimum": 3, "exclusiveMinimum": True}}, ["4"], ["3"]),
    ({"json": {"properties": {"a": {"properties": {"b": {}}}}}, "disable_additional_properties": True},
     ['{"a": {"b": 1}}', "{}"], ['{"c": 1}', '{"a": {"c": 1}}']),
    ({"json": {"properties": {"properties": {"type": "object"}}}, "disable_additional_properties": True},
     ['{"properties": {"x": 1}}'], ['{"x": 1}']),
    ({"json": {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}},
     ['{"a": 1, "b": "x"}'], ['{"a": "x"}', r'{"\u0061": "x"}']),
    ({"json": {"oneOf": [{"const": 1}, {"enum": [2, "x"]}]}}, ["1", "2", '"x"'], ["3"]),
    ({"regex": r"(ab|c)+\d"}, ["abc1", "c9"], ["ab", "1", "abc12"]),
    ({"regex": "^a/b$"}, ["a/b"], ["xa/b"]),
    ({"regex": r"[^\n]{2}é?"}, ["ab", "ab\u00e9", "éé"], ["a", "a\n"]),
    ({"choice": ["a", "ab", "é\n😀\x7f\x01", 'q"\\', "1/2"]}, ["a", "ab", "é\n😀\x7f\x01", 'q"\\', "1/2"], ["b", ""]),
    ({"grammar": 'start: "a" list "b"\nlist: ("x" | /[0-9]+/)*'}, ["ab", "ax12b"], ["a", "axyb"]),
    ({"grammar": 'start: greet\ngreet: "hi" | "hi" " " NAME\nNAME: /[A-Z][a-z]+/'}, ["hi", "hi Bo"], ["hi bo"]),
    ({"grammar": 'root ::= pair ("," pair)*\npair ::= "(" [0-9]+ ")" # one\n'}, ["(1)", "(1),(22)"], ["()", "(1),"]),
    ({"grammar": r'root ::= [\u0041-\u005A\u00e9] "\u0062c\\u" | "\U0001F600"'}, ["Abc\\u", "ébc\\u", "😀"], ["abc"]),
    (tags("triggered_tags"), ["", "a < b", ONE, f"x {ONE} y\n<g>{{}}</g>", "<g>{\"b\": [1]}</g>"],
     ["<f>", "<f>x", ONE.replace("1", '"1"'), "<g>[]</g>", "<g>{}"]),
    (tags("triggered_tags", stop_after_first=True), ["text", ONE, f"x {ONE}"], [ONE + ONE, ONE + " y"]),
    (tags("triggered_tags", at_least_one=True), [f"x{ONE}y"], ["", "text"]),
    (tags("tags_with_separator", separator=", ", at_least_one=True), [ONE, f"{ONE}, <g>{{}}</g>"],
     ["", "x", f"{ONE},"]),
    (tags("tags_with_separator", separator="", stop_after_first=True), ["", ONE], [ONE + ONE]),
    (tags("sequence", elements=[{"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "tag",
      "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}]}, CALL | {"type": "tag"}]),
     ["a" + ONE, "<t>b <f></t>" + ONE], [ONE, "<t>b" + ONE]),
    (after({"type": "json_schema", "json_schema": {"type": "integer"}}, "qwen3"),
     ["12", "<think>\n1 < 2\n</think>\n\n12", "<think></think>3"],
     ["x", "<think>\n12", "<think></think>x", "</think>1"]),
    (after({"type": "regex", "pattern": "a/b\\/\n\\n\\d"}, "deepseek_r1"),
     ["Hm.</think>\n\na/b/\n\n1"], ["a/b/\n\n1", "Hm."]),
    (free("qwen3"),
     ["", "x", ONE, f"x {ONE} y{ONE}", "<think>no <f> end", f"\n<think><f>x</think>{ONE}{ONE}", "a<think>"],
     ["<f>x", f"{ONE}<f>x", "<think></think><f>x", "a <think><f>x</think>", "<think><f>x</think><f>x"]),
    (begun(free("qwen3"), "<think>"), [f"<f>x</think>{ONE}", "<f>x", f"<think><f>x</think>{ONE}"],
     ["</think><f>x", f"x</think>{ONE}<f>x"]),
    (begun(free("deepseek_r1"), "</think>"), ["x", ONE], ["<f>x", "x</think><f>x"]),
    (begun(after({"type": "regex", "pattern": "a"}, "qwen3"), "<think>"), ["x</think>a", "</think>\na"], ["a", "x"]),
    (begun(after({"type": "regex", "pattern": "a"}, "deepseek_r1"), "</think>"), ["a"], ["x</think>a"]),
    (free("qwen3", True), [ONE, "x", f"<think><f>x</think>{ONE}"], [ONE + ONE, f"<think></think>{ONE}{ONE}"]),
    (free("deepseek_r1"), ["no thought", f"<f>x</think>{ONE}", "<f>x"], ["x</think><f>x", f"x</think>{ONE}<f>x"]),
    ({"structural_tag": json.dumps({"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
      "triggers": ["<"]})}, ["a <f>12</f>"], ["a < b", "<f>x</f>"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), FORMS, ids=lambda value: str(value)[:40])
def test_every_form_accepts_what_it_says(table: Any, form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(table, spec(**form), text)] == []
    assert [text for text in bad if accepts(table, spec(**form), text)] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "not JSON"), ({"json": "[1]"}, "object"), ({"json": '{"a": NaN}'}, "not JSON"),
    ({"json": False}, "no output"), ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"), ({"json": {"not": {}}}, "not"),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}}, "oneOf"),
    ({"json": {"oneOf": [{"const": 1}, {"const": 1.0}]}}, "oneOf"),
    ({"json": {"if": {}, "then": {}}}, "if"), ({"json": {"type": "array", "contains": {}}}, "contains"),
    ({"json": {"type": "object", "propertyNames": {"maxLength": 1}}}, "propertyNames"),
    ({"json": {"type": "object", "minProperties": 2}}, "minProperties=2"),
    ({"json": {"items": {"minProperties": 3, "required": ["a"]}}}, "minProperties=3"),
    ({"json": {"type": "object", "patternProperties": {"a": {}, "b": {"type": "null"}}}}, "not disjoint"),
    ({"json": {"type": "string", "format": "iri"}}, "iri"), ({"json": {"$ref": "http://x.example/y"}}, "x.example"),
    ({"json": {"$ref": "#/$defs/none"}}, "none"), ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "2"),
    ({"json": {"type": "string", "pattern": "(?=a)"}}, "look"),
    ({"json": {"type": "string", "pattern": "("}}, "unclosed"),
    ({"json_object": True, "whitespace_pattern": "("}, "("),
    ({"regex": "(ab"}, "unclosed"), ({"regex": r"(a)\1"}, "backreferences"),
    ({"grammar": "start: x"}, "x"), ({"grammar": 'begin: "a"'}, "start"), ({"grammar": 'root ::= "a'}, "GBNF"),
    ({"grammar": "root ::= other"}, "other"), ({"grammar": 'x ::= "a"'}, "root"),
    ({"structural_tag": "{"}, "not JSON"), ({"structural_tag": "[]"}, "object"), ({"structural_tag": "{}"}, "a format"),
    (tags("none"), "'none'"), (tags("sequence"), "elements"), (tags("regex"), "pattern"),
    (tags("triggered_tags", triggers=["x"]), "no trigger"),
    (tags("triggered_tags", tags=[1]), "each of tags"), (tags("triggered_tags", tags=[{**CALL, "end": 5}]), "end must"),
    (tags("triggered_tags", tags=[{**LOOSE, "content": {**LOOSE["content"], "strict": True}}]), "uniqueItems"),
    ({"grammar": r'root ::= "\uD800"'}, "no character"), ({"grammar": "root ::= " + "(" * 30000}, "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "word"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_honoured_is_refused_in_one_line(table: Any, form: dict[str, Any], word: str) -> None:
    with pytest.raises(GrammarError) as refused:
        start_matcher(table, grammar_of(spec(**form)))
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 300


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="JSON schema"):
        spec(json=deep)
    with pytest.raises(GrammarError, match=r"nested|not JSON"):
        grammar_of(spec(json='{"items": ' * 5000 + "{}" + "}" * 5000))


# ---------------------------------------------------------------- tokens


def test_tokens_that_end_or_pad_are_no_text(grammars: Grammars) -> None:
    admit(grammars, 0, spec(regex="(?s:.)*"))
    assert {END, END + 1} <= set(allowed(grammars, 0))
    assert not set(allowed(grammars, 0)) & set(range(END + 2, 320))
    admit(grammars, 1, spec(regex="(?s:.)+"))
    assert max(allowed(grammars, 1)) < END


def test_a_special_token_that_is_not_marked_is_no_text(tmp_path: Path) -> None:
    model = ModelConfig(byte_folder(tmp_path, marked=False), {}, 512, vocab_size=259, eos_token_ids=[END + 1])
    grammars = Grammars(model, EngineArgs())
    admit(grammars, 0, spec(regex=".*!"))
    assert max(allowed(grammars, 0)) < END
    write(grammars, 0, "!")
    assert [i for i in allowed(grammars, 0) if i >= END] == [END, END + 1]


@pytest.mark.parametrize("format", ["after", "free", "qwen3", "demanded"])
def test_a_mark_that_is_a_special_token_is_written_as_it_or_spelled_out(tmp_path: Path, format: str) -> None:
    folder = byte_folder(tmp_path)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.add_special_tokens(["<think>", "</think>", "<f>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    model = ModelConfig(folder, {}, 512, vocab_size=262, eos_token_ids=[END])
    table = token_table(folder, model)
    think, thought, call = (tokenizer.token_to_id(name) for name in ("<think>", "</think>", "<f>"))
    form = {
        "after": after({"type": "regex", "pattern": "a+"}, "deepseek_r1"), "free": free("deepseek_r1"),
        "qwen3": free("qwen3"), "demanded": {"structural_tag": structural(CALL | {"type": "tag"})},
    }[format]  # fmt: skip
    rest = list(ONE[3:].encode())
    good, bad = {
        "after": ([[think, *b"x", thought, *b"\na"], [*b"x</think>a"], [*b"<think>x", thought, *b"a"]],
                  [[*b"x", thought]]),
        "free": ([[think, *b"<f>x", thought, call, *rest], [*b"x", thought, *b"<f>", *rest], [think, *b"x"]],
                 [[*b"x", thought, call, *b"x"]]),
        "qwen3": ([[think, *b"<f>x", thought, *b"y", call, *rest], [call, *rest, *b"x"], [think, *b"<f>"]],
                  [[call, *b"x"], [think, thought, call]]),
        "demanded": ([[call, *rest], [*ONE.encode()]], [[call]]),
    }[format]  # fmt: skip
    for tokens, sound in [*((each, True) for each in good), *((each, False) for each in bad)]:
        matcher = start_matcher(table, grammar_of(spec(**form), table))
        assert (matcher.consume_tokens(tokens) and matcher.is_accepting()) is sound, tokens
    assert compiled(table, spec(**form)) == ""


# ---------------------------------------------------------------- budgets of thoughts


def think(grammars: Grammars, budget: int, outputs: bytes = b"", open: bool = True, **more: Any) -> None:
    """Row 0 thinks between < and />, where the prompt has spent one token of its budget if it is ``open``."""
    thinking = Thinking(budget, list(b"/>"), ["<"], ["/>", "!"], open, int(open))
    params = SamplingParams(max_tokens=400, thinking_token_budget=budget, **more)
    work = ThinkingGenerate(params, 0, [], b"", [], None, -1, thinking)
    grammars.admit(0, work, 3, np.array([1, 2, 3, *outputs], np.int32))


def forced(grammars: Grammars) -> str:
    """What a row draws that would go on with x wherever it may."""
    text = ""
    while len(text) < 12:
        mask, failed = grammars.fill([0])
        assert not failed
        ids = _ids(mask[0])
        text += chr(ord("x") if ord("x") in ids else ids[0])
        grammars.advance([0], [ord(text[-1])])
    return text


@pytest.mark.parametrize(
    ("budget", "open", "before", "text"),
    [
        (0, True, "", "/>xxxxxxxxxx"),
        (4, True, "", "xxx/>xxxxxxx"),
        (4, False, "", "xxxxxxxxxxxx"),
        (4, False, "ab<a", "xxx/>xxxxxxx"),
        (4, True, "abc/", ">xxxxxxxxxxx"),
        (4, True, "ab!", "xxxxxxxxxxxx"),
        (4, True, "a!<", "xx/>xxxxxxxx"),  # all thoughts of an answer together
        (4, True, "abc/>a<", "/>xxxxxxxxxx"),
        (100, True, "", "xxxxxxxxxxxx"),
    ],
)
def test_a_thought_ends_where_its_budget_does(
    grammars: Grammars, budget: int, open: bool, before: str, text: str
) -> None:
    """Also in a row that goes on elsewhere with the output so far, and in one that is a copy."""
    think(grammars, budget, before.encode(), open)
    assert forced(grammars) == text
    think(grammars, budget, b"", open)
    for byte in before.encode():
        grammars.advance([0], [byte])
    grammars.copy([0], [1])
    assert forced(grammars) == text
    grammars.copy([1], [0])
    assert forced(grammars) == text


def test_a_thoughts_end_is_what_the_grammar_permits(grammars: Grammars) -> None:
    """The grammar goes on behind it, and no character is cut in two."""
    form = spec(regex="<(x|é)*(/>|!)[ab]{3}!?")
    think(grammars, 3, b"<x\xc3", False, structured_outputs=form)
    assert allowed(grammars, 0) == [0xA9]
    grammars.advance([0], [0xA9])
    for byte in b"/>":
        assert allowed(grammars, 0) == [byte]
        grammars.advance([0], [byte])
    assert allowed(grammars, 0) == [*b"ab"]


def test_a_budget_without_a_token_that_ends_the_thought_fails_its_row_alone(grammars: Grammars) -> None:
    think(grammars, 1, allowed_token_ids=[*b"xy"])
    _, ((slot, status, message),) = grammars.fill([7, 0])
    assert (slot, status) == (1, 400) and "thinking_token_budget" in message


def test_gpt_oss_writes_what_is_demanded_in_its_channels(tmp_path: Path) -> None:
    """A form of the request's own in the last channel, calls in that of comments; with a thought before or without."""
    folder = byte_folder(tmp_path)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(f"{folder}/tokenizer.json")
    model = ModelConfig(folder, {}, 512, vocab_size=270, eos_token_ids=[END])
    table = token_table(folder, model)
    ids = {mark: tokenizer.token_to_id(mark) for mark in (*marks, "<|end|>")}

    def tokens(text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
        return [token for part in parts for token in ([ids[part]] if part in ids else part.encode())]

    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    tools = {"f": ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, True), "g": (True, False)}
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    answer = "<|channel|>final<|message|>12"
    number = headed({"type": "json_schema", "json_schema": {"type": "integer"}}, "gpt-oss")
    forms = {answer: number, call: demanded(CALL_FORMS["openai"], tools, False)}
    for good, format in forms.items():
        form = after(format, "gpt-oss")
        other = next(each for each in forms if each != good)
        for text, sound in (
            (good, True), (thought + good, True), (good + good, False), (thought, False), (thought + other, False),
            (good.replace("1", "x"), False), ("12", False),
        ):  # fmt: skip
            matcher = start_matcher(table, grammar_of(spec(**form), table))
            assert (matcher.consume_tokens(tokens(text)) and matcher.is_accepting()) is sound, text
        assert compiled(table, spec(**form)) == ""


SPELLED = [
    ({"regex": "</s>"}, "</s>"), ({"choice": ["a<|end|>b"]}, "a<|end|>b"), ({"json": {"const": "<pad>"}}, '"<pad>"'),
    ({"json": {"properties": {"</s>": {"const": 1}}, "required": ["</s>"]}}, '{"</s>":1}'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), SPELLED, ids=lambda value: str(value)[:40])
def test_the_text_of_a_special_token_is_spelled_out(table: Any, grammars: Grammars, form: Any, text: str) -> None:
    assert compiled(table, spec(**form)) == ""  # the check of a request
    admit(grammars, 0, spec(**form))
    for byte in text.encode():
        assert byte in allowed(grammars, 0) and max(allowed(grammars, 0)) < END
        grammars.advance([0], [byte])
    assert allowed(grammars, 0) == [END, END + 1]


def test_a_text_that_the_tokenizer_would_change_is_spelled_out_as_it_is(tmp_path: Path) -> None:
    folder = byte_folder(tmp_path)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(f"{folder}/tokenizer.json")
    model = ModelConfig(folder, {}, 512, vocab_size=259, eos_token_ids=[END])
    form, text = spec(choice=["cafe\u0301\u0301!"]), "cafe\u0301\u0301!"
    assert compiled(token_table(folder, model), form) == ""
    grammars = Grammars(model, EngineArgs())
    admit(grammars, 0, form)
    for byte in text.encode():
        assert allowed(grammars, 0) == [byte]
        grammars.advance([0], [byte])
    assert allowed(grammars, 0) == [END]


@pytest.mark.parametrize(("name", "token"), [("<pad>", END + 2), ("</s>", END)])
def test_a_special_token_that_a_grammar_names_is_one(table: Any, grammars: Grammars, name: str, token: int) -> None:
    form = spec(grammar=f'start: "a" {name} | "b" {name}* "c"')
    assert compiled(table, form) == ""
    admit(grammars, 0, form, b"a")
    assert allowed(grammars, 0) == [token]
    grammars.advance([0], [token])
    assert allowed(grammars, 0) == [END, END + 1]


def test_a_tokenizer_larger_than_the_model(bytes_model: ModelConfig) -> None:
    model = ModelConfig(bytes_model.path, {}, 512, vocab_size=200, eos_token_ids=[END])
    grammars = Grammars(model, EngineArgs())
    admit(grammars, 0, spec(regex="a|b"))
    mask, failed = grammars.fill([0])
    assert mask.shape == (1, 7) and mask.flags["C_CONTIGUOUS"] and not failed
    assert _ids(mask[0]) == [97, 98]


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    model = ModelConfig(str(tmp_path), {}, 512, vocab_size=300, eos_token_ids=[0])
    with pytest.raises(ConfigError, match="save one with"):
        token_table(str(tmp_path), model)
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    pieces.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        token_table(str(tmp_path), model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        token_table(str(tmp_path), model)
    with pytest.raises(ConfigError, match="EOS"):
        token_table(byte_folder(tmp_path / "bytes"), _without_eos(tmp_path / "bytes"))


def test_an_added_token_far_past_the_vocabulary_makes_no_table_of_its_size(tmp_path: Path) -> None:
    folder = Path(byte_folder(tmp_path))
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 10**9, "content": "<far>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    model = ModelConfig(str(folder), {}, 512, vocab_size=300, eos_token_ids=[END])
    with pytest.raises(ConfigError, match="a token of id 1000000000 and the model's vocab_size is 300"):
        token_table(str(folder), model)


def _without_eos(folder: Path) -> ModelConfig:
    (folder / "tokenizer_config.json").unlink()
    return ModelConfig(str(folder), {}, 512, vocab_size=300, eos_token_ids=[5000])


def test_without_a_tokenizer_a_slot_fails_alone(bytes_model: ModelConfig) -> None:
    grammars = Grammars(bytes_model, EngineArgs(skip_tokenizer_init=True))
    admit(grammars, 1, spec(json_object=True))
    mask, failed = grammars.fill([0, 1])
    assert (mask == -1).all()
    assert [(slot, status) for slot, status, _ in failed] == [(1, 400)]
    assert "--skip-tokenizer-init" in failed[0][2]


# ---------------------------------------------------------------- rows


def test_rows_without_a_grammar_are_free(grammars: Grammars) -> None:
    assert not grammars._rows
    admit(grammars, 1, spec(choice=["x"]))
    assert list(grammars._rows) == [1]
    mask, failed = grammars.fill([2, 1, 0])
    assert not failed and mask.dtype == np.int32 and mask.shape == (3, 10)
    assert (mask[[0, 2]] == -1).all() and _ids(mask[1]) == [120]
    grammars.drop([1, 7])
    assert not grammars._rows
    admit(grammars, 1, spec(choice=["x"]))
    grammars.reset()
    assert not grammars._rows


def test_masks_are_the_same_lived_replayed_and_forked(grammars: Grammars) -> None:
    form = spec(json={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
                      "required": ["a"]})  # fmt: skip
    text = '{"a": -12, "b": "yy"}'
    admit(grammars, 0, form)
    for at in range(len(text) + 1):
        if at:
            grammars.advance([0], [ord(text[at - 1])])
        admit(grammars, 1, form, text[:at].encode())
        grammars.copy([0, 1], [2, 3])
        mask, failed = grammars.fill([0, 1, 2, 3])
        assert not failed
        assert len({row.tobytes() for row in mask}) == 1
    assert {END, END + 1} <= set(allowed(grammars, 3))


def test_masks_are_the_same_filled_by_several_threads(grammars: Grammars) -> None:
    rows = list(range(24))
    for row in rows[::2]:
        admit(grammars, row, spec(regex=f"[a-{chr(98 + row)}]+"), b"a" * row)
    one, _ = grammars.fill(rows)
    grammars._parallel = 2  # as on a machine with more cores
    several, failed = grammars.fill(rows)
    assert not failed and grammars._executor is not None
    assert (one == several).all()


def test_forks_go_their_own_ways_and_read_before_they_write(grammars: Grammars) -> None:
    admit(grammars, 0, spec(choice=["aa", "ab"]))
    admit(grammars, 1, spec(choice=["cc", "cd"]))
    grammars.copy([0, 1, 5], [1, 0, 6])
    assert allowed(grammars, 0) == [ord("c")] and allowed(grammars, 1) == [ord("a")]
    write(grammars, 1, "a")
    grammars.copy([1, 1], [2, 3])
    write(grammars, 2, "b")
    assert allowed(grammars, 2) == [END, END + 1]
    assert allowed(grammars, 1) == allowed(grammars, 3) == [ord("a"), ord("b")]
    grammars.copy([9], [2])
    assert 2 not in grammars._rows


def test_the_end_is_allowed_exactly_where_the_grammar_is_complete(grammars: Grammars) -> None:
    admit(grammars, 0, spec(regex="ab?"))
    assert allowed(grammars, 0) == [ord("a")]
    write(grammars, 0, "a")
    assert allowed(grammars, 0) == [ord("b"), END, END + 1]
    write(grammars, 0, "b")
    for token in (END, END + 1, END):  # steps that overlap, or ignore_eos
        assert allowed(grammars, 0) == [END, END + 1]
        grammars.advance([0], [token])
    admit(grammars, 1, spec(regex="ab?"), [ord("a"), END])
    assert allowed(grammars, 1) == [END, END + 1]


def test_a_token_the_grammar_rejects_fails_its_slot_alone(grammars: Grammars) -> None:
    for row in (0, 1):
        admit(grammars, row, spec(regex="[0-9]+"))
    grammars.advance([0, 1, 2], [ord("x"), ord("7"), 5])
    grammars.copy([0], [3])
    for _ in range(2):
        mask, failed = grammars.fill([1, 0, 3])
        assert [(slot, status) for slot, status, _ in failed] == [(1, 400), (2, 400)]
        assert "does not allow" in failed[0][2] and "\n" not in failed[0][2]
        assert ord("8") in _ids(mask[0])
        grammars.advance([0], [ord("1")])
    admit(grammars, 0, spec(regex="[0-9]+"), b"1x")
    assert grammars.fill([0])[1][0][:2] == (0, 400)


def test_an_invalid_grammar_fails_its_slot_alone(grammars: Grammars) -> None:
    admit(grammars, 0, spec(regex="("))
    admit(grammars, 1, spec(regex="a"))
    grammars.advance([0], [3])
    mask, failed = grammars.fill([0, 1])
    assert [(slot, status) for slot, status, _ in failed] == [(0, 400)]
    assert "unclosed" in failed[0][2] and _ids(mask[1]) == [ord("a")]


def test_parameters_that_contradict_the_grammar(grammars: Grammars) -> None:
    admit(grammars, 0, spec(choice=["ab", "abc"]), min_tokens=4)
    write(grammars, 0, "ab")
    assert ord("c") in allowed(grammars, 0)  # the sampler keeps EOS from it
    write(grammars, 0, "c")
    (failure,) = grammars.fill([0])[1]
    assert failure[:2] == (0, 400) and "min_tokens=4" in failure[2]
    admit(grammars, 1, spec(choice=["ab", "abc"]), min_tokens=3)
    write(grammars, 1, "abc")
    assert allowed(grammars, 1) == [END, END + 1]
    admit(grammars, 2, spec(choice=["ab"]), allowed_token_ids=[ord("a"), END])
    assert allowed(grammars, 2) == [ord("a")]
    write(grammars, 2, "a")
    (failure,) = grammars.fill([2])[1]
    assert failure[:2] == (0, 400) and "allowed_token_ids" in failure[2]


def test_limits_fail_a_slot_and_are_not_shared(bytes_model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_grammar, "MAX_LEXER_STATES", 400)
    grammars = Grammars(bytes_model, EngineArgs())
    form = spec(regex="[ab]*a[ab]{60}c")
    draw = random.Random(0)
    for row in range(20):  # each makes some states of its own in the lexer they share
        admit(grammars, row, form)
        for _ in range(40):
            assert allowed(grammars, row)
            grammars.advance([row], [draw.choice(b"ab")])
    failed: list[Any] = []
    while not failed:
        grammars.advance([0], [draw.choice(b"ab")])
        failed = grammars.fill([0])[1]
    assert failed[0][:2] == (0, 400) and "too many states" in failed[0][2]
    assert allowed(grammars, 19)


# ---------------------------------------------------------------- 220 schemas


def test_whatever_is_drawn_under_the_masks_is_valid() -> None:
    """Uniform draws, pulled towards an end, of all schemas in one batch of rows; forks join in."""
    model = load_model_config(demo_model_path())
    grammars, table = Grammars(model, EngineArgs()), token_table(model.path, model)
    forms = schemas()
    assert len(forms) >= 200
    closers = np.array([any(c in b'"]},:' for c in table.decode_bytes([i])) for i in range(model.vocab_size)])
    rows = {row: (form, random.Random(row), []) for row, form in enumerate(forms)}
    for row, form in enumerate(forms):
        admit(grammars, row, spec(json=form, disable_any_whitespace=row % 3 == 0))
    done = []
    for step in range(150):
        if not rows:
            break
        live = list(rows)
        mask, failed = grammars.fill(live)
        assert not failed
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, : model.vocab_size].astype(bool)
        drawn = []
        for slot, row in enumerate(live):
            token = _draw(bits[slot], closers, rows[row][1], step)
            drawn.append(token)
            if token in model.eos_token_ids:
                done.append(rows.pop(row))
            else:
                rows[row][2].append(token)
        grammars.advance(live, drawn)
    assert len(done) >= 0.95 * len(forms), f"{len(rows)} outputs did not end"
    formats = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])
    for form, _, tokens in done:
        text = table.decode_bytes(tokens).decode()
        jsonschema.validate(json.loads(text), form, format_checker=formats)


def _draw(bits: np.ndarray, closers: np.ndarray, draw: random.Random, step: int) -> int:
    """EOS where it is allowed and the output is not short; else any allowed token, later more often a closer."""
    ids = np.nonzero(bits)[0]
    text = ids[ids > 2]
    if not len(text) or (step > 8 and len(text) < len(ids)):
        return int(ids[ids <= 2][0])
    ends = np.nonzero(bits & closers)[0]
    return int(draw.choice(ends if len(ends) and draw.random() < 0.2 + step / 100 else text))
