"""The file of ``--api-key-file``: a line for each key, with what the key may do and no key in it.

::

    # NAME sha256:HASH [OPTION=VALUE ...]
    alice sha256:9f86d0... requests_per_minute=60 tokens_per_minute=100000 expires=2027-01-31
    batch sha256:60303a... concurrent_requests=4 models=qwen,qwen-lora

A key is 256 random bits (``quire keygen --api-key NAME``), so its hash is a plain SHA-256: nobody can try all keys, and
salt and slowness, which protect passwords that people choose, would only cost each request time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..proto.config_error import ConfigError

log = logging.getLogger(__name__)

PREFIX = "sk-quire-"
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
OPTIONS = (*LIMITS, "models", "expires")
MAX_BYTES = 16 * 2**20
"""Of a file of keys: 100,000 of them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key. Limits are None where there is none; ``expires`` is in Unix seconds; no ``models`` means
    all of them."""

    name: str
    digest: bytes  # SHA-256 of the key
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    models: tuple[str, ...] = ()
    expires: float | None = None

    @property
    def limited(self) -> bool:
        """Whether its requests are counted."""
        return any(getattr(self, name) is not None for name in LIMITS)


def new_key() -> str:
    """A key nobody can guess: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def line_of(key: ApiKey) -> str:
    """The line of a file that ``parse_line`` reads as ``key``."""
    words = [key.name, f"sha256:{key.digest.hex()}"]
    words += [f"{name}={getattr(key, name)}" for name in LIMITS if getattr(key, name) is not None]
    if key.models:
        words.append(f"models={','.join(key.models)}")
    if key.expires is not None:
        words.append(f"expires={told_time(key.expires)}")
    return " ".join(words)


def told_time(seconds: float) -> str:
    """Unix seconds as a file has them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_line(line: str, where: str) -> ApiKey:
    """A key by its line. Raises ConfigError, which never quotes what may be a key."""
    name, *rest = line.split()
    hashed = _HASH.fullmatch(rest[0]) if rest else None
    if not _NAME.fullmatch(name) or hashed is None:
        raise ConfigError(
            f"{where} is not `NAME sha256:HASH [OPTION=VALUE ...]`; make a line with `quire keygen --api-key NAME`."
        )
    options: dict[str, str] = {}
    for word in rest[1:]:
        option, equals, value = word.partition("=")
        if option not in OPTIONS or not equals or not value or option in options:
            raise ConfigError(f"{where} ({name}): {word!r:.60} is none of {', '.join(OPTIONS)} with =VALUE, each once.")
        options[option] = value
    limits = {
        option: limit_of(options[option], f"{where} ({name}): {option}") for option in LIMITS if option in options
    }
    return ApiKey(
        name, bytes.fromhex(hashed[1]), **limits,
        models=tuple(filter(None, options.get("models", "").split(","))),
        expires=time_of(options["expires"], f"{where} ({name}): expires") if "expires" in options else None,
    )  # fmt: skip


def limit_of(text: str, what: str) -> int:
    """A limit by its text. Raises ConfigError."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) <= 10**9 or len(text) > 12:
        raise ConfigError(f"{what} must be a whole number from 1 to 1000000000, got {text!r:.40}.")
    return int(text)


def time_of(text: str, what: str) -> float:
    """Unix seconds of an ISO date or time, in UTC where it names no zone. Raises ConfigError."""
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the second of a first or last day of all in another zone
        raise ConfigError(f"{what} must be a date or time such as 2027-01-31 or 2027-01-31T12:00:00Z, got {text!r:.40}."
                          ) from None  # fmt: skip
    return moment.timestamp()


def parse_keys(text: str, path: str) -> list[ApiKey]:
    """All keys of a file. Raises ConfigError where a line is no key, or two have one name or one hash."""
    keys: list[ApiKey] = []
    seen: dict[object, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        key = parse_line(line, f"{path}, line {number}")
        for what, words in ((key.name, f"the name {key.name}"), (key.digest, "the same key")):
            if what in seen:
                raise ConfigError(f"{path}, line {number}: line {seen[what]} has {words} too; take one of them out.")
            seen[what] = number
        keys.append(key)
    return keys


class KeyFile:
    """The keys of a file, as it is now. Raises ConfigError where it cannot be used at first; later the keys that were
    read last go on, and the log says why."""

    def __init__(self, path: str):
        self.path = path
        self._stamp = self._look()
        self.keys = self._read()

    def changed(self) -> bool:
        """Look at the file, and read it where it is another than before; True where ``keys`` is new."""
        stamp: tuple[int, ...] = ()
        try:
            if (stamp := self._look()) == self._stamp:
                return False
            self.keys = self._read()
        except ConfigError as error:
            if stamp or self._stamp:
                log.error("%s The keys that were read before stay.", error)
            self._stamp = stamp  # what is broken is read again once it is another
            return False
        self._stamp = stamp
        log.info("%s has changed: %d keys", self.path, len(self.keys))
        return True

    def _look(self) -> tuple[int, ...]:
        """What tells one state of the file from another."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise ConfigError(f"api_key_file {self.path} cannot be read: {error.strerror}.") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:  # to open a pipe would wait
            raise ConfigError(f"api_key_file {self.path} is no file of at most {MAX_BYTES} bytes.")
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev

    def _read(self) -> list[ApiKey]:
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                    raise ConfigError(
                        f"api_key_file {self.path} can be written by every user, who could let themselves in; run "
                        f"`chmod o-w {self.path}`."
                    )
                text = file.read(MAX_BYTES + 1).decode("utf-8")
        except OSError as error:
            raise ConfigError(f"api_key_file {self.path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"api_key_file {self.path} is no text: byte {error.start} is not UTF-8.") from None
        keys = parse_keys(text, self.path)
        if not keys:
            log.warning("api_key_file %s holds no key: nobody is let in by it", self.path)
        return keys


def is_expired(key: ApiKey, clock: Callable[[], float] = time.time) -> bool:
    """Whether a key's time is over."""
    return key.expires is not None and clock() >= key.expires
