"""A worker from its flags to its end: load, serve, drain. ``main`` returns or raises its exit code."""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..proto.checkpoint.model_config import ModelConfig, config_of, model_folder
from ..proto.checkpoint.pooler_config import PoolerConfig, pooler_of
from ..proto.config import ConfigError, EngineArgs, parse_service_args
from ..proto.process import EXIT_CONFIG, collect_from_now, die, ignore_signals, setup_logging, watch_parent
from ..proto.wire.sockets import Keys, load_keys, needs_curve, worker_endpoint
from .device import choose_device, choose_threads, describe, parameter_estimate, usable_cores
from .link import Dismissed, Link

if TYPE_CHECKING:
    import torch

    from .lora.slots import LoraSpec
    from .models.model import Model
    from .moving import Mover
    from .parallel.group_link import Leader, Member
    from .parallel.parallel import Group
    from .spec import Shard
    from .worker import Worker

log = logging.getLogger(__name__)

DRAINED, ASKED = "drained", "asked to end"
"""The farewells of a worker that has done what it was there for."""


class Links:
    """What connects this process: ``link`` to the scheduler, or to the leader of its replica; a leader's ``others``."""

    def __init__(self) -> None:
        self.link: Link | Member | None = None
        self.others: Leader | None = None
        self.mover: Mover | None = None

    def leave(self) -> None:
        """Another process of this replica was asked to end."""
        if self.link is not None:
            self.link.leave()

    def close(self, farewell: str | None) -> None:
        """Say goodbye everywhere. Safe to call twice."""
        if self.others is not None:
            self.others.close(farewell or "it ends", farewell in (DRAINED, ASKED))
        if self.link is not None:
            self.link.close(farewell)
        if self.mover is not None:
            self.mover.close()


class Ending:
    """SIGTERM and SIGINT: while the worker loads they end it at once; once it serves, the first asks it to drain and
    the second ends it at once."""

    def __init__(self, links: Links) -> None:
        self.link: Link | Member | None = None  # set when it serves
        self.asked = self.over = False  # over: it ends, and signals change nothing any more
        self._links = links
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.over:
            return
        alone = self._links.others is None and isinstance(self.link, Link)
        if self.link is None or (self.asked and alone):
            self.leave()  # by no exception: it may be dropped, taken for a failure, or abort the process
        elif not self.asked:
            self.asked = True
            self.link.leave()
        else:  # a replica's link may be held by what this interrupts; once more at each signal, for it may be dropped
            raise KeyboardInterrupt

    def leave(self) -> NoReturn:
        """End this process now, with a farewell that no further signal cuts short."""
        self.over = True
        try:
            self._links.close(ASKED)
        finally:
            os._exit(0)


def main(argv: list[str] | None = None) -> int:
    """Load, then serve until told to end."""
    args = parse_service_args("gpu_worker", argv)
    setup_logging("gpu_worker", args.log_level, args.log_format)
    watch_parent()
    links = Links()
    ending = Ending(links)
    try:
        try:
            return _run(args, links, ending)
        finally:
            ignore_signals()
    except KeyboardInterrupt:
        ending.leave()


def _run(args: EngineArgs, links: Links, ending: Ending) -> int:
    """The same. Raises SystemExit where it cannot work or go on, and KeyboardInterrupt at the second signal."""
    farewell: str | None = None
    try:
        worker = _load(args, links)
        if (link := links.link) is not None:
            ending.link = link
            worker.serve(link)
        ending.over, farewell = True, DRAINED
    except ConfigError as error:
        farewell = str(error)
        die("gpu_worker", error)
    except Dismissed as dismissal:
        farewell = "dismissed"
        # One that was never let in cannot work here; one that was expelled may start again from nothing.
        die("gpu_worker", dismissal, 1 if dismissal.served else EXIT_CONFIG)
    except KeyboardInterrupt:
        farewell = ASKED
        raise
    except SystemExit:
        die("gpu_worker", "a step called sys.exit", 1)  # and the scheduler learns of it as of a crash
    except Exception as error:
        if args.tensor_parallel_size * args.pipeline_parallel_size == 1:
            raise
        if ending.asked:  # and so were the others, one of which has gone already
            farewell = ASKED
            return 0
        from .parallel.group_link import PATIENCE_S, end

        time.sleep(PATIENCE_S)  # where another process has died, the link to it ends this one meanwhile, and says so
        log.error("%s", error, exc_info=error)
        links.close(str(error))
        end(error)
    finally:
        links.close(farewell)
    worker.finish()  # others wait for nothing of this
    return 0


