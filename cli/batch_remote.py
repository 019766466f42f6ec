"""A batch answered by a server that runs already: ``quire run-batch --base-url``."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import CommandError

if TYPE_CHECKING:
    import aiohttp

    from ..frontend.batches.journal import Journal
    from ..frontend.batches.lines import Line, Lines

AGAIN = (429, 502, 503, 504)
"""Statuses that say nothing of the request itself."""
AGAIN_S, LONGEST_S = 1.0, 60.0
"""When to ask again where the server does not say, and the longest that is waited."""
PATIENCE_S = 300.0
"""How long a server may answer nothing at all before the run is ended."""


class Remote:
    """A server at ``base``, such as http://localhost:8000."""

    def __init__(self, base: str, session: aiohttp.ClientSession):
        self._base, self._session = base.rstrip("/").removesuffix("/v1"), session
        self._heard = time.monotonic()

    async def answer(self, line: Line) -> tuple[int, bytes]:
        """The status and the JSON of a request, asked again where the server is busy or away. Raises CommandError."""
        import aiohttp

        from ..frontend.batches.local import no_line, refuse_pieces
        from ..frontend.errors import ApiError, error_body

        try:
            refuse_pieces(line.body)
        except ApiError as error:
            return error.status, error_body(error)
        away: float | None = None  # since when
        while True:
            wait = AGAIN_S
            try:
                headers = {"Content-Type": "application/json"}
                async with self._session.post(self._base + line.url, data=line.body, headers=headers) as answer:
                    body = await answer.read()
                    if answer.status not in AGAIN:
                        self._heard = time.monotonic()
                        if _is_json(body):
                            return answer.status, body
                        told = no_line(answer.content_type, 400 if answer.status == 200 else answer.status)
                        return told.status, error_body(told)
                    why = f"status {answer.status}"
                    text = answer.headers.get("Retry-After", "")
                    wait = min(float(text), LONGEST_S) if text.isdecimal() else AGAIN_S
            except (aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            away = time.monotonic() if away is None else away
            if time.monotonic() - max(self._heard, away) > PATIENCE_S:
                raise CommandError(f"{self._base} has answered nothing for {PATIENCE_S:g} s: {why}.")
            await asyncio.sleep(wait)


def answer_remotely(
    base: str, key: str | None, lines: Lines, journal: Journal, window: int, told: Callable[[], None]
) -> bool:
    """Have a server answer what is left. False where a signal ended it before. Raises CommandError, OSError."""

    async def main() -> None:
        import aiohttp

        from ..frontend.batches.run import Run

        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            await Run(lines, journal, Remote(base, session).answer, window, True, told).go()

    try:
        asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return False
    return True


def _is_json(body: bytes) -> bool:
    """Whether an answer can stand in a line of the output, whatever its server calls it."""
    import msgspec

    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def key_of(given: str | None) -> str | None:
    """The API key by the flag or the environment: of several, as a server may have, the first. Raises ConfigError."""
    from ..frontend.access import API_KEY_ENV
    from ..frontend.auth import keys_of

    text = given or next(filter(None, map(os.environ.get, (*API_KEY_ENV, "OPENAI_API_KEY"))), None)
    return next(iter(keys_of(text)), None)
