"""The shapes of answers in other servers' dialects (``answers.py`` has those of OpenAI's and vLLM's routes)."""

from __future__ import annotations

from typing import Literal

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
    """llama.cpp's answer to one prompt."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: Named
    stop_type: str
    stopping_word: str
    truncated: bool
    timings: Named


class Props(Struct):
    """What llama.cpp tells of itself."""

    default_generation_settings: Named
    total_slots: int
    model_path: str
    chat_template: str
    build_info: str


class OllamaGenerated(Struct):
    """Ollama's answer to a prompt; durations are nanoseconds."""

    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    eval_count: int | None = None


class OllamaChatted(Struct):
    """Ollama's answer to a chat."""

    model: str
    created_at: str
    message: Named
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    eval_count: int | None = None


class OllamaModels(Struct):
    """Names, and what is known of each."""

    models: list[Named]


class OllamaShown(Struct):
    """What is known of a model."""

    details: Named
    model_info: Named
    capabilities: list[str]


class OllamaEmbedded(Struct):
    """A vector for each input."""

    model: str
    embeddings: list[list[float]]


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
    max_total_tokens: int | None
    router: str
    version: str
