"""/v1/files and /v1/batches, as OpenAI's clients know them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, web

from ...client.results import RequestError
from ..auth import OWNER
from ..calls import json_body
from ..errors import ApiError
from ..front import FRONT
from ..parsing import Request
from .lines import ENDPOINTS
from .objects import StoredBatch, StoredFile
from .service import Service
from .store import KEPT_S, Store

log = logging.getLogger(__name__)
for _category in (BadContentDispositionHeader, BadContentDispositionParam):  # which quote what a client sent
    warnings.filterwarnings("ignore", category=_category)

MOST_FILE = 200 * 2**20
"""Bytes of one file, as at OpenAI."""
SOONEST_S, LATEST_S = 3600, KEPT_S
"""When a file may expire."""
LOOK_BYTES = 16 * 2**20
"""How much of an upload may come until the room that is left is looked at again."""
UPLOAD_S = 3600.0
"""What an upload may take in all."""
_PAGE, _MOST_PAGE = 20, 100
_MOST_FILES_PAGE = 10_000
_FIELD_BYTES = 1024
_PIECE = 2**20
_UNITS = {"m": 60, "h": 3600, "d": 86400}

SERVICE: web.AppKey[Service] = web.AppKey("batches", Service)

S = TypeVar("S", StoredFile, StoredBatch)


def setup(app: web.Application) -> None:
    """Add the routes. Batches that a process before this one left are gone on with as soon as the app runs."""
    settings = app[FRONT].settings
    if settings.files_path is not None:
        app[SERVICE] = Service(app, Store(Path(settings.files_path), settings.files_max_bytes))
        app.on_startup.append(_resume)
        app.on_cleanup.append(_close)
    app.add_routes(
        [
            web.post("/v1/files", upload),
            web.get("/v1/files", list_files),
            web.get("/v1/files/{id}", get_file),
            web.get("/v1/files/{id}/content", content),
            web.delete("/v1/files/{id}", delete_file),
            web.post("/v1/batches", create),
            web.get("/v1/batches", list_batches),
            web.get("/v1/batches/{id}", get_batch),
            web.post("/v1/batches/{id}/cancel", cancel),
        ]
    )


async def _resume(app: web.Application) -> None:
    service = app[SERVICE]
    if service.store.begun:
        try:
            await service.begin()
        except OSError as error:
            log.error("the batches in %s are not run: %s", service.store.root, error)


async def _close(app: web.Application) -> None:
    await app[SERVICE].close()


def _service(request: web.Request) -> Service:
    found = request.app.get(SERVICE)
    if found is None:
        raise ApiError(404, "this server keeps no files; start it with --files-path FOLDER.")
    return found


def _owner(request: web.Request) -> str:
    return request.get(OWNER, "")


# ---------------------------------------------------------------- files


async def upload(request: web.Request) -> web.Response:
    """Keep a file: multipart/form-data with ``file``, ``purpose`` and, if wanted, when it expires."""
    service = _service(request)
    if request.content_type != "multipart/form-data":
        raise ApiError(400, f"Content-Type must be multipart/form-data, got {request.content_type}.")
    try:
        return json_body((await _kept(request, service)).shown())
    except ConnectionError:
        raise
    except OSError as error:
        raise _unkept(error) from error


def _unkept(error: OSError) -> ApiError:
    """What a client is told where the disk is full, or the folder cannot be written."""
    log.error("files cannot be kept: %s", error)
    return ApiError(507, f"the server cannot keep files: {error.strerror or error}.")


async def _kept(request: web.Request, service: Service) -> StoredFile:
    await service.begin()
    store = service.store
    path, file = await asyncio.to_thread(store.new_upload)
    try:
        fields, filename = await _receive(request, store, file)
        file.close()
        if filename is None:
            raise ApiError(400, "file is missing.", "file")
        if (purpose := fields.get("purpose")) != "batch":
            raise ApiError(400, f"purpose must be 'batch', got {purpose!r:.80}.", "purpose")
        now = int(time.time())
        info = StoredFile(
            f"file-{uuid.uuid4().hex}", _owner(request), path.stat().st_size, now,
            now + _expiry(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"), "expires_after"),
            filename, purpose,
        )  # fmt: skip
        await asyncio.to_thread(store.add_file, path, info)
        return info
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk, which has been told
            file.close()


async def _receive(request: web.Request, store: Store, file: BinaryIO) -> tuple[dict[str, str], str | None]:
    """Write the file's bytes as they come; the other fields, and its name. Raises ApiError."""
    fields: dict[str, str] = {}
    filename, patience = None, request.app[FRONT].settings.body_s
    try:
        async with asyncio.timeout(UPLOAD_S):
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader):
                    raise ApiError(400, "a part of the body is in several parts itself; send the file as it is.")
                if part.name == "file" and filename is None:
                    name = (part.filename or "file").encode("utf-8", "replace").decode()
                    filename = re.sub(r"[\x00-\x1f\x7f/\\]", "_", name)[:255]
                    await _write(part, store, file, patience)
                elif part.name is not None and len(fields) < 8:
                    async with asyncio.timeout(patience):
                        fields[part.name] = (await part.read_chunk(_FIELD_BYTES)).decode("utf-8", "replace")
                        await part.release()
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time.", headers={"Connection": "close"}) from None
    except (RequestError, web.HTTPException, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - aiohttp's reader has a dozen ways to say so
        log.info("refused an upload: %s", error)
        raise ApiError(400, "the body is not valid multipart/form-data.") from None
    return fields, filename


async def _write(part: BodyPartReader, store: Store, file: BinaryIO, patience: float) -> None:
    size, looked = 0, -LOOK_BYTES
    while True:
        if size - looked >= LOOK_BYTES:  # others may fill it meanwhile
            most, looked = size + await asyncio.to_thread(store.room), size
        async with asyncio.timeout(patience):
            piece = await part.read_chunk(_PIECE)
        size += len(piece)
        if size > MOST_FILE:
            raise ApiError(413, f"the file is over the limit of {MOST_FILE} bytes; send it in parts.", "file")
        if size > most:
            raise store.full()
        if not piece:
            break
        await asyncio.to_thread(file.write, piece)
    await asyncio.to_thread(_sync, file)
    if await asyncio.to_thread(store.room) < 0:
        raise store.full()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _expiry(anchor: Any, seconds: Any, name: str) -> int:
    """Seconds that a file is kept. Raises ApiError."""
    if anchor is None and seconds is None:
        return KEPT_S
    if anchor != "created_at":
        raise ApiError(400, f"{name}.anchor must be 'created_at', got {anchor!r:.80}.", name)
    text = str(seconds)
    if not text.isdecimal() or not SOONEST_S <= int(text[:12]) <= LATEST_S:
        raise ApiError(400, f"{name}.seconds must be from {SOONEST_S} to {LATEST_S}, got {text:.80}.", name)
    return int(text)


async def list_files(request: web.Request) -> web.Response:
    """The files of this key, the newest first; ``purpose``, ``limit``, ``after`` and ``order`` as at OpenAI."""
    store, owner, purpose = _service(request).store, _owner(request), request.query.get("purpose")
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r:.80}.", "order")
    found = await asyncio.to_thread(lambda: [each for each in store.all_files() if each.owner == owner])
    found = [each for each in found if purpose in (None, each.purpose)]
    return _page(request, found, _MOST_FILES_PAGE, _MOST_FILES_PAGE, order == "desc")


