"""A frontend from its flags to its end: listen, answer, let what is open end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path

from aiohttp import web

from ..client.adapter_folders import AdapterFolders, parse_modules
from ..client.engine import Engine
from ..client.offline.defaults import default_sampling
from ..client.results import RequestError
from ..proto.checkpoint.chat_templates import templates_of, tokenizer_config
from ..proto.checkpoint.model_config import DEMO_MODEL, config_of, model_folder, tokenizer_folder
from ..proto.checkpoint.pooler_config import pooler_of
from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.event_loop import new_loop
from ..proto.messages import AdapterEntry
from ..proto.process import (
    STARTED_AGAIN,
    collect_from_now,
    die,
    ending_signals,
    setup_logging,
    tell_ready,
    watch_parent,
)
from ..proto.wire.sockets import load_keys
from .app import make_app
from .auth import keys_of
from .front import FRONT, Front, Settings
from .port import ClaimedSite, claim, listen, url_of
from .protocol import Runner
from .tools import REASONING_PARSERS, TOOL_PARSERS, detect

log = logging.getLogger(__name__)

API_KEY_ENV, ADMIN_KEY_ENV = "QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"
BACKLOG = 2048
KEEPALIVE_S = 75.0
"""How long a connection may be idle, or take to send its headers."""
NOTICE_S = 0.5
"""How long /health/ready answers 503 before the port closes, for who asks in time."""
ABORT_S = 2.0
"""How long those that are ended then have to be told."""


def main() -> None:
    """Run a frontend. Exit code 0 after SIGTERM or SIGINT, 78 where it could never work as configured."""
    args = parse_service_args("frontend")
    setup_logging("frontend", args.log_level)
    watch_parent()
    try:
        settings = settings_of(args)
        sock = listen(args.host, args.port)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(args, settings, sock, claim(sock, str(args.scheduler))))
    except ConfigError as error:
        die("frontend", error)
    except KeyboardInterrupt:  # before serve() took over the signals
        pass


def settings_of(args: EngineArgs) -> Settings:
    """Settings by the flags, the environment and the model's folder. Raises ConfigError."""
    folder = model_folder(args)
    model = config_of(args, folder)
    pooler = pooler_of(model, args)  # may lower max_model_len
    defaults = default_sampling(model.generation, args.generation_config, args.override_generation_config)
    if "max_tokens" in defaults:  # not a request's own mistake where it is too much
        defaults["max_tokens"] = min(defaults["max_tokens"], model.max_model_len)
    said = args.generation_config not in ("auto", "quire") or "max_tokens" in default_sampling(
        {}, "quire", args.override_generation_config
    )
    if defaults:
        log.info("requests start from %s", defaults)
    api_key = args.api_key or os.environ.get(API_KEY_ENV) or None
    admin_key = args.admin_api_key or os.environ.get(ADMIN_KEY_ENV) or None
    for text in (api_key, admin_key):
        keys_of(text)
    names = args.served_model_name or [args.model or DEMO_MODEL]
    folders = AdapterFolders(args.max_lora_rank, args.download_dir) if args.enable_lora else None
    return Settings(
        names=names,
        adapters=folders,
        modules=_modules(folders, args.lora_modules or [], names),
        lora_root=args.lora_root,
        api_key=api_key,
        admin_api_key=admin_key,
        max_request_bytes=args.max_request_bytes,
        max_n=args.max_n,
        max_queued=args.max_num_queued_reqs,
        defaults=defaults,
        ceiling=defaults.get("max_tokens") if said else None,  # by flag it binds all; the model's own is a suggestion
        pooler=pooler,
        tool_parser=None if pooler is not None else _tool_parser(args, folder),
        reasoning_parser=_known("reasoning_parser", args.reasoning_parser, REASONING_PARSERS),
    )


def _tool_parser(args: EngineArgs, folder: str) -> str | None:
    """``--tool-call-parser``, or the one whose form the chat template shows. Raises ConfigError."""
    named = _known("tool_call_parser", args.tool_call_parser, TOOL_PARSERS)
    if named is not None or not args.enable_auto_tool_choice or args.skip_tokenizer_init:
        return named if args.enable_auto_tool_choice else None
    home = Path(tokenizer_folder(args, folder))
    templates = templates_of(home, tokenizer_config(home), args.chat_template)
    found = detect(templates.get("tool_use") or templates.get("default") or "")
    if found is not None:
        log.info("calls of tools are read by --tool-call-parser %s, which the chat template shows", found)
    return found


