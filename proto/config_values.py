"""Which values of flags cannot work, alone or together."""

from __future__ import annotations

import dataclasses
import json
import numbers
import typing
from typing import Any

from .config_error import ConfigError
from .flag_checks import check_listening, check_offload, check_tracing
from .flag_words import resolve_words
from .profiler import profiler_config

QUANTIZATIONS = (
    "awq", "gptq", "squeezellm", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "gguf", "int8", "int4",
    "fp8_per_tensor", "fp8_per_channel", "fp8_per_block",
    "auto_awq", "awq_marlin", "auto_gptq", "gptq_marlin", "marlin", "fbgemm_fp8", "modelopt", "gpt_oss_mxfp4",
)  # fmt: skip
"""Methods of quantization, and other names of some (``checkpoint/quantization.py``)."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` may be."""


def check_values(args: Any, hints: dict[str, Any]) -> None:
    """Refuse values of an EngineArgs that cannot work, and bring some into the form that others expect.

    ``hints`` are the types of its fields. Raises ConfigError.
    """
    resolve_words(args)
    _check_numbers(args, hints)
    if args.block_size not in (8, 16, 32):
        raise ConfigError(f"block_size must be 8, 16 or 32, got {args.block_size}.")
    for name in ("max_num_seqs", "data_parallel_size", "api_server_count",
                 "tensor_parallel_size", "pipeline_parallel_size",
                 "detokenizer_count", "max_num_queued_reqs", "max_request_bytes", "max_n", "stream_interval",
                 "files_max_bytes", "max_header_bytes", "max_json_depth"):  # fmt: skip
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(args, name)}.")
    if args.max_model_len in ("auto", -1):
        args.max_model_len = -1
    elif args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError(f"max_model_len must be at least 1, or auto, got {args.max_model_len}.")
    for name in ("allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers"):
        if isinstance(value := getattr(args, name), list):
            setattr(args, name, json.dumps(value))
    for name in ("api_key", "admin_api_key", "metrics_key"):
        if isinstance(value := getattr(args, name), list):  # the command line's values
            setattr(args, name, ",".join(value))
    _check_least(args)
    if not 1 <= args.flight_recorder_size < float("inf"):
        raise ConfigError(f"flight_recorder_size must be at least 1 (MB), got {args.flight_recorder_size}.")
    if args.max_logprobs < -1:
        raise ConfigError(f"max_logprobs must be at least -1 (no limit), got {args.max_logprobs}.")
    for name in ("gpu_memory_utilization", "kv_cache_metrics_sample"):
        if not 0 < getattr(args, name) <= 1:
            raise ConfigError(f"{name} must be in (0, 1], got {getattr(args, name)}.")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {args.port}.")
    workers = args.tensor_parallel_size * args.pipeline_parallel_size
    if not 0 <= args.rank < workers:
        raise ConfigError(
            f"rank must be in [0, {workers - 1}], as tensor_parallel_size * pipeline_parallel_size is {workers}, "
            f"got {args.rank}."
        )
    if not 0 < args.master_port <= 65535:
        raise ConfigError(f"master_port must be in [1, 65535], got {args.master_port}.")
    if args.quantization is not None and args.quantization not in QUANTIZATIONS:
        known = list(QUANTIZATIONS)
        raise ConfigError(f"Unknown quantization method: {args.quantization}. Must be one of {known}.")
    check_listening(args)
    profiler_config(args.profiler_config)
    check_tracing(args)
    _check_adapters(args)
    _check_together(args)
    for fld in dataclasses.fields(args):
        choices = fld.metadata["choices"]
        value = getattr(args, fld.name)
        if choices and value not in choices and not (value is None and fld.default is None):
            raise ConfigError(f"Unknown {fld.name}: {value!r}. Must be one of {list(choices)}.")


def _check_least(args: Any) -> None:
    """Refuse counts and seconds that may be left out, where they are given and too small."""
    for name in ("max_num_batched_tokens", "num_gpu_blocks_override", "cpu_threads", "max_num_queued_tokens",
                 "kv_cache_memory_bytes", "max_requests_per_key", "max_seq_len_to_capture",
                 "max_cudagraph_capture_size", "max_batch_concurrency", "max_connections_per_address"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    for name in (
        "worker_timeout",
        "step_timeout",
        "drain_timeout",
        "shutdown_timeout",
        "queue_timeout",
        "sse_keep_alive_interval",
        "request_timeout",
    ):
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be a number of seconds of at least 0, got {value}.")


def _check_adapters(args: Any) -> None:
    """Refuse numbers of adapters that cannot be."""
    if args.max_loras < 1:
        raise ConfigError(f"max_loras ({args.max_loras}) must be >= 1.")
    if args.max_lora_rank not in LORA_RANKS:
        raise ConfigError(f"max_lora_rank ({args.max_lora_rank}) must be one of {LORA_RANKS}.")
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise ConfigError(f"max_cpu_loras ({args.max_cpu_loras}) must be >= max_loras ({args.max_loras}).")
    if args.lora_modules and not args.enable_lora:
        raise ConfigError("lora_modules names adapters, and LoRA is not enabled; add --enable-lora.")


def _check_together(args: Any) -> None:
    """Refuse values that are sound by themselves."""
    from .speculation import resolve_speculation  # here, so that `quire chat --help` does not wait for msgspec

    resolve_speculation(args)
    check_offload(args)
    if (budget := args.max_num_batched_tokens) is not None and budget < args.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be at least max_num_seqs "
            f"({args.max_num_seqs}); raise the first or lower the second."
        )
    if args.batch_invariant and args.attention_backend == "flash":
        raise ConfigError(
            "attention_backend=flash cannot be batch_invariant, as FlashAttention chooses by the step; use "
            "--attention-backend=triton, or leave --batch-invariant out."
        )


def _check_numbers(args: Any, hints: dict[str, Any]) -> None:
    """Refuse what is no number where one is due, which a program may give and the command line cannot."""
    for fld in dataclasses.fields(args):
        value, kinds = getattr(args, fld.name), set(typing.get_args(hints[fld.name])) or {hints[fld.name]}
        if value is None or (fld.name == "max_model_len" and value == "auto"):
            continue
        for kind, number, what in ((int, numbers.Integral, "a whole number"), (float, numbers.Real, "a number")):
            if kind in kinds and (not isinstance(value, number) or isinstance(value, bool)):
                raise ConfigError(f"{fld.name} must be {what}, got {value!r}.")
