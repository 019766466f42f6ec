"""The load client against a server of its own kind: what it asks, how it reads streams, and how it fails."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.load import Client, Load

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":%b}]}\n\n' % json.dumps(text).encode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


async def run(load: Load, answer: Answer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the client saw of a server that answers so, and the bodies that the server was sent."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                bodies.append(json.loads(await reader.readexactly(size)))
                await answer(bodies[-1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await Client(replace(load, port=port)).run()
    return found, bodies


LOAD = Load("127.0.0.1", 0, "m", concurrency=2, seconds=0.2, warm=0.0)


def test_a_stream_in_pieces_is_read_whole():
    """Chunks cut anywhere, events in two chunks, several events in one; an event without text is no event."""
    whole = chunked(event("a")[:7], event("a")[7:] + event(""), event("b") + event("c") + USAGE + DONE)

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(HEAD + whole), 5):
            writer.write((HEAD + whole)[at : at + 5])
            await asyncio.sleep(0)

    found, bodies = asyncio.run(run(LOAD, answer))
    ended = [request for request in found["requests"] if request["done"]]
    assert ended and all(len(r["times"]) == r["tokens"] == 3 and r["prompt_tokens"] == 9 for r in ended)
    assert not any(request["error"] for request in found["requests"])
    assert bodies[0]["stream"] and bodies[0]["ignore_eos"] and bodies[0]["temperature"] == 0


def test_with_every_token_an_event_counts_that_has_ids_and_no_text():
    ids = b'data: {"choices":[{"text":"","prompt_token_ids":%b,"token_ids":%b}]}\n\n'
    opening, held, nothing = ids % (b"[5,6]", b"[]"), ids % (b"null", b"[7,8]"), ids % (b"null", b"null")

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunked(opening, held, nothing, held, USAGE, DONE))

    counts = {}
    for every_token in (False, True):
        found, bodies = asyncio.run(run(replace(LOAD, every_token=every_token), answer))
        assert bodies[0].get("return_token_ids", False) is every_token
        counts[every_token] = {len(request["times"]) for request in found["requests"] if request["done"]}
    assert counts == {False: {0}, True: {2}}


def test_as_many_requests_are_open_as_were_asked_for():
    now, most = 0, 0

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        writer.write(HEAD + chunked(event("a"), USAGE, DONE))

    found, _ = asyncio.run(run(replace(LOAD, concurrency=3), answer))
    assert most == 3
    assert found["window"][1] - found["window"][0] == pytest.approx(0.2)


def test_what_was_sent_within_the_window_ends_and_others_follow_meanwhile():
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        whole = HEAD + chunked(event("a"), USAGE, DONE)
        writer.write(whole[:-30])
        await asyncio.sleep(0.5 if served == 1 else 0.05)  # the first ends when the window is long over
        writer.write(whole[-30:])

    served = 0
    found, _ = asyncio.run(run(LOAD, answer))
    end = found["window"][1]
    assert all(each["done"] and each["ended"] >= each["sent"] for each in found["requests"] if each["sent"] < end)
    assert any(each["ended"] > end for each in found["requests"] if each["sent"] < end)
    assert any(each["sent"] > end for each in found["requests"])


def test_arrivals_wait_for_nobody_and_are_cut_off_in_the_end():
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    found, bodies = asyncio.run(run(replace(LOAD, rate=100.0, patience=0.05), answer))
    assert len(bodies) > 3 and len(found["requests"]) == len(bodies)
    assert not any(request["done"] for request in found["requests"])


def test_requests_are_the_same_in_every_run():
    one, two = (Load("127.0.0.1", 0, "m", shared=8) for _ in range(2))
    bodies = [json.loads(one.body(number)) for number in (1, 2)]
    assert bodies == [json.loads(two.body(number)) for number in (1, 2)]
    assert bodies[0]["prompt"][:8] == bodies[1]["prompt"][:8] and bodies[0]["prompt"] != bodies[1]["prompt"]
    assert all(32 <= len(body["prompt"]) <= 256 and 64 <= body["max_tokens"] <= 128 for body in bodies)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno!", "status 400: no!"),
        (HEAD + chunked(b'data: {"error":{"message":"too long"}}\n\n'), "too long"),
        (HEAD + chunked(event("a")), "the stream ended before"),
    ],
)
def test_a_load_whose_requests_fail_ends_with_their_error(reply, error):
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(reply)

    with pytest.raises(ConnectionError, match=error):
        asyncio.run(run(replace(LOAD, concurrency=1, seconds=30.0), answer))
