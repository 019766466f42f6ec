"""A conversation in a terminal: what was said, how it is sampled, and the ``/commands`` that change both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..proto.flag_parser import nearest
from . import chat_settings
from .api import Api
from .errors import CommandError

FILE_BYTES = 1 << 20
"""The largest file that ``/file`` sends."""


@dataclass
class Counts:
    """What an answer took; ``+`` adds the tokens and times of several."""

    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    first_s: float = 0.0
    decode_s: float = 0.0
    answers: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def line(self) -> str:
        """In one line."""
        if not self.answers:
            return "nothing was answered yet"
        cached = f" ({self.cached} cached)" if self.cached else ""
        rate = f", {(self.tokens - self.answers) / self.decode_s:.1f} tokens/s" if self.decode_s else ""
        mean = "mean " if self.answers > 1 else ""
        first = f"{mean}time to first token {1000 * self.first_s / self.answers:.0f} ms"
        return f"{self.prompt} tokens of prompt{cached}, {self.tokens} of answer{rate}, {first}"


class Message:
    """An answer, shown as it comes: thoughts, text, and calls of tools."""

    def __init__(self, screen: Any, thoughts: bool):
        self._screen, self._thoughts = screen, thoughts
        self.text, self.thought = "", ""
        self.calls: list[dict[str, Any]] = []
        self.counts = Counts()
        self.finish: str | None = None

    def show(self, events: Iterator[dict[str, Any]]) -> None:
        """Show all of it. What has come is kept where an error or Ctrl-C ends it."""
        began, first, last = time.monotonic(), 0.0, 0.0
        try:
            for event in events:
                for choice in event.get("choices") or ():
                    pieces = list(self._pieces(choice.get("delta") or {"content": choice.get("text")}))
                    if pieces:
                        last = time.monotonic()
                        first = first or last
                    for kind, piece in pieces:
                        self._screen.add(kind, piece)
                    self.finish = choice.get("finish_reason") or self.finish
                if usage := event.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    self.counts = Counts(
                        usage["prompt_tokens"], details.get("cached_tokens") or 0, usage.get("completion_tokens", 0),
                        (first or time.monotonic()) - began, last - first, 1,
                    )  # fmt: skip
        finally:
            self._screen.end()

    def _pieces(self, delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """What is new, by kind; it is kept too."""
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            self.thought += thought
            if self._thoughts:
                yield "thought", thought
        if text := delta.get("content"):
            self.text += text
            yield "text", text
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id"):
                named = {"name": function.get("name"), "arguments": ""}
                self.calls.append({"id": call["id"], "type": "function", "function": named})
                yield f"call {len(self.calls)}", f"{named['name']} "
            if (piece := function.get("arguments")) and self.calls:
                self.calls[-1]["function"]["arguments"] += piece
                yield f"call {len(self.calls)}", piece

    def message(self) -> dict[str, Any]:
        """The same for the turns after it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        more = {"reasoning": self.thought, "tool_calls": self.calls}
        return message | {name: value for name, value in more.items() if value}