async def get_file(request: web.Request) -> web.Response:
    """What is known of a file."""
    return json_body((await _file(request)).shown())


async def content(request: web.Request) -> web.StreamResponse:
    """A file's bytes."""
    file = await _file(request)
    path = _service(request).store.path_of(file)
    if not await asyncio.to_thread(path.is_file):  # aiohttp's own 404 says nothing
        raise ApiError(404, f"No such File object: {file.id}", "id")
    headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(path, headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    """Remove a file."""
    file = await _file(request)
    await asyncio.to_thread(_service(request).store.delete_file, file.id)
    return json_body({"id": file.id, "object": "file", "deleted": True})


async def _file(request: web.Request) -> StoredFile:
    return await asyncio.to_thread(_service(request).store.file, request.match_info["id"], _owner(request))


# ---------------------------------------------------------------- batches


class BatchRequest(Request, kw_only=True):
    """POST /v1/batches. None means: not given."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None

    def check(self) -> None:
        if self.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            raise ApiError(400, f"endpoint must be one of {known}; got {self.endpoint!r:.80}.", "endpoint")
        if not 60 <= self.window_s() <= KEPT_S:
            raise ApiError(
                400, f"completion_window must be such as '24h', '1m' to '30d'; got {self.completion_window!r:.80}.",
                "completion_window",
            )  # fmt: skip
        if len(data := self.metadata or {}) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in data.items()):
            raise ApiError(
                400, "metadata may have 16 pairs, with keys of 64 and values of 512 characters at most.", "metadata"
            )

    def window_s(self) -> int:
        """Seconds in which the batch is to be done; 0 where that cannot be read."""
        match = re.fullmatch(r"([0-9]{1,6})([mhd])", self.completion_window)
        return int(match[1]) * _UNITS[match[2]] if match else 0

    def output_s(self) -> int:
        """Seconds that its output is kept. Raises ApiError."""
        given = self.output_expires_after or {}
        return _expiry(given.get("anchor"), given.get("seconds"), "output_expires_after")


async def create(request: web.Request) -> web.Response:
    """Begin a batch of the requests in a file."""
    service = _service(request)
    body = await request.app[FRONT].read(request, BatchRequest)
    source = await asyncio.to_thread(service.store.file, body.input_file_id, _owner(request))
    if source.purpose != "batch":
        raise ApiError(400, f"the purpose of {source.id} is {source.purpose!r}; it must be 'batch'.", "input_file_id")
    now = int(time.time())
    batch = StoredBatch(
        f"batch_{uuid.uuid4().hex}", _owner(request), body.endpoint, source.id, body.completion_window, now,
        now + body.window_s(), body.output_s(), metadata=body.metadata,
    )  # fmt: skip
    try:
        await service.begin()
        await asyncio.to_thread(service.store.add_batch, batch, source)
    except OSError as error:
        raise _unkept(error) from error
    service.ring()
    return json_body(batch.shown())


async def list_batches(request: web.Request) -> web.Response:
    """The batches of this key, the newest first; ``limit`` and ``after`` as at OpenAI."""
    service, owner = _service(request), _owner(request)
    found = await asyncio.to_thread(lambda: [each for each in service.store.all_batches() if each.owner == owner])
    found = [service.current(each) for each in found]
    return _page(request, found, _PAGE, _MOST_PAGE, True)


async def get_batch(request: web.Request) -> web.Response:
    """A batch as it is now."""
    service = _service(request)
    batch = await asyncio.to_thread(service.store.batch, request.match_info["id"], _owner(request))
    return json_body(service.current(batch).shown())


async def cancel(request: web.Request) -> web.Response:
    """End a batch: what has been answered becomes its output."""
    service, id, owner = _service(request), request.match_info["id"], _owner(request)
    batch = await asyncio.to_thread(service.store.batch, id, owner)
    if batch.status in ("validating", "in_progress"):
        try:
            service.store.cancel_of(id).touch()
        except OSError as error:
            raise _unkept(error) from error
        service.ring()
        batch = await asyncio.to_thread(service.store.batch, id, owner)
    elif batch.status not in ("cancelling", "cancelled"):
        raise ApiError(400, f"Cannot cancel a batch with status '{batch.status}'.", "batch_id")
    return json_body(batch.shown())


def _page(request: web.Request, found: list[S], usual: int, most: int, newest_first: bool) -> web.Response:
    """``limit`` of what was found, after the id ``after``."""
    text = request.query.get("limit", str(usual))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ApiError(400, f"limit must be from 1 to {most}, got {text:.80}.", "limit")
    found = sorted(found, key=lambda each: (each.created_at, each.id), reverse=newest_first)
    if (after := request.query.get("after")) is not None:
        place = next((place for place, each in enumerate(found) if each.id == after), None)
        if place is None:
            raise ApiError(400, f"after {after!r:.80} is not in this list.", "after")
        found = found[place + 1 :]
    shown = [each.shown() for each in found[: int(text)]]
    return json_body(
        {
            "object": "list", "data": shown, "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None, "has_more": len(found) > len(shown),
        }
    )  # fmt: skip
