"""Chat templates, rendered as transformers renders them, in the sandbox of ``sandbox.py``.

Some templates read a message's content as a text, some as a list of parts, some each in another place. The template's
source gives the first guess. A template that then uses a content in the other form is run again with that message in
it, so that parts for a template of texts are joined, and a text for a template of parts becomes one part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..proto.call_arguments import told_object
from ..proto.checkpoint.chat_templates import names_tools
from ..proto.config import ConfigError
from ..proto.errors import Refused
from . import template_limits as limits
from .specials import Change, Rendered, Specials, written
from .template_limits import Limits, Parts, Text, WrongForm
from .tool_words import TOLD, has_calls, in_words

MAX_GIVEN = 16
"""Templates that came with requests, which stay compiled."""
MAX_TRIES = 8
"""Messages that change their form one by one; after so many all of a role change it together."""

NONE = Specials()
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_OPTIONS = {
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools",
    "add_special_tokens",
}  # fmt: skip
_RESERVED = {
    "messages", "conversation", "conversations", "tools", "documents", "add_generation_prompt", "chat_template",
    "continue_final_message", "tokenize", "return_assistant_tokens_mask", "raise_exception", "strftime_now",
    "namespace", "dict", "range", "lipsum", "cycler", "joiner", "self", "caller", "loop",
}  # fmt: skip


class Compiled(NamedTuple):
    """A template, in which forms it takes a message's content (a text, a list of parts, or either), and its marks."""

    source: str
    template: Any
    takes_text: bool
    takes_parts: bool
    marks: Specials


