"""``python -m quire.gpu_worker``: one device's worker. Exit codes: 0 asked to end, 78 cannot work as configured."""

from __future__ import annotations

import logging
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.model_config import config_of, model_folder
from ..proto.process import EXIT_CONFIG, die, setup_logging, watch_parent
from ..proto.sockets import load_keys, needs_curve, worker_endpoint
from .device import choose_device, choose_threads, describe, parameter_estimate, set_environment, usable_cores
from .link import Dismissed, Link

if TYPE_CHECKING:
    from .worker import Worker

log = logging.getLogger(__name__)


class Ending:
    """SIGTERM and SIGINT: while the worker loads they end it at once; once it serves, the first asks it to drain and
    the second ends it at once."""

    def __init__(self) -> None:
        self.link: Link | None = None  # set when it serves
        self.asked = False
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and self.link is not None:
            self.link.leave()
            return
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # one more must not cut the farewell short
        raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    """Load, then serve until told to end."""
    args = parse_service_args("gpu_worker", argv)
    setup_logging("gpu_worker", args.log_level)
    watch_parent()
    ending, link = Ending(), None
    farewell: str | None = None
    try:
        link, worker = _load(args)
        ending.link = link
        worker.serve(link)
        farewell = "drained"
    except ConfigError as error:
        farewell = str(error)
        die("gpu_worker", error)
    except Dismissed as dismissal:
        farewell = "dismissed"
        # One that was never let in cannot work here; one that was expelled may start again from nothing.
        die("gpu_worker", dismissal, 1 if dismissal.served else EXIT_CONFIG)
    except SystemExit:
        if ending.asked:
            farewell = "asked to end"
            raise
        die("gpu_worker", "a step called sys.exit", 1)  # and the scheduler learns of it as of a crash
    finally:
        if link is not None:
            link.close(farewell)
    return 0


def _load(args: EngineArgs) -> tuple[Link, Worker]:
    began = time.monotonic()
    endpoint, keys = worker_endpoint(args.scheduler or ""), load_keys(args.keys)
    needs_curve(endpoint, keys)  # refused now, not when the model has been loaded
    path = model_folder(args, weights=True)
    config = config_of(args, path)
    threads = choose_threads(args.cpu_threads, usable_cores(), parameter_estimate(config))
    set_environment(threads)

    import torch  # only now: OpenMP reads its environment when torch is imported

    from .grammar import Grammars
    from .models.loader import load_model, resolve_dtype
    from .processors import load_functions
    from .worker import Worker

    device = choose_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    dtype = resolve_dtype(args.dtype, config, device)
    functions = load_functions(args.logits_processor or [])
    grammars = Grammars(config, args)
    imported = time.monotonic()
    log.info("%s on %s in %s", path, describe(device, threads), str(dtype).removeprefix("torch."))
    link = Link(endpoint, describe(device, threads), keys)
    link.start()  # the scheduler learns of this worker, and assigns it, while it loads
    try:
        model = load_model(config, dtype, device, args.load_format, args.seed, progress=True)
        link.loaded = True
        log.info("started: %.2f s to import, %.2f s to load", imported - began, time.monotonic() - imported)
        return link, Worker(args, config, model, dtype, device, grammars, functions)
    except torch.OutOfMemoryError as error:
        link.close("out of memory")
        raise ConfigError(f"the weights of {path} do not fit the device: {error}") from error
    except BaseException as error:  # a signal's SystemExit too
        link.close(f"not loaded: {error}")
        raise


if __name__ == "__main__":
    sys.exit(main())
