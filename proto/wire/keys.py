"""Who may talk over tcp: CURVE keys, the file of keys let in, and the thread that answers ZeroMQ's question who is.

A deployment has its keys in one of two ways, both made by ``quire keygen``:

* **shared**: one file, given to every process. Whoever has it is in.
* **apart**: a folder with ``NAME.key`` for each process and ``allowed``, a line ``NAME PUBLIC`` for each that may
  connect. A process has its own ``NAME.key``; the scheduler and the detokenizers, where others connect, also have
  ``allowed``. It is read again when it has changed: taking a line out keeps that process from connecting again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import struct
import threading
import weakref
from collections.abc import Callable

import zmq
from zmq.utils import z85

from ..config import ConfigError
from ..readable import is_file

log = logging.getLogger(__name__)

ALLOWED = "allowed"
"""Name of the file of public keys, beside the key files."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Keys:
    """A process's CURVE key pair. All keys are in Z85, 40 characters.

    ``server`` is the public key of the scheduler (in a shared file its own), ``allowed`` the path of the file that
    says who else may connect here (None: only who has this very pair).
    """

    def __init__(self, public: bytes, secret: bytes, server: bytes | None = None, allowed: str | None = None):
        self.public, self.secret, self.server, self.allowed = public, secret, server or public, allowed

    @classmethod
    def generate(cls) -> Keys:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: str) -> Keys:
        """Raises ConfigError where the file is missing, readable by others, or no key file."""
        if not is_file(path, f"give it to this process's user: `chown {os.geteuid()} {path}`, and its folder too"):
            raise ConfigError(f"key file {path} is not a file; make one with `quire keygen {path}`.")
        try:
            data = json.loads(_read_private(path))
            public, secret = data["public"].encode("ascii"), data["secret"].encode("ascii")
            server = data.get("server", data["public"]).encode("ascii")
            if zmq.curve_public(secret) != public or not is_key(server):
                raise ValueError("its keys do not fit each other")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"key file {path} cannot be used ({error}); make one with `quire keygen`.") from error
        allowed = os.path.join(os.path.dirname(path), ALLOWED) if "server" in data else None
        return cls(public, secret, server, allowed)

    @property
    def shared(self) -> bool:
        """Every process of the deployment has this pair."""
        return self.allowed is None

    def save(self, path: str) -> None:
        """Write with mode 0600; FileExistsError rather than overwrite."""
        data = {"public": self.public.decode(), "secret": self.secret.decode()}
        if not self.shared:
            data["server"] = self.server.decode()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as out:
            json.dump(data, out)


def load_keys(path: str | None) -> Keys | None:
    """Keys of ``--keys``, or None."""
    return Keys.load(path) if path else None