class ChatTemplate:
    """A model's templates by name. ``render`` may be called from any thread.

    ``marks`` are special tokens, which messages cannot hold; of the ``added`` tokens that are not called special, those
    that a template puts around messages are marks of it too. ``form`` is how they are given contents: "string",
    "openai" (a list of parts), or "auto". With ``tells_tools`` a template that knows no tools has them told in words.
    """

    form = "auto"
    tells_tools = True

    def __init__(
        self, templates: dict[str, str], special: dict[str, str], marks: Specials = NONE, added: Iterable[str] = ()
    ):
        self._sources, self._special, self._marks, self._added = templates, special, marks, list(added)
        self._compiled: dict[str, Compiled] = {}
        self._given: dict[str, Compiled] = {}

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any] | None) -> Rendered:
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
        compiled = self._choose(tools, options.get("chat_template"))
        chat = [_message(n, message, compiled) for n, message in enumerate(messages)]
        if self._in_words(compiled.source, chat, tools):
            system = tools is None or self._takes_system(compiled)
            told = in_words(messages, tools, system)
            chat, tools = [_message(n, message, compiled) for n, message in enumerate(told)], None
        kwargs = _kwargs(options.get("chat_template_kwargs"))
        context = {
            **self._special,
            "documents": None,
            "add_generation_prompt": prompt,
        }

        def write(change: Change) -> str:
            context.update(change(kwargs, False), tools=change(tools, False))
            given = [change(message, message["role"] == "assistant") for message in chat]
            final = _mark_final(given) if resume else ""
            text = self._run_in_form(compiled.template, context, given)
            return _cut_final(text, final) if resume else text

        return written(compiled.marks, [chat, tools, kwargs], compiled.source, write)

    def _run_in_form(self, template: Any, context: dict[str, Any], chat: list[dict[str, Any]]) -> str:
        """Render, and again with a message in the other form where the template used its content so. A message that
        is used in both forms keeps the second, and is shown as jinja shows it."""
        changed: set[int] = set()
        while True:
            context["messages"] = [
                _in_form(n, message, n not in changed and self.form == "auto") for n, message in enumerate(chat)
            ]
            try:
                return self._run(template, context)
            except WrongForm as wrong:
                role = chat[wrong.n]["role"]
                alike = [n for n, message in enumerate(chat) if n not in changed and message["role"] == role]
                for n in [wrong.n] if len(changed) < MAX_TRIES else alike:
                    chat[n]["content"] = _other_form(chat[n]["content"])
                    changed.add(n)

    def _choose(self, tools: list[Any] | None, given: Any) -> Compiled:
        """The compiled template for this request: one it brings, or names, or the model's."""
        if given is not None and given not in self._sources:
            return self._own(given)
        name = (
            given
            if given is not None
            else "tool_use"
            if tools is not None and "tool_use" in self._sources
            else "default"
        )
        if name not in self._sources:
            raise Refused(
                "the model has no chat template; start the server with --chat-template FILE, or send text in place of "
                "messages.",
                "messages",
            )
        if name not in self._compiled:
            self._compiled[name] = self._compile(self._sources[name])
        return self._compiled[name]

    def _own(self, source: Any) -> Compiled:
        """A template that came with the request, as it is, or from the last ones."""
        if not isinstance(source, str):
            raise Refused(f"chat_template must be a string, got {source!r}."[:300], "chat_template")
        found = self._given.pop(source, None) or self._compile(source)
        self._given[source] = found
        if len(self._given) > MAX_GIVEN:
            self._given.pop(next(iter(self._given)), None)
        return found

    def _compile(self, source: str) -> Compiled:
        """A template, and which tokens are marks in its chats. Raises Refused."""
        compiled = _compile(source)
        if self.form != "auto":
            compiled = compiled._replace(takes_text=self.form == "string", takes_parts=self.form == "openai")
        if not self._marks.texts or not (named := [text for text in self._added if text in source]):
            return compiled._replace(marks=self._marks)
        around = self._around(compiled, Specials(named))
        return compiled._replace(marks=Specials(self._marks.texts | around, self._marks.folds))

    def _around(self, compiled: Compiled, marks: Specials) -> set[str]:
        """Which of these tokens the template writes around plain messages."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        for chat in (turns, turns[:1]):
            messages = [_message(n, message, compiled) for n, message in enumerate(chat)]
            context = {**self._special, "tools": None, "documents": None, "add_generation_prompt": False}
            try:
                return set(marks.found(self._run_in_form(compiled.template, context, messages)))
            except Refused:
                continue  # a template may want another order of roles
        return set()

    def _in_words(self, source: str, chat: list[dict[str, Any]], tools: list[Any] | None) -> bool:
        """Whether the template knows nothing of tools, and there is something of them to be told."""
        if not self.tells_tools or names_tools(source):
            return False
        return tools is not None or ("tool_calls" not in source and has_calls(chat))

    def _takes_system(self, compiled: Compiled) -> bool:
        """Whether the template shows a system message; some refuse it, and some leave it out."""
        turns = [{"role": "system", "content": TOLD}, {"role": "user", "content": "a"}]
        messages = [_message(n, message, compiled) for n, message in enumerate(turns)]
        context = {**self._special, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return TOLD in self._run_in_form(compiled.template, context, messages)
        except Refused:
            return False

    def check(self) -> None:
        """Compile every template. Raises ConfigError where one is not jinja."""
        for name, source in self._sources.items():
            try:
                self._compiled[name] = self._compile(source)
            except Refused as error:
                raise ConfigError(f"chat template {name!r}: {error.message}") from error

    def _run(self, template: Any, context: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        parts: list[str] = []
        size = 0
        try:
            with Limits():
                for part in template.generate(context):
                    size += len(part)
                    if size > limits.MAX_RENDERED:
                        text = f"the rendered chat is longer than {limits.MAX_RENDERED} characters; shorten it."
                        raise Refused(text, "messages")
                    parts.append(part)
        except WrongForm:
            raise
        except (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
                ValueError) as error:  # fmt: skip
            raise Refused(f"the chat template cannot render these messages: {error}"[:500], "messages") from error
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
        message["content"] = parts if compiled.takes_parts else _other_form(parts)
    elif isinstance(content, str):
        message["content"] = content if compiled.takes_text else _other_form(content)
    else:
        raise Refused(f"messages[{n}].content must be a string or a list of parts, got {content!r}"[:300], "messages")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(n, message["tool_calls"])
    return message


def _in_form(n: int, message: dict[str, Any], first: bool) -> dict[str, Any]:
    """The message as a template is given it; while its form is a ``first`` guess, it tells when it is the wrong one."""
    if not first:
        return message
    content = message.get("content", "")
    shown: Text | Parts = Text(content) if isinstance(content, str) else Parts(content)
    shown.n = n
    return {**message, "content": shown}


def _other_form(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return "\n".join(part["text"] for part in content)


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
    """OpenAI sends a call's arguments as a string of JSON; templates want the object. What is none is told as it is."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Refused(f"messages[{n}].tool_calls must be a list of objects.", "messages")
    out = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments") or "", str):
            call = {**call, "function": {**function, "arguments": told_object(arguments)}}
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


# ---------------------------------------------------------------- which form a template takes


_sandbox: Any = None


def _compile(source: str) -> Compiled:
    """A template that has a loop over a message's content takes parts, and text too where it asks for strings."""
    global _sandbox
    from jinja2 import TemplateError, nodes

    if _sandbox is None:
        from .sandbox import make_sandbox  # jinja comes with the first chat

        _sandbox = make_sandbox()
    try:
        tree = _sandbox.parse(source)
        loops = any(_is_content(each.iter) for each in tree.find_all(nodes.For))
        strings = any(each.name == "string" for each in tree.find_all(nodes.Test))
        return Compiled(source, _sandbox.from_string(tree), strings or not loops, loops, NONE)
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
