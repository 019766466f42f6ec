"""What each route takes and gives, by method and path. A route of the server that has no row here fails a test."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import adapters, cancel, label_scores, pooling_schema, schema, texts, token_ids
from ..batches.routes import BatchRequest
from ..dialects import anthropic, llama_cpp, llama_cpp_schema, ollama, ollama_schema, sagemaker, tgi
from ..page.serving import TYPES
from ..responses.request import ResponsesRequest
from . import answers as a
from . import dialect_answers as d

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TEXT, BYTES, FORM, PAGE = "text/plain", "application/octet-stream", "multipart/form-data", "text/html"


class Told(NamedTuple):
    """A route's request and answer.

    ``takes``: the struct of a JSON body, FORM, or None. ``gives``: the type of the JSON of a 200, a content type where
    it is none, or None for an empty body. ``others``: content types that may come in its place: a stream, vectors as
    bytes, another kind of file. ``queries``: its query parameters and their schemas. ``status``: what it answers with
    if all is well; None: it only refuses. ``more``: statuses that come beside it, each with its content type, or ""
    for an empty body.
    """

    takes: Any = None
    gives: Any = None
    others: tuple[str, ...] = ()
    queries: Mapping[str, Any] = MappingProxyType({})
    status: int | None = 200
    more: Mapping[int, str] = MappingProxyType({})


_STREAM, _LINES, _BYTES = (EVENTS,), (LINES,), (BYTES,)
_KNOWN = {304: ""}
"""Of files that carry an ETag, where the client has it."""
_WORD, _ORDER = {"type": "string"}, {"enum": ["asc", "desc"]}
_PAGES = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}, "after": _WORD}
_FILES = {"limit": {"type": "integer", "minimum": 1, "maximum": 10000}, "after": _WORD, "order": _ORDER}
_SCORES = Told(pooling_schema.ScoreRequest, a.PooledList)
_RANKS = Told(pooling_schema.RerankRequest, a.Reranked)
_LLAMA = d.LlamaCompletion | list[d.LlamaCompletion]
_REFUSED = Told(status=None)

TABLE: dict[str, Told] = {
    "GET /v1/models": Told(None, a.Models),
    "GET /v1/models/{model}": Told(None, a.Model),
    "POST /v1/completions": Told(schema.CompletionRequest, a.Completion, _STREAM),
    "POST /v1/chat/completions": Told(schema.ChatRequest, a.ChatCompletion, _STREAM),
    "POST /v1/responses": Told(ResponsesRequest, a.Response, _STREAM),
    "POST /v1/responses/input_tokens": Told(ResponsesRequest, a.InputTokens),
    "GET /v1/responses/{id}": Told(
        None, a.Response, _STREAM, {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
    ),
    "DELETE /v1/responses/{id}": Told(None, a.Deleted),
    "POST /v1/responses/{id}/cancel": Told(None, a.Response),
    "GET /v1/responses/{id}/input_items": Told(None, a.Page, (), {**_PAGES, "order": _ORDER}),
    "POST /v1/files": Told(FORM, a.File),
    "GET /v1/files": Told(None, a.Page, (), {**_FILES, "purpose": _WORD}),
    "GET /v1/files/{id}": Told(None, a.File),
    "GET /v1/files/{id}/content": Told(None, BYTES, more={**_KNOWN, 206: BYTES, 412: "", 416: ""}),
    "DELETE /v1/files/{id}": Told(None, a.Deleted),
    "POST /v1/batches": Told(BatchRequest, a.Batch),
    "GET /v1/batches": Told(None, a.Page, (), _PAGES),
    "GET /v1/batches/{id}": Told(None, a.Batch),
    "POST /v1/batches/{id}/cancel": Told(None, a.Batch),
    "POST /v1/messages": Told(anthropic.MessagesRequest, d.AnthropicMessage, _STREAM),
    "POST /v1/messages/count_tokens": Told(anthropic.MessagesRequest, a.InputTokens),
    "POST /completion": Told(llama_cpp_schema.LlamaRequest, _LLAMA, _STREAM),
    "POST /completions": Told(llama_cpp_schema.LlamaRequest, _LLAMA, _STREAM),
    "POST /infill": Told(llama_cpp_schema.InfillRequest, _LLAMA, _STREAM),
    "GET /props": Told(None, d.Props),
    "POST /props": _REFUSED,
    "GET /slots": Told(None, list[a.Named], (), {"fail_on_no_slot": {"enum": [0, 1]}}),
    "POST /slots/{id}": _REFUSED,
    "POST /api/generate": Told(ollama_schema.OllamaGenerate, d.OllamaGenerated, _LINES),
    "POST /api/chat": Told(ollama_schema.OllamaChatRequest, d.OllamaChatted, _LINES),
    "POST /api/embed": Told(ollama_schema.EmbedRequest, d.OllamaEmbedded),
    "POST /api/embeddings": Told(ollama_schema.EmbeddingsRequest, d.OllamaEmbedding),
    "GET /api/tags": Told(None, d.OllamaModels),
    "GET /api/ps": Told(None, d.OllamaModels),
    "POST /api/show": Told(ollama_schema.ShowRequest, d.OllamaShown),
    "GET /api/version": Told(None, a.Version),
    "DELETE /api/delete": _REFUSED,
    **{f"POST /api/{what}": _REFUSED for what in ("pull", "push", "create", "copy")},
    "POST /": Told(tgi.TgiRequest, d.TgiGenerated | list[d.TgiGenerated], _STREAM),
    "POST /generate": Told(tgi.TgiRequest, d.TgiGenerated | list[d.TgiGenerated]),
    "POST /generate_stream": Told(tgi.TgiRequest, EVENTS),
    "GET /info": Told(None, d.TgiInfo),
    "POST /invocations": Told(sagemaker.Invocation, a.Named, (EVENTS, BYTES)),
    "POST /tokenize": Told(texts.TokenizeRequest, a.Tokenized),
    "POST /detokenize": Told(texts.DetokenizeRequest, a.Detokenized),
    "POST /apply-template": Told(schema.ChatRequest, a.Applied),
    "GET /tokenizer_info": Told(None, a.Named),
    "POST /inference/v1/generate": Told(token_ids.GenerateRequest, a.Generated, _STREAM),
    "POST /v1/completions/render": Told(schema.CompletionRequest, list[a.Rendered]),
    "POST /v1/chat/completions/render": Told(schema.ChatRequest, a.Rendered),
    "POST /v1/requests/cancel": Told(cancel.CancelRequest, a.Cancelled),
    "POST /v1/requests/{id}/cancel": Told(None, a.Cancelled),
    "DELETE /v1/requests/{id}": Told(None, a.Cancelled),
    "POST /v1/embeddings": Told(pooling_schema.EmbeddingRequest, a.PooledList, _BYTES),
    "POST /classify": Told(pooling_schema.ClassifyRequest, a.PooledList),
    "POST /pooling": Told(pooling_schema.PoolingRequest, a.PooledList, _BYTES),
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
    "GET /server_info": Told(None, a.ServerInfo, (), {"config_format": {"enum": ["text", "json"]}}),
    "POST /sleep": Told(None, None, (), {"level": {"enum": [1, 2]}, "mode": {"enum": ["keep", "wait", "abort"]}}),
    "POST /wake_up": Told(None, None, (), {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}}),
    **{f"POST /{what}_profile": Told() for what in ("start", "stop")},
    "POST /reset_prefix_cache": Told(None, a.Done),
    "GET /is_sleeping": Told(None, a.Asleep),
    "POST /v1/load_lora_adapter": Told(adapters.LoadRequest, TEXT),
    "POST /v1/unload_lora_adapter": Told(adapters.UnloadRequest, TEXT),
    "GET /openapi.json": Told(None, a.Named),
    "GET /docs": Told(None, PAGE),
    "GET /": Told(None, PAGE, more=_KNOWN),
    "GET /page/{file}": Told(None, PAGE, tuple(kind for kind in TYPES.values() if kind != PAGE), more=_KNOWN),
}

ERRORS: dict[Any, Any] = {
    anthropic.refused: d.AnthropicError, llama_cpp.refused: d.LlamaError, ollama.refused: d.OllamaError,
    sagemaker.refused: a.Error, tgi.refused: d.TgiError,
}  # fmt: skip
"""The shape of an error, by what tells it (``errors.SHAPES``)."""
