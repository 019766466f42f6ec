"""POST /v1/responses: what its body may hold, and the same as a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ApiError
from ..parsing import Request, kind_of
from ..schema import ChatRequest
from ..shapes import CHOICE, FORMAT, PART, STREAM, Shape, shape

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_TOP_LOGPROBS = 20

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.results",
    "web_search_call.action.sources",
)  # fmt: skip
_TIERS = ("auto", "default", "flex", "scale", "priority")
_EFFECTLESS = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")


class ResponsesRequest(Request, kw_only=True):
    """The body. None means: not given. Fields after ``user`` are vLLM's own."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (), "prompt": (), "context_management": ([],), "moderation": (), "previous_response": (),
        "previous_input_messages": (), "enable_response_messages": (False,), "mm_processor_kwargs": ({},),
    }  # fmt: skip

    inside: ClassVar[Mapping[str, Shape]] = {
        "input": shape("type id role status call_id name arguments input summary encrypted_content phase namespace "
                       "created_by parsed_arguments caller async", content=PART, output=PART),
        "tools": shape("type name description parameters strict format defer_loading function output_schema "
                       "allowed_callers async"), "tool_choice": CHOICE,
        "reasoning": shape("effort summary generate_summary"), "text": shape("verbosity", format=FORMAT),
        "stream_options": STREAM,
    }  # fmt: skip

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Any = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: Any = None

    def check(self) -> None:
        if self.background and self.store is False:
            raise ApiError(400, "background can only be used when `store` is true: leave store out.", "background")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ApiError(400, f"max_tool_calls must be at least 0, got {self.max_tool_calls}.", "max_tool_calls")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ApiError(
                400, f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}.", "top_logprobs"
            )
        for name, known in (("truncation", ("auto", "disabled")), ("service_tier", _TIERS)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ApiError(400, f"{name} must be one of {', '.join(known)}; got {value!r:.80}.", name)
        for each in self.include or ():
            if each not in _INCLUDES:
                raise ApiError(400, f"include may hold {', '.join(_INCLUDES)}; got {each!r:.80}.", "include")
        _check_metadata(self.metadata)

    @property
    def logprobs(self) -> bool:
        """Whether the logprobs of a message's tokens are wanted."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, items: list[dict[str, Any]]) -> ChatRequest:
        """The same as a chat of ``items``, which are those of ``input`` and of the turns before it. Raises ApiError."""
        said = messages_of(items)
        if self.instructions:
            said.insert(0, {"role": "system", "content": self.instructions})
        tools, choice = _chosen(self.tools, self.tool_choice)
        go_on = bool(items) and items[-1].get("role") == "assistant" and items[-1].get("status") in _UNFINISHED
        chat = _Chat(
            model=self.model, messages=said, max_tokens=self.max_output_tokens, temperature=self.temperature,
            top_p=self.top_p, tools=[_tool(tool, n) for n, tool in enumerate(tools)] or None, tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls, response_format=_format((self.text or {}).get("format")),
            reasoning_effort=_effort(self.reasoning), logprobs=self.logprobs or None,
            top_logprobs=self.top_logprobs if self.logprobs else None, continue_final_message=go_on or None,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        )  # fmt: skip
        try:
            chat.check()
        except ApiError as error:
            raise chat.own_words(error) from error
        return chat

    @property
    def custom(self) -> set[str]:
        """Names of the tools whose input is one text."""
        given = [tool for tool in self.tools or () if isinstance(tool, dict)]
        return {str(tool.get("name")) for tool in given if tool.get("type") == "custom"}

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that its response repeats."""
        return {
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls, "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id, "temperature": self.temperature, "top_p": self.top_p,
            "top_logprobs": self.top_logprobs or 0, "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [], "text": self.text or {"format": {"type": "text"}}, "reasoning": self.reasoning,
            "truncation": self.truncation or "disabled", "store": self.store is not False,
            "background": bool(self.background), "service_tier": "default",
            **{name: getattr(self, name) for name in _EFFECTLESS},
        }  # fmt: skip


_AS_THEY_ARE = (
    "stream", "top_k", "seed", "stop", "repetition_penalty", "logit_bias", "ignore_eos", "structured_outputs",
    "chat_template_kwargs", "thinking_token_budget", "priority", "cache_salt",
)  # fmt: skip
_UNFINISHED = ("in_progress", "incomplete")


class _Chat(ChatRequest):
    """A chat whose errors name this API's fields."""

    def own_names(self) -> dict[str | None, str]:
        own: dict[str | None, str] = {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "reasoning_effort": "reasoning.effort",
        }
        return {**ChatRequest.own_names(self), **own}


def _check_metadata(given: dict[str, Any] | None) -> None:
    if len(given or ()) > MAX_METADATA:
        raise ApiError(400, f"metadata has {len(given or ())} keys, over the limit of {MAX_METADATA}.", "metadata")
    for key, value in (given or {}).items():
        if not isinstance(value, str):
            raise ApiError(400, f"metadata[{key!r:.80}] must be a string, got {kind_of(value)}.", "metadata")
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise ApiError(
                400, f"metadata[{key!r:.80}] has a key of {len(key)} and a value of {len(value)} characters, over the "
                f"limits of {MAX_METADATA_KEY} and {MAX_METADATA_VALUE}.", "metadata",
            )  # fmt: skip


# ---------------------------------------------------------------- items and messages


def items_of(given: Any) -> list[dict[str, Any]]:
    """The items of ``input``. Raises ApiError."""
    if isinstance(given, str) and given:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"input must be a text or a list of items, not empty; got {kind_of(given)}.", "input")
    for n, item in enumerate(given):
        if not isinstance(item, dict):
            raise ApiError(400, f"input[{n}] must be an object, got {kind_of(item)}.", "input")
    return [item if "type" in item else {"type": "message", **item} for item in given]


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as messages of a chat: a thought, a text and the calls after it are one message. Raises ApiError."""
    told: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the assistant's message that items may still be added to
    for n, item in enumerate(items):
        kind = item.get("type")
        if kind == "message" and item.get("role") != "assistant":
            role = "system" if item.get("role") == "developer" else item.get("role")
            told.append({"role": role, "content": _content(item.get("content"))})
            answer = None
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"))
            told.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            answer = None
        elif kind in ("message", "function_call", "custom_tool_call", "reasoning"):
            if answer is None or (kind == "reasoning" and len(answer) > 2) or (kind == "message" and _said(answer)):
                answer = {"role": "assistant", "content": None}
                told.append(answer)
            _add(answer, item)
        else:
            raise ApiError(400, f"input[{n}] of type {kind!r:.80} is not supported.", "input")
    return [each for each in told if each["role"] != "assistant" or len(each) > 2 or each["content"] is not None]


def _said(answer: dict[str, Any]) -> bool:
    return answer["content"] is not None or "tool_calls" in answer


def _add(answer: dict[str, Any], item: dict[str, Any]) -> None:
    """One more item of an assistant's message."""
    if item["type"] == "message":
        answer["content"] = _content(item.get("content"))
    elif item["type"] == "reasoning":
        parts = item.get("content")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if text := "\n".join(each for each in texts if isinstance(each, str)):
            answer["reasoning_content"] = text
    else:
        arguments = item.get("arguments")
        if item["type"] == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
        call = {"name": item.get("name"), "arguments": arguments}
        answer.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})


