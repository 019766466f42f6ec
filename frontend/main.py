"""A frontend from its flags to its end: listen, answer, let what is open end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import socket
import ssl
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from ..client.adapter_folders import AdapterFolders, parse_modules
from ..client.engine import Engine
from ..client.offline.defaults import default_sampling
from ..client.traced import traces_of
from ..proto.checkpoint.chat_templates import IN_WORDS, names_tools, templates_of, tokenizer_config
from ..proto.checkpoint.model_config import DEMO_MODEL, ModelConfig, config_of, model_folder, tokenizer_folder
from ..proto.checkpoint.pooler_config import pooler_of
from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.event_loop import new_loop
from ..proto.flag_words import json_object, structured_rules
from ..proto.messages import AdapterEntry
from ..proto.process import (
    FIGURES,
    READY_FD,
    STARTED_AGAIN,
    announce,
    collect_from_now,
    die,
    ending_signals,
    setup_logging,
    tell_ready,
    watch_parent,
)
from ..proto.thinking import parser_of
from ..proto.wire.sockets import load_keys
from .access import access_of
from .app import make_app, make_inner
from .ending import Ending, drain, hand_over
from .front import FRONT, Front, Settings
from .log import LogSettings
from .model_card import ModelCard, read_card
from .peers import Peers
from .plugins import load_middlewares
from .port import ClaimedSite, bound, claim, url_of
from .protocol import Runner
from .responses import STORE
from .shared_figures import SharedFigures
from .tls import context_of
from .tools import REASONING_PARSERS, TOOL_PARSERS, detect

log = logging.getLogger(__name__)

_SECRET = re.compile(r"key|^hf_token$")
BACKLOG = 2048
KEEPALIVE_S = 75.0
"""How long a connection may be idle, or take to send its headers."""


def main() -> None:
    """Run a frontend. Exit code 0 after SIGTERM or SIGINT, 78 where it could never work as configured."""
    args = parse_service_args("frontend")
    setup_logging("frontend", args.uvicorn_log_level or args.log_level, args.log_format)
    watch_parent()
    try:
        settings, tls = settings_of(args), context_of(args)
        sock = bound(args)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(args, settings, sock, claim(sock, str(args.scheduler)), tls))
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
    names = args.served_model_name or [args.model or DEMO_MODEL]
    folders = AdapterFolders(args.max_lora_rank, args.download_dir) if args.enable_lora else None
    return Settings(
        names=names,
        adapters=folders,
        modules=_modules(folders, args.lora_modules or [], names),
        card=partial(_card, args, folder, model),
        lora_root=args.lora_root,
        follows=os.environ.get(STARTED_AGAIN) == "1",
        slots=args.max_num_seqs,
        embed_size=_embed_size(model) if args.enable_prompt_embeds else None,
        config=_told(args),
        tokenizer=(Path(tokenizer_folder(args, folder)), args.chat_template)
        if args.enable_tokenizer_info_endpoint and not args.skip_tokenizer_init
        else None,
        root=args.served_model_root or names[0],
        **access_of(args),
        max_n=args.max_n,
        lenient_types=args.lenient_types,
        reject_unknown_fields=args.reject_unknown_fields,
        docs=not args.disable_fastapi_docs,
        page=not args.disable_page,
        files_path=_files_path(args),
        files_max_bytes=args.files_max_bytes,
        batch_window=args.max_batch_concurrency or max(1, args.max_num_seqs // 2),
        max_queued=args.max_num_queued_reqs,
        defaults=defaults,
        ceiling=defaults.get("max_tokens") if said else None,  # by flag it binds all; the model's own is a suggestion
        pooler=pooler,
        score_template=args.chat_template is not None,
        tool_parser=None if pooler is not None else _tool_parser(args, folder),
        reasoning_parser=None if pooler is not None else _reasoning_parser(args, folder),
        **_answers(args),
    )


def _answers(args: EngineArgs) -> dict[str, Any]:
    """What the flags say of answers and of the log, as fields of Settings. Raises ConfigError."""
    silent = (args.disable_access_log_for_endpoints or "").split(",")
    return {
        "log": LogSettings(
            requests=args.enable_log_requests,
            outputs=args.enable_log_outputs,
            most=args.max_log_len,
            access=not args.disable_uvicorn_access_log,
            silent=frozenset(path.strip() for path in silent),
        ),
        "role": args.response_role,
        "names_are_ids": args.return_tokens_as_token_ids,
        "usage_details": args.enable_prompt_tokens_details,
        "force_usage": args.enable_force_include_usage,
        "stream_interval": args.stream_interval,
        "id_headers": args.enable_request_id_headers,
        "count_load": args.enable_server_load_tracking,
        "chat_kwargs": json_object("default_chat_template_kwargs", args.default_chat_template_kwargs),
        "structured": structured_rules(args),
        "keep_alive_s": args.sse_keep_alive_interval,
        "root_path": args.root_path,
        "middlewares": load_middlewares(args.middleware or []),
        "traced": args.otlp_traces_endpoint is not None,
    }


def _files_path(args: EngineArgs) -> str | None:
    """``--files-path``, or a folder beside the scheduler's sockets, where it has one on this machine."""
    folder = str(args.scheduler or "").removeprefix("ipc://")
    if args.files_path is not None or folder == args.scheduler or not folder:
        return args.files_path
    return os.path.join(folder, "files")


