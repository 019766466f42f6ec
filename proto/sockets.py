"""ZeroMQ sockets with identities, monitors, and CURVE when they leave the machine.

``ipc://FOLDER`` is the default address of a scheduler: a 0700 folder of socket files. ``tcp://HOST:PORT`` takes PORT
for the front side and PORT + 1 for workers. A plain tcp bind off loopback is refused.

Sockets here never block and have no high-water marks: bounds are the scheduler's business (429), and a peer that is
gone is an error at the sender (ROUTER_MANDATORY) or found by its monitor, not a silent drop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
import zmq.auth.thread
from zmq.utils.monitor import parse_monitor_message

from .codec import BadFrame, Decoder, encode
from .config import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FRAME = 256 * 2**20
MAX_FOLDER = 85
"""A socket file's whole path may have 107 characters; the longest name in the folder has 21."""
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
DRAIN_LIMIT = 512
"""Messages handled in one turn of an event loop before others get theirs."""

CONNECTED, DISCONNECTED = "connected", "disconnected"

_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: CONNECTED,
    zmq.EVENT_DISCONNECTED: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: DISCONNECTED,
}


class Keys:
    """A CURVE key pair shared by a deployment, from a file written by ``quire keygen`` (mode 0600)."""

    def __init__(self, public: bytes, secret: bytes):
        self.public, self.secret = public, secret

    @classmethod
    def generate(cls) -> Keys:
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: str) -> Keys:
        """Raises ConfigError where the file is missing, readable by others, or no key file."""
        try:
            if not os.path.isfile(path):
                raise ConfigError(f"key file {path} is not a file; make one with `quire keygen {path}`.")
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigError(f"key file {path} can be read by others; run `chmod 600 {path}`.")
            data = json.loads(Path(path).read_text())
            return cls(data["public"].encode("ascii"), data["secret"].encode("ascii"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"key file {path} cannot be used ({error}); make one with `quire keygen`.") from error

    def save(self, path: str) -> None:
        """Write with mode 0600; FileExistsError rather than overwrite."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as out:
            json.dump({"public": self.public.decode(), "secret": self.secret.decode()}, out)


def private_dir(path: str) -> str:
    """Make (or accept) a folder that is ours and 0700. Raises ConfigError otherwise."""
    if len(path) > MAX_FOLDER:
        raise ConfigError(
            f"socket folder {path!r} is {len(path)} characters long, over {MAX_FOLDER}; choose a shorter one."
        )
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"socket folder {path} cannot be made: {error.strerror}; name another.") from error
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"{path} must be a folder of this user with mode 0700; name another with --scheduler ipc://…")
    return path


def front_endpoint(address: str) -> str:
    """Where detokenizers and frontends meet the scheduler at ``address``."""
    return _endpoint(address, "scheduler.front", 0)


def worker_endpoint(address: str) -> str:
    """Where workers meet the scheduler at ``address``."""
    return _endpoint(address, "scheduler.workers", 1)


def detokenizer_bind(address: str, incarnation: str) -> str:
    """Where a detokenizer listens by default, given the scheduler's address: a socket file beside its."""
    if address.startswith("tcp://"):
        return "tcp://127.0.0.1:*"
    return f"{address}/{incarnation[:20]}"


def _endpoint(address: str, name: str, offset: int) -> str:
    if address.startswith("ipc://"):
        return f"{address}/{name}"
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError(f"address {address!r} must look like ipc:///folder or tcp://host:port.")
    return f"tcp://{host}:{int(port) + offset}"


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _descriptor(socket: zmq.Socket) -> int:
    return int(socket.getsockopt(zmq.FD))


class Wire(Generic[T]):
    """A socket that sends messages and receives one closed union.

    ``bad_frames`` counts what did not decode; such bytes are logged with their peer and dropped.
    """

    def __init__(self, kind: int, union: Any, context: zmq.Context | None = None):
        self.socket = (context or zmq.Context.instance()).socket(kind)
        self._decode: Decoder[T] = Decoder(union)
        self._monitor: zmq.Socket | None = None
        self._pump: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.bad_frames = 0
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):  # fmt: skip
            self.socket.setsockopt(option, value)

    # -- asyncio

    def attach(self, on_message: Callable[..., None], on_event: Callable[[str], None] | None = None) -> None:
        """Call ``on_message`` for each message (a Router gives peer and message) in the running loop.

        ZeroMQ's descriptor signals edges, not levels, so the socket is drained after every send as well.
        """
        self._loop = asyncio.get_running_loop()
        loop = self._loop

        def pump() -> None:
            for _ in range(DRAIN_LIMIT):
                if self.socket.closed:
                    return
                item = self.recv()
                if item is None:
                    return
                on_message(*item) if isinstance(item, tuple) else on_message(item)
            loop.call_soon(pump)

        self._pump = pump
        loop.add_reader(_descriptor(self.socket), pump)
        if on_event is not None:
            monitor = self.monitor()

            def pump_events() -> None:
                while not monitor.closed and (event := self.next_event()) is not None:
                    on_event(event)

            loop.add_reader(_descriptor(monitor), pump_events)
            loop.call_soon(pump_events)
        loop.call_soon(pump)

    def _after_send(self) -> None:
        if self._pump is not None and self._loop is not None and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._pump)

    # -- monitor

    def monitor(self) -> zmq.Socket:
        """The PAIR socket that tells of connections made and lost; poll it, then call ``next_event``."""
        if self._monitor is None:
            events = 0
            for event in _EVENTS:
                events |= event
            self._monitor = self.socket.get_monitor_socket(events)
        return self._monitor

    def next_event(self) -> str | None:
        """CONNECTED or DISCONNECTED, or None when there is nothing to tell."""
        if self._monitor is None or self._monitor.closed:
            return None
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return _EVENTS.get(parse_monitor_message(frames)["event"])

    def recv(self) -> Any:
        raise NotImplementedError

    def _drop(self, peer: str, error: object) -> None:
        self.bad_frames += 1
        if self.bad_frames <= 20 or self.bad_frames % 1000 == 0:
            # A stranger's identity may be any bytes: repr keeps them from a terminal.
            log.warning("dropped a bad frame from %r (%d so far): %s", peer, self.bad_frames, error)

    def close(self) -> None:
        """Close at once; messages not yet sent are given up."""
        if self.socket.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(_descriptor(self.socket))
            if self._monitor is not None:
                self._loop.remove_reader(_descriptor(self._monitor))
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.close(0)


