"""The flags of ``vllm serve`` that are no fields of EngineArgs: each is taken without effect, or refused by name.

The parser of ``quire serve`` and the table of docs/flags.md are made of this table. Flags of vLLM that are fields of
EngineArgs are honoured; ``HONOURED`` lists them, so that a test can tell when one of them is lost. The list is that of
vLLM 0.31, with the flags of 0.6 and later that it has dropped since.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from .flag_parser import FlagParser
from .foreign_flags import FOREIGN


class Row(NamedTuple):
    """One flag of vLLM. ``values``: those that change nothing where others are refused; empty: all, or none."""

    name: str  # without its dashes
    takes: str  # "switch", "value" or "values"
    refused: bool
    said: str  # why it changes nothing, or what to use in its place
    values: tuple[str, ...] = ()
    shorts: tuple[str, ...] = ()

    def told(self) -> str:
        """``values`` in words: "0" and "0.0" are one."""
        return " or ".join(dict.fromkeys(value.removesuffix(".0") for value in self.values))


TEXT_ALONE = "models here take text alone: no images, audio or video"
SPEED = "it chooses among vLLM's own kernels; quire's are chosen by the device and the step"
MAMBA = "no model here has Mamba layers"
METRIC = "/metrics has what is measured (docs/reliability.md); this is not"
MULTI_NODE = "start --headless workers on other machines, with --scheduler"

_NOTHING = {
    # why it changes nothing: flags; ! takes no value, * several, (a,b) names the values that change nothing
    "quire's own supervisor starts the processes, and they talk over ZeroMQ": "distributed-executor-backend "
    "data-parallel-backend,-dpb disable-frontend-multiprocessing! engine-use-ray! worker-use-ray! "
    "ray-workers-use-nsight! max-parallel-loading-workers disable-nccl-for-dp-synchronization!",
    "two plans are always in flight": "async-scheduling! disable-async-output-proc! num-scheduler-steps "
    "multi-step-stream-outputs! num-lookahead-slots",
    "kernels are compiled before the server is ready": "compilation-config,-cc optimization-level,-O "
    "performance-mode jit-monitor-mode jit-monitor-verbose! "
    "enable-flashinfer-autotune! additional-config",
    SPEED: "kernel-config ir-op-priority enable-bf16x3-router-gemm! moe-backend linear-backend "
    "gdn-prefill-backend kda-prefill-backend use-fp64-gumbel! disable-cascade-attn! enable-flash-late-interaction! "
    "use-tqdm-on-load! speculative-disable-mqa-scorer!",
    TEXT_ALONE: "allowed-local-media-path allowed-media-domains* language-model-only! limit-mm-per-prompt "
    "enable-mm-embeds! media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type "
    "mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend "
    "mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "
    "mm-encoder-fp8-scale-save-margin interleave-mm-strings! skip-mm-profiling! video-pruning-rate "
    "video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize! "
    "disable-mm-preprocessor-cache! disable-chunked-mm-input! enable-multimodal-encoder-data-parallel! "
    "enable-tower-connector-lora!",
    MAMBA: "mamba-backend mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding! mamba-cache-philox-rounds "
    "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode replayssm-buffer-len use-replayssm!",
    "a rank's experts are whole experts already (docs/parallel.md)": "enable-expert-parallel!,-ep "
    "expert-placement-strategy all2all-backend",
    "experts and batches are not moved about among ranks": "enable-eplb! eplb-config num-redundant-experts "
    "eplb-window-size eplb-step-interval eplb-log-balancedness! enable-ep-weight-filter! enable-dbo! ubatch-size "
    "dbo-decode-token-threshold dbo-prefill-token-threshold dp-sync-interval enable-batch-sharded-sampling!",
    "a sequence's context is never divided among ranks": "dcp-comm-backend dcp-q-replicate! "
    "dcp-kv-cache-interleave-size cp-kv-cache-interleave-size decode-context-parallel-size(1),-dcp "
    "prefill-context-parallel-size(1),-pcp",
    "lost processes are always started again, and their requests go on": "enable-fault-tolerance! "
    "fault-tolerance-config",
    "a sequence begins with blocks for all the tokens that it has": "scheduler-reserve-full-isl! watermark "
    "use-v2-block-manager! preemption-mode(recompute) disable-hybrid-kv-cache-manager! prefill-schedule-interval "
    "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold(0) scheduler-delay-factor(0,0.0)",
    "blocks have 128-bit BLAKE2b hashes, and any full block can be shared": "prefix-caching-hash-algo "
    "prefix-cache-retention-interval prefix-match-unit kv-sharing-fast-prefill!",
    "the loader reads just the parts that a process holds": "safetensors-load-strategy "
    "safetensors-prefetch-num-threads safetensors-prefetch-block-size ignore-patterns* pt-load-map-location",
    "/sleep and /wake_up need --admin-api-key alone": "enable-sleep-mode! enable-cumem-allocator! "
    "enable-nccl-comm-suspend!",
    "workers are not bound to cores or NUMA nodes; start them by numactl": "numa-bind! numa-bind-nodes* "
    "numa-bind-cpus*",
    "faults of the server are always logged with their stack": "log-error-stack!",
    "an output is logged once, when it is complete": "enable-log-deltas!",
    "the line of figures is of all workers together": "aggregate-engine-logging!",
    "no environment variable is validated": "fail-on-environ-validation!",
    "the page at /docs needs nothing from outside": "enable-offline-docs!",
    "--reasoning-parser is enough": "enable-reasoning!",
    "adapters of any kind share one set of slots": "specialize-active-lora! enable-mixed-moe-lora-format! "
    "enable-moe-shared-loras! enable-lora-bias! lora-extra-vocab-size",
    "tokenizers run in the detokenizer's process; see --detokenizer-count": "tokenizer-pool-size tokenizer-pool-type "
    "tokenizer-pool-extra-config renderer-num-workers intial-incremental-detokenization-offset",
    "every format that is known is read": "allow-deprecated-quantization! config-format(auto,hf)",
    "there is one grammar engine, quire's own, and it never falls back": "guided-decoding-disable-fallback!",
    "weights stay on the device": "cpu-offload-gb(0,0.0) offload-backend(auto)",
    "a model that is to call no tools is told of none": "exclude-tools-when-tool-choice-none!",
    "no metric is hidden": "show-hidden-metrics-for-version",
}

_REFUSED = {
    # what to use in its place: flags
    "HTTP is what there is; use --port": "grpc!",
    MULTI_NODE: "nnodes,-n node-rank,-r data-parallel-rank,-dpn data-parallel-start-rank,-dpr "
    "data-parallel-address,-dpa data-parallel-rpc-port,-dpp data-parallel-hybrid-lb!,-dph "
    "data-parallel-external-lb!,-dpe data-parallel-multi-port-external-lb!,-dpm enable-elastic-ep! "
    "data-parallel-supervisor-port dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s "
    "dp-supervisor-probe-failure-threshold",
    "--data-parallel-size counts the copies on this machine": "data-parallel-size-local,-dpl",
    "use --worker-timeout and --step-timeout": "distributed-timeout-seconds cpu-distributed-timeout-seconds",
    "set CUDA_VISIBLE_DEVICES": "device-ids",
    "use a smaller --dtype, --quantization, or --tensor-parallel-size": "cpu-offload-params* offload-group-size "
    "offload-num-in-group offload-prefetch-step offload-params*",
    "use --kv-offloading-size": "kv-cache-dtype-skip-layers* ec-transfer-config ec-manager-config",
    "use --worker-role (docs/kv-transfer.md)": "kv-transfer-config kv-events-config",
    "use --chat-template; a request's own template is refused": "trust-request-chat-template!",
    "use --tool-call-parser, which has its parsers built in": "tool-parser-plugin tool-server",
    "use --reasoning-parser, which has its parsers built in": "reasoning-parser-plugin "
    "cohere-is-reasoning-model! cohere-format",
    "use --log-level": "log-config-file enable-logging-iteration-details!",
    "timings are in /metrics": "enable-per-request-metrics! per-request-spec-decode-metrics!",
    "use /metrics, or --otlp-traces-endpoint": "cudagraph-metrics! enable-layerwise-nvtx-tracing! enable-mfu-metrics!",
    "answers carry no system_fingerprint": "fingerprint-mode fingerprint-value",
    "use --skip-tokenizer-init": "tokens-only!",
    "128 headers is the limit; use --max-header-bytes for their size": "h11-max-header-count",
    "use --hf-overrides": "hf-config-path model-class-overrides",
    "use --quantization": "quantization-config qlora-adapter-name-or-path",
    "prompts are text, token ids or embeddings": "io-processor-plugin",
    "use --logprobs-mode": "enable-return-routed-experts! return-sampling-mask! enable-trace-replay!",
    "use --load-format": "model-loader-extra-config weight-transfer-config",
    "use --dtype": "override-attention-dtype",
    "use --attention-backend": "attention-config,-ac",
    "code of others is taken by --middleware and --logits-processor": "worker-cls worker-extension-cls "
    "scheduler-cls logits-processor-pattern",
    "use --enable-lora": "enable-prompt-adapter! max-prompt-adapters max-prompt-adapter-token prompt-adapters* "
    "lora-target-modules* default-mm-loras long-lora-scaling-factors",
    "use --max-num-batched-tokens": "max-num-scheduled-tokens",
    "use --max-seq-len-to-capture": "max-context-len-to-capture",
    "use --speculative-config": "spec-method diffusion-config typical-acceptance-sampler-posterior-threshold "
    "typical-acceptance-sampler-posterior-alpha",
    "it needs images; models here take text": "mm-encoder-only!",
    "there is no Neuron device; use --device": "override-neuron-config",
}

_HONOURED = """
-asc -dp -pp -q -sc -tp allow-credentials allowed-headers allowed-methods allowed-origins api-key api-server-count
attention-backend block-size calculate-kv-scales chat-template chat-template-content-format code-revision
collect-detailed-traces config convert cuda-graph-sizes cudagraph-capture-sizes data-parallel-size
default-chat-template-kwargs device disable-access-log-for-endpoints
disable-custom-all-reduce disable-fastapi-docs disable-log-requests disable-log-stats
disable-logprobs-during-spec-decoding disable-sliding-window disable-uvicorn-access-log download-dir dtype
enable-auto-tool-choice enable-chunked-prefill enable-force-include-usage enable-log-outputs enable-log-requests
enable-lora enable-prefix-caching enable-prompt-embeds
enable-prompt-tokens-details enable-request-id-headers enable-server-load-tracking
enable-ssl-refresh enable-tokenizer-info-endpoint enforce-eager fully-sharded-loras generation-config
gpu-memory-utilization guided-decoding-backend guided-decoding-disable-additional-properties
guided-decoding-disable-any-whitespace h11-max-incomplete-event-size headless hf-overrides hf-token host
kv-cache-dtype kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample kv-offloading-backend
kv-offloading-size load-format logits-processors
logprobs-mode lora-dtype lora-modules master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
max-logprobs max-lora-rank max-loras max-model-len max-num-batched-tokens max-num-queued-reqs max-num-queued-tokens
max-num-seqs max-seq-len-to-capture middleware model model-impl ngram-prompt-lookup-max ngram-prompt-lookup-min
num-gpu-blocks-override num-speculative-tokens otlp-traces-endpoint override-generation-config override-pooler-config
pipeline-parallel-size pooler-config port profiler-config quantization reasoning-config reasoning-parser response-role
return-tokens-as-token-ids revision root-path rope-scaling rope-theta runner scheduling-policy seed
served-model-name shutdown-timeout skip-tokenizer-init spec-decoding-acceptance-method spec-model spec-tokens
speculative-config speculative-disable-by-batch-size speculative-draft-tensor-parallel-size
speculative-max-model-len speculative-model speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile
ssl-ciphers ssl-keyfile stream-interval structured-outputs-config swap-space task tensor-parallel-size tokenizer
tokenizer-mode tokenizer-revision tool-call-parser trust-remote-code uds uvicorn-log-level
"""
HONOURED = _HONOURED.split()
"""vLLM's flags that are honoured: fields of EngineArgs, ``--config``, and other names and short forms of them."""

