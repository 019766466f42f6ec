"""Who asks: the keys that a server knows, the one that a request came with, and what follows from it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ..proto.config import ConfigError
from .errors import ApiError
from .key_file import ApiKey, KeyFile, digest_of, is_expired, told_time
from .key_limits import Meter, Work, meter_of

OWNER: Any = web.RequestKey("owner", str) if hasattr(web, "RequestKey") else "quire.owner"
"""Where a request keeps the name of its key: what the scheduler shares and limits by."""
CALLER: Any = web.RequestKey("caller", object) if hasattr(web, "RequestKey") else "quire.caller"
"""Where it keeps its ``Caller``, where it has one."""


def keys_of(text: str | None) -> list[str]:
    """The keys of ``--api-key``: one, or several with commas or spaces between them. Raises ConfigError."""
    if not text:
        return []
    if keys := [key for key in re.split(r"[\s,]+", text) if key]:
        return keys
    raise ConfigError(f"api_key {text!r} holds no key; name one, or leave it out.")


def owner_of(key: str) -> str:
    """A key's name inside quire: a hash, so that no log and no other process ever holds the key."""
    return _owner_of(digest_of(key.encode()))


def _owner_of(digest: bytes) -> str:
    return hashlib.sha256(b"quire api key\0" + digest).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a request is. ``meter`` counts it where its key is limited."""

    key: ApiKey
    owner: str
    meter: Meter | None = None
    salted: bool = False  # cached blocks are shared only among requests of this key


class KeyRing:
    """Keys given as they are, and those of a file, which is looked at with each request.

    Only hashes are kept. They are found by a hash of the hash under a secret of this process: the time that a look-up
    takes depends on nothing that a client could choose or know, however many keys there are. ``besides`` are other
    keys that requests may come with, for which ``several`` is true as well.
    """

    def __init__(self, given: Iterable[str] = (), path: str | None = None, besides: int = 0, salted: bool = False):
        self._given = [ApiKey(f"key-{n}", digest_of(key.encode())) for n, key in enumerate(dict.fromkeys(given), 1)]
        self._file = KeyFile(path) if path else None
        self._secret, self._besides, self._salted = secrets.token_bytes(32), besides, salted
        self._nobody = ApiKey("nobody", secrets.token_bytes(32))
        self._seen: set[bytes] = set()
        self._meters: dict[bytes, Meter] = {}
        self._callers: dict[bytes, Caller] = {}
        self._fill()

    def __bool__(self) -> bool:
        """Whether a key is asked for. A file that holds none lets nobody in."""
        return bool(self._given) or self._file is not None

    @property
    def limits(self) -> bool:
        """Whether keys may have limits."""
        return self._file is not None

    def find(self, given: bytes) -> Caller | None:
        """Whose key this is; None where it is nobody's."""
        if self._file is not None and self._file.changed():
            self._fill()
        digest = digest_of(given)
        found = self._callers.get(self._place(digest))
        known = found.key if found is not None else self._nobody
        return found if hmac.compare_digest(digest, known.digest) else None

    def by_owner(self, owner: str) -> Caller | None:
        """The caller of this name; None where its key is none any more."""
        if self._file is not None and self._file.changed():
            self._fill()
        return next((caller for caller in self._callers.values() if caller.owner == owner), None)

    def find_in(self, request: web.BaseRequest) -> Caller | None:
        """Whose key a request came with; None where it is nobody's."""
        return self.find(credentials_of(request))

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

    def _fill(self) -> None:
        """Make the callers anew of what the keys are now. A key that is both given and in the file is the file's."""
        now, keys = time.monotonic(), {key.digest: key for key in self._given}
        keys |= {key.digest: key for key in (self._file.keys if self._file is not None else ())}
        self._seen |= keys.keys()
        salted = self._salted and len(self._seen) + self._besides > 1  # also where a key has taken another's place
        self._meters = {digest: meter for digest, meter in self._meters.items() if digest in keys}
        self._callers = {
            self._place(digest): Caller(
                key, _owner_of(digest), meter_of(self._meters, key, now) if key.limited else None, salted
            )
            for digest, key in keys.items()
        }


def credentials_of(request: web.BaseRequest) -> bytes:
    """The key that a request came with: ``Authorization: Bearer KEY``, or Anthropic's ``X-Api-Key``; empty for none."""
    given = request.headers.get("Authorization")
    if given is None:
        key = request.headers.get("X-Api-Key", "")
    else:
        scheme, _, key = given.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
    return key.encode("utf-8", "surrogateescape")


def authenticate(request: web.Request, *rings: KeyRing, password: bool = False) -> Caller:
    """Whose a request is, and note it there. ``password``: the key may come as that of HTTP's Basic too, which browsers
    ask people for. Raises ApiError 401 where no ring has its key, or its time is over."""
    given = credentials_of(request) or (_password_of(request) if password else b"")
    found = [caller for ring in rings if (caller := ring.find(given)) is not None]  # all are asked, whoever knows it
    if not given or not found:
        how = 'Basic realm="quire: the API key is the password", charset="UTF-8"' if password else "Bearer"
        raise _unauthorized("this server needs an API key: send the header 'Authorization: Bearer <key>'.", how)
    caller = found[0]
    if is_expired(caller.key):
        over = told_time(caller.key.expires or 0.0)
        raise _unauthorized(f"the API key {caller.key.name} has expired ({over}); ask for a new one.")
    request[OWNER], request[CALLER] = caller.owner, caller
    return caller


def _unauthorized(message: str, how: str = "Bearer") -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": how})


def _password_of(request: web.BaseRequest) -> bytes:
    """The password of HTTP's Basic; empty for none."""
    scheme, _, coded = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(coded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


# ---------------------------------------------------------------- what follows from it


def check_model(request: web.Request, model: str) -> None:
    """Raises ApiError 403 where the request's key is not good for a model of this name."""
    caller: Caller | None = request.get(CALLER)
    if caller is not None and caller.key.models and model not in caller.key.models:
        raise ApiError(
            403, f"the API key {caller.key.name} is not good for the model `{model:.200}`; it is for "
            f"{', '.join(caller.key.models)}.", "model",
        )  # fmt: skip


def may_see(request: web.Request, model: str) -> bool:
    """Whether the request's key is good for a model."""
    caller: Caller | None = request.get(CALLER)
    return caller is None or not caller.key.models or model in caller.key.models


def salt_of(request: web.Request, given: str | None) -> str:
    """The cache salt of a request: its own, and with several keys that of its key, so that nobody can tell by the time
    of an answer what the holder of another key has asked."""
    caller: Caller | None = request.get(CALLER)
    if caller is None or not caller.salted:
        return given or ""
    return f"{caller.owner}:{given}" if given else caller.owner


def watch(request: web.Request, work: Work) -> None:
    """Count the tokens of a request in the engine, where its key is limited."""
    caller: Caller | None = request.get(CALLER)
    if caller is not None and caller.meter is not None:
        caller.meter.watch(work)


def charge(request: web.Request, tokens: int) -> None:
    """Count tokens that a request has spent, where its key is limited."""
    caller: Caller | None = request.get(CALLER)
    if caller is not None and caller.meter is not None:
        caller.meter.charge(tokens, time.monotonic())
