"""How the processes of one replica find each other: first their links, over which the leader says where torch's
store is, then torch.distributed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.checkpoint.pooler_config import PoolerConfig
from ...proto.config import ConfigError, EngineArgs
from ...proto.wire.sockets import Keys
from ..models.fallback import uses_fallback
from ..models.families import find_family
from ..models.pooled import find_pooled
from ..spec import Shard
from .group_link import Leader, Member
from .parallel import TIMEOUT, Ranks, check_shards, leader_of, number_of

_ALIKE = (
    "tensor_parallel_size", "pipeline_parallel_size", "load_format", "seed", "logprobs_mode", "max_logprobs",
    "enforce_eager", "max_seq_len_to_capture", "model_impl", "runner", "convert", "pooler_config",
    "quantization", "quantize_lm_head", "batch_invariant", "attention_backend", "disable_custom_all_reduce",
    "kv_cache_dtype", "calculate_kv_scales",
)  # fmt: skip


def settings_of(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """What all processes of a replica must have alike."""
    described = hashlib.sha256(json.dumps(config.hf, sort_keys=True).encode()).hexdigest()[:16]
    own = {name: str(getattr(args, name)) for name in _ALIKE}
    found = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "max_model_len": config.max_model_len}
    return {"model's config": described, **{name: str(value) for name, value in found.items()}, **own}


def check(config: ModelConfig, pooler: PoolerConfig | None, args: EngineArgs) -> None:
    """Raises ConfigError where this model cannot be shared out as ``args`` say."""
    if pooler is not None and pooler.whole:
        raise ConfigError(
            f"{config.architecture} runs in one process; leave out --tensor-parallel-size and --pipeline-parallel-size."
        )
    if pooler is None and uses_fallback(config):
        return  # whose loader refuses it
    spec = (find_family(config.hf) if pooler is None else find_pooled(config.hf, pooler))[0]
    check_shards(spec, args.tensor_parallel_size, args.pipeline_parallel_size)


def link_for(
    args: EngineArgs, shard: Shard, settings: dict[str, str], keys: Keys | None, on_leave: Callable[[], Any],
    pages: str = "",
) -> Leader | Member:  # fmt: skip
    """This process's links, started. ``pages``: where it takes pages of other workers. Raises ConfigError for an
    address that cannot be."""
    number, count = number_of(shard), shard.size * shard.stages
    if number == leader_of(shard.size, shard.stages):
        others = [each for each in range(count) if each != number]
        leader = Leader(_endpoint(args, bind=True), others, settings, keys, on_leave)
        leader.start()
        return leader
    endpoint = _endpoint(args, bind=False)
    if keys is not None and endpoint.startswith("tcp://"):
        endpoint += " " + keys.public.decode()  # a replica's processes share one pair
    member = Member(endpoint, number, settings, keys, pages=pages)
    member.start()
    return member


def ranks_of(args: EngineArgs, shard: Shard, link: Leader | Member, device: torch.device) -> Ranks:
    """Wait for all processes, then connect them."""
    count = shard.size * shard.stages
    local = args.master_addr.startswith("ipc://")
    if local or args.master_addr in ("localhost", "127.0.0.1", "::1"):
        _stay_on_loopback()
    store: dist.Store
    if isinstance(link, Leader):
        if local:
            file = args.master_addr.removeprefix("ipc://") + ".store"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)  # of those who were here before
            store = dist.FileStore(file, count)
            link.meet(file, 0)
        else:
            store = _store_at(args.master_addr, count)
            link.meet("", store.port)
    else:
        told = link.meet()
        if told.file:
            store = dist.FileStore(told.file, count)
        else:
            store = dist.TCPStore(args.master_addr, told.port, count, is_master=False, timeout=TIMEOUT)
    return Ranks(shard, store, device, not args.disable_custom_all_reduce)


def _store_at(host: str, count: int) -> dist.TCPStore:
    """The store for ``count`` processes, at ``host`` alone: left to itself torch listens on every interface."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    address = str(place[0])
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, count, is_master=True, wait_for_workers=False, timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _endpoint(args: EngineArgs, bind: bool) -> str:
    host = args.master_addr
    if host.startswith("ipc://"):
        return host
    if bind:
        try:  # an address of this machine: ZeroMQ binds no names
            host = str(socket.getaddrinfo(host, args.master_port, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"master_addr {args.master_addr!r} is no address: {error}; name another.") from error
    return f"tcp://{f'[{host}]' if ':' in host else host}:{args.master_port}"


def _stay_on_loopback() -> None:
    """Tensors of processes of one machine stay off its network. What the user has set stays."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if names:
            os.environ.setdefault(variable, names[0])
