"""A detokenizer from its flags to its end: load the tokenizer, serve."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from ..proto.checkpoint.chat_templates import IN_WORDS
from ..proto.checkpoint.model_config import config_of, model_folder, tokenizer_folder
from ..proto.checkpoint.pooler_config import pooler_of
from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.event_loop import new_loop
from ..proto.process import (
    collect_from_now,
    die,
    ending_signals,
    new_incarnation,
    setup_logging,
    tell_ready,
    watch_parent,
)
from ..proto.thinking import marks_of, parser_of
from ..proto.wire.sockets import load_keys, own_bind, private_dir
from .gate import Checker
from .loop import Detokenizer, check_bind
from .tokenize import Preparer
from .tokenizer import load_tokenizer

log = logging.getLogger(__name__)


def load(args: EngineArgs) -> tuple[Preparer, str]:
    """Read the model's config and its tokenizer; also the tokenizer's folder. Raises ConfigError."""
    began = time.monotonic()
    path = model_folder(args)
    model = config_of(args, path)
    pooler = pooler_of(model, args)
    if args.skip_tokenizer_init:
        return Preparer(None, model, args.max_logprobs, pooler), path
    folder = tokenizer_folder(args, path)
    tokenizer = load_tokenizer(folder, args.tokenizer_mode, args.chat_template, args.trust_remote_code)
    parser = parser_of(args.reasoning_parser, tokenizer.templates.get("default", ""))
    marks, raw = marks_of(parser, args.reasoning_config), args.allow_special_tokens_in_content
    preparer = Preparer(tokenizer, model, args.max_logprobs, pooler, marks, raw)
    preparer.template.form = args.chat_template_content_format
    preparer.template.tells_tools = args.tool_call_parser in (None, *IN_WORDS)
    if tokenizer.templates:
        try:
            preparer.template.check()
        except ConfigError as error:
            if args.chat_template is not None:
                raise
            log.warning("%s; chats will be refused, completions work", error)
    log.info("tokenizer of %s loaded in %.2f s", folder, time.monotonic() - began)
    return preparer, folder


async def serve(args: EngineArgs, preparer: Preparer, folder: str) -> str | None:
    """Run until a signal or the scheduler's Bye; its reason."""

    def checker() -> Checker:
        from .grammar_check import GrammarChecker  # nothing of it is loaded before a request needs it

        return GrammarChecker(folder, preparer.model)

    assert args.scheduler is not None  # parse_service_args sets it
    incarnation = new_incarnation("detokenizer")
    if args.scheduler.startswith("ipc://") and args.bind is None:
        private_dir(args.scheduler.removeprefix("ipc://"))
    bind = args.bind or own_bind(args.scheduler, incarnation)
    check_bind(bind)
    spans = None
    if args.otlp_traces_endpoint is not None:
        from ..proto.tracing import Tracing

        spans = Tracing(args.otlp_traces_endpoint, "detokenizer").spans
    keys = load_keys(args.keys)
    process = Detokenizer(preparer, args.scheduler, incarnation, bind, args.advertise, keys, checker, spans)
    with ending_signals(asyncio.get_running_loop(), process.stop):
        tell_ready()
        return await process.run()


def main() -> None:
    args = parse_service_args("detokenizer")
    setup_logging("detokenizer", args.log_level, args.log_format)
    watch_parent()
    try:
        preparer, folder = load(args)
        collect_from_now()  # but not in tables of the vocabulary
        with asyncio.Runner(loop_factory=new_loop) as runner:
            reason = runner.run(serve(args, preparer, folder))
    except ConfigError as error:
        die("detokenizer", error)
    except KeyboardInterrupt:
        sys.exit(0)
    if reason:
        die("detokenizer", reason)
