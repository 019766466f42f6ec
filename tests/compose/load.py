"""Streams against a server, many at once, each told apart by its prompt, seed and parameters."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

READ_S = 240.0
"""Longest silence within a stream: a container may be away for as long as it takes to start another."""


@dataclass
class Answer:
    """What one stream sent. ``error`` is why it did not reach its end."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None

    @property
    def same(self) -> tuple[list[int], str, str | None]:
        """What must not depend on anything that happened to containers."""
        return self.tokens, self.text, self.finish


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests: greedy and seeded ones, penalties, a stop string that comes now and then."""
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": f"Number {number}: The capital of", "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        if number % 2:
            body |= {"temperature": 1.0, "seed": number, "top_p": 0.95}
        if number % 4 == 3:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
        if number % 8 == 5:
            body |= {"stop": ["zq"]}
        made.append(body)
    return made


class Load:
    """Streams that are open. Make it in a running loop."""

    def __init__(self, urls: list[str], requests: list[dict[str, Any]]):
        """Stream ``i`` goes to ``urls[i % len(urls)]``."""
        self.answers = [Answer() for _ in requests]
        self.started = time.monotonic()
        self.ended = 0.0
        self._tasks = [
            asyncio.create_task(self._stream(urls[i % len(urls)], body, answer))
            for i, (body, answer) in enumerate(zip(requests, self.answers, strict=True))
        ]

    @property
    def tokens(self) -> int:
        """Tokens that came so far, all streams together."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def open(self) -> int:
        """Streams that have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def until(self, tokens: int) -> None:
        """Return once so many tokens have come. Raises RuntimeError where the streams ended before."""
        while self.tokens < tokens:
            if not self.open:
                raise RuntimeError(f"every stream ended, after {self.tokens} tokens: {self.answers[0]}")
            await asyncio.sleep(0.02)

    async def finish(self) -> list[Answer]:
        """The answers, once every stream has ended."""
        await asyncio.gather(*self._tasks)
        self.ended = time.monotonic()
        return self.answers

    async def _stream(self, url: str, body: dict[str, Any], answer: Answer) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{url}/v1/completions", json=body) as response,
            ):
                if response.status != 200:
                    answer.error = f"{response.status}: {await response.text()}"
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        _read(json.loads(line.removeprefix(b"data: ")), answer)
            if answer.finish is None and answer.error is None:
                answer.error = "ended without a finish reason"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"


def _read(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        answer.tokens += choice.get("token_ids") or []
        answer.text += choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish
