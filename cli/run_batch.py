"""``quire run-batch -i IN -o OUT``: answer a file of requests with processes of its own, and end.

Whatever is killed meanwhile, itself too: the same command goes on where it was. Answers are kept in OUT.journal as they
come, and OUT is there when it is whole, in the order of the input.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..proto.checkpoint.model_config import DEMO_MODEL
from ..proto.config import ConfigError, EngineArgs, add_flags
from ..proto.process import collect_from_now, setup_logging
from ..proto.vllm_flags import add_vllm_flags
from .errors import CommandError
from .serve import Ending, engine_args_of, tell_without_effect

if TYPE_CHECKING:
    from ..client.engine import Engine
    from ..frontend.batches.journal import Journal
    from ..frontend.batches.lines import Lines
    from ..frontend.front import Settings

STOP_S = 10.0
"""What may pass until answers that are there are on the disk, where the run is to end before its time."""
INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """The command's flags: its files, and all of EngineArgs."""
    parser = subparsers.add_parser("run-batch")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE",
        help="requests: JSON Lines with custom_id, method, url and body; a file, or an http:// or https:// URL",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="answers, in the order of the requests; a file, or a URL to which they are put",
    )  # fmt: skip
    parser.add_argument(
        "--output-tmp-dir", metavar="FOLDER",
        help="where answers are kept until all are there (default: beside the output; of a URL, the working folder)",
    )  # fmt: skip
    parser.add_argument(
        "--base-url", metavar="URL",
        help="have a server that runs already answer, such as http://localhost:8000, and start none (--api-key is its)",
    )  # fmt: skip
    parser.add_argument("--enable-metrics", action="store_true", help="serve /metrics at --host and --port meanwhile")
    add_flags(parser)
    add_vllm_flags(parser)
    parser.set_defaults(run=run_batch, several=[])


@dataclass
class Places:
    """The files of a run."""

    source: Path
    output: Path
    journal: Path
    fetched: bool = False  # whether ``source`` is a copy of what a URL gave

    def forget(self) -> None:
        """Remove what was needed until the output is there."""
        self.journal.unlink(missing_ok=True)
        if self.fetched:
            self.source.unlink(missing_ok=True)


def run_batch(args: argparse.Namespace) -> int:
    """Answer all requests; 130 where a signal ended it before. Raises CommandError, ConfigError."""
    from ..frontend.batches.journal import Journal
    from ..frontend.batches.lines import Lines

    engine_args = engine_args_of(args)
    setup_logging("run-batch", engine_args.log_level, engine_args.log_format)
    tell_without_effect(args)
    places = _places(args)
    try:
        lines = Lines(places.source, engine_args.max_request_bytes)
        head = {"input": lines.digest, "model": args.base_url or engine_args.model or DEMO_MODEL}
        journal = Journal(places.journal, head)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from error
    try:
        _warn(lines)
        if len(journal):
            _say(f"{len(journal)} of {len(lines)} requests have been answered before; going on with the others.")
        if len(journal) < len(lines) and not _answered(args, engine_args, lines, journal):
            _say(f"stopped: {len(journal)} of {len(lines)} answers are in {journal.path}; the same command goes on.")
            return INTERRUPTED
        _write(places, journal, args.output_file)
        answered, failed = journal.counts[True], journal.counts[False]
        _say(f"{len(lines)} requests: {answered} answered, {failed} with errors; {args.output_file}")
    except (CommandError, OSError) as error:
        kept = f" {len(journal)} of {len(lines)} answers are in {journal.path}; the same command goes on."
        raise CommandError(f"{error}{kept}", getattr(error, "code", 1)) from error
    finally:
        lines.close()
        journal.close()
    places.forget()
    return 0


# ---------------------------------------------------------------- the files


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _places(args: argparse.Namespace) -> Places:
    """Where everything is; what a URL gives is fetched. Raises ConfigError."""
    import hashlib

    output = Path(os.path.realpath(args.output_file))  # where a link leads to: the output takes the place of a file
    if _is_url(args.output_file):
        output = Path(f"quire-batch-{hashlib.sha256(args.output_file.encode()).hexdigest()[:16]}.jsonl")
    elif (output.exists() and not output.is_file()) or not output.parent.is_dir():  # /dev/null would become a file
        raise ConfigError(f"output_file {args.output_file!r} must be a file in a folder that exists.")
    base = output if args.output_tmp_dir is None else Path(args.output_tmp_dir) / output.name
    if not base.parent.is_dir():
        raise ConfigError(f"output_tmp_dir {args.output_tmp_dir!r} must be a folder that exists.")
    found = Places(Path(args.input_file), output, base.with_name(base.name + ".journal"))
    if _is_url(args.output_file):
        found.output = base
    if _is_url(args.input_file):
        found.source, found.fetched = base.with_name(base.name + ".input"), True
        if not (found.journal.exists() and found.source.exists()):
            _fetch(args.input_file, found.source)
    elif os.path.realpath(args.input_file) == str(found.output):
        raise ConfigError(f"output_file {args.output_file!r} is the input file; name another.")
    return found