def _content(given: Any) -> Any:
    """A content of texts as one text where it has one part, as what a chat is told of most."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], dict):
        part = given[0]
        text = part.get("text")
        if part.get("type") in ("input_text", "output_text", "text") and isinstance(text, str):
            return text
    return given


# ---------------------------------------------------------------- tools and forms


def _chosen(tools: list[Any] | None, choice: Any) -> tuple[list[Any], Any]:
    """The tools that may be called, and a chat's tool_choice. Raises ApiError."""
    given = tools or []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        names = [each.get("name") for each in allowed if isinstance(each, dict)] if isinstance(allowed, list) else []
        given = [tool for tool in given if isinstance(tool, dict) and tool.get("name") in names]
        if not given:
            raise ApiError(400, "tool_choice.tools must name some of the tools.", "tool_choice")
        choice = choice.get("mode", "auto")
    if isinstance(choice, dict) and choice.get("type") not in ("function", "custom"):
        said = f"tool_choice of type {choice.get('type')!r:.80} is not supported"
        raise ApiError(400, f"{said}: this server runs no tools of its own; name a function.", "tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if not given and choice in ("auto", "none"):
        choice = None
    return given, choice


def _tool(given: Any, n: int) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "custom":
        return {"type": "function", "function": _custom(given, f"tools[{n}]")}
    if kind != "function":
        raise ApiError(
            400, f"tools[{n}] of type {kind!r:.80} is not supported: this server runs no tools of its own; it takes "
            "those of type function and custom, which the client runs.", "tools",
        )  # fmt: skip
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}


def _custom(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool with a text as its input: a function of one argument."""
    format = given.get("format") or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    if not isinstance(format, dict) or format.get("type") not in ("text", "grammar"):
        raise ApiError(400, f"{where}.format must be an object of type text or grammar.", "tools")
    if format["type"] == "grammar":
        if format.get("syntax") != "regex" or not isinstance(format.get("definition"), str):
            said = f"{where}.format.syntax must be regex, with a definition; got {format.get('syntax')!r:.80}"
            raise ApiError(400, said + ": a grammar cannot be told within JSON.", "tools")
        text["pattern"] = f"^(?:{format['definition']})$"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    told = {"name": given.get("name"), "description": given.get("description"), "parameters": schema, "strict": True}
    return {name: value for name, value in told.items() if value is not None}


def _format(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else given
    if kind not in (None, "text", "json_object", "json_schema"):
        raise ApiError(400, f"text.format.type must be text, json_object or json_schema, got {kind!r:.80}.", "text")
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
    return given


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, f"reasoning.effort must be a string, got {kind_of(effort)}.", "reasoning")
    return effort