def _embed_size(model: ModelConfig) -> int:
    """Numbers of a token's embedding. Raises ConfigError where config.json does not say."""
    size = model.hf.get("word_embed_proj_dim") or model.hf.get("hidden_size")
    if not isinstance(size, int):
        raise ConfigError("--enable-prompt-embeds needs a model whose config.json says its hidden_size.")
    return size


def _told(args: EngineArgs) -> dict[str, Any]:
    """The flags that a frontend reads, those left out that hold a secret."""
    told = {}
    for each in dataclasses.fields(args):
        if "frontend" in each.metadata["services"] and not _SECRET.search(each.name):
            value = getattr(args, each.name)
            told[each.name] = value if isinstance(value, str | int | float | list | None) else str(value)
    return told


def _tool_parser(args: EngineArgs, folder: str) -> str | None:
    """``--tool-call-parser``, or the one whose form the chat template shows. Raises ConfigError."""
    named = _known("tool_call_parser", args.tool_call_parser, TOOL_PARSERS)
    if named is not None or not args.enable_auto_tool_choice or args.skip_tokenizer_init:
        return named if args.enable_auto_tool_choice else None
    template = _template(args, folder)
    if template and not names_tools(template):
        log.info(
            "the chat template knows no tools: they are told in the system message, in the form of %s", IN_WORDS[0]
        )
        return IN_WORDS[0]
    found = detect(template)
    if found is not None:
        log.info("calls of tools are read by --tool-call-parser %s, which the chat template shows", found)
    return found


def _reasoning_parser(args: EngineArgs, folder: str) -> str | None:
    """``--reasoning-parser``, or that of gpt-oss where the chat template is of its kind. Raises ConfigError."""
    named = _known("reasoning_parser", args.reasoning_parser, REASONING_PARSERS)
    if named is not None or args.skip_tokenizer_init:
        return named
    found = parser_of(None, _template(args, folder))
    if found is not None:
        log.info("thoughts are read by --reasoning-parser %s, which the chat template shows", found)
    return found


def _template(args: EngineArgs, folder: str) -> str:
    """The chat template, that for tools where there are several; empty where there is none. Raises ConfigError."""
    home = Path(tokenizer_folder(args, folder))
    templates = templates_of(home, tokenizer_config(home), args.chat_template)
    return templates.get("tool_use") or templates.get("default") or ""


def _card(args: EngineArgs, folder: str, model: ModelConfig) -> ModelCard:
    try:
        template = _template(args, folder)
    except ConfigError:
        template = ""
    return read_card(model, template)


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


def app_runner(app: web.Application) -> Runner:
    """How the application is run: a client that leaves cancels its handler, and nothing is unpacked unasked."""
    settings = app[FRONT].settings
    return Runner(
        app, root_path=settings.root_path, handle_signals=False, access_log=None, keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=1.0, handler_cancellation=True, auto_decompress=False,
        max_field_size=settings.max_header_bytes,
        max_connections_per_address=settings.max_connections_per_address, stall_s=settings.stall_s,
    )  # fmt: skip