NOTES = {
    "allow-credentials": "only with origins that are named",
    "allowed-headers": "a JSON list, or names with commas between them",
    "allowed-methods": "a JSON list, or names with commas between them",
    "allowed-origins": "a JSON list; none by default, as in vLLM since 0.32",
    "api-key": "also --api-key-file (docs/security.md)",
    "attention-backend": "auto, triton or flash; FLASH_ATTN and TRITON_ATTN are taken for the last two",
    "collect-detailed-traces": "each of its values is a span for each step in the worker",
    "config": "flags in a YAML file; the command line goes before it",
    "disable-uvicorn-access-log": "on unless --no-disable-uvicorn-access-log",
    "enable-auto-tool-choice": "on; the parser is known by the chat template",
    "enable-prompt-tokens-details": "on; --no-enable-prompt-tokens-details leaves them out",
    "generation-config": "auto, quire (vllm is taken for it) or a folder",
    "load-format": "auto, safetensors, pt or dummy; gguf and bitsandbytes are taken for auto",
    "model-impl": "auto, quire (vllm is taken for it) or transformers",
    "tokenizer-mode": "auto (hf is taken for it) or slow",
    "guided-decoding-backend": "any of vLLM's names; the grammars are quire's own",
    "h11-max-incomplete-event-size": "bytes of the headers; 16384 by default",
    "headless": "workers alone, for the scheduler at --scheduler",
    "master-addr": "where the ranks of one copy meet",
    "middleware": "a middleware of aiohttp, not of ASGI",
    "swap-space": "0 by default",
    "task": "sets --runner and --convert",
    "otlp-traces-endpoint": "http/protobuf but for grpc:// and port 4317 (docs/tracing.md)",
    "shutdown-timeout": "30 s by default",
    "structured-outputs-config": "of backends there is one; disable_fallback is not taken",
}
"""What is different from vLLM in flags that are honoured."""


