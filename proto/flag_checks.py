"""What some flags may say together, or with a model. Below ``config.py``, which has the flags."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

from .config_error import ConfigError


def check_offload(args: Any) -> None:
    """Refuse sizes and pairs of an EngineArgs that cannot work. Raises ConfigError."""
    for name in ("swap_space", "kv_offloading_size", "kv_disk_size"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be at least 0 (GiB), got {value}.")
    if args.swap_space and args.kv_offloading_size:
        raise ConfigError(
            f"swap_space ({args.swap_space:g} GiB for each worker) and kv_offloading_size ({args.kv_offloading_size:g} "
            "GiB for all) are two ways to say one thing; give one of them."
        )
    if bool(args.kv_disk_path) != bool(args.kv_disk_size):
        given, missing = ("kv_disk_path", "kv_disk_size") if args.kv_disk_path else ("kv_disk_size", "kv_disk_path")
        raise ConfigError(f"{given} needs {missing}: a folder, and how many GiB blocks may take there.")
    if (args.swap_space or args.kv_offloading_size or args.kv_disk_path) and not args.enable_prefix_caching:
        raise ConfigError(
            "blocks outside of the device are found by the prefix cache's hashes; leave --no-enable-prefix-caching "
            "out, or swap_space, kv_offloading_size and kv_disk_path."
        )


def check_listening(args: Any) -> None:
    """Refuse ways to listen, and to log, of an EngineArgs that cannot work. Raises ConfigError."""
    if args.uds and args.api_server_count > 1:
        raise ConfigError(
            f"api_server_count is {args.api_server_count}, and a Unix socket has one frontend; leave --uds out, or "
            "--api-server-count."
        )
    if not args.ssl_certfile and (
        given := [name for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers") if getattr(args, name)]
    ):
        raise ConfigError(f"{given[0]} means nothing without a certificate; give --ssl-certfile too.")
    if args.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(f"ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), got {args.ssl_cert_reqs}.")
    if args.ssl_cert_reqs and not args.ssl_ca_certs:
        raise ConfigError(f"ssl_cert_reqs is {args.ssl_cert_reqs}, and nothing to check by; give --ssl-ca-certs too.")
    if args.root_path is not None and not args.root_path.startswith("/"):
        raise ConfigError(f"root_path must begin with /, got {args.root_path!r:.80}.")
    if args.max_log_len is not None and args.max_log_len < 0:
        raise ConfigError(f"max_log_len must be at least 0, got {args.max_log_len}.")
    if args.enable_log_outputs and not args.enable_log_requests:
        raise ConfigError("enable_log_outputs logs the ends of requests; give --enable-log-requests too.")
    if args.headless and not args.scheduler:
        raise ConfigError(
            "headless starts workers for a scheduler elsewhere; name it with --scheduler tcp://HOST:PORT."
        )
    if not args.response_role:
        raise ConfigError("response_role is empty; leave it out, or name a role such as assistant.")
    for size in args.cudagraph_capture_sizes or ():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"cudagraph_capture_sizes must be at least 1 each, got {size!r}.")
    sizes, most = args.cudagraph_capture_sizes, args.max_cudagraph_capture_size
    if sizes and most and min(sizes) > most:
        raise ConfigError(f"cudagraph_capture_sizes {sizes} are all over max_cudagraph_capture_size ({most}).")


DETAILS = ("model", "worker", "all")


def check_tracing(args: Any) -> None:
    """Refuse traces of an EngineArgs that lead nowhere. Raises ConfigError."""
    endpoint, details = args.otlp_traces_endpoint, args.collect_detailed_traces
    if isinstance(details, list):  # as LLM() is given it
        details = args.collect_detailed_traces = ",".join(details)
    if details is not None and not endpoint:
        raise ConfigError("collect_detailed_traces needs a collector; give --otlp-traces-endpoint too.")
    for each in (details or "all").split(","):
        if each not in DETAILS:
            raise ConfigError(f"collect_detailed_traces must be of {', '.join(DETAILS)}, got {each!r:.80}.")
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://", "grpc://")) or len(endpoint.split("://")[1]) < 1:
        raise ConfigError(f"otlp_traces_endpoint must be like http://localhost:4318, got {endpoint!r:.200}.")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError("otlp_traces_endpoint needs packages: pip install 'quire[tracing]'.")


def check_split(heads: object, layers: object, size: int, stages: int) -> None:
    """Raises ConfigError where a model of so many attention heads and layers cannot be shared out so."""
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
        )
    if isinstance(layers, int) and stages > layers:
        raise ConfigError(f"Pipeline parallel size ({stages}) must be at most the model's number of layers ({layers}).")
