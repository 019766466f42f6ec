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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config_error import ConfigError as ConfigError
from .config_values import check_values
from .flag import CORE, EVERY, HTTP, LISTENS, MODEL, TEXT, WORK, flag
from .flag import SERVICES as SERVICES
from .flag_parser import FlagParser as FlagParser
from .flag_parser import Several, human_length, port_number
from .flag_parser import human_int as human_int
from .flag_words import TASKS, reader_of
from .http_args import HttpArgs

STEP_TOKENS, CPU_STEP_TOKENS = 2048, 896
"""Default token budgets of one step. A CPU's is smaller: every answer waits for the prompts that share its step, and a
CPU computes 896 tokens as fast, token for token, as 2,048 (docs/benchmarks.md)."""
CPU_ENOUGH_TOKENS = 256
"""Tokens of prompts with which a CPU's step is about as fast, token for token, as with more."""
CHUNK_TOKENS = 256
"""Tokens for prompts that a default budget has room for beside a decode of every sequence."""

_hints = functools.cache(typing.get_type_hints)  # which takes milliseconds


@dataclass
class EngineArgs(HttpArgs):
    """All flags. Every service reads only those that name it."""

    # Model
    model: str | None = flag(None, MODEL, "folder or hub id; the demo model when left out")
    revision: str | None = flag(None, MODEL, "branch, tag or commit of the model")
    download_dir: str | None = flag(None, MODEL, "where downloads are kept (default: the hub's cache)")
    hf_token: str | None = flag(
        None, MODEL, "token of the hub, for models that ask for one; alone, that of `hf auth login`; also HF_TOKEN",
        const="",
    )  # fmt: skip
    code_revision: str | None = flag(None, WORK, "branch, tag or commit of the model's code, with trust_remote_code")
    trust_remote_code: bool = flag(
        False, MODEL, "run Python code that comes with the model, where it is of no family known here"
    )
    max_model_len: int | None = flag(
        None, MODEL, "longest prompt + output in tokens; 32k, 32K; auto or -1: what the model allows, or as much of "
        "it as fits the memory",
    )  # fmt: skip
    disable_sliding_window: bool = flag(
        False, MODEL, "cap max_model_len at the model's sliding window, so that every token sees all before it"
    )
    hf_overrides: str | None = flag(None, MODEL, "JSON object of values over those of config.json")
    rope_scaling: str | None = flag(None, MODEL, "JSON object in place of config.json's rope_scaling")
    rope_theta: float | None = flag(None, MODEL, "number in place of config.json's rope_theta")
    model_impl: str = flag(
        "auto", WORK, "whose model runs: auto: quire's where it knows the architecture, else transformers' with "
        "quire's attention", ("auto", "quire", "transformers"),
    )  # fmt: skip
    tokenizer: str | None = flag(None, MODEL, "folder or hub id of the tokenizer (default: the model's)")
    tokenizer_mode: str = flag("auto", TEXT, "auto: the fast tokenizer if there is one", ("auto", "slow"))
    tokenizer_revision: str | None = flag(None, MODEL, "branch, tag or commit of the tokenizer")
    skip_tokenizer_init: bool = flag(
        False, ("frontend", "detokenizer", "gpu_worker"), "no tokenizer: prompts are token ids, and no text comes out"
    )
    chat_template: str | None = flag(
        None, ("frontend", "detokenizer"), "a jinja file, or the template itself, in place of the model's"
    )
    chat_template_content_format: str = flag(
        "auto", TEXT, "how chat templates are given contents: as a string, or as openai's list of parts; auto: as the "
        "template reads them", ("auto", "string", "openai"),
    )  # fmt: skip
    allow_special_tokens_in_content: bool = flag(
        False, TEXT, "let special tokens that messages and tools hold be special tokens; a user can then forge turns"
    )
    load_format: str = flag(
        "auto", WORK, "auto: safetensors; pt: pickled tensors (.bin, .pt); dummy: random weights by config",
        ("auto", "safetensors", "pt", "dummy"),
    )  # fmt: skip
    dtype: str = flag(
        "auto", WORK, "type of weights and activations",
        ("auto", "half", "float16", "bfloat16", "float", "float32"),
    )  # fmt: skip
    quantization: str | None = flag(
        None,
        WORK,
        "how the checkpoint is quantized (default: as it says), or, of a float one, what its weights become "
        "while they are loaded: fp8, int8, int4",
        also="-q",
    )
    quantize_lm_head: bool | None = flag(None, WORK, "with --quantization, the lm_head too (default: with int8, int4)")
    runner: str = flag(
        "auto", MODEL, "what the model is served for; auto: by its files", ("auto", "generate", "pooling")
    )
    task: str = flag(
        "auto", (), "vLLM's older word for --runner and --convert: generate, embed, classify, score or reward",
        tuple(TASKS),
    )  # fmt: skip
    convert: str = flag(
        "auto", MODEL, "with --runner pooling, what is made of the model; auto: by its architecture",
        ("auto", "none", "embed", "classify"),
    )  # fmt: skip
    pooler_config: str | None = flag(
        None, MODEL, "JSON object over the model's own: pooling_type, normalize, dimensions, use_activation",
        also="--override-pooler-config",
    )  # fmt: skip

    # Adapters (LoRA)
    enable_lora: bool = flag(False, ("frontend", "gpu_worker"), "take low-rank adapters of the model (docs/lora.md)")
    max_loras: int = flag(1, WORK, "adapters that a worker has ready at once")
    max_lora_rank: int = flag(16, ("frontend", "gpu_worker"), "highest rank: 1, 8, 16, 32, 64, 128, 256, 320 or 512")
    max_cpu_loras: int | None = flag(
        None, WORK, "adapters that a worker keeps in host memory, at least max_loras (default: as many)"
    )
    lora_dtype: str = flag(
        "auto", WORK, "type of adapters' weights; auto: the model's", ("auto", "float16", "bfloat16", "float32")
    )
    fully_sharded_loras: bool = flag(
        False, WORK, "with tensor parallelism, divide both matrices of an adapter among the ranks"
    )
    lora_modules: list[str] | None = flag(
        None, HTTP, "adapters that requests may name as their model: name=path, or a JSON object with name, path and "
        "base_model_name"
    )  # fmt: skip
    lora_root: str | None = flag(
        None, HTTP, "folder below which /v1/load_lora_adapter, which needs --admin-api-key, may load adapters"
    )

    # Generation
    generation_config: str = flag(
        "auto", HTTP, "where default sampling parameters come from: auto (the model's generation_config.json), quire "
        "(SamplingParams' own), or a folder with such a file",
    )  # fmt: skip
    override_generation_config: str | None = flag(None, HTTP, "JSON object of sampling defaults over those")
    max_logprobs: int = flag(20, ("detokenizer", "gpu_worker"), "most logprobs a token may be asked for; -1: no limit")
    logprobs_mode: str = flag(
        "raw_logprobs", WORK, "what logprobs are of: raw: the model's own logits (and a grammar's mask); processed: "
        "after penalties, temperature and filters",
        ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )  # fmt: skip
    logits_processor: list[str] | None = flag(
        None, WORK, "functions that requests may name in logits_processors, as package.module:function",
        also="--logits-processors",
    )  # fmt: skip

    # Structured output
    structured_outputs_config: str | None = flag(
        None, HTTP, "JSON object: disable_any_whitespace, disable_additional_properties, "
        "allow_additional_properties, reasoning_parser, and backend, of which there is one",
    )  # fmt: skip
    guided_decoding_backend: str | None = flag(None, (), "the same of structured_outputs_config: backend")
    guided_decoding_disable_any_whitespace: bool = flag(False, (), "the same: disable_any_whitespace")
    guided_decoding_disable_additional_properties: bool = flag(False, (), "the same: disable_additional_properties")

    # Speculation
    speculative_config: str | None = flag(
        None, WORK, "JSON object of how tokens are drafted ahead of time: method, num_speculative_tokens, ... "
        "(docs/speculation.md); outputs stay the same",
        also="-sc",
    )  # fmt: skip
    speculative_model: str | None = flag(
        None, (), "model of speculative_config: a folder or hub id, or [ngram]", also="--spec-model"
    )
    num_speculative_tokens: int | None = flag(
        None, (), "the same of speculative_config: tokens drafted in a step", also="--spec-tokens"
    )
    speculative_draft_tensor_parallel_size: int | None = flag(
        None, (), "draft_tensor_parallel_size of speculative_config", also="-spec-draft-tp"
    )
    speculative_max_model_len: int | None = flag(None, (), "max_model_len of speculative_config")
    speculative_disable_by_batch_size: int | None = flag(None, (), "disable_by_batch_size of speculative_config")
    speculative_model_quantization: str | None = flag(None, (), "quantization of speculative_config")
    ngram_prompt_lookup_max: int | None = flag(None, (), "prompt_lookup_max of speculative_config")
    ngram_prompt_lookup_min: int | None = flag(None, (), "prompt_lookup_min of speculative_config")
    spec_decoding_acceptance_method: str = flag(
        "rejection_sampler", (), "accepted for vLLM's sake: a drafted token is kept where it is just what would have "
        "been drawn", ("rejection_sampler", "typical_acceptance_sampler"),
    )  # fmt: skip
    disable_logprobs_during_spec_decoding: bool = flag(
        False, (), "accepted for vLLM's sake: logprobs are those of a run without speculation"
    )

    profiler_config: str | None = flag(
        None, WORK, "JSON object: profiler (torch) and torch_profiler_dir, where /start_profile and /stop_profile have "
        "workers write traces of their steps",
    )  # fmt: skip

    # Device and memory
    device: str = flag("auto", WORK, "auto: cuda where there is one", ("auto", "cpu", "cuda"))
    gpu_memory_utilization: float = flag(0.9, WORK, "share of the device's memory for weights, activations and KV")
    kv_cache_memory_bytes: int | None = flag(None, WORK, "bytes of KV cache, in place of what profiling finds")
    num_gpu_blocks_override: int | None = flag(None, WORK, "number of KV blocks, in place of what profiling finds")
    kv_cache_dtype: str = flag(
        "auto", WORK, "type of the KV cache; auto: the model's, or fp8 where the checkpoint asks for it; fp8 is "
        "fp8_e4m3, and int8, for CPUs, is int8_per_token_head",
        ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"),
    )  # fmt: skip
    calculate_kv_scales: bool = flag(False, WORK, "measure an fp8 KV cache's scales at load, not the checkpoint's")
    enforce_eager: bool = flag(False, WORK, "no CUDA graphs")
    swap_space: float = flag(0, WORK, "GiB of each worker's host memory that keep KV blocks which leave its cache")
    kv_offloading_size: float | None = flag(None, WORK, "the same for all workers of a copy of the model together")
    kv_offloading_backend: str = flag("native", WORK, "what keeps them", ("native",))
    kv_disk_path: str | None = flag(None, WORK, "folder that keeps KV blocks over restarts, with --kv-disk-size")
    kv_disk_size: float | None = flag(None, WORK, "GiB that they may take there, for each copy of the model")
    attention_backend: str = flag(
        "auto", WORK, "what computes the attention of prompts on a GPU; flash: FlashAttention, of quire[flash], on "
        "Hopper and B200; decodes are Triton's, and auto is triton", ("auto", "triton", "flash"),
    )  # fmt: skip
    batch_invariant: bool = flag(False, WORK, "on a GPU, compute a row with the same bits in any company; slower")
    max_seq_len_to_capture: int | None = flag(
        None, WORK, "longest sequence that CUDA graphs of decode steps cover (default: max_model_len)"
    )
    cudagraph_capture_sizes: list[int] | None = flag(
        None, WORK, "numbers of rows of which decode steps are captured as CUDA graphs (default: 1, 2, 4, then every "
        "eighth)", also="--cuda-graph-sizes",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = flag(None, WORK, "the largest of them")
    cpu_threads: int | None = flag(None, WORK, "compute threads on a CPU (default: chosen from the cores)")
    seed: int = flag(0, WORK, "seed of dummy weights")

    # Scheduling
    block_size: int = flag(16, CORE, "tokens in a KV block: 8, 16 or 32")
    max_num_seqs: int = flag(256, CORE + HTTP, "sequences in one step at most")
    max_num_batched_tokens: int | None = flag(
        None, CORE, f"token budget of one step (default: {STEP_TOKENS}, or {CPU_STEP_TOKENS} on a CPU)"
    )
    enable_prefix_caching: bool = flag(True, CORE, "share the KV blocks of equal prefixes")
    kv_cache_metrics: bool = flag(False, CORE, "measure how long KV blocks live, lie idle and wait to be used again")
    kv_cache_metrics_sample: float = flag(0.01, CORE, "share of blocks that are measured, above 0 and up to 1")
    enable_chunked_prefill: bool = flag(True, CORE, "split long prompts over steps")
    scheduling_policy: str = flag("fcfs", CORE, "priority: lower number first", ("fcfs", "priority"))
    max_num_queued_reqs: int = flag(2048, ("scheduler", "frontend"), "requests that may wait; more get 429")
    max_num_queued_tokens: int | None = flag(None, CORE, "prompt tokens that may wait; more get 429")

    max_requests_per_key: int | None = flag(
        None, CORE, "requests of one API key that may be open at once; more get 429"
    )
    queue_timeout: float | None = flag(None, CORE, "seconds a request may wait for its first step; then it gets 503")

    # When something fails or leaves; seconds
    worker_timeout: float = flag(15.0, CORE, "a worker that has not been heard of for so long is taken for hung")
    step_timeout: float = flag(300.0, CORE, "a step that has not ended in so long is taken for hung")
    drain_timeout: float = flag(
        30.0, ("scheduler", "gpu_worker"), "what a worker that leaves may finish; the rest goes to other workers"
    )
    shutdown_timeout: float = flag(30.0, HTTP, "what requests that are open when the server ends may take")

    # A bug report that reproduces itself
    flight_recorder: str | None = flag(
        None, CORE, "file that keeps what the scheduler was sent lately, for `quire replay`"
    )
    flight_recorder_size: float = flag(64, CORE, "its size in MB; what is older is overwritten")
    flight_recorder_tokens: bool = flag(False, CORE, "record token ids too, of prompts and outputs")

    # Processes (read by `quire serve` and LLM alone)
    data_parallel_size: int = flag(1, (), "copies of the model to start, each with workers of its own", also="-dp")
    api_server_count: int = flag(1, (), "frontends to start, sharing the port", also="-asc")
    headless: bool = flag(False, (), "start workers alone, for the scheduler at --scheduler on another machine")
    detokenizer_count: int = flag(1, (), "detokenizers to start")

    # One copy of the model in several workers
    tensor_parallel_size: int = flag(1, WORK, "workers among which each layer is shared out", also="-tp")
    pipeline_parallel_size: int = flag(1, WORK, "parts, one after the other, into which the layers are split; each "
                                        "has tensor_parallel_size workers", also="-pp")  # fmt: skip
    disable_custom_all_reduce: bool = flag(
        False, WORK, "sum small tensors among GPUs by NCCL too, and not in one launch over symmetric memory"
    )
    rank: int = flag(0, WORK, "which of its copy's workers this one is; `quire serve` and LLM set it themselves")
    master_addr: str = flag(
        "127.0.0.1", WORK, "where a copy's workers meet: the machine of the one that speaks for them, rank "
        "(pipeline_parallel_size - 1) * tensor_parallel_size; or ipc://FILE on one machine"
    )  # fmt: skip
    master_port: int = flag(29501, WORK, "the port there")

    worker_role: str = flag(
        "both", WORK, "prefill: computes prompts, and hands what it began to a worker that decodes; decode: takes it "
        "over; of either kind none, and the other does both", ("prefill", "decode", "both"),
    )  # fmt: skip

    # Wires
    scheduler: str | None = flag(None, EVERY, "the scheduler's address: ipc://FOLDER or tcp://HOST:PORT")
    advertise: str | None = flag(None, LISTENS, "address others reach this process at, when not the one it binds")
    bind: str | None = flag(None, LISTENS, "address to listen on (default: a socket file beside the scheduler's)")
    keys: str | None = flag(None, EVERY, "CURVE key file made by `quire keygen`; needed for tcp:// off loopback")

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


GROUPS = {
    "host": "HTTP", "served_model_name": "Names and keys",
    "allowed_hosts": "From where, and how much", "enable_auto_tool_choice": "Answers", "log_level": "Log",
    "otlp_traces_endpoint": "Traces",
    "model": "Model", "enable_lora": "Adapters", "generation_config": "Generation",
    "structured_outputs_config": "Structured output", "speculative_config": "Speculation",
    "device": "Device and memory", "block_size": "Scheduling", "worker_timeout": "Failures and shutdown",
    "flight_recorder": "Flight recorder", "data_parallel_size": "Processes",
    "tensor_parallel_size": "One copy in several workers", "scheduler": "Wires",
}  # fmt: skip
"""The groups of ``--help``: each begins with the flag that is named."""


def add_flags(parser: argparse.ArgumentParser, service: str | None = None, skip: tuple[str, ...] = ()) -> None:
    """Add the flags of one service, or of all of them, to a parser, in groups."""
    hints = _hints(EngineArgs)
    group: Any = parser
    for fld in dataclasses.fields(EngineArgs):
        if fld.name in GROUPS:
            group = parser.add_argument_group(GROUPS[fld.name])
        if fld.name in skip or (service and service not in fld.metadata["services"]):
            continue
        group.add_argument(*flags_of(fld), dest=fld.name, **_options(fld, hints[fld.name]))


def flags_of(fld: dataclasses.Field[Any]) -> list[str]:
    """How a field is written on the command line."""
    return [*fld.metadata["also"].split(), "--" + fld.name.replace("_", "-")]


def _options(fld: dataclasses.Field[Any], kind: Any) -> dict[str, Any]:
    """What argparse is told of a field of type ``kind``."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    shown = "" if fld.default is None or isinstance(fld.default, bool) else f" (default: {fld.default})"
    options: dict[str, Any] = {"default": fld.default, "help": fld.metadata["help"] + shown}
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is list:
        each = human_int if typing.get_args(kind) == (int,) else str
        return options | {"nargs": "+", "action": Several, "type": each}
    if fld.metadata["several"]:
        return options | {"nargs": "+", "action": Several}
    if fld.metadata["const"] is not None:
        options |= {"nargs": "?", "const": fld.metadata["const"]}
    read: Callable[[str], Any] = human_int if kind is int else kind
    if fld.name == "max_model_len":
        read = human_length
    elif fld.name in ("port", "master_port"):
        read = port_number
    elif (reader := reader_of(fld.name)) is not None:
        read = reader
    return options | {"type": read, "choices": fld.metadata["choices"]}


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
