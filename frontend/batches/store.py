"""The folder of /v1/files and /v1/batches. Blocking; several frontends share it.

``files/ID`` is a file and ``files/ID.json`` what is known of it, written last. ``batches/ID.json`` is a batch;
``ID.input``, a second name of its input file, ``ID.journal`` and ``ID.cancel`` are there until it is over. ``tmp/`` has
uploads. All of it is private to the user who runs the server.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ..errors import ApiError
from .journal import sync_folder, write_whole
from .objects import StoredBatch, StoredFile

log = logging.getLogger(__name__)

KEPT_S = 30 * 24 * 3600
"""How long files and batches that are over are kept, where nothing else is said."""
STALE_S = 3600.0
"""What a killed process left behind half written is removed when it is as old as this."""
MAX_FILES, MAX_BATCHES = 10_000, 10_000
"""Files, and batches, that a folder may hold."""

_ID = re.compile(r"(file|batch)[-_][0-9a-f]{8,64}")

T = TypeVar("T", StoredFile, StoredBatch)


class Store:
    """The folder, which is made when it is first used."""

    def __init__(self, root: Path, most_bytes: int):
        self.root, self.most_bytes = root, most_bytes
        self.files, self.batches, self.tmp = root / "files", root / "batches", root / "tmp"

    @property
    def begun(self) -> bool:
        """Whether it holds anything."""
        return self.batches.is_dir()

    def begin(self) -> None:
        """Make the folders. Raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.tmp, self.files, self.batches):
            folder.mkdir(mode=0o700, exist_ok=True)

    # -- room

    def used(self) -> int:
        """Bytes that it holds."""
        total = 0
        for folder in (self.files, self.batches, self.tmp):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        info = entry.stat()
                        total += info.st_size // max(1, info.st_nlink)
        return total

    def room(self) -> int:
        """Bytes that there is room for."""
        return self.most_bytes - self.used()

    def full(self, param: str = "file") -> ApiError:
        """What is told where there is none."""
        return ApiError(
            413, f"the files are over the limit of {self.most_bytes} bytes in all; delete some, or raise "
            "--files-max-bytes.", param,
        )  # fmt: skip

    # -- files

    def new_upload(self) -> tuple[Path, BinaryIO]:
        """A file to write an upload into."""
        path = self.tmp / uuid.uuid4().hex
        return path, os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def add_file(self, path: Path, info: StoredFile) -> None:
        """Take over a file, which is on the disk already. Raises ApiError, OSError."""
        if len(os.listdir(self.files)) >= 2 * MAX_FILES:
            raise ApiError(413, f"there are {MAX_FILES} files, the most that are kept; delete some.", "file")
        os.replace(path, self.files / info.id)
        sync_folder(self.files)
        self._save(self.files, info)

    def write_file(self, info: StoredFile, write: Callable[[BinaryIO], None]) -> None:
        """Make a file; of the same id as one that is there it replaces that. Raises OSError."""
        write_whole(self.files / info.id, write)
        info.bytes = (self.files / info.id).stat().st_size
        self._save(self.files, info)

    def file(self, id: str, owner: str) -> StoredFile:
        """A file of this owner. Raises ApiError 404."""
        found = self._load(self.files, id, StoredFile)
        if found is None or found.owner != owner or found.expires_at <= time.time():
            raise ApiError(404, f"No such File object: {id[:80]}", "id")
        return found

    def path_of(self, file: StoredFile) -> Path:
        """Where its bytes are."""
        return self.files / file.id

    def all_files(self) -> Iterator[StoredFile]:
        """Every file that has not expired."""
        now = time.time()
        return (each for each in self._all(self.files, StoredFile) if each.expires_at > now)

    def delete_file(self, id: str) -> None:
        """Remove a file; a batch that reads it goes on."""
        (self.files / f"{id}.json").unlink(missing_ok=True)
        (self.files / id).unlink(missing_ok=True)

    # -- batches

    def add_batch(self, batch: StoredBatch, source: StoredFile) -> None:
        """Begin a batch. Raises ApiError, OSError."""
        if sum(name.endswith(".json") for name in os.listdir(self.batches)) >= MAX_BATCHES:
            raise ApiError(
                429, f"there are {MAX_BATCHES} batches, the most that are kept; try again later.", retry_after=60
            )
        if self.room() <= 0:
            raise self.full("input_file_id")
        try:
            os.link(self.path_of(source), self.input_of(batch.id))
        except FileNotFoundError:
            raise ApiError(404, f"No such File object: {source.id}", "input_file_id") from None
        self.save_batch(batch)

    def save_batch(self, batch: StoredBatch) -> None:
        """Put a batch's state on the disk."""
        self._save(self.batches, batch)

    def batch(self, id: str, owner: str) -> StoredBatch:
        """A batch of this owner. Raises ApiError 404."""
        found = self._load(self.batches, id, StoredBatch)
        if found is None or found.owner != owner:
            raise ApiError(404, f"No such Batch object: {id[:80]}", "batch_id")
        return self._as_seen(found)

    def all_batches(self) -> Iterator[StoredBatch]:
        """Every batch."""
        return map(self._as_seen, self._all(self.batches, StoredBatch))

    def _as_seen(self, batch: StoredBatch) -> StoredBatch:
        """A batch is being cancelled from the moment that somebody asks for it, whoever runs it."""
        if batch.status in ("validating", "in_progress"):
            with suppress(FileNotFoundError):
                batch.cancelling_at = int(self.cancel_of(batch.id).stat().st_mtime)
                batch.status = "cancelling"
        return batch

    def input_of(self, id: str) -> Path:
        """A batch's requests."""
        return self.batches / f"{id}.input"

    def journal_of(self, id: str) -> Path:
        """A batch's answers so far."""
        return self.batches / f"{id}.journal"

    def cancel_of(self, id: str) -> Path:
        """What is there where a batch is to be cancelled."""
        return self.batches / f"{id}.cancel"

    def forget_work(self, id: str) -> None:
        """Remove what a batch needs until it is over."""
        for path in (self.journal_of(id), self.input_of(id), self.cancel_of(id)):
            path.unlink(missing_ok=True)

    # -- both

    def sweep(self) -> None:
        """Remove what has expired, and what killed processes left behind."""
        now = time.time()
        for file in list(self._all(self.files, StoredFile)):
            if file.expires_at <= now:
                self.delete_file(file.id)
        for batch in list(self._all(self.batches, StoredBatch)):
            if batch.over:
                self.forget_work(batch.id)
                if batch.expires_at + KEPT_S <= now:
                    (self.batches / f"{batch.id}.json").unlink(missing_ok=True)
        for folder in (self.tmp, self.files, self.batches):
            for path in list(folder.iterdir()):
                known = path.suffix == ".json" or (folder / f"{path.name.partition('.')[0]}.json").exists()
                with suppress(FileNotFoundError):
                    if not known and path.stat().st_ctime + STALE_S <= now:
                        path.unlink()

    def _save(self, folder: Path, info: StoredFile | StoredBatch) -> None:
        write_whole(folder / f"{info.id}.json", lambda file: file.writelines([msgspec.json.encode(info)]))

    def _load(self, folder: Path, id: str, kind: type[T]) -> T | None:
        if not _ID.fullmatch(id):
            return None
        try:
            return msgspec.json.decode((folder / f"{id}.json").read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            log.error("%s/%s.json is left aside: %s", folder, id, error)
            return None

    def _all(self, folder: Path, kind: type[T]) -> Iterator[T]:
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):
                stem, suffix = os.path.splitext(name)
                if suffix == ".json" and (found := self._load(folder, stem, kind)) is not None:
                    yield found
