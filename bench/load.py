"""The load client: a process of its own that keeps streams open to an OpenAI server and notes when each token came.

``python -P bench/load.py`` reads a `Load` as JSON from standard input and writes what it saw as JSON to standard
output. It imports nothing of quire's and does little for an event (a search for a few bytes), since it shares the
machine with the server that it measures: about 2% of a core at 1,000 tokens/s.

Two kinds of load. A **closed loop** keeps ``concurrency`` requests open: each that ends is followed by the next. An
**open loop** sends requests at random times (Poisson) at ``rate`` a second, whatever becomes of them. Request number i
is the same for every server and in every run with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

OPEN, CHOICE, NO_TEXT, DONE = b"data: ", b'"choices":[{', b'"text":""', b"[DONE]"
IDS, NO_IDS = b'"token_ids":[', b'"token_ids":[]'
END = b"\n\n"


@dataclass
class Load:
    """What to ask of whom. Lengths are tokens, both ends included; times are seconds.

    The window that counts begins once ``warm`` seconds are over and each of the first requests has had its first
    token, and ends ``seconds`` later. ``shared`` tokens at the start of every prompt are alike. After the window,
    requests that were sent before its end may take ``patience`` more; a closed loop goes on meanwhile, so that they end
    under the load that was measured.

    An event counts where it has text, or with ``every_token`` where it has tokens: their ids are asked for then, so
    that those have an event too whose text is half a character and held back.
    """

    host: str
    port: int
    model: str
    concurrency: int = 0
    rate: float = 0.0
    seconds: float = 20.0
    warm: float = 2.0
    patience: float = 30.0
    inputs: tuple[int, int] = (32, 256)
    outputs: tuple[int, int] = (64, 128)
    shared: int = 0
    ids: tuple[int, int] = (3, 4000)
    every_token: bool = False
    seed: int = 11
    timeout: float = 600.0
    key: str = ""  # sent as a bearer token

    def body(self, number: int) -> bytes:
        """The JSON of request ``number``: random token ids, greedy, to the full length."""
        rng = random.Random(f"{self.seed}/{number}")
        low, high = self.ids
        ids = random.Random(self.seed).choices(range(low, high), k=self.shared)
        ids += rng.choices(range(low, high), k=max(0, rng.randint(*self.inputs) - self.shared))
        fields = {
            "model": self.model, "prompt": ids, "max_tokens": rng.randint(*self.outputs), "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.every_token:
            fields["return_token_ids"] = True
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass
class Request:
    """One request as the client saw it: times on one clock, in seconds.

    ``times`` has one of each event that counts. Without ``Load.every_token`` a token whose text is held back, half a
    character, has none: some servers send an empty event for it and others nothing.
    """

    number: int
    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    ended: float = 0.0
    done: bool = False
    error: str = ""


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time: headers, chunks, and server-sent events in them."""

    def __init__(self, load: Load, on_first: Callable[[int], None]):
        """``on_first`` is told the number of each request whose first token has come, or will not."""
        self._load, self._on_first = load, on_first
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._over: asyncio.Future[None] | None = None
        self._data = b""  # not yet understood
        self._events = b""  # the part of a body that is no whole event yet
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    async def ask(self, request: Request, body: bytes) -> None:
        """Send a request and wait for the end of its answer, or of the connection."""
        assert self._transport is not None
        self._request, self._in_body, self._data, self._events = request, False, b"", b""
        self._over = asyncio.get_running_loop().create_future()
        key = f"Authorization: Bearer {self._load.key}\r\n" if self._load.key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._load.host}:{self._load.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{key}\r\n"
        )
        request.sent = time.perf_counter()
        self._transport.write(head.encode() + body)
        try:
            async with asyncio.timeout(self._load.timeout):
                await self._over
        except TimeoutError:
            request.error = f"no end after {self._load.timeout:g} s"
            self.close()

    def close(self) -> None:
        """Give up, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end("the connection was closed")

    @property
    def open(self) -> bool:
        return self._transport is not None

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._data += data
        if not self._in_body and not self._read_head():
            return
        while (chunk := self._next_chunk()) is not None:
            if not chunk:
                self._end("the stream ended before [DONE]")
                return
            self._events += chunk
            *events, self._events = self._events.split(END)
            for event in events:
                self._take(event, now)

    def _read_head(self) -> bool:
        """True once the headers are here. An answer that is no stream ends the request."""
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return False
        self._data = rest
        status = head.split(None, 2)[1]
        if status != b"200" or b"chunked" not in head.lower():
            self._end(f"status {status.decode()}: {rest[:300].decode(errors='replace')}")
            self.close()
            return False
        self._in_body = True
        return True

    def _next_chunk(self) -> bytes | None:
        """The next whole chunk of the body; empty at its end; None until more has come."""
        line, end, rest = self._data.partition(b"\r\n")
        if not end:
            return None
        size = int(line.partition(b";")[0], 16)
        if len(rest) < size + 2:
            return None
        self._data = rest[size + 2 :]
        return rest[:size]

    def _take(self, event: bytes, now: float) -> None:
        request = self._request
        if request is None or not event.startswith(OPEN):
            return
        if CHOICE in event:
            has_ids, has_text = IDS in event and NO_IDS not in event, NO_TEXT not in event
            if has_ids if self._load.every_token else has_text:
                request.times.append(now)
                if len(request.times) == 1:
                    self._on_first(request.number)
        elif event.endswith(DONE):
            request.done = True
        else:
            fields = json.loads(event[len(OPEN) :])
            if "error" in fields:
                request.error = str(fields["error"])[:300]
            elif usage := fields.get("usage"):
                request.tokens, request.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]

    def _end(self, reason: str) -> None:
        if self._request is not None:
            if not self._request.done and not self._request.error:
                self._request.error = reason
            self._request.ended = time.perf_counter()
            self._on_first(self._request.number)
        self._request = None
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Client:
    """Runs one load."""

    def __init__(self, load: Load):
        self.load = load
        self.requests: list[Request] = []
        self.began = 0.0  # of the window
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._starting = set(range(load.concurrency))  # of the first requests, those without a token
        self._started = asyncio.Event()
        self._one_ended = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """What was seen; ``window`` on the requests' clock."""
        load = self.load
        tasks: set[asyncio.Task[None]] = set()
        if load.rate:
            await self._arrivals(tasks)
        else:
            await self._loop(tasks)
        end = self.began + load.seconds
        if load.rate and tasks:
            await asyncio.wait(tasks, timeout=load.patience)
        elif not load.rate:
            await self._wait_for(end)
        cut = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections:
            connection.close()
        return {
            "window": [self.began, end],
            "cut": cut,
            "cpu_seconds": time.process_time(),
            "requests": [asdict(request) for request in self.requests],
        }

    async def _wait_for(self, end: float) -> None:
        """Until what was sent before ``end`` has ended, ``patience`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.load.patience):
                while any(request.sent < end and not request.ended for request in self.requests):
                    self._one_ended.clear()
                    await self._one_ended.wait()

    async def _loop(self, tasks: set[asyncio.Task[None]]) -> None:
        """Keep so many requests open until the window is over. Raises ConnectionError where all of them fail."""
        numbers = iter(range(10**9))
        tasks |= {asyncio.create_task(self._one_by_one(numbers)) for _ in range(self.load.concurrency)}
        warm = time.perf_counter() + self.load.warm
        await self._started.wait()
        await asyncio.sleep(max(0.0, warm - time.perf_counter()))
        self.began = time.perf_counter()
        await asyncio.wait(tasks, timeout=self.load.seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    def _note_first(self, number: int) -> None:
        self._starting.discard(number)
        if not self._starting:
            self._started.set()

    async def _one_by_one(self, numbers: Iterator[int]) -> None:
        failed = 0
        number = next(numbers)
        body = self.load.body(number)
        while failed < 3:
            request = await self._ask(number, body)
            failed = failed + 1 if request.error else 0
            number = next(numbers)
            body = self.load.body(number)
        raise ConnectionError(f"three requests in a row failed: {self.requests[-1].error}")

    async def _arrivals(self, tasks: set[asyncio.Task[None]]) -> None:
        """Send at random times until the window is over."""
        rng = random.Random(self.load.seed)
        due = time.perf_counter()
        self.began = due + self.load.warm
        number = 0
        while (due := due + rng.expovariate(self.load.rate)) < self.began + self.load.seconds:
            body = self.load.body(number)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.add(asyncio.create_task(self._ask(number, body)))  # type: ignore[arg-type]
            number += 1
        await asyncio.sleep(max(0.0, self.began + self.load.seconds - time.perf_counter()))

    async def _ask(self, number: int, body: bytes) -> Request:
        request = Request(number, time.perf_counter())
        self.requests.append(request)
        try:
            connection = await self._connect()
            await connection.ask(request, body)
        except OSError as error:
            request.error, request.ended = f"{type(error).__name__}: {error}", time.perf_counter()
            self._note_first(number)
            self._one_ended.set()
            return request
        self._one_ended.set()
        if request.done and connection.open:
            self._idle.append(connection)
        else:
            connection.close()
        return request

    async def _connect(self) -> Connection:
        """A connection that is free, or a new one."""
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self.load, self._note_first), self.load.host, self.load.port
        )
        self._connections.add(connection)
        return connection


def main() -> None:
    """Read a load, run it, write what was seen."""
    load = Load(**json.load(sys.stdin))
    try:
        import uvloop
    except ImportError:
        found = asyncio.run(Client(load).run())
    else:
        found = uvloop.run(Client(load).run())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
