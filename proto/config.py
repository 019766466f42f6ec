"""EngineArgs: every flag, its default, its help, and the processes that take it. vLLM's names throughout.

``quire serve`` and ``LLM`` take them all; each service's ``__main__`` takes its own; ``argv_for`` turns the first
into the second, so a flag is written once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import tempfile
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from .config_error import ConfigError as ConfigError
from .config_values import check_values
from .flag_parser import FlagParser as FlagParser
from .flag_parser import Several, human_length
from .flag_parser import human_int as human_int

SERVICES = ("frontend", "detokenizer", "scheduler", "gpu_worker")
EVERY = SERVICES

STEP_TOKENS, CPU_STEP_TOKENS = 2048, 512
"""Default token budgets of one step. A CPU's is smaller: every answer waits for the prompts that share its step, and a
CPU computes 512 tokens as fast, token for token, as 2,048 (docs/benchmarks.md)."""
CHUNK_TOKENS = 256
"""Tokens for prompts that a default budget has room for beside a decode of every sequence."""

_hints = functools.cache(typing.get_type_hints)  # which takes milliseconds


def _flag(
    default: Any, services: tuple[str, ...], help: str, choices: tuple[str, ...] | None = None, also: str = "",
    several: bool = False,
) -> Any:  # fmt: skip
    """``also``: another spelling; ``several``: the command line takes several values, as for a list."""
    return field(default=default, metadata={
        "services": services, "help": help, "choices": choices, "also": also, "several": several,
    })  # fmt: skip


_MODEL = ("frontend", "detokenizer", "gpu_worker")
_CORE = ("scheduler",)
_WORK = ("gpu_worker",)
_TEXT = ("detokenizer",)
_HTTP = ("frontend",)
_LISTENS = ("detokenizer", "gpu_worker")
_WORDS = ("detokenizer", "gpu_worker")  # the worker's grammars are made of the tokenizer's tokens


@dataclass
class EngineArgs:
    """All flags. Every service reads only those that name it."""

    # Model
    model: str | None = _flag(None, _MODEL, "folder or hub id; the demo model when left out")
    revision: str | None = _flag(None, _MODEL, "branch, tag or commit of the model")
    download_dir: str | None = _flag(None, _MODEL, "where downloads are kept (default: the hub's cache)")
    code_revision: str | None = _flag(None, _WORK, "branch, tag or commit of the model's code, with trust_remote_code")
    trust_remote_code: bool = _flag(
        False, _MODEL, "run Python code that comes with the model, where it is of no family known here"
    )
    max_model_len: int | None = _flag(
        None, _MODEL, "longest prompt + output in tokens; 32k, 32K; auto or -1: what the model allows, or as much of "
        "it as fits the memory",
    )  # fmt: skip
    hf_overrides: str | None = _flag(None, _MODEL, "JSON object of values over those of config.json")
    rope_scaling: str | None = _flag(None, _MODEL, "JSON object in place of config.json's rope_scaling")
    rope_theta: float | None = _flag(None, _MODEL, "number in place of config.json's rope_theta")
    model_impl: str = _flag(
        "auto", _WORK, "whose model runs: auto: quire's where it knows the architecture, else transformers' with "
        "quire's attention", ("auto", "quire", "transformers"),
    )  # fmt: skip
    tokenizer: str | None = _flag(None, _MODEL, "folder or hub id of the tokenizer (default: the model's)")
    tokenizer_mode: str = _flag("auto", _TEXT, "auto: the fast tokenizer if there is one", ("auto", "slow"))
    tokenizer_revision: str | None = _flag(None, _MODEL, "branch, tag or commit of the tokenizer")
    skip_tokenizer_init: bool = _flag(
        False, ("frontend", "detokenizer", "gpu_worker"), "no tokenizer: prompts are token ids, and no text comes out"
    )
    chat_template: str | None = _flag(
        None, ("frontend", "detokenizer"), "a jinja file, or the template itself, in place of the model's"
    )
    load_format: str = _flag(
        "auto", _WORK, "auto: safetensors; pt: pickled tensors (.bin, .pt); dummy: random weights by config",
        ("auto", "safetensors", "pt", "dummy"),
    )  # fmt: skip
    dtype: str = _flag(
        "auto", _WORK, "type of weights and activations",
        ("auto", "half", "float16", "bfloat16", "float", "float32"),
    )  # fmt: skip
    quantization: str | None = _flag(
        None,
        _WORK,
        "how the checkpoint is quantized (default: as it says), or, of a float one, what its weights become "
        "while they are loaded: fp8, int8, int4",
    )
    quantize_lm_head: bool | None = _flag(
        None, _WORK, "with --quantization, the lm_head too (default: with int8, int4)"
    )
    runner: str = _flag(
        "auto", _MODEL, "what the model is served for; auto: by its files", ("auto", "generate", "pooling")
    )
    convert: str = _flag(
        "auto", _MODEL, "with --runner pooling, what is made of the model; auto: by its architecture",
        ("auto", "none", "embed", "classify"),
    )  # fmt: skip
    pooler_config: str | None = _flag(
        None, _MODEL, "JSON object over the model's own: pooling_type, normalize, dimensions, use_activation"
    )

    # Adapters (LoRA)
    enable_lora: bool = _flag(False, ("frontend", "gpu_worker"), "take low-rank adapters of the model (docs/lora.md)")
    max_loras: int = _flag(1, _WORK, "adapters that a worker has ready at once")
    max_lora_rank: int = _flag(16, ("frontend", "gpu_worker"), "highest rank: 1, 8, 16, 32, 64, 128, 256, 320 or 512")
    max_cpu_loras: int | None = _flag(
        None, _WORK, "adapters that a worker keeps in host memory, at least max_loras (default: as many)"
    )
    lora_dtype: str = _flag(
        "auto", _WORK, "type of adapters' weights; auto: the model's", ("auto", "float16", "bfloat16", "float32")
    )
    fully_sharded_loras: bool = _flag(
        False, _WORK, "with tensor parallelism, divide both matrices of an adapter among the ranks"
    )
    lora_modules: list[str] | None = _flag(
        None, _HTTP, "adapters that requests may name as their model: name=path, or a JSON object with name, path and "
        "base_model_name"
    )  # fmt: skip
    lora_root: str | None = _flag(
        None, _HTTP, "folder below which /v1/load_lora_adapter, which needs --admin-api-key, may load adapters"
    )

    # Generation
    generation_config: str = _flag(
        "auto", _HTTP, "where default sampling parameters come from: auto (the model's generation_config.json), quire "
        "(SamplingParams' own), or a folder with such a file",
    )  # fmt: skip
    override_generation_config: str | None = _flag(None, _HTTP, "JSON object of sampling defaults over those")
    max_logprobs: int = _flag(20, ("detokenizer", "gpu_worker"), "most logprobs a token may be asked for; -1: no limit")
    logprobs_mode: str = _flag(
        "raw_logprobs", _WORK, "what logprobs are of: raw: the model's own logits (and a grammar's mask); processed: "
        "after penalties, temperature and filters",
        ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )  # fmt: skip
    logits_processor: list[str] | None = _flag(
        None, _WORK, "functions that requests may name in logits_processors, as package.module:function",
        also="--logits-processors",
    )  # fmt: skip

    # Speculation
    speculative_config: str | None = _flag(
        None, _WORK, "JSON object of how tokens are drafted ahead of time: method, num_speculative_tokens, ... "
        "(docs/speculation.md); outputs stay the same",
    )  # fmt: skip
    speculative_model: str | None = _flag(None, (), "model of speculative_config: a folder or hub id, or [ngram]")
    num_speculative_tokens: int | None = _flag(None, (), "the same of speculative_config: tokens drafted in a step")
    speculative_draft_tensor_parallel_size: int | None = _flag(
        None, (), "draft_tensor_parallel_size of speculative_config", also="-spec-draft-tp"
    )
    speculative_max_model_len: int | None = _flag(None, (), "max_model_len of speculative_config")
    speculative_disable_by_batch_size: int | None = _flag(None, (), "disable_by_batch_size of speculative_config")
    speculative_model_quantization: str | None = _flag(None, (), "quantization of speculative_config")
    ngram_prompt_lookup_max: int | None = _flag(None, (), "prompt_lookup_max of speculative_config")
    ngram_prompt_lookup_min: int | None = _flag(None, (), "prompt_lookup_min of speculative_config")
    spec_decoding_acceptance_method: str = _flag(
        "rejection_sampler", (), "accepted for vLLM's sake: a drafted token is kept where it is just what would have "
        "been drawn", ("rejection_sampler", "typical_acceptance_sampler"),
    )  # fmt: skip
    disable_logprobs_during_spec_decoding: bool = _flag(
        False, (), "accepted for vLLM's sake: logprobs are those of a run without speculation"
    )

    # Device and memory
    device: str = _flag("auto", _WORK, "auto: cuda where there is one", ("auto", "cpu", "cuda"))
    gpu_memory_utilization: float = _flag(0.9, _WORK, "share of the device's memory for weights, activations and KV")
    kv_cache_memory_bytes: int | None = _flag(None, _WORK, "bytes of KV cache, in place of what profiling finds")
    num_gpu_blocks_override: int | None = _flag(None, _WORK, "number of KV blocks, in place of what profiling finds")
    kv_cache_dtype: str = _flag(
        "auto", _WORK, "type of the KV cache; auto: the model's, or fp8 where the checkpoint asks for it; fp8 is "
        "fp8_e4m3, and int8, for CPUs, is int8_per_token_head",
        ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"),
    )  # fmt: skip
    calculate_kv_scales: bool = _flag(False, _WORK, "measure an fp8 KV cache's scales at load, not the checkpoint's")
    enforce_eager: bool = _flag(False, _WORK, "no CUDA graphs")
    swap_space: float = _flag(0, _WORK, "GiB of each worker's host memory that keep KV blocks which leave its cache")
    kv_offloading_size: float | None = _flag(None, _WORK, "the same for all workers of a copy of the model together")
    kv_offloading_backend: str = _flag("native", _WORK, "what keeps them", ("native",))
    kv_disk_path: str | None = _flag(None, _WORK, "folder that keeps KV blocks over restarts, with --kv-disk-size")
    kv_disk_size: float | None = _flag(None, _WORK, "GiB that they may take there, for each copy of the model")
    attention_backend: str = _flag(
        "auto", _WORK, "what computes the attention of prompts on a GPU; flash: FlashAttention, of quire[flash], on "
        "Hopper and B200; decodes are Triton's, and auto is triton", ("auto", "triton", "flash"),
    )  # fmt: skip
    batch_invariant: bool = _flag(False, _WORK, "on a GPU, compute a row with the same bits in any company; slower")
    max_seq_len_to_capture: int | None = _flag(
        None, _WORK, "longest sequence that CUDA graphs of decode steps cover (default: max_model_len)"
    )
    cpu_threads: int | None = _flag(None, _WORK, "compute threads on a CPU (default: chosen from the cores)")
    seed: int = _flag(0, _WORK, "seed of dummy weights")

    # Scheduling
    block_size: int = _flag(16, _CORE, "tokens in a KV block: 8, 16 or 32")
    max_num_seqs: int = _flag(256, _CORE, "sequences in one step at most")
    max_num_batched_tokens: int | None = _flag(
        None, _CORE, f"token budget of one step (default: {STEP_TOKENS}, or {CPU_STEP_TOKENS} on a CPU)"
    )
    enable_prefix_caching: bool = _flag(True, _CORE, "share the KV blocks of equal prefixes")
    enable_chunked_prefill: bool = _flag(True, _CORE, "split long prompts over steps")
    scheduling_policy: str = _flag("fcfs", _CORE, "priority: lower number first", ("fcfs", "priority"))
    max_num_queued_reqs: int = _flag(2048, ("scheduler", "frontend"), "requests that may wait; more get 429")
    max_num_queued_tokens: int | None = _flag(None, _CORE, "prompt tokens that may wait; more get 429")

    max_requests_per_key: int | None = _flag(
        None, _CORE, "requests of one API key that may be open at once; more get 429"
    )
    queue_timeout: float | None = _flag(None, _CORE, "seconds a request may wait for its first step; then it gets 503")

    # When something fails or leaves; seconds
    worker_timeout: float = _flag(15.0, _CORE, "a worker that has not been heard of for so long is taken for hung")
    step_timeout: float = _flag(300.0, _CORE, "a step that has not ended in so long is taken for hung")
    drain_timeout: float = _flag(
        30.0, ("scheduler", "gpu_worker"), "what a worker that leaves may finish; the rest goes to other workers"
    )
    shutdown_timeout: float = _flag(30.0, _HTTP, "what requests that are open when the server ends may take")

    # A bug report that reproduces itself
    flight_recorder: str | None = _flag(
        None, _CORE, "file that keeps what the scheduler was sent lately, for `quire replay`"
    )
    flight_recorder_size: float = _flag(64, _CORE, "its size in MB; what is older is overwritten")
    flight_recorder_tokens: bool = _flag(False, _CORE, "record token ids too, of prompts and outputs")

    # HTTP
    host: str = _flag("0.0.0.0", _HTTP, "address to listen on")
    port: int = _flag(8000, _HTTP, "port to listen on; 0 takes a free one")
    served_model_name: list[str] | None = _flag(None, _HTTP, "names the API answers to (default: the model's)")
    api_key: str | None = _flag(
        None, _HTTP, "required as a bearer token; several with spaces or commas; also QUIRE_API_KEY", several=True
    )
    admin_api_key: str | None = _flag(
        None, _HTTP, "the key that routes of administrators ask for, which are there only with one (/sleep, /wake_up, "
        "/is_sleeping, /v1/load_lora_adapter, /v1/unload_lora_adapter); several as for --api-key; also "
        "QUIRE_ADMIN_API_KEY", several=True,
    )  # fmt: skip
    enable_auto_tool_choice: bool = _flag(
        True, _HTTP, "let models choose whether to call tools, where it is known how they write calls"
    )
    tool_call_parser: str | None = _flag(
        None, _HTTP, "how the model writes calls of tools: hermes, llama3_json, ... (docs/tools.md; default: by its "
        "chat template)",
    )  # fmt: skip
    reasoning_parser: str | None = _flag(
        None, _HTTP, "how the model writes its thoughts, told as reasoning: deepseek_r1, qwen3, ... (docs/tools.md; "
        "default: they are part of the answer)",
    )  # fmt: skip
    max_request_bytes: int = _flag(8 * 2**20, _HTTP, "largest request body in bytes; more gets 413")
    max_n: int = _flag(128, _HTTP, "most choices of one prompt, n and best_of, that a request may ask for")

    # Processes (read by `quire serve` and LLM alone)
    data_parallel_size: int = _flag(1, (), "copies of the model to start, each with workers of its own")
    api_server_count: int = _flag(1, (), "frontends to start, sharing the port")
    detokenizer_count: int = _flag(1, (), "detokenizers to start")

    # One copy of the model in several workers
    tensor_parallel_size: int = _flag(1, _WORK, "workers among which each layer is shared out", also="-tp")
    pipeline_parallel_size: int = _flag(1, _WORK, "parts, one after the other, into which the layers are split; each "
                                        "has tensor_parallel_size workers", also="-pp")  # fmt: skip
    disable_custom_all_reduce: bool = _flag(
        False, _WORK, "sum small tensors among GPUs by NCCL too, and not in one launch over symmetric memory"
    )
    rank: int = _flag(0, _WORK, "which of its copy's workers this one is; `quire serve` and LLM set it themselves")
    master_addr: str = _flag(
        "127.0.0.1", _WORK, "where a copy's workers meet: the machine of the one that speaks for them, rank "
        "(pipeline_parallel_size - 1) * tensor_parallel_size; or ipc://FILE on one machine"
    )  # fmt: skip
    master_port: int = _flag(29501, _WORK, "the port there")

    worker_role: str = _flag(
        "both", _WORK, "prefill: computes prompts, and hands what it began to a worker that decodes; decode: takes it "
        "over; of either kind none, and the other does both", ("prefill", "decode", "both"),
    )  # fmt: skip

    # Wires
    scheduler: str | None = _flag(None, EVERY, "the scheduler's address: ipc://FOLDER or tcp://HOST:PORT")
    advertise: str | None = _flag(None, _LISTENS, "address others reach this process at, when not the one it binds")
    bind: str | None = _flag(None, _LISTENS, "address to listen on (default: a socket file beside the scheduler's)")
    keys: str | None = _flag(None, EVERY, "CURVE key file made by `quire keygen`; needed for tcp:// off loopback")
    log_level: str = _flag("info", EVERY, "least severe level to log", ("debug", "info", "warning", "error"))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a script's parser all flags: ``LLM(**vars(parser.parse_args()))`` then takes them."""
        add_flags(parser)
        return parser

    def check(self) -> EngineArgs:
        """Refuse values that cannot work. Returns self. Raises ConfigError."""
        check_values(self, _hints(EngineArgs))
        return self

    def token_budget(self, cpu: bool = False) -> int:
        """The most tokens of one step: max_num_batched_tokens, or a default for a ``cpu`` or for any other worker.

        Where prompts are not split the default is the same for all, because it is also the longest prompt.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        default = CPU_STEP_TOKENS if cpu and self.enable_chunked_prefill else STEP_TOKENS
        return max(default, self.max_num_seqs + CHUNK_TOKENS)

    def argv_for(self, service: str) -> list[str]:
        """The command-line flags for one service: those that name it and differ from their defaults."""
        argv: list[str] = []
        for fld in dataclasses.fields(self):
            value = getattr(self, fld.name)
            if service not in fld.metadata["services"] or value == fld.default:
                continue
            name = "--" + fld.name.replace("_", "-")
            if isinstance(value, bool):
                argv.append(name if value else "--no-" + name[2:])
            elif isinstance(value, list):
                argv += [f"{name}={one}" for one in value]  # one by one, for a value may begin with a dash
            else:
                argv.append(f"{name}={value}")
        return argv


def add_flags(parser: argparse.ArgumentParser, service: str | None = None, skip: tuple[str, ...] = ()) -> None:
    """Add the flags of one service, or of all of them, to a parser."""
    hints = _hints(EngineArgs)
    for fld in dataclasses.fields(EngineArgs):
        if fld.name in skip or (service and service not in fld.metadata["services"]) or not fld.metadata["help"]:
            continue  # one without help is not offered yet
        kind = hints[fld.name]
        if isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        shown = "" if fld.default is None or isinstance(fld.default, bool) else f" (default: {fld.default})"
        kwargs: dict[str, Any] = {"default": fld.default, "help": fld.metadata["help"] + shown}
        if kind is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list or fld.metadata["several"]:
            kwargs.update(nargs="+", action=Several)
        else:
            parse = human_length if fld.name == "max_model_len" else human_int if kind is int else kind
            kwargs.update(type=parse, choices=fld.metadata["choices"])
        names = ([fld.metadata["also"]] if fld.metadata["also"] else []) + ["--" + fld.name.replace("_", "-")]
        parser.add_argument(*names, dest=fld.name, **kwargs)


def from_namespace(namespace: argparse.Namespace) -> EngineArgs:
    """EngineArgs of a parsed command line, checked."""
    names = {fld.name for fld in dataclasses.fields(EngineArgs)}
    return EngineArgs(**{k: v for k, v in vars(namespace).items() if k in names}).check()


def parse_service_args(service: str, argv: list[str] | None = None) -> EngineArgs:
    """Parse ``python -m quire.<service>``'s command line; a bad one ends the process with one line and code 2."""
    parser = FlagParser(prog=f"python -m quire.{service}")
    add_flags(parser, service)
    try:
        args = from_namespace(parser.parse_args(argv))
    except ConfigError as error:
        parser.error(str(error))
    if args.scheduler is None:
        args.scheduler = "ipc://" + default_run_dir()
    return args


def default_run_dir() -> str:
    """The folder for socket files when none is named: one for each user, so four shells find each other."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, "quire") if base else os.path.join(tempfile.gettempdir(), f"quire-{os.getuid()}")