@dataclass
class Session:
    """A conversation. ``result`` asks the user what a tool answers to a call; None leaves calls unanswered."""

    api: Api
    model: str
    screen: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    thoughts: bool = False
    stats: bool = False
    result: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    last: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)
    attached: str = ""

    def answer(self, text: str) -> None:
        """Ask, and show what is answered. What fails before anything is said leaves the conversation as it was; what
        Ctrl-C cuts short is kept as far as it came."""
        asked = [*self.messages, {"role": "user", "content": self.attached + text}]
        self._go_on(asked)
        self.attached = ""

    def _go_on(self, asked: list[dict[str, Any]]) -> None:
        while True:
            said = Message(self.screen(), self.thoughts)
            settings = {{"max_tokens": "max_completion_tokens"}.get(n, n): v for n, v in self.settings.items()}
            body = {"model": self.model, "messages": asked, "tools": self.tools, **settings}
            events = self.api.stream("/chat/completions", body | {"stream_options": {"include_usage": True}})
            try:
                said.show(events)
            except KeyboardInterrupt:
                if said.text:
                    self.messages[:] = [*asked, {"role": "assistant", "content": said.text}]
                raise
            asked.append(said.message())
            self.last = said.counts
            self.total = self.total + said.counts
            if self.result is None or not said.calls:
                break
            asked += [self.result(call) for call in said.calls]
        self.messages[:] = asked

    def obey(self, line: str) -> str | None:
        """Do what a ``/command`` says; what to tell the user. Raises CommandError, and EOFError to end."""
        word, _, rest = line.partition(" ")
        name = _SHORT.get(word, word)
        if name not in COMMANDS:
            hint = nearest(word, COMMANDS) or "."
            raise CommandError(
                f"there is no command {word!r:.60}{hint} `/help` lists them; a message that begins with / is written "
                "with two."
            )
        return getattr(self, "_" + name[1:])(rest.strip())

    def _help(self, text: str) -> str:
        lines = [f"{(name + ' ' + arguments):24}{help}" for name, (arguments, help) in COMMANDS.items()]
        more = '"""                     begin a message of several lines, and end it'
        keys = "Ctrl-C                  cut an answer short, or take back the line\n"
        keys += "Ctrl-D                  end the conversation"
        return "\n".join([*lines, more, keys])

    def _clear(self, text: str) -> str:
        self.messages[:] = [each for each in self.messages[:1] if each["role"] == "system"]
        self.attached, self.total = "", Counts()
        return "the conversation begins anew" + ("; the system prompt stays" if self.messages else "")

    def _exit(self, text: str) -> str:
        raise EOFError

    def _system(self, text: str) -> str:
        told = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        if not text:
            return told[0]["content"] if told else "no system prompt; `/system TEXT` sets one"
        self.messages[: len(told)] = [{"role": "system", "content": text}]
        return "the system prompt is set"

    def _set(self, text: str) -> str:
        return chat_settings.change(self.settings, text)

    def _retry(self, text: str) -> None:
        users = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise CommandError("there is no question to ask again.")
        self._go_on(self.messages[: users[-1] + 1])

    def _save(self, text: str) -> str:
        path = _path(text, "/save FILE")
        if path.exists() and _saved(path) is None:
            raise CommandError(f"{path} exists and is no saved conversation; name another file.")
        kept = {"model": self.model, "settings": self.settings, "messages": self.messages}
        try:
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}.") from None
        return f"{len(self.messages)} messages are in {path}"

    def _load(self, text: str) -> str:
        path = _path(text, "/load FILE")
        if (kept := _saved(path)) is None:
            raise CommandError(f"{path} is no conversation that /save wrote.")
        self.messages[:] = kept["messages"]
        self.settings = {name: value for name, value in kept["settings"].items() if name in chat_settings.SETTINGS}
        return f"{len(self.messages)} messages; the next is answered by {self.model}"

    def _file(self, text: str) -> str:
        path = _path(text, "/file PATH")
        try:
            if path.stat().st_size > FILE_BYTES:
                raise CommandError(f"{path} has {path.stat().st_size} bytes; /file sends {FILE_BYTES} at most.")
            content = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise CommandError(f"{path} is no text in UTF-8; only text can be sent.") from None
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}.") from None
        fence = "```"
        while fence in content:
            fence += "`"
        self.attached += f"{path.name}:\n{fence}\n{content.rstrip()}\n{fence}\n\n"
        return f"{path.name} ({len(content)} characters) goes with the next message"

    def _stats(self, text: str) -> str:
        if text in ("on", "off"):
            self.stats = text == "on"
            return f"statistics after each answer are {text}"
        if self.total.answers < 2:
            return self.last.line()
        return f"last: {self.last.line()}\nall {self.total.answers}: {self.total.line()}"

    def _model(self, text: str) -> str:
        names = self.api.models()
        if not text:
            return "\n".join(f"{'*' if name == self.model else ' '} {name}" for name in names)
        if text not in names:
            raise CommandError(
                f"the server has no model {text!r:.80}{nearest(text, names) or '.'} `/model` lists them."
            )
        self.model = text
        return f"{self.model} answers from now on"


COMMANDS = {
    "/help": ("", "show this"),
    "/clear": ("", "forget the conversation; the system prompt stays"),
    "/exit": ("", "end; also /quit and Ctrl-D"),
    "/system": ("[TEXT]", "show or set what the model is told before the conversation"),
    "/set": ("[NAME=VALUE]", "show or set how answers are sampled: /set temperature=0.2"),
    "/retry": ("", "answer the last question again"),
    "/file": ("PATH", "send a text file with the next message"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "go on with one that was written"),
    "/stats": ("[on|off]", "tokens, tokens/s and time to first token; on: after each answer"),
    "/model": ("[NAME]", "show the server's models, or choose one"),
}
"""What a user may type: arguments, and what it does. ``Session`` has a method of each name."""
_SHORT = {"/quit": "/exit", "/bye": "/exit", "/q": "/exit", "/?": "/help"}


def _path(text: str, usage: str) -> Path:
    if not text:
        raise CommandError(f"no file is named; write `{usage}`.")
    return Path(text).expanduser()


def _saved(path: Path) -> dict[str, Any] | None:
    """What a file holds that ``/save`` wrote, or None. Raises CommandError where it cannot be read."""
    try:
        kept = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        return None
    if not isinstance(kept, dict) or not isinstance(kept.get("settings"), dict):
        return None
    messages = kept.get("messages")
    sound = isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    return kept if sound else None
