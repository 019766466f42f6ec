"""How a frontend asks the others on its port for what they alone keep: each listens at a Unix socket in one folder.

The folder is its user's alone (0700), so nobody else reaches these sockets; a frontend whose folder is open to others
has none. Who asks has authenticated the client before, and says whose the request is. Nothing is asked where this
process knows the answer, and with one frontend there is no folder and no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from ..proto.config import ConfigError
from ..proto.listening import listen_unix
from .errors import ApiError

log = logging.getLogger(__name__)

OWNER_HEADER = "X-Quire-Owner"
"""Whose a request is, between frontends."""
ANSWER_S = 10.0
"""How long another frontend may take to begin an answer, and to end one that is no stream."""
_NAME = re.compile(r"[0-9a-f]{8}")


class Gone(Exception):
    """No frontend of this name listens."""


class Peers:
    """This process's socket in ``folder``, by the name ``name``, and the way to those of the others."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._runner: web.AppRunner | None = None

    async def open(self, runner: web.AppRunner) -> None:
        """Answer the others by this runner's application. Raises ConfigError, OSError."""
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{self._folder} can be used by others; make it this user's with mode 0700.")
        await runner.setup()
        self._runner = runner
        made = self._folder / f"{self._name}.new"
        await web.SockSite(runner, listen_unix(str(made))).start()
        made.rename(self._folder / self._name)  # what stands by its name and refuses connections is a dead process's

    async def close(self) -> None:
        """Answer no more."""
        if self._runner is not None:
            (self._folder / self._name).unlink(missing_ok=True)
            await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def ask(
        self, name: str, method: str, path: str, owner: str, query: Mapping[str, str] | None = None, data: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of one of the others, as it begins. Raises Gone, or ApiError 503 where it does not answer."""
        if not _NAME.fullmatch(name) or name == self._name:
            raise Gone
        at = self._folder / name
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(at)), timeout=timeout, auto_decompress=False
        ) as session:
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await session.request(
                        method, f"http://frontend{path}", params=query, headers={OWNER_HEADER: owner},
                        data=None if data is None else msgspec.json.encode(data),
                    )  # fmt: skip
            except aiohttp.ClientConnectorError as error:
                if not isinstance(error.os_error, ConnectionRefusedError | FileNotFoundError):
                    raise _silent(error) from error
                at.unlink(missing_ok=True)
                raise Gone from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _silent(error) from error
            async with answer:
                yield answer

    async def ask_all(self, method: str, path: str, owner: str, data: Any) -> list[Any]:
        """What all others answer with 200, as objects; one that does not answer is left out."""
        try:
            names = [each.name for each in self._folder.iterdir() if _NAME.fullmatch(each.name)]
        except OSError as error:
            log.warning("the other frontends cannot be found: %s", error)
            return []
        told = await asyncio.gather(*(self._body(each, method, path, owner, data) for each in names))
        return [msgspec.json.decode(body) for body in told if body is not None]

    async def _body(self, name: str, method: str, path: str, owner: str, data: Any) -> bytes | None:
        try:
            async with self.ask(name, method, path, owner, data=data) as answer:
                return await body_of(answer) if answer.status == 200 else None
        except Gone:
            return None
        except ApiError as error:
            log.warning("%s", error.message)
            return None


async def body_of(answer: aiohttp.ClientResponse) -> bytes:
    """All of an answer that is no stream. Raises ApiError 503."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _silent(error) from error


def _silent(error: Exception) -> ApiError:
    why = str(error) or type(error).__name__
    return ApiError(503, f"the frontend that keeps this does not answer ({why:.100}); try again.", None, 1.0)