def rows() -> Iterator[Row]:
    """The flags that are taken without effect or refused."""
    for refused, table in ((False, _NOTHING), (True, _REFUSED)):
        for said, names in table.items():
            for word in names.split():
                word, *shorts = _apart(word)
                word, _, values = word.partition("(")
                takes = {"!": "switch", "*": "values"}.get(word[-1], "value")
                allowed = tuple(values[:-1].split(",")) if values else ()
                yield Row(word.rstrip("!*"), takes, refused, said, allowed, tuple(shorts))


def _apart(word: str) -> list[str]:
    """A flag and its short form: ``watermark(0,0.0),-w`` has commas of two kinds."""
    at = word.rfind(",-")
    return [word] if at < 0 else [word[:at], word[at + 1 :]]


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser take vLLM's other flags. What was given without effect is in ``namespace.without_effect``, a list
    of (flag, why). Raises ConfigError, when the command line is read, for one that is refused."""
    if isinstance(parser, FlagParser):
        parser.foreign = FOREIGN
    taken = set(parser._option_string_actions)
    parser.set_defaults(without_effect=())
    for row in rows():
        if f"--{row.name}" in taken:
            continue
        both = [f"--{row.name}", f"--no-{row.name}"] if row.takes == "switch" else [f"--{row.name}"]
        nargs: Any = {"switch": 0, "value": None, "values": "*"}[row.takes]
        parser.add_argument(
            *row.shorts, *both, action=_Other, nargs=nargs, row=row, dest="without_effect", help=argparse.SUPPRESS
        )


class _Other(argparse.Action):
    """One of vLLM's other flags was given."""

    def __init__(self, option_strings: Any, dest: str, row: Row, **options: Any):
        super().__init__(option_strings, dest, **options)
        self.row = row

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        row, flag = self.row, option_string or self.option_strings[0]
        if row.refused and not flag.startswith("--no-"):
            parser.refusals.append(f"{flag} is a flag of vLLM that quire has not: {row.said}.")
        elif row.values and values not in row.values:
            parser.refusals.append(
                f"{flag} {values} is not possible here: {row.said}; leave it out, or give {row.told()}."
            )
        namespace.without_effect = [*namespace.without_effect, (flag, row.said)]
