"""``quire chat`` and ``quire complete``: talk to a running server, at a prompt or with one question."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from ..proto.process import EXIT_CONFIG
from . import chat_settings
from .api import DEFAULT_URL, Api
from .chat_input import Typed
from .chat_screen import screen, shown, wrapped
from .chat_session import COMMANDS, Message, Session
from .errors import CommandError


def add_parser(subparsers: Any) -> None:
    """The flags of both commands; vLLM's names."""
    chat = subparsers.add_parser("chat")
    _add_common(chat)
    chat.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the conversation")
    chat.add_argument(
        "--tools", metavar="FILE", help="JSON list of tools that the model may call; you are asked for what they answer"
    )
    chat.add_argument(
        "--show-reasoning", action=argparse.BooleanOptionalAction, help="show thoughts (default: at a terminal)"
    )
    chat.add_argument(
        "--markdown", action=argparse.BooleanOptionalAction,
        help="draw Markdown (default: at a terminal, with the package of pip install 'quire[cli]')",
    )  # fmt: skip
    chat_settings.add_flags(chat)
    chat.set_defaults(run=run_chat)
    complete = subparsers.add_parser("complete")
    _add_common(complete)
    chat_settings.add_flags(complete)
    complete.set_defaults(run=run_complete, markdown=False)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask (default: the first the server has)")
    parser.add_argument("--api-key", metavar="KEY", help="also QUIRE_API_KEY or OPENAI_API_KEY")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, and leave")
    parser.add_argument(
        "--stats", action="store_true", help="tell tokens, tokens/s and time to first token after each answer"
    )


def run_chat(args: argparse.Namespace) -> int:
    """A conversation, remembered until its end. Raises CommandError."""
    _check_rich(args.markdown)
    typed = Typed([*COMMANDS, "/quit"])
    session = Session(
        *_begin(args), screen=lambda: screen(args.markdown), settings=chat_settings.given(args),
        messages=[{"role": "system", "content": args.system_prompt}] if args.system_prompt else [],
        tools=_tools(args.tools) if args.tools else None, stats=args.stats,
        thoughts=sys.stdout.isatty() if args.show_reasoning is None else args.show_reasoning,
    )  # fmt: skip
    if args.quick is None:
        session.result = lambda call: _result(typed, call)

    def answer(text: str) -> None:
        session.answer(text)
        if session.stats:
            print(wrapped(session.last.line()), file=sys.stderr)

    def obey(line: str) -> None:
        if told := session.obey(line):
            print(shown(told))
        elif session.stats:
            print(wrapped(session.last.line()), file=sys.stderr)

    greeting = f"{session.model} at {session.api.url}: type a message, or /help; Ctrl-D ends the conversation."
    return _loop(args.quick, greeting, typed, answer, obey)


def run_complete(args: argparse.Namespace) -> int:
    """Texts continued, each for itself. Raises CommandError."""
    api, model = _begin(args)
    settings = chat_settings.given(args)

    def answer(text: str) -> None:
        said = Message(screen(False), False)
        options = {"stream_options": {"include_usage": True}}
        said.show(api.stream("/completions", {"model": model, "prompt": text, **settings, **options}))
        if args.stats:
            print(wrapped(said.counts.line()), file=sys.stderr)

    greeting = f"{model} at {api.url}: type the beginning of a text; Ctrl-D ends."
    return _loop(args.quick, greeting, Typed(), answer, None)


def _begin(args: argparse.Namespace) -> tuple[Api, str]:
    """The server, and the model that answers. Raises CommandError."""
    api = Api(args.url, args.api_key)
    return api, args.model_name or api.models()[0]


def _loop(
    quick: str | None, greeting: str, typed: Typed, answer: Callable[[str], None], obey: Callable[[str], None] | None
) -> int:
    """Answer ``quick``, or each message that is typed. Ctrl-C cuts an answer short; at a terminal's prompt it takes
    back the line, and ends where it comes twice in a row. ``obey`` is told lines that begin with one slash, at a
    terminal."""
    if quick is not None:
        answer(quick)
        return 0
    if typed.at_terminal:
        print(wrapped(greeting))
    try:
        while True:
            text = _read(typed)
            try:
                if obey is not None and typed.at_terminal and text.startswith("/"):
                    if not text.startswith("//"):
                        obey(text)
                        continue
                    text = text[1:]
                answer(text)
            except KeyboardInterrupt:
                print()
            except CommandError as error:
                if not typed.at_terminal:
                    raise
                print(wrapped(f"error: {error}"), file=sys.stderr)
    except (EOFError, KeyboardInterrupt):
        if typed.at_terminal:
            print()
        return 0
    finally:
        typed.close()


def _read(typed: Typed) -> str:
    """The next message. Raises EOFError at the end, and KeyboardInterrupt at the second Ctrl-C in a row."""
    try:
        return typed.read()
    except KeyboardInterrupt:
        if not typed.at_terminal:
            raise
    print("\n" + wrapped("Ctrl-C again, or Ctrl-D, ends it."))
    return typed.read()


def _check_rich(markdown: bool | None) -> None:
    """Raises CommandError where Markdown is asked for and cannot be drawn."""
    if markdown:
        try:
            import rich  # noqa: F401
        except ImportError:
            raise CommandError("--markdown needs a package: pip install 'quire[cli]'.") from None


def _tools(path: str) -> list[Any]:
    """The tools of a file. Raises CommandError."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise CommandError(f"--tools {path!r} cannot be read: {error}.", EXIT_CONFIG) from None
    if not isinstance(found, list):
        raise CommandError(
            f"--tools {path!r} must hold a JSON list of tools, as /v1/chat/completions takes them.", EXIT_CONFIG
        )
    return found


def _result(typed: Typed, call: dict[str, Any]) -> dict[str, Any]:
    """What a tool answers, which the user is asked for. Raises EOFError where there is no more input."""
    text = typed.ask(shown(f"{call['function']['name']} answers: "))
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