def generate_apart(folder: str, names: list[str]) -> list[str]:
    """A key file in ``folder`` for each of ``names`` and for the scheduler, where there is none yet; those made.

    Raises ConfigError for names that cannot be file names, FileExistsError where one of ``names`` has its file.
    """
    if bad := [name for name in names if not _NAME.fullmatch(name) or name == ALLOWED]:
        raise ConfigError(f"{bad[0]!r} cannot name a key; use letters, digits, '.', '_' and '-'.")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if taken := [name for name in names if os.path.exists(_key_file(folder, name))]:
        raise FileExistsError(errno.EEXIST, "exists", _key_file(folder, taken[0]))
    allowed = os.path.join(folder, ALLOWED)
    if not os.path.exists(_key_file(folder, "scheduler")):
        names = ["scheduler", *(name for name in names if name != "scheduler")]
    made = []
    for name in dict.fromkeys(names):
        own = Keys.generate()
        server = own.public if name == "scheduler" else Keys.load(_key_file(folder, "scheduler")).public
        Keys(own.public, own.secret, server, allowed).save(_key_file(folder, name))
        made.append(_key_file(folder, name))
        with open(os.open(allowed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as out:
            out.write(f"{name} {own.public.decode()}\n")
    return made


def _key_file(folder: str, name: str) -> str:
    return os.path.join(folder, name + ".key")


def _read_private(path: str) -> str:
    """Raises ConfigError where others can read it, OSError and ValueError where it is no text."""
    with open(path, encoding="ascii") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise ConfigError(f"key file {path} can be read by others; run `chmod 600 {path}`.")
        return file.read()


def is_key(key: bytes) -> bool:
    """Whether ``key`` has the form of a public key."""
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (ValueError, KeyError, struct.error):
        return False


class Allowed:
    """The public keys in a file of lines ``NAME PUBLIC``; ``#`` starts a line that is none. Read again when changed."""

    def __init__(self, path: str):
        """Raises ConfigError where the file cannot be used."""
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._names: dict[bytes, str] = {}
        self._refresh()

    def __call__(self, key: bytes) -> bool:
        """Whether this key may connect now. A file that has become unusable lets nobody in."""
        try:
            self._refresh()
        except ConfigError as error:
            if self._names:
                log.error("%s Nobody new is let in.", error)
            self._names, self._stamp = {}, ()
        return key in self._names

    def _refresh(self) -> None:
        try:
            info = os.stat(self._path)
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino, info.st_mode)
            if stamp == self._stamp:
                return
            lines = [line.split() for line in _read_private(self._path).splitlines()]
            lines = [line for line in lines if line and not line[0].startswith("#")]
            if wrong := next((line for line in lines if len(line) != 2 or not is_key(line[1].encode())), None):
                raise ConfigError(f"{self._path}: {' '.join(wrong)[:80]!r} is not a name and a public key.")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of allowed keys {self._path} cannot be read ({error}).") from error
        self._names, self._stamp = {line[1].encode(): line[0] for line in lines}, stamp


# ---------------------------------------------------------------- the two ends of a connection


def connect_with(socket: zmq.Socket, keys: Keys, server: bytes = b"") -> None:
    """Prove ourselves, and talk only to who has ``server``'s secret key. ZMQError where that is no key."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.curve_serverkey = server or keys.server


def serve_with(socket: zmq.Socket, context: zmq.Context, keys: Keys) -> None:
    """Encrypt, and let in only whom ``keys`` allow. Raises ConfigError where the file of these cannot be used."""
    own = keys.public
    may_enter: Callable[[bytes], bool] = (lambda key: key == own) if keys.allowed is None else Allowed(keys.allowed)
    socket.setsockopt(zmq.ZAP_DOMAIN, _doorkeeper(context).guard(may_enter))
    # Without this, ZeroMQ lets in everyone who knows the server's public key where no doorkeeper answers.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.curve_server = True


class Doorkeeper:
    """Answers ZAP requests (rfc.zeromq.org/spec/27) of one context's sockets in a thread that sleeps between them."""

    def __init__(self, context: zmq.Context):
        # A shadow's sockets are not among those that context.destroy() closes from another thread: this one ends
        # itself when the context ends.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._guards: dict[bytes, Callable[[bytes], bool]] = {}
        self._refused = 0
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def guard(self, may_enter: Callable[[bytes], bool]) -> bytes:
        """A domain for a socket whose peers ``may_enter`` decides on, by their public key in Z85."""
        domain = b"quire-%d" % len(self._guards)
        self._guards[domain] = may_enter
        return domain

    def _run(self) -> None:
        try:
            while True:
                request = self._socket.recv_multipart()
                version, number, domain, address = (*request, b"", b"", b"", b"")[:4]
                welcome = self._welcome(domain, request)
                if not welcome:
                    self._refused += 1
                    if self._refused <= 20 or self._refused % 1000 == 0:
                        log.warning("refused a connection from %r (%d so far): its key is not allowed here",
                                    address.decode("ascii", "replace"), self._refused)  # fmt: skip
                status = (b"200", b"OK") if welcome else (b"400", b"key not allowed")
                self._socket.send_multipart((version, number, *status, b"", b""))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def _welcome(self, domain: bytes, request: list[bytes]) -> bool:
        may_enter = self._guards.get(domain)
        if may_enter is None or len(request) != 7 or request[5] != b"CURVE" or len(request[6]) != 32:
            return False
        try:
            return may_enter(z85.encode(request[6]))
        except Exception:
            log.exception("a connection was refused: its key could not be looked up")
            return False


_doorkeepers: weakref.WeakKeyDictionary[zmq.Context, Doorkeeper] = weakref.WeakKeyDictionary()


def _doorkeeper(context: zmq.Context) -> Doorkeeper:
    keeper = _doorkeepers.get(context)
    if keeper is None:
        keeper = _doorkeepers[context] = Doorkeeper(context)
    return keeper