def _known(flag: str, name: str | None, parsers: Collection[str]) -> str | None:
    if name is not None and name not in parsers:
        told = ", ".join(sorted(parsers))
        raise ConfigError(f"{flag} must be one of {told}; got {name!r:.80}.")
    return name


def _modules(folders: AdapterFolders | None, texts: list[str], names: list[str]) -> list[AdapterEntry]:
    """``--lora-modules``, which exist until somebody unloads them. Raises ConfigError; a frontend that takes the place
    of another leaves out a folder that cannot be read any more, for the scheduler knows its name."""
    if folders is None:
        return []
    found, again = [], os.environ.get(STARTED_AGAIN) == "1"
    for each in parse_modules(texts, names):
        try:
            found.append(AdapterEntry(each.name, 0, folders.adapter(each.name, each.path), each.parent))
        except ConfigError as error:
            if not again:
                raise
            log.warning("--lora-modules: %s It is left out here; the scheduler may know the name.", error)
    return found


def app_runner(app: web.Application) -> web.AppRunner:
    """How the application is run: a client that leaves cancels its handler, and nothing is unpacked unasked."""
    return Runner(
        app, handle_signals=False, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=1.0,
        handler_cancellation=True, auto_decompress=False,
    )  # fmt: skip


async def serve(args: EngineArgs, settings: Settings, sock: socket.socket, claimed: socket.socket | None) -> None:
    """Answer until SIGTERM or SIGINT, then let open requests end; a second signal ends them."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    with ending_signals(asyncio.get_running_loop(), lambda: (hurry if stop.is_set() else stop).set()):
        await _serve(args, settings, sock, claimed, stop, hurry)


async def _serve(
    args: EngineArgs, settings: Settings, sock: socket.socket, claimed: socket.socket | None, stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:  # fmt: skip
    if settings.pooler is not None:
        import numpy  # noqa: F401 - now, and not while the first request waits
    engine = Engine(str(args.scheduler), load_keys(args.keys))
    engine.adapters.merge(settings.modules)
    await engine.start()
    app = make_app(engine, settings)
    runner = app_runner(app)
    await runner.setup()
    collect_from_now()
    site = ClaimedSite(runner, sock, claimed, backlog=BACKLOG)
    await site.start()
    print(f"listening on {url_of(sock)}", flush=True)
    tell_ready()
    refused = asyncio.create_task(_watch(engine, stop))
    try:
        await stop.wait()
    finally:
        refused.cancel()
        await drain(app[FRONT], site, args.shutdown_timeout, hurry)
        await runner.cleanup()
        await engine.close()
    if not refused.cancelled() and refused.done() and (reason := refused.result()):
        raise ConfigError(reason)


async def _watch(engine: Engine, stop: asyncio.Event) -> str | None:
    """Log when requests can be run; the reason where the scheduler will have nothing to do with this process."""
    try:
        await engine.wait_ready(None)
    except RuntimeError as error:
        stop.set()
        return str(error)
    log.info("ready")
    return None


async def drain(front: Front, site: web.BaseSite, limit: float, hurry: asyncio.Event) -> None:
    """Say that nothing new is taken, close the port, wait for open requests up to ``limit``, fail the rest with 503.

    Idle connections stay until the end, so that what is sent on them still gets its 503.
    """
    front.draining = True
    hurried = asyncio.ensure_future(hurry.wait())
    began = time.monotonic()
    await asyncio.wait([hurried], timeout=min(NOTICE_S, limit))
    await site.stop()
    idle = asyncio.ensure_future(front.idle())
    left = limit - (time.monotonic() - began)
    await asyncio.wait([idle, hurried], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        log.warning("ending %d requests that are still open", front.active)
        why = "it was told to hurry" if hurry.is_set() else f"the {limit:g} s of --shutdown-timeout are over"
        message = f"the server is shutting down and {why}; send the request again."
        front.engine.fail_all(RequestError(503, message, retry_after=5))
        await asyncio.wait([idle], timeout=ABORT_S)
    for waited in (idle, hurried):
        waited.cancel()
