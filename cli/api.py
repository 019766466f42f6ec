"""A running server as the commands ask it: an OpenAI-style API over the standard library, which starts faster than any
client of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ..proto.flag_parser import nearest
from ..proto.process import EXIT_CONFIG
from .errors import CommandError

DEFAULT_URL = "http://localhost:8000"
CONNECT_S = 10.0


class Api:
    """Where a server is, and the key that it is asked with.

    ``url``: the server (``http://localhost:8000``), or its API with the path that ends in ``/v1``. Raises CommandError
    where it is no URL.
    """

    def __init__(self, url: str, key: str | None):
        parts = urlsplit(url if "://" in url else "http://" + url)
        try:
            self.port = parts.port
        except ValueError:
            raise CommandError(f"{url!r} is no URL; it should look like {DEFAULT_URL}.", EXIT_CONFIG) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"{url!r} is no URL; it should look like {DEFAULT_URL}.", EXIT_CONFIG)
        self.host, path = parts.hostname, parts.path.rstrip("/")
        self._path = path or "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        key = key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY") or "EMPTY"
        key = key.strip()
        if not (key.isascii() and key.isprintable()):  # http.client's own complaint would show the key
            raise CommandError("the API key has a character that no HTTP header may have; is it the right file's text?")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def models(self) -> list[str]:
        """The names of what the server has. Raises CommandError."""
        text = self.read(self._path + "/models")
        try:
            found = [str(model["id"]) for model in json.loads(text)["data"]]
        except (ValueError, LookupError, TypeError):
            found = []
        if not found:
            raise CommandError(f"{self.url} has no OpenAI-style list of models; is --url right?")
        return found

    def read(self, path: str, timeout: float | None = CONNECT_S) -> str:
        """What GET of a path from the server's root answers, as text. Raises CommandError."""
        connection, response = self._request("GET", path, None, timeout)
        try:
            return response.read().decode("utf-8", "replace")
        except (HTTPException, OSError) as error:
            raise CommandError(f"lost the connection to {self.url}: {error}.") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Leaving the loop early closes the connection, which ends the request."""
        body = {name: value for name, value in body.items() if value is not None}
        data = json.dumps(body | {"stream": True}).encode()
        connection, response = self._request("POST", self._path + path, data, None)
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise CommandError(f"{self.url} sent an event that is no JSON object; is --url right?")
                if "error" in event:
                    raise CommandError(f"the server failed: {_message(event)}")
                yield event
            raise CommandError("the server ended the answer before it was complete.")
        except (OSError, HTTPException, ValueError) as error:
            raise CommandError(f"lost the connection to {self.url}: {error}.") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: bytes | None, timeout: float | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._kind(self.host, self.port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)  # None: an answer may take as long as it likes
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise CommandError(_unreached(self.url, error)) from None
        if response.status != 200:
            text = response.read(65536)
            connection.close()
            try:
                message = _message(json.loads(text))
            except (ValueError, AttributeError):
                message = response.reason
            raise CommandError(
                f"{self.url} answered {response.status}: {message.rstrip()}{self._remedy(response, body, message)}"
            )
        return connection, response

    def _remedy(self, response: HTTPResponse, body: bytes | None, message: str) -> str:
        """What to do about an answer that is an error."""
        if response.status == 400 and "no chat template" in message:  # a base model, which knows no turns
            return " `quire complete` goes on with a text that you begin, which such a model can."
        if response.status == 404 and body:
            wrong = str(json.loads(body).get("model"))
            with suppress(CommandError):
                names = self.models()
                if wrong not in names:
                    return nearest(wrong, names).replace("; d", " D", 1)
        return _REMEDIES.get(response.status, "")


_REMEDIES = {401: " Give its key with --api-key or in QUIRE_API_KEY.", 503: " It may be starting: try again."}


def _unreached(url: str, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"nothing answers at {url}: is `quire serve` running? --url says where it is."
    reason = getattr(error, "strerror", None) or error or type(error).__name__
    return f"cannot reach {url}: {reason}; is `quire serve` running there?"


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message") if isinstance(error, dict) else error)