async def serve(
    args: EngineArgs, settings: Settings, sock: socket.socket, claimed: socket.socket | None,
    tls: ssl.SSLContext | None = None,
) -> None:  # fmt: skip
    """Answer until SIGTERM or SIGINT, then let open requests end; a second signal ends them. At HAND_OVER all that has
    begun is finished, and what is new is left to another process that listens on the same socket."""
    ending = Ending()
    with ending_signals(asyncio.get_running_loop(), ending.act, ending.hand_over):
        await _serve(args, settings, sock, claimed, tls, ending)


async def _serve(
    args: EngineArgs, settings: Settings, sock: socket.socket, claimed: socket.socket | None,
    tls: ssl.SSLContext | None, ending: Ending,
) -> None:  # fmt: skip
    if settings.pooler is not None:
        import numpy  # noqa: F401 - now, and not while the first request waits
    traces = traces_of(args.otlp_traces_endpoint, "frontend", settings.names[0])
    engine = Engine(str(args.scheduler), load_keys(args.keys), traces)
    engine.adapters.merge(settings.modules)
    await engine.start()
    app = make_app(engine, settings)
    runner = app_runner(app)
    await runner.setup()
    collect_from_now()
    site = ClaimedSite(runner, sock, claimed, backlog=BACKLOG, ssl_context=tls)
    if os.environ.get(STARTED_AGAIN) == "1":  # whom it follows answers until then, or connections wait in the socket
        with suppress(TimeoutError, RuntimeError):
            await engine.wait_ready(settings.restart_s)
    app[FRONT].peers = peers = await meet(app, os.environ.get(FIGURES))
    await site.start()
    if READY_FD not in os.environ:  # else `quire serve` says where it is, once the whole server can answer
        announce(f"listening on {url_of(sock, 'http' if tls is None else 'https')}")
    tell_ready()
    shared = _share(app[FRONT])
    refused = asyncio.create_task(_watch(engine, ending.stop))
    try:
        await ending.stop.wait()
    finally:
        refused.cancel()
        if ending.hands_over:
            await hand_over(app[FRONT], site, runner, ending.hurry)
        else:
            await drain(app[FRONT], site, args.shutdown_timeout, ending.hurry)
        await runner.cleanup()
        if peers is not None:
            await peers.close()
        await engine.close()
        if shared is not None:  # last: what was measured until now is told by the others
            shared.cancel()
            await asyncio.wait([shared])
    if not refused.cancelled() and refused.done() and (reason := refused.result()):
        raise ConfigError(reason)


def _share(front: Front) -> asyncio.Task[None] | None:
    """Keep what is measured where other frontends on this port find it; None where there are no others."""
    if (folder := os.environ.get(FIGURES)) is None:
        return None
    try:
        front.shared = SharedFigures(Path(folder), front.metrics)
    except OSError as error:
        log.warning("/metrics tells of this frontend alone: %s", error)
        return None
    return asyncio.create_task(front.shared.keep())


async def meet(app: web.Application, folder: str | None) -> Peers | None:
    """Have other frontends on this port reach this one, and the other way round; None where there are no others."""
    if folder is None:
        return None
    peers, settings = Peers(Path(folder) / "peers", app[STORE].name), app[FRONT].settings
    runner = Runner(
        make_inner(app), handle_signals=False, access_log=None, shutdown_timeout=1.0, handler_cancellation=True,
        auto_decompress=False, stall_s=settings.stall_s,
    )  # fmt: skip
    try:
        await peers.open(runner)
    except (ConfigError, OSError) as error:
        log.warning("what other frontends keep is not found from here, nor the other way round: %s", error)
        return None
    return peers


async def _watch(engine: Engine, stop: asyncio.Event) -> str | None:
    """Log when requests can be run; the reason where the scheduler will have nothing to do with this process."""
    try:
        await engine.wait_ready(None)
    except RuntimeError as error:
        stop.set()
        return str(error)
    log.info("ready")
    return None