def _load(args: EngineArgs, links: Links) -> Worker:
    """The worker, loaded, and its links."""
    began = time.monotonic()
    endpoint, keys = worker_endpoint(args.scheduler or ""), load_keys(args.keys)
    needs_curve(endpoint, keys)  # refused now, not when the model has been loaded
    path = model_folder(args, weights=True)
    config = config_of(args, path)
    pooler = pooler_of(config, args)
    count = args.tensor_parallel_size * args.pipeline_parallel_size
    threads = choose_threads(args.cpu_threads, usable_cores(), parameter_estimate(config) // count)

    import torch  # only now: what is wrong with the flags is found without it

    from .footprint import check_footprint
    from .layers.formats.registry import check_device
    from .memory import out_of_memory
    from .models.cache_dtype import resolve_cache_dtype
    from .models.loader import resolve_dtype
    from .parallel.parallel import Group, shard_of
    from .sampling.grammar import Grammars
    from .sampling.processors import load_functions
    from .speculation.loading import drafts_of
    from .worker import Worker

    collect_from_now()
    device = choose_device(args.device)
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)
    dtype = resolve_dtype(args.dtype, config, device)
    check_device(config.hf, dtype, device)
    _suit(args, device)
    cache_dtype = resolve_cache_dtype(args, config, dtype, device)
    imported = time.monotonic()
    log.info("%s on %s in %s", path, describe(device, threads), str(dtype).removeprefix("torch."))
    shard = shard_of(args.rank, args.tensor_parallel_size, args.pipeline_parallel_size)
    _check_parts(config, pooler, args)
    check_footprint(args, config, pooler, dtype, device, shard, cache_dtype)
    functions, grammars = load_functions(args.logits_processor or []), Grammars(config, args)
    links.mover = _mover(args, keys) if pooler is None else None
    group = _join(args, config, dtype, device, shard, keys, links) if count > 1 else Group()
    if links.link is None:
        shared = f", one of {count}" if count > 1 else ""
        links.link = own = _link(args, endpoint, describe(device, threads) + shared, keys)
        _tell(own, links, args)
        own.start()  # the scheduler learns of this worker, and assigns it, while it loads

    load = partial(_model, args, config, dtype, cache_dtype, device, group, pooler)
    try:
        model = load()
        drafts = drafts_of(args, config, model)
    except Exception as error:
        if out_of_memory(error):
            raise ConfigError(f"the weights of {path} do not fit the device: {error}") from error
        links.close(f"not loaded: {error}")
        raise
    links.link.loaded = True
    log.info("started: %.2f s to import, %.2f s to load", imported - began, time.monotonic() - imported)
    how = args, config, model, dtype, device
    return Worker(*how, grammars, functions, group, links.others, pooler, load, links.mover, drafts)


def _link(args: EngineArgs, endpoint: str, told: str, keys: Keys | None) -> Link:
    """To the scheduler; one that traces steps where they are asked for. Raises ConfigError."""
    if args.otlp_traces_endpoint is None or args.collect_detailed_traces is None:
        return Link(endpoint, told, keys)
    from ..proto.tracing import Tracing
    from .traced import TracedLink

    return TracedLink(Tracing(args.otlp_traces_endpoint, "gpu_worker").spans, endpoint, told, keys)


def _check_parts(config: ModelConfig, pooler: PoolerConfig | None, args: EngineArgs) -> None:
    """Raises ConfigError where the model cannot be shared out as the flags say."""
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        from .parallel.rendezvous import check

        check(config, pooler, args)


def _mover(args: EngineArgs, keys: Keys | None) -> Mover | None:
    """What exchanges pages with other workers."""
    from .moving import mover_for

    return mover_for(args, keys)


def _tell(link: Link, links: Links, args: EngineArgs) -> None:
    """What the scheduler learns of where pages of other workers come in: all processes of a replica, or nowhere."""
    from .page_moves import BETWEEN

    link.role = args.worker_role
    if links.mover is not None:
        others = links.others.endpoints if links.others is not None else {}
        endpoints = {**others, args.rank: links.mover.endpoint}
        link.bad_pages = links.mover.bad_frames
        if all(endpoints.values()):
            link.endpoint = BETWEEN.join(endpoints[number] for number in sorted(endpoints))


def _model(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device,
    group: Group, pooler: PoolerConfig | None,
) -> Model:  # fmt: skip
    """The model, and the scales of its cache."""
    from .models.kv_scales import scales_to_read, set_scales
    from .models.loader import load_model

    kv_scales = scales_to_read(cache_dtype, args.calculate_kv_scales)
    model = load_model(
        config, dtype, device, args.load_format, args.seed, group.leader, group, pooler, args.quantization,
        args.quantize_lm_head, kv_scales, _lora(args, dtype),
    )  # fmt: skip
    set_scales(model, cache_dtype, args.calculate_kv_scales, kv_scales, config.max_model_len)
    if args.enable_prompt_embeds:
        _take_embeds(model)
    return model


def _take_embeds(model: Model) -> None:
    """Prompts may be embeddings. Raises ConfigError where the model reads ids alone."""
    from .models.decoder import Decoder
    from .models.given import Given

    if not isinstance(model, Decoder):
        raise ConfigError("--enable-prompt-embeds needs a decoder of a family that quire knows (docs/models.md).")
    model.given = Given(model.whole.embed_size or model.whole.hidden_size, model.dtype, model.device)


def _lora(args: EngineArgs, dtype: torch.dtype) -> LoraSpec | None:
    """Which adapters the model may have."""
    if not args.enable_lora:
        return None
    from .lora.slots import LoraSpec
    from .models.adapter_reader import adapter_dtype

    kind = adapter_dtype(args.lora_dtype, dtype)
    return LoraSpec(args.max_loras, args.max_lora_rank, kind, args.fully_sharded_loras)


def _suit(args: EngineArgs, device: torch.device) -> None:
    """Make the kernels' choices that hold for all of this process. Raises ConfigError where they cannot run here."""
    from .kernels.attention_flash import choose_flash, use_flash
    from .kernels.card import card_of, check_card
    from .kernels.company import set_batch_invariant

    card = card_of(device)
    check_card(card)
    set_batch_invariant(args.batch_invariant)
    use_flash(choose_flash(args.attention_backend, card))


def _join(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard, keys: Keys | None,
    links: Links,
) -> Group:  # fmt: skip
    """Meet the other processes of this replica."""
    from .parallel import rendezvous

    settings, mover = rendezvous.settings_of(args, config, dtype, device), links.mover
    pages = "" if mover is None else mover.endpoint
    link = rendezvous.link_for(args, shard, settings, keys, links.leave, pages)
    if isinstance(link, rendezvous.Leader):
        links.others = link
    else:
        links.link = link
    return rendezvous.ranks_of(args, shard, link, device)
