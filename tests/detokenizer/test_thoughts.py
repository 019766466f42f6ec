"""Budgets of thinking tokens as the detokenizer resolves them: by the marks that the server was started with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from detokenizer_rig import MODEL

from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import i32
from quire.proto.config import ConfigError
from quire.proto.errors import Refused
from quire.proto.messages import Tokenize
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.thinking import MARKS, Thinking, marks_of
from quire.proto.work import Adapter, Generate, ThinkingGenerate, Work, adapter_of, with_adapter

TOKENIZER, CONFIG = load_tokenizer(MODEL), load_model_config(MODEL, 128)


def preparer(parser: str | None, config: str | None = None) -> Preparer:
    made = Preparer(TOKENIZER, CONFIG, marks=marks_of(parser, config))
    made.template._sources["default"] = "{{ messages[0].content }}"
    return made


def work_of(made: Preparer, budget: int | None, given: Any, **more: Any) -> Work:
    """What a prompt, its ids or a chat with it as its only message is resolved to."""
    params = SamplingParams(thinking_token_budget=budget, **more)
    source: dict[str, Any] = {"ids": i32(given)} if isinstance(given, list) else given
    source = {"messages": [{"role": "user", "content": given}]} if isinstance(given, str) else source
    return made.prepare(Tokenize(1, 0, arrival=0.0, work=Generate(params, 7), **source), 16, 128).work


def thinking(made: Preparer, budget: int, given: Any) -> Thinking:
    work = work_of(made, budget, given)
    assert isinstance(work, ThinkingGenerate) and work.thinking is not None
    return work.thinking


@pytest.mark.parametrize(
    ("parser", "prompt", "open"),
    [
        ("qwen3", "hi", False),
        ("qwen3", "hi<think>\n", True),
        ("qwen3", "hi<think>\n\n</think>\n\n", False),
        ("qwen3", "Use <think> for thoughts.", False),
        ("deepseek_r1", "hi", True),
        ("deepseek_r1", "hi</think>", False),
        ("mistral", "hi[THINK]", True),
    ],
)
def test_a_chats_end_says_whether_its_answer_begins_with_a_thought(parser: str, prompt: str, open: bool) -> None:
    made = preparer(parser)
    found = thinking(made, 5, prompt)
    assert (found.budget, found.open, found.spent) == (5, open, 0)
    assert TOKENIZER.decode(found.end, False) == MARKS[parser].ends[0]
    assert work_of(made, None, prompt).__class__ is Generate
    assert work_of(made, -1, prompt).__class__ is Generate


@pytest.mark.parametrize(
    ("parser", "said", "thought"),
    [
        ("qwen3", "hi", None),
        ("qwen3", "<think>one two", "one two"),
        ("qwen3", "<think>one</think>two three", None),
        ("deepseek_r1", "one two", "one two"),
        ("deepseek_r1", "<think>one two", "one two"),
        ("deepseek_r1", "one</think>two three", None),
    ],
)
def test_an_answer_that_goes_on_may_be_within_its_thought(parser: str, said: str, thought: str | None) -> None:
    made = preparer(parser)
    made.template._sources["default"] = "{{ messages[0].content }}\n{{ messages[1].content }}"
    messages = [{"role": "user", "content": "What does <think> mean?"}, {"role": "assistant", "content": said + " "}]
    asked = Tokenize(
        1, 0, arrival=0.0, work=Generate(SamplingParams(thinking_token_budget=5), 7), messages=messages,
        template={"continue_final_message": True},
    )  # fmt: skip
    work = made.prepare(asked, 16, 128).work
    assert isinstance(work, ThinkingGenerate) and work.thinking is not None
    spent = len(TOKENIZER.encode(thought, False)) if thought else 0
    assert work.thinking.open is (thought is not None) and abs(work.thinking.spent - spent) <= 1


def test_a_prompt_that_is_no_chat_may_end_in_the_midst_of_a_thought() -> None:
    made, rest = preparer("deepseek_r1"), " one two three"
    spent = len(TOKENIZER.encode(rest, False))
    for given in ({"prompt": "a<think>" + rest}, TOKENIZER.encode("</think><think>" + rest, False)):
        assert (thinking(made, 5, given).open, thinking(made, 5, given).spent) == (True, spent)
    for text in ("a", "<think>a</think>b"):
        assert not thinking(made, 5, {"prompt": text}).open


def test_what_was_resolved_stays_when_it_is_sent_again_and_beside_an_adapter() -> None:
    made, adapter = preparer("deepseek_r1"), Adapter("a", "/a", bytes(16))
    first = work_of(made, 5, "hi")
    again = made.prepare(Tokenize(1, 1, arrival=0.0, work=with_adapter(first, adapter), ids=i32([1, 2])), 16, 128).work
    assert isinstance(first, ThinkingGenerate) and isinstance(again, ThinkingGenerate)
    assert first.thinking is not None and first.thinking.open and again.thinking == first.thinking
    assert adapter_of(again) == adapter
    slotted = with_adapter(again, None, 3)
    assert isinstance(slotted, ThinkingGenerate) and (slotted.slot, slotted.thinking) == (3, first.thinking)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(slotted), type=Work) == slotted


def test_the_words_that_end_a_thought_are_configured() -> None:
    config = '{"reasoning_start_str": "<t>", "reasoning_end_str": "Time is up.</t>"}'
    found = thinking(preparer(None, config), 5, "hi<t>")
    assert found.open and (found.starts, found.ends) == (["<t>"], ["</t>"])
    assert TOKENIZER.decode(found.end, False) == "Time is up.</t>"
    found = thinking(preparer("qwen3", '{"reasoning_end_str": "Enough."}'), 5, "hi<think>")
    assert found.open and found.ends == ["</think>"] and TOKENIZER.decode(found.end, False) == "Enough."


@pytest.mark.parametrize("config", ["[]", "{", '{"a": 1}', '{"reasoning_end_str": 5}', '{"reasoning_start_str": "x"}'])
def test_a_bad_configuration_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="reasoning_config"):
        marks_of(None, config)


def test_a_budget_needs_known_marks() -> None:
    with pytest.raises(Refused, match="--reasoning-parser") as error:
        work_of(preparer(None), 5, "hi")
    assert error.value.param == "thinking_token_budget"


def test_a_forms_thought_begins_where_the_prompt_ends() -> None:
    tag = '{"format": {"type": "after_thought", "thought": {"begin": "<think>", "end": "</think>"}, "content": {}}}'
    for prompt, begun in (("hi<think>\n", '"thought"'), ("hi</think>", '"answer"'), ("hi", None)):
        form = StructuredOutputsParams(structural_tag=tag)
        found = work_of(preparer("qwen3"), None, prompt, structured_outputs=form)
        assert isinstance(found, Generate) and found.params.structured_outputs is not None
        text = found.params.structured_outputs.structural_tag or ""
        assert text == tag if begun is None else f'"begun": {begun}' in text
