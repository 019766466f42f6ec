"""A TCP proxy that can break the connections through it: reset one, or hold up everything for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct

CHUNK = 65536


class Proxy:
    """Listens on ``port`` of the loopback and passes everything on to ``target``, another port there."""

    def __init__(self, port: int, target: int):
        self.port, self.target = port, target
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._open.set()
        for pair in list(self._pairs):
            _reset(pair)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self, rng: random.Random) -> bool:
        """Break one connection with a TCP reset on both sides; False where there is none."""
        if not self._pairs:
            return False
        _reset(rng.choice(sorted(self._pairs, key=id)))
        return True

    async def hold(self, seconds: float) -> None:
        """Pass nothing on for a while, with every connection standing; what comes meanwhile is passed on later."""
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        copies = [asyncio.ensure_future(self._copy(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            self._pairs.discard(pair)
            for side in pair:
                side.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()


def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    for writer in pair:
        sock = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
