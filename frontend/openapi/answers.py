"""The shapes of answers, as structs for ``/openapi.json``. Answers are not made of them, for they are told by the
thousand; a test holds real answers against them. A field without a default is always there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Struct = msgspec.Struct
Named = dict[str, Any]

# ---------------------------------------------------------------- errors


class Refusal(Struct):
    """What was wrong: which field, as far as it is one's, and the status."""

    message: str
    type: str
    param: str | None
    code: int


class Error(Struct):
    """Of OpenAI's and vLLM's routes."""

    error: Refusal


# ---------------------------------------------------------------- OpenAI's generation


class CachedTokens(Struct):
    """Tokens of the prompt whose keys and values were there."""

    cached_tokens: int | None = None


class Usage(Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: Named | None = None


class ChatLogprobs(Struct):
    """Of each token, with the likeliest beside it."""

    content: list[Named] | None


class AnswerMessage(Struct):
    """What the model said."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Named] | None = None


class ChatChoice(Struct):
    """One answer of n."""

    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    """A chat's answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Named | None] | None = None


class TextLogprobs(Struct):
    """Of each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[Named | None] | None


class TextChoice(Struct):
    """One answer to one prompt."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Named | None] | None = None


class Completion(Struct):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Model(Struct):
    """A name that requests may give. ``parent``: of an adapter, the model it changes."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class Models(Struct):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class Response(Struct):
    """An answer of the Responses API as it is now."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[Named]
    error: Named | None
    incomplete_details: Named | None
    usage: Named | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    tool_choice: Any
    tools: list[Named]
    text: Named
    reasoning: Named | None
    truncation: str
    store: bool
    background: bool
    service_tier: str
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    safety_identifier: str | None
    user: str | None
    completed_at: int | None = None


class InputTokens(Struct):
    """How many tokens a prompt would have; Anthropic's clients are told the number alone."""

    input_tokens: int
    object: str | None = None


class Page(Struct):
    """A part of a list."""

    object: Literal["list"]
    data: list[Named]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct):
    """What is no more."""

    id: str
    object: str
    deleted: bool


class File(Struct):
    """A file that was sent or made here."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    status_details: str | None


class Batch(Struct):
    """A batch as it is now."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    errors: Named | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    metadata: dict[str, str] | None
    request_counts: Named
    model: str | None
    usage: Named | None


# ---------------------------------------------------------------- pooling


class PooledList(Struct):
    """What was computed of each input."""

    id: str
    object: str
    created: int
    model: str
    data: list[Named]
    usage: Usage


class Reranked(Struct):
    """The documents, the best first."""

    id: str
    model: str
    usage: Named
    results: list[Named]


# ---------------------------------------------------------------- texts and tokens


class Tokenized(Struct):
    """vLLM's fields, or llama.cpp's ``tokens`` alone."""

    tokens: list[Any]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """The text of tokens, by both names that it has."""

    prompt: str
    content: str


class Applied(Struct):
    """A chat as the text that the model is given."""

    prompt: str


class Generated(Struct):
    """Ids out."""

    request_id: str
    id: str
    created: int
    model: str
    choices: list[Named]
    usage: Usage
    prompt_logprobs: list[Named | None] | None
    kv_transfer_params: Named | None


class Cancelled(Struct):
    """What was ended."""

    status: str
    request_id: str | None = None
    cancelled_request_ids: list[str] | None = None


# ---------------------------------------------------------------- the server


class Version(Struct):
    """quire's version; Ollama's clients are told the one whose dialect this is, and quire's as ``quire``."""

    version: str
    quire: str | None = None


class Load(Struct):
    """Requests that are open."""

    server_load: int


class Rendered(Struct):
    """The body of POST /inference/v1/generate that would run."""

    request_id: str
    token_ids: list[int]
    sampling_params: Named
    model: str


class Done(Struct):
    """That it was done."""

    success: bool


class Asleep(Struct):
    """Whether something is put away."""

    is_sleeping: bool
    tags: list[str]


class ServerInfo(Struct):
    """The flags and the workers."""

    version: str
    vllm_config: str | Named
    max_model_len: int | None
    replicas: list[Named] | None