class Router(Wire[T]):
    """A ROUTER that knows its peers by their incarnation and raises nothing."""

    def __init__(self, union: Any, endpoint: str, keys: Keys | None = None, context: zmq.Context | None = None):
        """Bind ``endpoint``; ``self.endpoint`` is what was bound. Raises ConfigError where it cannot be."""
        super().__init__(zmq.ROUTER, union, context)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if endpoint.startswith("tcp://"):
            if keys is not None:
                _serve_curve(self.socket, keys)
            elif not _is_loopback(endpoint):
                raise ConfigError(f"{endpoint} is off loopback and needs --keys; make a file with `quire keygen`.")
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigError(f"cannot listen on {endpoint}: {error}; choose another address.") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def recv(self) -> tuple[str, T] | None:
        """The next (peer, message), or None when nothing waits. Bad frames are counted and passed over."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = frames[0].decode("ascii", "replace")
            if len(frames) != 2:
                self._drop(peer, f"{len(frames) - 1} frames where one was expected")
                continue
            try:
                return peer, self._decode(frames[1])
            except BadFrame as error:
                self._drop(peer, error)

    def send(self, peer: str, message: Any) -> bool:
        """False where the peer is gone."""
        return self.send_frame(peer, encode(message))

    def send_frame(self, peer: str, frame: bytes) -> bool:
        """Send bytes already encoded. False where the peer is gone."""
        try:
            self.socket.send_multipart((peer.encode("ascii", "replace"), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self._after_send()
        return True


class Dealer(Wire[T]):
    """A DEALER whose identity is its process's incarnation."""

    def __init__(
        self, union: Any, endpoint: str, identity: str, keys: Keys | None = None, context: zmq.Context | None = None
    ):
        """Connect to ``endpoint`` (the peer may come later)."""
        super().__init__(zmq.DEALER, union, context)
        self.endpoint = endpoint
        self.socket.setsockopt(zmq.IDENTITY, identity.encode("ascii"))
        if endpoint.startswith("tcp://") and keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
            self.socket.curve_serverkey = keys.public
        self.monitor()  # before connecting, so that no event is missed
        self.socket.connect(endpoint)

    def recv(self) -> T | None:
        """The next message, or None when nothing waits. Bad frames are counted and passed over."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) != 1:
                self._drop(self.endpoint, f"{len(frames)} frames where one was expected")
                continue
            try:
                return self._decode(frames[0])
            except BadFrame as error:
                self._drop(self.endpoint, error)

    def send(self, message: Any) -> bool:
        """False where it could not be queued (there are no high-water marks: only on a closed context)."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._after_send()
        return True


_authenticator: zmq.auth.thread.ThreadAuthenticator | None = None


def _serve_curve(socket: zmq.Socket, keys: Keys) -> None:
    """Encrypt, and let in only holders of the deployment's key."""
    global _authenticator
    if _authenticator is None:
        _authenticator = zmq.auth.thread.ThreadAuthenticator(zmq.Context.instance())
        _authenticator.start()
    allowed = keys.public

    class Allowed:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == allowed

    _authenticator.configure_curve_callback(domain="quire", credentials_provider=Allowed())
    socket.setsockopt(zmq.ZAP_DOMAIN, b"quire")
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.curve_server = True


def load_keys(path: str | None) -> Keys | None:
    """Keys of ``--keys``, or None."""
    return Keys.load(path) if path else None
