"""``quire serve [MODEL]``: start every process, say when the server is ready, keep it running, end it whole."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..proto.checkpoint.gguf import gguf_file
from ..proto.checkpoint.model_config import DEMO_MODEL, ModelConfig
from ..proto.config import ConfigError, EngineArgs, add_flags, from_namespace
from ..proto.log_lines import counted
from ..proto.process import announce, collect_from_now, ignore_signals, setup_logging
from ..proto.vllm_flags import add_vllm_flags
from .errors import CommandError
from .flag_help import add_help
from .serving import Serving

if TYPE_CHECKING:
    from ..client.supervisor.launch import Supervisor

POLL_S = 0.05
MOST_USED = (
    "--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--dtype", "--quantization",
    "--gpu-memory-utilization", "--max-num-seqs", "--tensor-parallel-size", "--data-parallel-size", "--enable-lora",
    "--tool-call-parser", "--reasoning-parser", "--chat-template", "--speculative-config", "--log-level",
)  # fmt: skip
"""What ``quire serve --help`` explains; it lists all."""

log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """The command's flags: all of EngineArgs, and the model without a flag."""
    parser = subparsers.add_parser("serve", add_help=False)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_help(parser, MOST_USED)
    parser.add_argument(  # for the help: with_config_file has read it
        "--config", metavar="FILE.yaml", help="flags, one a line, such as `port: 8001`; the command line goes before it"
    )
    add_flags(parser)
    add_vllm_flags(parser)
    parser.set_defaults(run=serve, several=[])


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP: exit code 0. Raises CommandError where a process cannot be kept up."""
    began = time.monotonic()
    try:
        engine_args = engine_args_of(args)
        setup_logging("serve", engine_args.log_level, engine_args.log_format)
        tell_without_effect(args)
        _serve(engine_args, Ending(), began)
    except KeyboardInterrupt:
        pass
    finally:
        ignore_signals(signal.SIGHUP)
    return 0


def _serve(engine_args: EngineArgs, ending: Ending, began: float) -> None:
    gc.disable()
    from ..client.supervisor.launch import LaunchError, Supervisor

    collect_from_now()
    supervisor = Supervisor(engine_args, http=True)
    supervisor.hurry = ending.hurry
    ending.interrupts = False  # what a signal raises could come between a process's start and its being written down
    try:
        supervisor.start()
        log.info("%s", first_words(supervisor.args, stored_weights(supervisor.config)))
        if _is_ready(supervisor, ending.stop):
            serving_of(supervisor.args).write(supervisor.make_run_dir())
            take_orders(supervisor)
            announce(ready_line(supervisor.args, time.monotonic() - began))
        supervisor.supervise(ending.stop)
        log.info("ending: open requests may take %g s more; a second signal ends them", engine_args.shutdown_timeout)
    except LaunchError as error:
        ending.hurry.set()  # what is open cannot be finished, only told so
        raise CommandError(str(error), error.code if error.code > 0 else 1) from error
    finally:
        supervisor.close()


def take_orders(supervisor: Supervisor) -> None:
    """Let ``quire restart`` reach this server; where that cannot be, the server serves all the same."""
    from ..client.supervisor.control import Control

    try:
        Control(supervisor)
    except OSError as error:
        log.warning("quire restart cannot reach this server: %s", error)


def _is_ready(supervisor: Supervisor, stop: threading.Event) -> bool:
    """Wait until the server is ready. False where it is to end first. Raises LaunchError."""
    while not stop.is_set():
        with suppress(TimeoutError):
            supervisor.wait_ready(POLL_S)
            return True
    return False


def tell_without_effect(args: argparse.Namespace) -> None:
    """Log which flags of vLLM's that were given change nothing."""
    for flag, why in args.without_effect:
        log.info("%s changes nothing here: %s", flag, why)


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
    model = (args.served_model_name or ["?"])[0]
    if args.headless:
        return f"quire is ready: workers of {args.scheduler} (model {model}, {seconds:.1f} s)"
    if args.uds:
        return f"quire is ready: unix:{args.uds} (model {model}, {seconds:.1f} s); Ctrl-C stops it"
    host = "localhost" if args.host in ("0.0.0.0", "::", "") else args.host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if args.ssl_certfile else "http"
    url = f"{scheme}://{host}:{args.port}"
    return f"quire is ready: {url} (model {model}, {seconds:.1f} s); open it in a browser, Ctrl-C stops it"


def serving_of(args: EngineArgs) -> Serving:
    """What ``quire workers``, ``quire top`` and ``quire restart`` find the server by."""
    port = 0 if args.uds or args.headless else args.port
    return Serving(port, (args.served_model_name or ["?"])[0], os.getpid(), args.scheduler or "")


def stored_weights(config: ModelConfig) -> str:
    """How the checkpoint holds the weights: the type that config.json says, or a GGUF, each of whose tensors has a type
    of its own; "" where it is not known."""
    if gguf_file(config.path):
        return "a GGUF"
    hf = config.hf
    return str(hf.get("dtype") or hf.get("torch_dtype") or "").removeprefix("torch.")


def first_words(args: EngineArgs, stored: str) -> str:
    """What is being started, before anything is. ``stored``: how the checkpoint holds the weights."""
    workers = args.data_parallel_size * args.tensor_parallel_size * args.pipeline_parallel_size
    device = {"auto": "the GPU, or the CPU where there is none", "cpu": "the CPU", "cuda": "the GPU"}[args.device]
    name = (args.served_model_name or ["?"])[0]
    dtype = f"weights stored as {stored}" if args.dtype == "auto" and stored else f"dtype {args.dtype}"
    return f"starting {name} from {args.model}: {dtype}, {counted(workers, 'worker')} on {device}; Ctrl-C stops it"


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
