"""Tool calls and thoughts are found in what each family writes, however its text is cut."""

# ruff: noqa: E501 - texts of models stand as they are
from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.detokenizer.template import ChatTemplate
from quire.frontend.prompts import conversation_of
from quire.frontend.tool_choice import ChoiceReader, Reading, tools_of
from quire.frontend.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Arguments,
    Begin,
    Content,
    Reader,
    Reasoning,
    detect,
)
from quire.frontend.tools.json_values import ValueReader
from quire.frontend.tools.reader import Broken
from quire.proto.checkpoint.model_config import demo_model_path
from quire.proto.thinking import MARKS as MARKS_OF

Found = tuple[str, str, list[tuple[str, str]]]
"""Thought, content, and calls as (name, arguments)."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "high": {"type": "number"}, "now": {"type": "boolean"},
        "where": {"type": "object"}, "tags": {"type": ["array", "null"]}, "code": {},
        "note": {"type": ["string", "null"]},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
SCHEMAS = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}}}

ONE = '{"city": "Paris", "days": 2}'
PARIS, TIME = ("get_weather", ONE), ("get_time", "{}")
HEART = '{"name": "get_weather", "arguments": ' + ONE + "}"
LLAMA = HEART.replace("arguments", "parameters")
EMPTY = '{"name": "get_time", "arguments": {}}'

CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{HEART}\n</tool_call>", "", [PARIS]),
    ("hermes", f"Let me see.\n<tool_call>\n{HEART}\n</tool_call>\n<tool_call>{EMPTY}</tool_call>\n", "Let me see.", [PARIS, TIME]),
    ("hermes", '<tool_call>{"arguments": {"a": "}\\"{"}, "name": "f"}</tool_call> Done.', " Done.", [("f", '{"a": "}\\"{"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "a <tool_call> is a mark, and so is </tool_call>", "a <tool_call> is a mark, and so is </tool_call>", []),
    ("hermes", 'x <tool_call>{"name": 5}</tool_call>', 'x <tool_call>{"name": 5}</tool_call>', []),
    ("hermes", 'so <tool_call>\n{"na', 'so <tool_call>\n{"na', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>after', "after", [("f", '{"a": ')]),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    ("hermes", "\n\nplain\n", "\n\nplain\n", []),
    ("llama3_json", LLAMA, "", [PARIS]),
    ("llama3_json", f'<|python_tag|>{LLAMA}; {{"name": "get_time", "parameters": {{}}}}', "", [PARIS, TIME]),
    ("llama3_json", f'Here are the results: {LLAMA} ; {{"type": "function", "name": "get_time", "parameters": {{}}}} Would you?', "Here are the results: Would you?", [PARIS, TIME]),
    ("llama3_json", '{"name": "toolWithoutParams"}', '{"name": "toolWithoutParams"}', []),
    ("llama3_json", '{"parameters": {}} and {invalid json}', '{"parameters": {}} and {invalid json}', []),
    ("llama3_json", f'{{"result": {LLAMA}}}', '{"result":}', [PARIS]),
    ("mistral", f"[TOOL_CALLS] [{HEART}, {EMPTY}]", "", [PARIS, TIME]),
    ("mistral", f"Well[TOOL_CALLS]get_weather{ONE}[TOOL_CALLS]get_time{{}}", "Well", [PARIS, TIME]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{ONE}", "", [PARIS]),
    ("mistral", "[TOOL_CALLS] no call at all {", "[TOOL_CALLS] no call at all {", []),
    ("internlm", f"Sure.<|action_start|><|plugin|>\n{LLAMA}\n<|action_end|>", "Sure.", [PARIS]),
    ("internlm", "<|action_start|><|interpreter|>\n1+1<|action_end|>", "<|action_start|><|interpreter|>\n1+1<|action_end|>", []),
    ("granite", f"<|tool_call|>[{HEART}, {EMPTY}]", "", [PARIS, TIME]),
    ("granite", f"<tool_call> [{HEART}]", "", [PARIS]),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", []),
    ("phi4_mini_json", f"functools[\n  {HEART},\n  {EMPTY}\n]\nMore?", "\nMore?", [PARIS, TIME]),
    ("phi4_mini_json", 'functools[] is text, functools{"name": "f"} too', 'functools[] is text, functools{"name": "f"} too', []),
    ("xlam", f"[{HEART}, {EMPTY}]", "", [PARIS, TIME]),
    ("xlam", f"<think>Hm.</think>[{HEART}]", "<think>Hm.</think>", [PARIS]),
    ("xlam", f"I'll look.\n```json\n[{HEART}]\n```", "I'll look.", [PARIS]),
    ("xlam", f"I'll look.[TOOL_CALLS][{HEART}]", "I'll look.", [PARIS]),
    ("xlam", f"I'll look.<tool_call>[{HEART}]</tool_call>", "I'll look.", [PARIS]),
    ("xlam", "[1, 2] and ```python\nx = {}\n```", "[1, 2] and ```python\nx = {}\n```", []),
    ("pythonic", "[get_weather(city='Paris', days=2), get_time()]", "", [PARIS, TIME]),
    ("pythonic", r"""[get_weather(city='Martha\'s', high=-1.5, now=True, where={'a': ["x, y)", 'b']}, tags=None)]""", "",
     [("get_weather", '{"city": "Martha\'s", "high": -1.5, "now": true, "where": {"a": ["x, y)", "b"]}, "tags": null}')]),
    ("pythonic", "[get_weather(city=here, code=b'z', high=1e999, now=true)]", "",
     [("get_weather", '{"city": "here", "code": "b\'z\'", "high": "1e999", "now": true}')]),
    ("pythonic", "[see f(x=1)] and [1, 2]", "[see f(x=1)] and [1, 2]", []),
    ("pythonic", "[other(x=1)]", "[other(x=1)]", []),
    ("pythonic", "How can I help?", "How can I help?", []),
    ("llama4_pythonic", "<|python_start|>[get_weather(city='Paris', days=2)]<|python_end|>", "", [PARIS]),
    ("llama4_pythonic", "[get_weather(city='Paris', days=2)]", "", [PARIS]),
    ("qwen3_coder", "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>", "Yes.", [PARIS, TIME]),
    ("qwen3_xml", "<function=get_weather>\n<parameter=city>\nline \"1\"\n\nline 2\n</parameter>\n<parameter=now>True</parameter>\n<parameter=where>{'a': 1}</parameter>\n<parameter=tags>null</parameter>\n<parameter=high>3</parameter><parameter=code>5</parameter>\n</function>", "",
     [("get_weather", '{"city": "line \\"1\\"\\n\\nline 2", "now": true, "where": {"a": 1}, "tags": null, "high": 3, "code": "5"}')]),
    ("qwen3_xml", "<tool_call><function=get_weather><parameter=days>many<parameter=city></function></tool_call>", "",
     [("get_weather", '{"days": "many", "city": ""}')]),
    ("qwen3_xml", "a <tool_call> b", "a <tool_call> b", []),
    ("deepseek_v3", f"Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ONE}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Ok.", [PARIS, TIME]),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [PARIS, TIME]),
    ("openai", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ONE}<|call|>", "", [PARIS]),
    ("openai", f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ONE}<|end|><|start|>assistant<|channel|>commentary to=functions.get_time<|message|><|end|><|start|>assistant<|channel|>final<|message|>There.", "First.\nThere.", [PARIS, TIME]),
    ("granite4", f"<tool_call>\n{HEART}\n</tool_call>", "", [PARIS]),
    ("granite-20b-fc", f"<function_call> {HEART}\n<function_call> {EMPTY}", "", [PARIS, TIME]),
    ("granite-20b-fc", "a <function_call> b", "a <function_call> b", []),
    ("ernie45", f"<tool_call>\n{HEART}\n</tool_call>\n<tool_call>\n{EMPTY}\n</tool_call>\n", "", [PARIS, TIME]),
    ("longcat", f"Sure.<longcat_tool_call>{HEART}</longcat_tool_call>", "Sure.", [PARIS]),
    ("jamba", f"I'll look. <tool_calls>[\n    {HEART},\n    {EMPTY}\n]</tool_calls>", "I'll look.", [PARIS, TIME]),
    ("hunyuan_a13b", f"<tool_calls>[{HEART}, {EMPTY}]</tool_calls> Done.", " Done.", [PARIS, TIME]),
    ("hunyuan_a13b", "<tool_calls>[]</tool_calls>", "<tool_calls>[]</tool_calls>", []),
    ("minimax", f"<tool_calls>\n{HEART}\n{EMPTY}\n</tool_calls>", "", [PARIS, TIME]),
    ("cohere_command3", '<|START_ACTION|>\n[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + ONE + '},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]\n<|END_ACTION|>', "", [PARIS, TIME]),
    ("kimi_k2", f"I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_call_begin|>get_time:1<|tool_call_argument_begin|> {{}} <|tool_call_end|><|tool_calls_section_end|>", "I'll check.", [PARIS, TIME]),
    ("kimi_k2", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.invalid.0<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_calls_section_end|>", "", [PARIS]),
    ("kimi_k2", "<|tool_calls_section_begin|> none <|tool_calls_section_end|>", "<|tool_calls_section_begin|> none <|tool_calls_section_end|>", []),
    ("glm45", "I will help.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n    <arg_key>days</arg_key>\n    <arg_value>2</arg_value>\n</tool_call>\n\n<tool_call>get_time\n</tool_call>", "I will help.", [PARIS, TIME]),
    ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value> a\n</arg_value><arg_key>where</arg_key><arg_value>{\"a\": [1]}</arg_value></tool_call><tool_call>get_time</tool_call>", "", [("get_weather", '{"city": " a\\n", "where": {"a": [1]}}'), TIME]),
    ("glm47", "<tool_call>get_weather<arg_key>note</arg_key><arg_value>\n x\n</arg_value></tool_call><tool_call>get_weather<arg_key>note</arg_key><arg_value>null</arg_value></tool_call>", "", [("get_weather", '{"note": "\\n x\\n"}'), ("get_weather", '{"note": null}')]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=note>\n\n x\n</parameter>\n</function>", "", [("get_weather", '{"note": "\\n x"}')]),
    ("deepseek_v32", '<｜DSML｜function_calls>' + "".join(f'<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="note" string="{text}">{said}</｜DSML｜parameter></｜DSML｜invoke>' for text, said in (("true", "null"), ("false", "null"), ("true", "\nx\n"))) + "</｜DSML｜function_calls>", "",
     [("get_weather", '{"note": "null"}'), ("get_weather", '{"note": null}'), ("get_weather", '{"note": "\\nx\\n"}')]),
    ("glm45", "a <tool_call> in\na text", "a <tool_call> in\na text", []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>', "", [PARIS, TIME]),
    ("minimax_m2", 'Let me check. <minimax:tool_call><invoke name="get_weather"><parameter name="city">\n  x\n</parameter><parameter name="code">5</parameter></invoke></minimax:tool_call>', "Let me check.", [("get_weather", '{"city": "\\n  x\\n", "code": "5"}')]),
    ("deepseek_v32", 'Sure! <｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="code" string="false">[1, true]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "Sure!", [("get_weather", '{"city": "Paris", "code": [1, true]}'), TIME]),
    ("seed_oss", "Yes.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", "Yes.", [PARIS]),
    ("step3", 'Ok.\n<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>get_weather\n<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="days"> 2 </steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="get_time"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>\nThere.', "Ok.\nThere.", [PARIS, TIME]),
    ("step3p5", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", "", [TIME]),
    ("lfm2", 'Hm.<|tool_call_start|>[get_weather(city="Paris", days=2), get_time()]<|tool_call_end|>', "Hm.", [PARIS, TIME]),
    ("lfm2", "[get_time()]", "[get_time()]", []),
    ("lfm2", "<|tool_call_start|> [get_weather(city='a\nb', days=07, code={'x'})]<|tool_call_end|>\nThere.", "\nThere.",
     [("get_weather", '{"city": "a\\nb", "days": 7, "code": ["x"]}')]),
    ("gigachat3", f"I'll check.<|message_sep|>\n\nfunction call<|role_sep|>\n{HEART}", "I'll check.", [PARIS]),
    ("gigachat3", f"<|function_call|>{EMPTY}", "", [TIME]),
    ("apertus", 'Sure! <|tools_prefix|>[{"get_weather": ' + ONE + '}, {"get_time": {}}]<|tools_suffix|>', "Sure!", [PARIS, TIME]),
    ("apertus", "<|tools_prefix|>[1]<|tools_suffix|>", "<|tools_prefix|>[1]<|tools_suffix|>", []),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "", [TIME]),
    ("olmo3", "<function_calls>get_weather(city='Paris', days=2)\nget_time()</function_calls>", "", [PARIS, TIME]),
    ("olmo3", "a <function_calls> b", "a <function_calls> b", []),
    ("functiongemma", "Sure. <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:<escape>2<escape>}<end_function_call><start_function_call>call:get_time{}<end_function_call>", "Sure.", [PARIS, TIME]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Pa, {r}is<|"|>,days:2,where:{<|"|>a<|"|>:[<|"|>x]<|"|>,null,[1.5]]},now:true}<tool_call|><|tool_call>call:get_time{}<tool_call|>', "",
     [("get_weather", '{"city": "Pa, {r}is", "days": 2, "where": {"a": ["x]", null, [1.5]]}, "now": true}'), TIME]),
    ("gemma4", '<|tool_call>call:f{ x : {<|"|> a<|"|>:1,<|"|>a<|"|>:2, b :3}}<tool_call|>', "", [("f", '{"x": {" a": 1, "a": 2, "b": 3}}')]),
    ("gemma4", '<|tool_call>call:f{x:[},5],y:}<tool_call|>', "", [("f", '{"x": ["", "", 5], "y": ""}')]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Lon', '<|tool_call>call:get_weather{city:<|"|>Lon', []),
    ("openai", "No marks here.", "No marks here.", []),
]  # fmt: skip

THOUGHTS: list[tuple[str, str | None, str, str, str]] = [
    ("deepseek_r1", None, "Hm. Hm.\n</think>\n\nYes.", "Hm. Hm.", "Yes."),
    ("deepseek_r1", "<｜Assistant｜><think>\n", "<think>\nHm.</think>Yes.\n", "Hm.", "Yes.\n"),
    ("deepseek_r1", None, "never closed ", "never closed", ""),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "<|im_start|>assistant\n", "<think>\n1 < 2\n</think>\n\nYes.", "1 < 2", "Yes."),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes. <think>", "", "Yes. <think>"),
    ("qwen3", None, " Yes.", "", " Yes."),
    ("glm45", None, "<think>Hm.</think>\nYes.", "Hm.", "Yes."),
    ("granite", None, "Here is my thought process: This\nThat Here is my response: Yes.", "This\nThat", "Yes."),
    ("granite", None, "Here's my thought process:a Here was Here's my response:", "a Here was", ""),
    ("granite", None, "Here is my thought failure", "", "Here is my thought failure"),
    ("mistral", None, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes.\n"),
    ("hunyuan_a13b", None, "<think>\nHm.\n</think>\n<answer>\nYes. </b>\n</answer>", "Hm.", "Yes. </b>"),
    ("hunyuan_a13b", None, "Yes. \n", "", "Yes. \n"),
    ("cohere_command3", None, "<|START_THINKING|> Hm.<|END_THINKING|>\n<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
    ("seed_oss", None, "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("gemma4", None, "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("kimi_k2", None, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("minimax_m2", "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("gpt-oss", None, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes."),
]  # fmt: skip


def run(pieces: list[str], tool: str | None, reasoning: str | None = None, prompt: str | None = None) -> Found:
    reader = Reader(tool, reasoning, SCHEMAS, prompt)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
    calls: list[list[str]] = []
    texts: dict[Any, str] = {Content: "", Reasoning: ""}
    for delta in deltas:
        if isinstance(delta, Begin):
            calls.append([delta.name, ""])
        elif isinstance(delta, Arguments):
            calls[-1][1] += delta.text
        else:
            texts[type(delta)] += delta.text
    return texts[Reasoning], texts[Content], [(name, arguments) for name, arguments in calls]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("tool, text, content, calls", CALLS)
def test_what_a_family_writes(tool: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    thought = "Hm." if "analysis" in text else ""
    assert run([text], tool) == (thought, content, calls)
    assert run(list(text), tool) == (thought, content, calls)


@pytest.mark.parametrize("reasoning, prompt, text, thought, content", THOUGHTS)
def test_what_is_thought(reasoning: str, prompt: str | None, text: str, thought: str, content: str) -> None:
    assert run([text], None, reasoning, prompt) == (thought, content, [])
    assert run(list(text), None, reasoning, prompt) == (thought, content, [])


def test_a_call_after_a_thought() -> None:
    text = f"<think>Should I call <tool_call>?</think>\n\n<tool_call>\n{HEART}\n</tool_call>"
    assert run([text], "hermes", "qwen3") == ("Should I call <tool_call>?", "", [PARIS])


def test_a_call_that_the_model_names_keeps_its_name() -> None:
    reader = Reader("kimi_k2", None, {"f": {}})
    text = "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for id in ("functions.f:3", "4")
    )
    found = [delta for delta in reader.feed(text) + reader.end() if isinstance(delta, Begin)]
    assert found == [Begin("f", "functions.f:3"), Begin("f", "4")]


def test_every_parser_has_an_example() -> None:
    assert {tool for tool, *_ in CALLS} | {"llama4_json", "cohere_command4", "mimo"} == set(TOOL_PARSERS)
    shown = [MARKS_OF[name] for name, *_ in THOUGHTS]
    assert {name for name, marks in MARKS_OF.items() if marks in shown} == set(REASONING_PARSERS)


MARKS = sorted(
    {mark for _, text, _, _ in CALLS for mark in (text[:12], text[3:30], text[-14:])} | set('{}[]"\\:,\n <>=()')
)


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(CALLS + [("hermes", text, "", []) for _, _, text, _, _ in THOUGHTS]),
    st.sampled_from([None, *sorted(REASONING_PARSERS)]),
    st.lists(st.integers(0, 10**6), max_size=12),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(MARKS)), max_size=3),
)
def test_any_split_of_any_truncation_of_any_damage_gives_the_same(case, reasoning, places, end, damage) -> None:  # type: ignore[no-untyped-def]
    tool, text = case[0], case[1]
    for place, mark in damage:
        place %= len(text) + 1
        text = text[:place] + mark + text[place:]
    text = text[: len(text) - end % (len(text) + 1)] if end % 3 == 0 else text
    found = run([text], tool, reasoning)
    assert run(cut(text, places), tool, reasoning) == found
    assert all(is_json_as_far_as_it_goes(arguments) for _, arguments in found[2]), found


def is_json_as_far_as_it_goes(arguments: str) -> bool:
    """An object, or the begin of one."""
    told: list[str] = []
    reader = ValueReader()
    reader.text = arguments
    try:
        if not arguments or next(reader.value(told.append), "whole") is None:  # it waits for more
            return arguments.startswith("".join(told))
    except Broken:
        return False
    return isinstance(json.loads(arguments, parse_constant=lambda word: pytest.fail(word)), dict)


PUT_RIGHT = [
    ('{"b": False, "c": [True, None]}', {"b": False, "c": [True, None]}),
    ("{'city': 'Par\\'is', 'say': 'a \"word\"'}", {"city": "Par'is", "say": 'a "word"'}),
    ('{"a": [1, 2, ], }', {"a": [1, 2]}),
    ('{"a": "one\ntwo\t", "b": "\\d\\\'\\u12"}', {"a": "one\ntwo\t", "b": "\\d'\\u12"}),
    ("{city: Paris, 7: 0x1f, true: +5}", {"city": "Paris", "7": 31, "true": 5}),
    ('{"a": NaN, "b": -Infinity, "c": 1e999, "d": .5}', {"a": "NaN", "b": "-Infinity", "c": "1e999", "d": 0.5}),
    ('{"a":\u00a01\x0b}', {"a": 1}),
]


@pytest.mark.parametrize("tool", ["hermes", "mistral", "kimi_k2", "openai", "deepseek_v31", "llama3_json", "jamba"])
@pytest.mark.parametrize("said, meant", PUT_RIGHT)
def test_arguments_that_python_would_read_become_json(tool: str, said: str, meant: Any) -> None:
    """What comes out may be sent back in, and be read by the client."""
    before, after = {
        "hermes": ('<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        "jamba": ('<tool_calls>[{"name": "f", "arguments": ', "}]</tool_calls>"),
        "llama3_json": ('{"name": "f", "parameters": ', "}"),
        "mistral": ("[TOOL_CALLS]f", ""),
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        "openai": ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"),
        "deepseek_v31": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    }[tool]  # fmt: skip
    ((name, arguments),) = run([before + said + after], tool)[2]
    assert (name, json.loads(arguments)) == ("f", meant)
    assert run(list(before + said + after), tool) == run([before + said + after], tool)


@pytest.mark.parametrize("said", ["[1]", "5", '"text"', "\"{'a': \"", "True", '"[1]"', "foo bar"])
def test_what_has_arguments_that_are_no_object_is_no_call(said: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {said}}}</tool_call>'
    assert run([text], "hermes") == ("", text, [])
    said = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{said}<|tool_call_end|>"
    assert run([said], "kimi_k2")[2] == [] and run([f"[TOOL_CALLS]f[ARGS]{said}"], "mistral")[2] == []
    assert run(["<|channel|>commentary to=functions.f <|message|>[1]<|call|>"], "openai")[2] == [("f", "")]


def test_ten_thousand_splits_and_truncations() -> None:
    rng = random.Random(17)
    for number in range(10_000):
        tool, text, content, calls = CALLS[number % len(CALLS)]
        whole = number % 2 == 0
        text = text if whole else text[: rng.randrange(len(text) + 1)]
        found = run(cut(text, [rng.randrange(len(text) + 1) for _ in range(rng.randrange(6))]), tool)
        if whole:
            assert found[1:] == (content, calls)
        for _, arguments in found[2]:
            assert isinstance(arguments, str)


def test_arguments_come_in_pieces_and_begin_with_the_name() -> None:
    reader = Reader("hermes", None, {})
    given_ = [
        reader.feed(piece) for piece in ('<tool_call>{"name": "f", "arg', 'uments": {"a"', ': "bc', 'd"}', "}</tool")
    ]
    assert given_ == [[], [Begin("f"), Arguments('{"a"')], [Arguments(': "bc')], [Arguments('d"}')], []]
    assert reader.feed("_call>") + reader.end() == []


def test_half_of_a_surrogate_pair_is_no_character() -> None:
    said = '<tool_call>{"name": "f\\ud800", "arguments": {"\\udc00": "\\ud83d\\ude00"}}</tool_call>'
    _, _, ((name, arguments),) = run([said], "hermes")
    assert (name, arguments) == ("f\ufffd", '{"\\ufffd": "\\ud83d\\ude00"}')
    assert run([r"[get_weather(city='\ud800')]"], "pythonic")[2] == [("get_weather", '{"city": "?"}')]


def test_long_and_deep_text_is_read_in_time() -> None:
    for tool in TOOL_PARSERS:
        for unit in (
            "{",
            "[",
            '{"name": ',
            '{"type": {"',
            "<tool_call>",
            "[get_time(",
            "[get_weather(city=[",
            "```",
            "</think>[",
        ):
            found = run([unit] * 300, tool)
            assert found == run([unit * 300], tool)


@pytest.mark.parametrize(
    "template, name",
    [
        ("{% if tools %}<tool_call>{\"name\": , \"arguments\": }", "hermes"),
        ("{% if tools %}<tool_call>{\\\"name\\\": , \\\"arguments\\\": }", "hermes"),
        ("{% if tools %}<tool_call><function=", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|start_of_role|> <|tool_call|>", "granite"),
        ("{{ tools }}Environment: ipython \"parameters\"", "llama3_json"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{% if tools %}<tool_call>{name}<arg_key>{\"arguments\"", "glm45"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2"),
        ("{{ tools }}<minimax:tool_call>", "minimax_m2"),
        ("<tool_call> \"arguments\"", None),
        ("{{ tools }}", None),
    ],
)  # fmt: skip
def test_a_template_tells_its_parser(template: str, name: str | None) -> None:
    assert detect(template) == name


def test_calls_are_json_of_their_values() -> None:
    for tool, text, _, calls in CALLS:
        for (name, arguments), (_, said) in zip(run([text], tool)[2], calls, strict=True):
            if arguments != '{"a": ':
                assert json.loads(arguments) == json.loads(said), name


def test_a_long_list_is_a_list() -> None:
    said = json.dumps(["x" * 70_000, 1])
    text = f"<tool_call>get_weather<arg_key>tags</arg_key><arg_value>{said}</arg_value></tool_call>"
    assert run([text], "glm47")[2] == [("get_weather", f'{{"tags": {said}}}')]


def test_limits_are_the_same_whole_and_in_pieces(recwarn: pytest.WarningsRecorder) -> None:
    for text in (f"[get_weather(city='{'x' * 70_000}')]", f"[{'f' * 300}(a=1)]", f"[get_weather({'a' * 300}=1)]"):
        assert run([text], "pythonic") == run([text[at : at + 1_000] for at in range(0, len(text), 1_000)], "pythonic")
        assert run([text], "pythonic") == run(list(text[:400]) + [text[400:]], "pythonic")
    run(["[get_weather(city=1if 1else 1)]"], "pythonic")
    assert not recwarn.list  # what Python finds odd in a model's words is no news


@pytest.mark.parametrize("source", [None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"])
def test_what_any_parser_gives_may_be_sent_back(source: str | None) -> None:
    """However its text is cut: to a template that shows calls, and to one that knows none."""
    source = source or (Path(demo_model_path()) / "chat_template.jinja").read_text("utf-8")
    template = ChatTemplate({"default": source}, {})
    for tool, text, _, _ in CALLS:
        for end in range(0, len(text) + 1, 5):
            reader = ChoiceReader(Reading(tool, None, tools_of(TOOLS)), None)
            answer = {"role": "assistant", **reader.message(text[:end])}
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "no"} for call in answer.get("tool_calls", ())
            ]
            chat = conversation_of([{"role": "user", "content": "hi"}, answer, *results])
            rendered = template.render(chat, {"tools": TOOLS})
            assert all(call["function"]["name"] in rendered for call in answer.get("tool_calls", ()))
            whole = [_is_object(call["function"]["arguments"]) for call in answer.get("tool_calls", ())]
            assert reader.reason("stop") == ("tool_calls" if whole and all(whole) else "stop")


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
