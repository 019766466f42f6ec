"""Requests over plain sockets, so that it is known which connection, and so which frontend, each one has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


class Cut(ConnectionError):
    """The connection ended before the answer did."""


@dataclass
class Answer:
    """What has come: ``port`` is the connection's own, ``begun`` says whether any byte of an answer came."""

    port: int = 0
    begun: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


async def post(port: int, path: str, body: dict[str, Any], answer: Answer) -> AsyncIterator[Any]:
    """The JSON objects of the answer: each event of a stream, or the one body. Raises Cut."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    except OSError as error:
        raise Cut(f"not connected: {error}") from error
    try:
        answer.port = writer.get_extra_info("sockname")[1]
        data = json.dumps(body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        answer.begun = True
        status, *lines = head.decode("latin-1").split("\r\n")
        answer.status = int(status.split()[1])
        answer.headers = {k.strip().lower(): v.strip() for k, _, v in (x.partition(":") for x in lines) if k}
        if "event-stream" not in answer.headers.get("content-type", ""):
            yield json.loads(await _body(reader, answer) or b"{}")
            return
        carry, ended = b"", False
        async for piece in _chunks(reader):
            *events, carry = (carry + piece).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    ended = True
                else:
                    yield json.loads(event.removeprefix(b"data: "))
        if not ended:
            raise Cut("the stream ended without [DONE]")
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Cut(str(error) or type(error).__name__) from error
    finally:
        writer.transport.abort()


async def _body(reader: asyncio.StreamReader, answer: Answer) -> bytes:
    if "content-length" in answer.headers:
        return await reader.readexactly(int(answer.headers["content-length"]))
    return b"".join([piece async for piece in _chunks(reader)])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
