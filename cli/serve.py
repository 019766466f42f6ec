"""``quire serve [MODEL]``: start every process, say when the server is ready, keep it running, end it whole."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..proto.checkpoint.model_config import DEMO_MODEL
from ..proto.config import ConfigError, EngineArgs, add_flags, from_namespace
from ..proto.process import collect_from_now, ignore_signals, setup_logging
from .errors import CommandError

if TYPE_CHECKING:
    from ..client.supervisor.launch import Supervisor

POLL_S = 0.05

log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """The command's flags: all of EngineArgs, and the model without a flag."""
    parser = subparsers.add_parser("serve")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser)
    parser.set_defaults(run=serve, several=[])


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP: exit code 0. Raises CommandError where a process cannot be kept up."""
    began = time.monotonic()
    try:
        _serve(engine_args_of(args), Ending(), began)
    except KeyboardInterrupt:
        pass
    finally:
        ignore_signals(signal.SIGHUP)
    return 0


def _serve(engine_args: EngineArgs, ending: Ending, began: float) -> None:
    gc.disable()
    from ..client.supervisor.launch import LaunchError, Supervisor

    collect_from_now()
    setup_logging("serve", engine_args.log_level)
    supervisor = Supervisor(engine_args, http=True)
    supervisor.hurry = ending.hurry
    ending.interrupts = False  # what a signal raises could come between a process's start and its being written down
    try:
        supervisor.start()
        if _is_ready(supervisor, ending.stop):
            say(ready_line(supervisor.args, time.monotonic() - began))
        supervisor.supervise(ending.stop)
        log.info("ending: open requests may take %g s more; a second signal ends them", engine_args.shutdown_timeout)
    except LaunchError as error:
        ending.hurry.set()  # what is open cannot be finished, only told so
        raise CommandError(str(error), error.code if error.code > 0 else 1) from error
    finally:
        supervisor.close()


def _is_ready(supervisor: Supervisor, stop: threading.Event) -> bool:
    """Wait until the server is ready. False where it is to end first. Raises LaunchError."""
    while not stop.is_set():
        with suppress(TimeoutError):
            supervisor.wait_ready(POLL_S)
            return True
    return False


def engine_args_of(args: argparse.Namespace) -> EngineArgs:
    """EngineArgs of the command line. Raises ConfigError."""
    if args.model_tag is not None:
        if args.model is not None and args.model != args.model_tag:
            raise ConfigError(f"two models are named, {args.model_tag!r} and {args.model!r}; name one.")
        args.model = args.model_tag
    for flag, values in args.several if args.model is None else ():
        _check_is_no_model(flag, values)
    return from_namespace(args)


def _check_is_no_model(flag: str, values: list[str]) -> None:
    """Raises ConfigError where the last of a flag's values may have been meant as the model."""
    if "logits" in flag and ":" in values[-1]:  # a function's name; no hub id looks so
        return
    if "lora" in flag and ("=" in values[-1] or values[-1].startswith("{")):  # nor so
        return
    given = f"{len(values)} values" if "key" in flag else " ".join(map(repr, values))
    raise ConfigError(
        f"no model is named, and {flag} takes all of what follows it: {given}. Where the last is the model, write "
        f"`quire serve MODEL {flag} ...`; for the demo model write `quire serve {DEMO_MODEL} {flag} ...`."
    )


def ready_line(args: EngineArgs, seconds: float) -> str:
    """The one line on standard output that says where the server is."""
    host = "localhost" if args.host in ("0.0.0.0", "::", "") else args.host
    host = f"[{host}]" if ":" in host else host
    model = (args.served_model_name or ["?"])[0]
    return f"quire is ready: http://{host}:{args.port} (model {model}, {seconds:.1f} s)"


def say(line: str) -> None:
    """Print ``line``. Where its reader has left, the server stays for others."""
    with suppress(OSError):
        print(line, flush=True)


class Flag(threading.Event):
    """An Event that a signal's handler may set: it takes no lock, which what the signal interrupts may hold."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """For a short while: who sets it wakes nobody."""
        if not self._is_set:
            time.sleep(POLL_S if timeout is None else timeout)
        return self._is_set


class Ending:
    """Signals that end the server: the first sets ``stop``, and before there is anything to end it also interrupts;
    the second sets ``hurry``."""

    def __init__(self) -> None:
        self.stop, self.hurry = Flag(), Flag()
        self.interrupts = True
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup's
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: object) -> None:
        first = not self.stop.is_set()
        (self.stop if first else self.hurry).set()
        if first and self.interrupts:
            raise KeyboardInterrupt
