"""What each route takes and gives, by method and path. A route of the server that has no row here fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import adapters, cancel, label_scores, pooling_schema, schema, texts, token_ids
from ..batches.routes import BatchRequest
from ..dialects import anthropic, llama_cpp, llama_cpp_schema, ollama, ollama_schema, sagemaker, tgi
from ..responses.request import ResponsesRequest
from . import answers as a
from . import dialect_answers as d

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TEXT, BYTES, FORM = "text/plain", "application/octet-stream", "multipart/form-data"


class Told(NamedTuple):
    """A route's request and answer.

    ``takes``: the struct of a JSON body, FORM, or None. ``gives``: the type of the JSON of a 200, a content type where
    it is none, or None for an empty body. ``streams``: the content type of a stream that may come in its place.
    ``queries``: its query parameters and their schemas. ``status``: what it answers with if all is well; None: it only
    refuses.
    """

    takes: Any = None
    gives: Any = None
    streams: str = ""
    queries: Mapping[str, Any] = MappingProxyType({})
    status: int | None = 200


_NUMBER, _WORD = {"type": "integer", "minimum": 1, "maximum": 100}, {"type": "string"}
_PAGES = {"limit": _NUMBER, "after": _WORD}
_SCORES = Told(pooling_schema.ScoreRequest, a.PooledList)
_RANKS = Told(pooling_schema.RerankRequest, a.Reranked)
_LLAMA = d.LlamaCompletion | list[d.LlamaCompletion]
_REFUSED = Told(status=None)

TABLE: dict[str, Told] = {
    "GET /v1/models": Told(None, a.Models),
    "GET /v1/models/{model}": Told(None, a.Model),
    "POST /v1/completions": Told(schema.CompletionRequest, a.Completion, EVENTS),
    "POST /v1/chat/completions": Told(schema.ChatRequest, a.ChatCompletion, EVENTS),
    "POST /v1/responses": Told(ResponsesRequest, a.Response, EVENTS),
    "POST /v1/responses/input_tokens": Told(ResponsesRequest, a.InputTokens),
    "GET /v1/responses/{id}": Told(
        None, a.Response, EVENTS, {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
    ),
    "DELETE /v1/responses/{id}": Told(None, a.Deleted),
    "POST /v1/responses/{id}/cancel": Told(None, a.Response),
    "GET /v1/responses/{id}/input_items": Told(None, a.Page, "", _PAGES),
    "POST /v1/files": Told(FORM, a.File),
    "GET /v1/files": Told(None, a.Page, "", {**_PAGES, "purpose": _WORD}),
    "GET /v1/files/{id}": Told(None, a.File),
    "GET /v1/files/{id}/content": Told(None, BYTES),
    "DELETE /v1/files/{id}": Told(None, a.Deleted),
    "POST /v1/batches": Told(BatchRequest, a.Batch),
    "GET /v1/batches": Told(None, a.Page, "", _PAGES),
    "GET /v1/batches/{id}": Told(None, a.Batch),
    "POST /v1/batches/{id}/cancel": Told(None, a.Batch),
    "POST /v1/messages": Told(anthropic.MessagesRequest, d.AnthropicMessage, EVENTS),
    "POST /v1/messages/count_tokens": Told(anthropic.MessagesRequest, a.InputTokens),
    "POST /completion": Told(llama_cpp_schema.LlamaRequest, _LLAMA, EVENTS),
    "POST /completions": Told(llama_cpp_schema.LlamaRequest, _LLAMA, EVENTS),
    "POST /infill": Told(llama_cpp_schema.InfillRequest, _LLAMA, EVENTS),
    "GET /props": Told(None, d.Props),
    "POST /props": _REFUSED,
    "GET /slots": Told(None, list[a.Named]),
    "POST /slots/{id}": _REFUSED,
    "POST /api/generate": Told(ollama_schema.OllamaGenerate, d.OllamaGenerated, LINES),
    "POST /api/chat": Told(ollama_schema.OllamaChatRequest, d.OllamaChatted, LINES),
    "POST /api/embed": Told(ollama_schema.EmbedRequest, d.OllamaEmbedded),
    "POST /api/embeddings": Told(ollama_schema.EmbeddingsRequest, d.OllamaEmbedding),
    "GET /api/tags": Told(None, d.OllamaModels),
    "GET /api/ps": Told(None, d.OllamaModels),
    "POST /api/show": Told(ollama_schema.ShowRequest, d.OllamaShown),
    "GET /api/version": Told(None, a.Version),
    "DELETE /api/delete": _REFUSED,
    **{f"POST /api/{what}": _REFUSED for what in ("pull", "push", "create", "copy")},
    "POST /": Told(tgi.TgiRequest, d.TgiGenerated | list[d.TgiGenerated], EVENTS),
    "POST /generate": Told(tgi.TgiRequest, d.TgiGenerated | list[d.TgiGenerated]),
    "POST /generate_stream": Told(tgi.TgiRequest, EVENTS),
    "GET /info": Told(None, d.TgiInfo),
    "POST /invocations": Told(sagemaker.Invocation, a.Named, EVENTS),
    "POST /tokenize": Told(texts.TokenizeRequest, a.Tokenized),
    "POST /detokenize": Told(texts.DetokenizeRequest, a.Detokenized),
    "POST /apply-template": Told(schema.ChatRequest, a.Applied),
    "GET /tokenizer_info": Told(None, a.Named),
    "POST /inference/v1/generate": Told(token_ids.GenerateRequest, a.Generated, EVENTS),
    "POST /v1/requests/cancel": Told(cancel.CancelRequest, a.Cancelled),
    "POST /v1/requests/{id}/cancel": Told(None, a.Cancelled),
    "DELETE /v1/requests/{id}": Told(None, a.Cancelled),
    "POST /v1/embeddings": Told(pooling_schema.EmbeddingRequest, a.PooledList),
    "POST /classify": Told(pooling_schema.ClassifyRequest, a.PooledList),
    "POST /pooling": Told(pooling_schema.PoolingRequest, a.PooledList),
    "POST /generative_scoring": Told(label_scores.LabelScoreRequest, a.PooledList),
    "POST /score": _SCORES,
    "POST /v1/score": _SCORES,
    "POST /rerank": _RANKS,
    "POST /v1/rerank": _RANKS,
    "POST /v2/rerank": _RANKS,
    "POST /reranking": _RANKS,
    "POST /v1/reranking": _RANKS,
    **{f"GET {path}": Told() for path in ("/health", "/health/live", "/health/ready", "/health/generate", "/ping")},
    "POST /ping": Told(),
    "GET /version": Told(None, a.Version),
    "GET /load": Told(None, a.Load),
    "GET /metrics": Told(None, TEXT),
    "GET /dashboard/events": Told(None, EVENTS),
    "GET /server_info": Told(None, a.ServerInfo, "", {"config_format": {"enum": ["text", "json"]}}),
    "POST /sleep": Told(None, None, "", {"level": {"enum": [1, 2]}, "mode": {"enum": ["keep", "wait", "abort"]}}),
    "POST /wake_up": Told(None, None, "", {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}),
    "POST /reset_prefix_cache": Told(),
    "GET /is_sleeping": Told(None, a.Asleep),
    "POST /v1/load_lora_adapter": Told(adapters.LoadRequest, TEXT),
    "POST /v1/unload_lora_adapter": Told(adapters.UnloadRequest, TEXT),
    "GET /openapi.json": Told(None, a.Named),
    "GET /docs": Told(None, "text/html"),
    "GET /": Told(None, "text/html"),
    "GET /page/{file}": Told(None, BYTES),
}

ERRORS: dict[Any, Any] = {
    anthropic.refused: d.AnthropicError, llama_cpp.refused: d.LlamaError, ollama.refused: d.OllamaError,
    sagemaker.refused: a.Error, tgi.refused: d.TgiError,
}  # fmt: skip
"""The shape of an error, by what tells it (``errors.SHAPES``)."""
