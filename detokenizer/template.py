"""Chat templates: jinja in an immutable sandbox, with limits on size and time, rendered as transformers renders.

A template comes with the model, so its author is trusted to mean well but not to be careful; the messages come from
anybody. Attribute and item access, calls and products pass through the sandbox, which is where the limits are kept.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from typing import Any, NamedTuple

from ..proto.config import ConfigError
from .errors import Refused

MAX_RENDERED = 16 * 2**20
"""Characters a rendered chat may have."""

MAX_SECONDS = 5.0
"""Processor time one rendering may take."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_OPTIONS = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "add_special_tokens"}
_RESERVED = {
    "messages", "conversation", "conversations", "tools", "documents", "add_generation_prompt", "chat_template",
    "continue_final_message", "tokenize", "return_assistant_tokens_mask", "raise_exception", "strftime_now",
    "namespace", "dict", "range", "lipsum", "cycler", "joiner", "self", "caller", "loop",
}  # fmt: skip


class Compiled(NamedTuple):
    """A template, and in which forms it takes a message's content: a text, a list of parts, or either."""

    template: Any
    takes_text: bool
    takes_parts: bool


class ChatTemplate:
    """A model's templates by name. ``render`` may be called from any thread."""

    def __init__(self, templates: dict[str, str], special: dict[str, str]):
        self._sources, self._special = templates, special
        self._compiled: dict[str, Compiled] = {}

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any] | None) -> str:
        """The prompt's text, to be encoded as it is, or by its ``add_special_tokens`` with special tokens. Raises
        Refused (400) that names the field at fault."""
        options = {k: v for k, v in (options or {}).items() if v is not None}
        if unknown := sorted(set(options) - _OPTIONS):
            raise Refused(f"{unknown[0]} is not supported; leave it out.", unknown[0])
        if not messages:
            raise Refused(
                "Cannot apply chat template to an empty conversation. Provide at least one message.", "messages"
            )
        resume = _flag(options, "continue_final_message", False)
        prompt = _flag(options, "add_generation_prompt", not resume)
        if resume and prompt:
            raise Refused(
                "continue_final_message and add_generation_prompt cannot both be true; set one of them to false.",
                "continue_final_message",
            )
        _flag(options, "add_special_tokens", False)
        tools = _tools(options.get("tools"))
        compiled = self._choose(tools)
        chat = [_message(n, message, compiled) for n, message in enumerate(messages)]
        extra = _kwargs(options.get("chat_template_kwargs"))
        final = _mark_final(chat) if resume else ""
        context = {
            **self._special,
            **extra,
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        text = self._run(compiled.template, context)
        return _cut_final(text, final) if resume else text

    def _choose(self, tools: list[Any] | None) -> Compiled:
        """The compiled template for this request."""
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise Refused(
                "the model has no chat template; start the server with --chat-template FILE, or send text in place of "
                "messages.",
                "messages",
            )
        if name not in self._compiled:
            self._compiled[name] = _compile(self._sources[name])
        return self._compiled[name]

    def check(self) -> None:
        """Compile every template. Raises ConfigError where one is not jinja."""
        for name, source in self._sources.items():
            try:
                self._compiled[name] = _compile(source)
            except Refused as error:
                raise ConfigError(f"chat template {name!r}: {error.message}") from error

    def _run(self, template: Any, context: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        parts: list[str] = []
        size = 0
        _limits.until = time.thread_time() + MAX_SECONDS
        try:
            for part in template.generate(context):
                size += len(part)
                if size > MAX_RENDERED:
                    raise Refused(
                        f"the rendered chat is longer than {MAX_RENDERED} characters; shorten it.", "messages"
                    )
                parts.append(part)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
                ValueError) as error:  # fmt: skip
            raise Refused(f"the chat template cannot render these messages: {error}"[:500], "messages") from error
        finally:
            _limits.until = None
        return "".join(parts)


# ---------------------------------------------------------------- messages and options


def _message(n: int, message: Any, compiled: Compiled) -> dict[str, Any]:
    """One message as its template expects it: content as a string or as parts, tool arguments as objects, no nulls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"messages[{n}] must be an object with a role.", "messages")
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")  # null or left out beside tool calls; templates want a string
    if isinstance(content, list):
        parts = [_part(n, part) for part in content]
        message["content"] = parts if compiled.takes_parts else "\n".join(part["text"] for part in parts)
    elif isinstance(content, str):
        message["content"] = content if compiled.takes_text else [{"type": "text", "text": content}]
    else:
        raise Refused(f"messages[{n}].content must be a string or a list of parts, got {content!r}"[:300], "messages")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(n, message["tool_calls"])
    return message


def _part(n: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise Refused(
            f"messages[{n}].content has a part of type {kind!r}, but only 'text' parts are supported."[:300], "messages"
        )
    if not isinstance(part.get("text"), str):
        raise Refused(f"messages[{n}].content has a text part whose text is not a string.", "messages")
    return part


def _tool_calls(n: int, calls: Any) -> list[Any]:
    """OpenAI sends a call's arguments as a string of JSON; templates want the object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Refused(f"messages[{n}].tool_calls must be a list of objects.", "messages")
    out = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            try:
                parsed = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                raise Refused(f"messages[{n}].tool_calls has arguments that are not JSON.", "messages") from None
            call = {**call, "function": {**function, "arguments": parsed}}
        out.append(call)
    return out


def _flag(options: dict[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, got {value!r}."[:300], name)
    return value


def _tools(tools: Any) -> list[Any] | None:
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise Refused("tools must be a list of objects.", "tools")
    return tools or None


def _kwargs(extra: Any) -> dict[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise Refused("chat_template_kwargs must be an object.", "chat_template_kwargs")
    for name in extra:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _RESERVED:
            raise Refused(f"chat_template_kwargs may not set {name!r}."[:300], "chat_template_kwargs")
    return extra


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Put a tag after the last message's text, to be found again in the rendered chat."""
    content = chat[-1]["content"]
    parts = isinstance(content, list)
    final = content[-1]["text"] if parts and content else content
    if not final:
        raise Refused("continue_final_message needs a last message with content.", "continue_final_message")
    chat[-1]["content"] = [*content[:-1], {**content[-1], "text": final + _TAG}] if parts else final + _TAG
    return final


def _cut_final(text: str, final: str) -> str:
    """The rendered chat up to the end of the last message's text."""
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise Refused(
            "continue_final_message is set, but the chat template does not show the last message as it is.",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


# ---------------------------------------------------------------- the sandbox


class _Limits(threading.local):
    until: float | None = None
    calls: int = 0


_limits = _Limits()


def _tick() -> None:
    """Called by everything a template does; ends one that runs too long."""
    _limits.calls += 1
    if _limits.calls & 63 == 0 and _limits.until is not None and time.thread_time() > _limits.until:
        raise Refused(f"the chat template took longer than {MAX_SECONDS:g} s; shorten the messages.", "messages")


_sandbox: Any = None


def _compile(source: str) -> Compiled:
    """A template that has a loop over a message's content takes parts, and text too where it asks for strings."""
    global _sandbox
    from jinja2 import TemplateError, nodes

    if _sandbox is None:
        _sandbox = _environment()
    try:
        tree = _sandbox.parse(source)
        loops = any(_is_content(each.iter) for each in tree.find_all(nodes.For))
        strings = any(each.name == "string" for each in tree.find_all(nodes.Test))
        return Compiled(_sandbox.from_string(tree), strings or not loops, loops)
    except (TemplateError, RecursionError, ValueError) as error:
        raise Refused(f"the chat template cannot be compiled: {error}"[:500], "messages") from error


def _is_content(of: Any) -> bool:
    """Whether an expression of a template is a message's content, filtered or not."""
    from jinja2 import nodes

    while isinstance(of, nodes.Filter):
        of = of.node
    if isinstance(of, nodes.Getitem):
        return isinstance(of.arg, nodes.Const) and of.arg.value == "content"
    if isinstance(of, nodes.Getattr):
        return of.attr == "content"
    return isinstance(of, nodes.Name) and of.name == "content"


def _environment() -> Any:
    """jinja is imported here, so that a server of completions alone never loads it."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def getattr(self, obj: Any, attribute: str) -> Any:
            _tick()
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            _tick()
            return super().getitem(obj, argument)

        def call(self, *args: Any, **kwargs: Any) -> Any:  # jinja's own: (context, callable, ...)
            _tick()
            return super().call(*args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _tick()
            if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
                raise SecurityError("the power is too large")
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    is_repeat = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                    if is_repeat and len(many) * times > MAX_RENDERED:
                        raise SecurityError("the repetition is too long")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here its body is simply shown."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    environment.globals.pop("lipsum", None)
    return environment
