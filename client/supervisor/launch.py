"""Start quire's processes, restart those that die, and end them all.

Everything is a plain subprocess in a session of its own, so a Ctrl-C at the terminal reaches only the parent, which
ends the rest in order. Each child watches a pipe that breaks when the parent is gone, however it went; the folder of
socket files goes after the last of them (``rundir.py``).

Who is started, killed and started again is decided in ``watch.py``, which knows neither a process nor a clock; a
process is in ``child.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import shutil
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...proto.checkpoint.model_config import DEMO_MODEL, config_of, model_folder, tokenizer_folder
from ...proto.checkpoint.pooler_config import pooler_of
from ...proto.config import EngineArgs
from ...proto.flag_checks import check_split
from ...proto.listening import listen, listen_unix
from ...proto.process import (
    FEW_BESIDE,
    FIGURES,
    LISTEN_FD,
    LOCAL_WORKERS,
    PARENT_FD,
    STARTED_AGAIN,
    TERMINAL,
    shows_bars,
)
from ...proto.restarts import PROCESSES, TOLD, Restarts
from .child import Child, JsonLines, say, without_errors
from .commands import command_of, connect, cpu_count, devices_of, free_port, import_path
from .limits import too_low
from .place import Place
from .rundir import make_run_dir, remove_after
from .watch import LaunchError, Watch

if TYPE_CHECKING:
    from ..background import EngineThread

log = logging.getLogger(__name__)

POLL_S = 0.05
START_POLL_S = 0.02
"""How often a server that starts is looked after: each process waits for the one before, and its user for the last."""
WATCH_S = 0.2
"""How often a server that is ready is looked after. Each look costs 0.2 ms of a core, and most find nothing."""
GRACE_S = {"frontend": 5.0, "gpu_worker": 5.0, "detokenizer": 5.0, "scheduler": 5.0}
"""How long each has between SIGTERM and SIGKILL, in the order in which they are ended; a frontend after the
``shutdown_timeout`` in which it finishes what is open."""
HURRY_S = 2.0
"""How long each has after a second signal."""
SETTLE_S = 0.2
"""While the server starts, one failure may end several processes, and the one that says why is wanted."""


class Supervisor:
    """The processes of one quire. ``address`` is the scheduler's; ``args`` are as the children see them; ``config``
    is the model's.

    Raises ConfigError where the model, the tokenizer or the key file cannot be had; nothing runs before ``start``.
    """

    def __init__(self, args: EngineArgs, http: bool = False):
        if args.keys:
            from ...proto.wire.keys import Keys  # with ZeroMQ, which a server's supervisor needs for nothing else

            Keys.load(args.keys)
        served = args.served_model_name or [args.model or DEMO_MODEL]
        model = model_folder(args, weights=True)
        self.config = config_of(args, model)
        pooler, budget = pooler_of(self.config, args), args.max_num_batched_tokens
        if pooler is not None and pooler.whole:  # the longest prompt must fit one step
            budget = max(args.token_budget(), self.config.max_model_len)
        hf, split = self.config.hf, (args.tensor_parallel_size, args.pipeline_parallel_size)
        check_split(hf.get("num_attention_heads"), hf.get("num_hidden_layers"), *split)
        folder = tokenizer_folder(args, model)
        tokenizer = None if folder == model else os.path.abspath(folder)
        self.http, self._keys = http, args.keys
        self.run_dir: str | None = None
        self.args = dataclasses.replace(
            args, model=os.path.abspath(model), tokenizer=tokenizer, revision=None, tokenizer_revision=None,
            served_model_name=served, served_model_root=args.served_model_root or args.model or DEMO_MODEL,
            api_key=None, admin_api_key=None, metrics_key=None, hf_token=None, max_num_batched_tokens=budget,
        )  # fmt: skip
        # Keys travel in the environment: a command line can be read by every user.
        found = {
            "QUIRE_API_KEY": args.api_key, "QUIRE_ADMIN_API_KEY": args.admin_api_key,
            "QUIRE_METRICS_KEY": args.metrics_key,
        }  # fmt: skip
        self._api_keys = {name: key for name, key in found.items() if key is not None}
        self.watch: Watch[Child] = Watch(self._spawn, time.monotonic, cpu_count())
        self._places = self.watch.places
        self._selector = selectors.DefaultSelector()
        self._alive_fd = self._read_end = self._lock_fd = self._held_fd = -1
        self._listeners: list[socket.socket] = []  # one for each frontend
        self._remover: subprocess.Popen[bytes] | None = None
        self.hurry = threading.Event()  # set: end without patience
        self.lock = threading.RLock()
        self.closed = self._was_ready = False
        self._restarts = Restarts()
        self._asks: EngineThread | None = None
        self._pid = os.getpid()
        _supervisors.add(self)

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return self.args.scheduler or ""

    @property
    def pids(self) -> dict[int, str]:
        """Process ids and services of the children that run now."""
        return {place.process.pid: place.service for place in self._all if place.process and place.running}

    @property
    def _all(self) -> list[Place[Child]]:
        return [*self._places, *self.watch.apart]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Start as many processes at once as there are cores, and the others as soon as those serve: ``wait_ready``
        does that, and says when they are of use. Raises LaunchError, ConfigError."""
        for line in too_low():
            log.warning("%s", line)
        try:
            if self.http and not self.args.uds and not self.args.headless:
                self.args.port = free_port(self.args.host, self.args.port)
            if self.http and not self.args.headless:
                self._listeners = [self._bind() for _ in range(self.args.api_server_count)]
            if self.args.scheduler is None:
                self.args.scheduler = "ipc://" + self.make_run_dir()
            self._read_end, self._alive_fd = os.pipe()
            self._places += self._plan()
            self.check(starting=True)
            threading.Thread(target=self._pump, name="quire-stderr", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> socket.socket:
        """The socket of a frontend and its successors, on which nobody listens yet. Raises ConfigError."""
        return listen_unix(self.args.uds) if self.args.uds else listen(self.args.host, self.args.port)

    def make_run_dir(self) -> str:
        """The folder that lives as long as this supervisor."""
        if self.run_dir is None:
            self.run_dir, self._lock_fd = make_run_dir()
            self._remover, self._held_fd = remove_after(self.run_dir)
        return self.run_dir

    def _plan(self) -> list[Place[Child]]:
        args = self.args
        environment = dict(os.environ, **{PARENT_FD: str(self._read_end)})
        if shows_bars():  # the children write to a pipe
            size = shutil.get_terminal_size()
            environment.update({"COLUMNS": str(size.columns), "LINES": str(size.lines), TERMINAL: "1"})
        counts = {
            "gpu_worker": args.data_parallel_size * self._ranks,  # first: these take longest, to import torch
            "scheduler": 1, "frontend": args.api_server_count if self.http else 0,
            "detokenizer": args.detokenizer_count,
        }  # fmt: skip
        if args.headless:
            counts = {"gpu_worker": counts["gpu_worker"]}
        devices = devices_of(counts["gpu_worker"], args.device)
        places: list[Place[Child]] = []
        for service, count in counts.items():
            own_args = args if service == "detokenizer" else dataclasses.replace(args, bind=None, advertise=None)
            command = command_of(service, own_args)
            for number in range(count):
                own = dict(environment)
                if service == "gpu_worker" and count > 1:
                    if devices:
                        own["CUDA_VISIBLE_DEVICES"] = devices[number]
                    own[LOCAL_WORKERS] = str(count)
                if service == "gpu_worker" and not self.http:
                    own[FEW_BESIDE] = "1"
                if (service == "gpu_worker" and args.logits_processor) or (service == "frontend" and args.middleware):
                    own["PYTHONPATH"] = import_path()
                if service == "frontend":
                    own |= self._api_keys | {PROCESSES: f"{self.make_run_dir()}/{TOLD}"}
                    if self._listeners:
                        own[LISTEN_FD] = str(self._listeners[number].fileno())
                    if count > 1:
                        own[FIGURES] = f"{self.make_run_dir()}/figures"
                if service == "gpu_worker" and self._ranks > 1:
                    replica, rank = divmod(number, self._ranks)
                    part = [f"--rank={rank}", f"--master-addr=ipc://{self.make_run_dir()}/replica{replica}"]
                    places.append(Place(service, command + part, own, replica))
                else:
                    places.append(Place(service, command, own))
        return places

    @property
    def _ranks(self) -> int:
        """Workers of one copy of the model."""
        return self.args.tensor_parallel_size * self.args.pipeline_parallel_size

    def _spawn(self, place: Place[Child]) -> Child:
        if (before := place.process) is not None:
            _unregister(self._selector, before)
            before.close_ready()
        held = [self._held_fd] if self._held_fd >= 0 else []
        if (listens := place.environment.get(LISTEN_FD)) is not None:
            held.append(int(listens))
        again = {} if before is None else {STARTED_AGAIN: "1"}
        try:
            child = Child(place.command, {**place.environment, **again}, self._read_end, *held)
        except OSError as error:
            raise LaunchError(f"quire.{place.service} cannot be started: {error}.") from error
        if self.args.log_format == "json":
            child.form = JsonLines(place.service, child.pid)
        self._selector.register(child.stream, selectors.EVENT_READ, child)
        return child

    def forget(self, child: Child) -> None:
        """Give up what is held for one that has ended and that nobody follows in its place."""
        child.drained.wait(1.0)
        _unregister(self._selector, child)
        child.close()

    def wait_ready(self, timeout: float | None = None, is_ready: Callable[[], bool] | None = None) -> None:
        """Return once a request would run: ``is_ready`` says so, or by default /health or an Engine of its own.

        Raises LaunchError as soon as a child fails, with the line in which it says why, and TimeoutError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (self.ready if is_ready is None else is_ready)():
            self._check_start()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"not ready within {timeout:g} s; the log above says how far it came.")
            time.sleep(START_POLL_S)
        self._was_ready = True

    def ready(self) -> bool:
        """Whether a request would run."""
        if self.args.headless:
            return self.watch.begun()
        return self._healthy() if self.http and not self.args.ssl_certfile else self._engine_ready()

    def _engine_ready(self) -> bool:
        """The same for a server that has no port to ask, or whose port wants certificates: by an Engine of its own."""
        if self._asks is None and self.watch.begun():
            from ...proto.wire.keys import load_keys
            from ..background import EngineThread  # with ZeroMQ

            self._asks = EngineThread(self.address, load_keys(self._keys))
        if self._asks is None or not self._asks.engine.ready:
            return False
        self._ask_no_more()
        return True

    def _ask_no_more(self) -> None:
        """Close the Engine that ``_engine_ready`` has made."""
        asks, self._asks = self._asks, None
        if asks is not None:
            asks.close()

    def _check_start(self) -> None:
        """One round of ``wait_ready``. Raises LaunchError where a child has failed; being killed is no failure."""
        with self.lock:
            if any(self.watch.fallen(place) for place in self._places):
                time.sleep(SETTLE_S)
            self.check(starting=not self._was_ready)

    def _healthy(self) -> bool:
        """Whether /health says so. It is not asked before one of each service has begun to serve."""
        if not self.watch.begun():
            return False
        try:  # by hand: to import http.client takes longer than all the rest
            with connect(self.args) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in connection.makefile("rb").readline()
        except OSError:
            return False

    # ------------------------------------------------------------ watch

    def supervise(self, stop: threading.Event) -> None:
        """Restart what dies until ``stop`` is set. Raises LaunchError when a child cannot be kept running."""
        while not stop.wait(WATCH_S) and not self.closed:
            self.check()

    def check(self, starting: bool = False) -> None:
        """One round of ``supervise``. ``starting``: the server has not been ready yet."""
        with self.lock:
            if not self.closed:
                self.watch.look(starting=starting)
                if self.http and self.run_dir is not None:
                    watch = self.watch
                    self._restarts.tell(self.run_dir, watch.restarts, watch.failing(), watch.no_workers())

    def set_tokenizer(self, folder: str) -> None:
        """Replace the detokenizers by ones with the tokenizer in ``folder``; the old ones have ended on return.

        The workers keep theirs. Raises LaunchError.
        """
        with self.lock:
            self.args.tokenizer = folder
            self._end(["detokenizer"])
            for place in self._places:
                if place.service == "detokenizer" and not self.closed:
                    if place.process is not None:
                        place.process.drained.wait(1.0)
                    place.command, place.history = command_of("detokenizer", self.args), []
                    self.watch.start(place)

    def _pump(self) -> None:
        """Pass on what the children print, byte for byte, but for the lines in which they say why they end."""
        while True:
            try:
                ready = self._selector.select(timeout=1.0)
            except (OSError, ValueError, RuntimeError):
                return
            for key, _ in ready:
                child = key.data
                try:
                    data = os.read(key.fd, 65536)
                except BlockingIOError:
                    continue
                if data:
                    say(child.form(without_errors(child, data)))
                else:
                    with contextlib.suppress(KeyError):  # another process has been started in its place meanwhile
                        self._selector.unregister(key.fileobj)
                    say(child.form(child.carry, last=True))
                    child.carry = b""
                    child.drained.set()
            if self.closed and not self._selector.get_map():
                return

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End every process in order, remove the run folder. Idempotent; does nothing in a forked copy."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._ask_no_more()
            path = self._listeners[0].getsockname() if self.args.uds and self._listeners else None
            for listener in self._listeners:  # so that the port closes with the frontends
                listener.close()
            self._end(["frontend"], others_live=True)
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            self._end(["gpu_worker", "detokenizer"])
            self._end(["scheduler"])
            _close_fd(self._alive_fd)
            _close_fd(self._read_end)
            for place in self._all:
                if place.process is not None:
                    place.process.close()
            if self._remover is not None:
                self._remover.kill()
                self._remover.wait()
            if self.run_dir is not None:
                shutil.rmtree(self.run_dir, ignore_errors=True)
            _close_fd(self._lock_fd)
            _close_fd(self._held_fd)

    def _end(self, services: list[str], others_live: bool = False) -> None:
        """SIGTERM in the order given, then SIGKILL for what has not gone within its grace.

        ``others_live``: what dies of the rest meanwhile is started again, for those that end still need it.
        """
        ending = [place for service in services for place in self._all if place.service == service]
        others = [place for place in self._places if others_live and place not in ending]
        self._terminate(ending)
        began, hurried, killed = time.monotonic(), False, set[int]()
        while left := [place for place in ending if not self.watch.dead(place)]:
            try:
                if self.hurry.is_set():
                    if not hurried:
                        began, hurried, others = time.monotonic(), True, []
                    self._terminate(left)  # again and again: two signals close together may arrive as one
                for place in left:
                    grace = HURRY_S if hurried else self._grace(place.service)
                    if place.process is None or place.process.pid in killed or time.monotonic() - began <= grace:
                        continue
                    log.warning("quire.%s did not end within %g s; killing it.", place.service, grace)
                    killed.add(place.process.pid)
                    self.watch.kill(place)
                self.watch.look(others)
                time.sleep(0.05 if hurried else 0.01)
            except LaunchError as error:
                log.error("%s", error)
                others = []
            except KeyboardInterrupt:  # a second Ctrl-C: no more patience
                self.hurry.set()

    def _terminate(self, places: list[Place[Child]]) -> None:
        for place in places:
            if not self.watch.dead(place) and place.process is not None:
                place.process.terminate()

    def _grace(self, service: str) -> float:
        return GRACE_S[service] + (self.args.shutdown_timeout if service == "frontend" else 0.0)


# ---------------------------------------------------------------- helpers


def _unregister(selector: selectors.BaseSelector, child: Child) -> None:
    with contextlib.suppress(KeyError, ValueError):  # it is there if not read to its end: someone else holds it open
        selector.unregister(child.stream)


def _close_fd(fd: int) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)


_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked copy of the parent must not keep the children alive when the parent dies."""
    for supervisor in _supervisors:
        _close_fd(supervisor._alive_fd)
        _close_fd(supervisor._held_fd)
        supervisor._alive_fd = supervisor._held_fd = -1
        for listener in supervisor._listeners:
            listener.close()


os.register_at_fork(after_in_child=_after_fork)
