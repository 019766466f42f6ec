"""The shapes of answers in other servers' dialects (``answers.py`` has those of OpenAI's and vLLM's routes)."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from .answers import Named, Struct

# ---------------------------------------------------------------- errors


class AnthropicRefusal(Struct):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(Struct):
    """Of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicRefusal


class LlamaRefusal(Struct):
    """What was wrong."""

    code: int
    message: str
    type: str


class LlamaError(Struct):
    """Of llama.cpp's routes."""

    error: LlamaRefusal


class OllamaError(Struct):
    """Of Ollama's routes."""

    error: str


class TgiError(Struct):
    """Of text-generation-inference's routes."""

    error: str
    error_type: str


# ---------------------------------------------------------------- other servers' dialects


class AnthropicMessage(Struct):
    """What the model said, in blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Named]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Named


class LlamaCompletion(Struct):
    """llama.cpp's answer to one prompt; with ``response_fields`` what it names alone, ``a/b`` under that name."""

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    generation_settings: Named | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    timings: Named | UnsetType = UNSET
    completion_probabilities: list[Named] | UnsetType = UNSET


class Props(Struct):
    """What llama.cpp tells of itself."""

    default_generation_settings: Named
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    build_info: str
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET


class OllamaGenerated(Struct):
    """Ollama's answer to a prompt; durations are nanoseconds."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | None = None
    done_reason: str | None = None
    logprobs: list[Named] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatted(Struct):
    """Ollama's answer to a chat."""

    model: str
    created_at: str
    message: Named
    done: bool
    done_reason: str | None = None
    logprobs: list[Named] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaModels(Struct):
    """Names, and what is known of each."""

    models: list[Named]


class OllamaShown(Struct):
    """What is known of a model."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: Named
    model_info: Named
    capabilities: list[str]
    modified_at: str


class OllamaEmbedded(Struct):
    """A vector for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """One vector."""

    embedding: list[float]


class TgiGenerated(Struct):
    """text-generation-inference's answer."""

    generated_text: str
    details: Named | None = None


class TgiInfo(Struct):
    """What is served, in text-generation-inference's words."""

    model_id: str
    model_sha: str | None
    model_dtype: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int | None
    max_total_tokens: int | None
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
