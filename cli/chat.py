"""``quire chat`` and ``quire complete``: talk to a running server, at a prompt or with one question."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from .errors import CommandError

DEFAULT_URL = "http://localhost:8000/v1"
CONNECT_S = 10.0


def add_parser(subparsers: Any) -> None:
    """The flags of both commands; vLLM's names."""
    chat = subparsers.add_parser("chat")
    _add_common(chat)
    chat.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the conversation")
    chat.set_defaults(run=run_chat)
    complete = subparsers.add_parser("complete")
    _add_common(complete)
    complete.set_defaults(run=run_complete)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server's API is (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask (default: the first the server has)")
    parser.add_argument("--api-key", metavar="KEY", help="also QUIRE_API_KEY or OPENAI_API_KEY")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer, and leave")


def run_chat(args: argparse.Namespace) -> int:
    """A conversation, remembered until its end."""
    api = Api(args.url, args.api_key)
    model = args.model_name or api.first_model()
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def answer(text: str) -> None:
        asked = [*messages, {"role": "user", "content": text}]
        body = {"model": model, "messages": asked, "max_completion_tokens": args.max_tokens}
        said = _show(api.stream("/chat/completions", body), lambda choice: choice["delta"].get("content") or "")
        messages[:] = [*asked, {"role": "assistant", "content": said}]

    return _loop(args.quick, f"{model}: type a message; Ctrl-D ends the conversation.", answer)


def run_complete(args: argparse.Namespace) -> int:
    """Texts continued, each for itself."""
    api = Api(args.url, args.api_key)
    model = args.model_name or api.first_model()

    def answer(text: str) -> None:
        body = {"model": model, "prompt": text, "max_tokens": args.max_tokens}
        _show(api.stream("/completions", body), lambda choice: choice["text"])

    return _loop(args.quick, f"{model}: type the beginning of a text; Ctrl-D ends.", answer)


def _loop(quick: str | None, greeting: str, answer: Callable[[str], None]) -> int:
    """Answer ``quick``, or each line of standard input. Ctrl-C cuts an answer short, at the prompt it ends."""
    if quick is not None:
        answer(quick)
        return 0
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401 - gives input() its history and editing

        print(greeting)
    while True:
        try:
            text = input("> " if at_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if at_terminal:
                print()
            return 0
        if not text.strip():
            continue
        try:
            answer(text)
        except KeyboardInterrupt:
            print()
        except CommandError as error:
            if not at_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)


def _show(events: Iterator[dict[str, Any]], text_of: Callable[[dict[str, Any]], str]) -> str:
    """Print text as it comes; all of it."""
    parts = []
    for event in events:
        for choice in event.get("choices", ()):
            if text := text_of(choice):
                parts.append(text)
                print(text, end="", flush=True)
    print(flush=True)
    return "".join(parts)


class Api:
    """An OpenAI-style API over the standard library, which starts faster than any client of it."""

    def __init__(self, url: str, key: str | None):
        parts = urlsplit(url if "://" in url else "http://" + url)
        try:
            self._port = parts.port
        except ValueError:
            raise CommandError(f"{url!r} is no URL; it should look like {DEFAULT_URL}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"{url!r} is no URL; it should look like {DEFAULT_URL}.")
        self._url, self._host, self._path = url, parts.hostname, parts.path.rstrip("/")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        key = key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def first_model(self) -> str:
        """The name of the first model the server has. Raises CommandError."""
        connection, response = self._request("GET", "/models", None)
        try:
            return json.loads(response.read())["data"][0]["id"]
        except (ValueError, LookupError, TypeError, HTTPException, OSError):
            raise CommandError(f"{self._url}/models is not an OpenAI-style list of models; is --url right?") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Leaving the loop early closes the connection, which ends the request."""
        body = {name: value for name, value in body.items() if value is not None}
        connection, response = self._request("POST", path, json.dumps(body | {"stream": True}).encode())
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise CommandError(f"the server failed: {_message(event)}")
                yield event
            raise CommandError("the server ended the answer before it was complete.")
        except (OSError, HTTPException, ValueError) as error:
            raise CommandError(f"lost the connection to {self._url}: {error}.") from None
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # an answer may take as long as it likes
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or error
            raise CommandError(f"cannot reach {self._url}: {reason}; is a server running? (`quire serve`)") from None
        if response.status != 200:
            text = response.read(65536)
            connection.close()
            try:
                message = _message(json.loads(text))
            except (ValueError, AttributeError):
                message = response.reason
            raise CommandError(f"the server answered {response.status}: {message}")
        return connection, response


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message") if isinstance(error, dict) else error)
