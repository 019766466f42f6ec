"""The flags of the HTTP server and of the log: the part of EngineArgs that frontends read."""

from __future__ import annotations

from dataclasses import dataclass

from .flag import EVERY, HTTP, TEXT, WORK, flag
from .log_lines import FORMATS

LEVELS = ("debug", "info", "warning", "error")


@dataclass
class HttpArgs:
    """How the server is reached, what it answers beside the text, and what it logs."""

    # HTTP
    host: str = flag("0.0.0.0", HTTP, "address to listen on")
    port: int = flag(8000, HTTP, "port to listen on; 0 takes a free one")
    uds: str | None = flag(None, HTTP, "Unix socket to listen on, in place of --host and --port")
    root_path: str | None = flag(None, HTTP, "prefix of all routes where a proxy does not take it off, such as /llm")
    ssl_keyfile: str | None = flag(None, HTTP, "private key of --ssl-certfile, where that file does not hold it")
    ssl_certfile: str | None = flag(None, HTTP, "certificate (PEM): the server speaks HTTPS")
    ssl_ca_certs: str | None = flag(None, HTTP, "certificates (PEM) that clients' own certificates are checked by")
    ssl_cert_reqs: int = flag(0, HTTP, "clients' certificates: 0 are not asked for, 1 may be sent, 2 must be sent")
    ssl_ciphers: str | None = flag(None, HTTP, "cipher suites of TLS 1.2, as OpenSSL writes them")
    enable_ssl_refresh: bool = flag(False, HTTP, "read the certificate and its key again when their files change")
    middleware: list[str] | None = flag(
        None, HTTP, "code of yours that every request goes through, as package.module.name: a middleware of aiohttp, "
        "or a class of such; may be given several times",
    )  # fmt: skip
    sse_keep_alive_interval: float = flag(
        0, HTTP, "seconds after which a silent stream is sent a comment, so that no proxy closes it; 0: never"
    )

    # Names and keys
    served_model_name: list[str] | None = flag(None, HTTP, "names the API answers to (default: the model's)")
    served_model_root: str | None = flag(
        None, HTTP, "what /v1/models tells as root; `quire serve` sets it to the model as it is named"
    )
    api_key: str | None = flag(
        None, HTTP, "required as a bearer token; several with spaces or commas; also QUIRE_API_KEY, VLLM_API_KEY",
        several=True,
    )  # fmt: skip
    api_key_file: str | None = flag(
        None, HTTP, "file of keys by their hashes, with names, limits and ends (docs/security.md); read again when it "
        "has changed; `quire keygen --api-key NAME` makes a line",
    )  # fmt: skip
    admin_api_key: str | None = flag(
        None, HTTP, "the key that routes of administrators ask for, which are there only with one (/server_info, "
        "/sleep, /wake_up, /is_sleeping, /reset_prefix_cache, /v1/load_lora_adapter, /v1/unload_lora_adapter); several "
        "as for --api-key; also QUIRE_ADMIN_API_KEY", several=True,
    )  # fmt: skip
    metrics_key: str | None = flag(
        None, HTTP, "the key that /metrics, /version and /load ask for in place of an API key; several as for "
        "--api-key; also QUIRE_METRICS_KEY", several=True,
    )  # fmt: skip
    open_metrics: bool = flag(False, HTTP, "have /metrics, /version and /load ask for no key")
    metrics_prefix: str = flag(
        "both", HTTP, "how /metrics names figures that vLLM has too: vllm (vllm:NAME), quire (quire:NAME), or both"
    )
    shared_prefix_cache: bool = flag(
        False, HTTP, "share cached prefixes among all API keys; by default each key has its own, so that nobody can "
        "tell from the time of an answer what others asked",
    )  # fmt: skip

    # From where, and how much
    allowed_hosts: str | None = flag(
        None, HTTP, "names that the server answers to, beside localhost: JSON list, or with commas; *.NAME for all "
        "below one, * for any (default: any, but where --host is this machine alone, only its own)",
    )  # fmt: skip
    allowed_origins: str | None = flag(
        None, HTTP, 'origins whose pages may ask (CORS), as a JSON list; ["*"]: any (default: none)'
    )
    allowed_methods: str | None = flag(None, HTTP, "methods that they may use, as a JSON list (default: all)")
    allowed_headers: str | None = flag(None, HTTP, "headers that they may send, as a JSON list (default: all)")
    allow_credentials: bool = flag(False, HTTP, "let them send cookies and the like; origins must be named")
    max_header_bytes: int = flag(
        16 * 2**10, HTTP, "largest headers of a request in bytes, all together; more get 431",
        also="--h11-max-incomplete-event-size",
    )  # fmt: skip
    max_request_bytes: int = flag(8 * 2**20, HTTP, "largest request body in bytes; more gets 413")
    max_json_depth: int = flag(100, HTTP, "levels that lists and objects of a body may be nested; more get 400")
    request_timeout: float | None = flag(None, HTTP, "seconds a request may take in all; then it gets 408")
    max_connections_per_address: int | None = flag(
        None, HTTP, "connections that one address may have open to a frontend; more get 429 (default: no limit)"
    )

    # Answers
    enable_auto_tool_choice: bool = flag(
        True, HTTP, "let models choose whether to call tools, where it is known how they write calls"
    )
    tool_call_parser: str | None = flag(
        None, ("frontend", "detokenizer"), "how the model writes calls of tools: hermes, llama3_json, ... "
        "(docs/tools.md; default: by its chat template)",
    )  # fmt: skip
    reasoning_parser: str | None = flag(
        None, ("frontend", "detokenizer"), "how the model writes its thoughts, told as reasoning: deepseek_r1, qwen3, "
        "... (docs/tools.md; default: they are part of the answer)",
    )  # fmt: skip
    reasoning_config: str | None = flag(
        None, TEXT, "JSON object with reasoning_start_str and reasoning_end_str: what begins a thought that has a "
        "thinking_token_budget, and the words that end it by force (default: the reasoning parser's marks)",
    )  # fmt: skip
    enable_tokenizer_info_endpoint: bool = flag(
        False, HTTP, "answer GET /tokenizer_info: the tokenizer's configuration and the chat template"
    )
    default_chat_template_kwargs: str | None = flag(
        None, HTTP, "JSON object of values for chat templates, below a request's own chat_template_kwargs"
    )
    response_role: str = flag("assistant", HTTP, "role of answers to /v1/chat/completions")
    return_tokens_as_token_ids: bool = flag(False, HTTP, "tell tokens of logprobs as token_id:N")
    enable_prompt_tokens_details: bool = flag(True, HTTP, "tell in usage how many tokens of the prompt were cached")
    enable_force_include_usage: bool = flag(
        False, HTTP, "put the usage so far into every chunk of a stream and end it with one, asked for or not"
    )
    stream_interval: int = flag(1, HTTP, "tokens that a chunk of a stream has at least, where a request does not say")
    enable_request_id_headers: bool = flag(False, HTTP, "answer with the header X-Request-Id")
    enable_server_load_tracking: bool = flag(False, HTTP, "count open requests for GET /load")
    enable_prompt_embeds: bool = flag(
        False, HTTP + WORK, "let completions bring prompt_embeds, embeddings in place of text (docs/http.md)"
    )
    lenient_types: bool = flag(
        True, HTTP, 'take numbers and booleans that come as strings ("max_tokens": "5"), as vLLM does, with a warning'
    )
    reject_unknown_fields: bool = flag(
        False, HTTP, "answer 400 to a field that is not known (max_token), where there is a warning otherwise"
    )
    disable_fastapi_docs: bool = flag(False, HTTP, "do not answer GET /openapi.json and GET /docs")
    disable_page: bool = flag(False, HTTP, "do not answer GET /, the page for people (docs/page.md)")
    max_n: int = flag(128, HTTP, "most choices of one prompt, n and best_of, that a request may ask for")

    # Files and batches
    files_path: str | None = flag(
        None,
        HTTP,
        "folder of /v1/files and /v1/batches, which then outlive the server (default: one that ends with it)",
    )
    files_max_bytes: int = flag(2**30, HTTP, "bytes that /v1/files and /v1/batches may hold in all")
    max_batch_concurrency: int | None = flag(
        None, HTTP, "requests of batches that are under way at once (default: half of max_num_seqs)"
    )

    # Log
    log_level: str = flag("info", EVERY, "least severe level to log", LEVELS)
    log_format: str = flag(
        "text", EVERY, "lines of the log as text, or each as a JSON object: time, level, process, pid, message, and "
        "request_id where it is about a request", FORMATS,
    )  # fmt: skip
    uvicorn_log_level: str | None = flag(None, HTTP, "the same for frontends alone", (*LEVELS, "critical", "trace"))
    disable_log_stats: bool = flag(False, ("scheduler",), "no line of figures every 10 seconds while requests run")
    enable_log_requests: bool = flag(False, HTTP, "log each request's start and end; prompts with --log-level debug")
    disable_log_requests: bool = flag(True, (), "vLLM's older flag: --no-disable-log-requests is --enable-log-requests")
    enable_log_outputs: bool = flag(False, HTTP, "with --enable-log-requests, log what was generated too")
    max_log_len: int | None = flag(None, HTTP, "most characters, or token ids, of a prompt or an output in a log line")
    disable_uvicorn_access_log: bool = flag(True, HTTP, "log no line for each HTTP request that is answered")
    disable_access_log_for_endpoints: str | None = flag(
        None, HTTP, "paths, with commas between them, that get no such line: /health,/metrics"
    )

    # Traces
    otlp_traces_endpoint: str | None = flag(
        None, EVERY, "collector of OpenTelemetry traces (http://HOST:4318, grpc://HOST:4317); a request is one trace "
        "through all processes (docs/tracing.md)",
    )  # fmt: skip
    collect_detailed_traces: str | None = flag(
        None, ("scheduler", "gpu_worker"), "with --otlp-traces-endpoint, also a span for each step of a traced request "
        "in its worker: model, worker or all, which are one here",
    )  # fmt: skip