def _fetch(url: str, path: Path) -> None:
    import shutil
    import urllib.request

    from ..frontend.batches.journal import write_whole

    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            write_whole(path, lambda file: shutil.copyfileobj(answer, file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"input_file {url!r:.200} cannot be fetched: {error}.") from error


def _write(places: Places, journal: Journal, asked: str) -> None:
    """Put all answers into the output. Raises OSError, CommandError."""
    from ..frontend.batches.journal import write_whole

    def write(file: BinaryIO) -> None:
        file.writelines(data + b"\n" for _, _, data in journal.in_order())

    write_whole(places.output, write)
    if not _is_url(asked):
        return
    import urllib.request

    size = places.output.stat().st_size
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    with open(places.output, "rb") as file:
        request = urllib.request.Request(asked, data=file, headers=headers, method="PUT")
        try:
            urllib.request.urlopen(request, timeout=600).close()
        except (OSError, ValueError) as error:
            raise CommandError(f"the output cannot be put to {asked!r:.200}: {error}.") from error
    places.output.unlink()


def _warn(lines: Lines) -> None:
    for number, error in lines.check():
        if error.code == "duplicate_custom_id":
            _say(f"warning: line {number}: {error.message} Both are answered.")
            break


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"quire run-batch: {line}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the processes


def _answered(args: argparse.Namespace, engine_args: EngineArgs, lines: Lines, journal: Journal) -> bool:
    """Have what is left answered. False where a signal ended it before."""
    window = min(engine_args.max_batch_concurrency or _window(engine_args), len(lines))
    if args.base_url is None:
        return _answer(engine_args, lines, journal, window, args.enable_metrics)
    from .batch_remote import answer_remotely, key_of

    with _bar(lines, journal) as told:
        return answer_remotely(args.base_url, key_of(engine_args.api_key), lines, journal, window, told)


def _answer(args: EngineArgs, lines: Lines, journal: Journal, window: int, metrics: bool) -> bool:
    """Start a server without a port, and have it answer what is left. False where a signal ended it before.

    Raises CommandError, ConfigError.
    """
    from ..client.background import EngineThread
    from ..client.supervisor.launch import LaunchError, Supervisor
    from ..frontend.main import settings_of
    from ..proto.wire.keys import load_keys

    ending = Ending()
    with ExitStack() as after:
        supervisor = Supervisor(args)
        after.callback(supervisor.close)
        supervisor.hurry = ending.hurry
        ending.interrupts = False  # what it raises could come between a process's start and its being written down
        settings = settings_of(supervisor.args)
        collect_from_now()
        try:
            supervisor.start()
            thread = EngineThread(supervisor.address, load_keys(args.keys))
            after.callback(thread.close)
            supervisor.wait_ready(is_ready=lambda: thread.engine.ready or ending.stop.is_set())
            if ending.stop.is_set():
                return False
            told = after.enter_context(_bar(lines, journal))
            at = (args.host, args.port) if metrics else None
            job = Job(thread, _answer_all(thread.engine, settings, lines, journal, window, told, at), ending.stop.set)
            after.callback(job.end)
            supervisor.supervise(ending.stop)
            return job.end()
        except LaunchError as error:
            raise CommandError(str(error), error.code if error.code > 0 else 1) from error


def _window(args: EngineArgs) -> int:
    """Requests that are under way at most: a step's worth, and as many that wait."""
    return min(2 * args.max_num_seqs * args.data_parallel_size, args.max_num_queued_reqs)


async def _answer_all(
    engine: Engine, settings: Settings, lines: Lines, journal: Journal, window: int, told: Callable[[], None],
    metrics_at: tuple[str, int] | None,
) -> None:  # fmt: skip
    from ..frontend.app import make_app
    from ..frontend.batches.local import answer
    from ..frontend.batches.run import Run

    engine.adapters.merge(settings.modules)
    app = make_app(engine, settings)
    app.freeze()
    run = Run(lines, journal, lambda line: answer(app, line.url, line.body), window, True, told)
    if metrics_at is None:
        return await run.go()
    from aiohttp import web

    from ..frontend.app import metrics
    from ..frontend.front import FRONT

    small = web.Application()
    small[FRONT] = app[FRONT]
    small.router.add_get("/metrics", metrics)
    runner = web.AppRunner(small, handle_signals=False, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, *metrics_at).start()
        await run.go()
    finally:
        await runner.cleanup()


class Job:
    """A coroutine in the Engine's thread; ``on_end`` is called when it has ended by itself."""

    def __init__(self, thread: Any, work: Any, on_end: Callable[[], None]):
        self._over = threading.Event()
        self._future: concurrent.futures.Future[None] = thread.run(self._run(work))
        self._future.add_done_callback(lambda _: on_end())

    async def _run(self, work: Any) -> None:
        try:
            await work
        finally:
            self._over.set()

    def end(self) -> bool:
        """Whether it had come to its end; else it is cancelled, and has kept its answers on return. Raises OSError."""
        if self._future.cancel() or self._future.cancelled():
            self._over.wait(STOP_S)
            return False
        self._future.result()
        return True


class _bar:
    """A progress bar, on a terminal; what it gives is called when there are more answers."""

    def __init__(self, lines: Lines, journal: Journal):
        self._bar: Any = None
        self._journal = journal
        if sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            total, done = len(lines), len(journal)
            self._bar = tqdm(total=total, initial=done, desc="Running batch", unit="req", dynamic_ncols=True)

    def __enter__(self) -> Callable[[], None]:
        return self._tell

    def _tell(self) -> None:
        if self._bar is not None:
            self._bar.update(len(self._journal) - self._bar.n)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
