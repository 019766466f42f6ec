"""What requests that pool may hold: embeddings, classification, scores, ranks. Names are OpenAI's, vLLM's and Jina's.

Types are checked while a body is parsed, what lists hold here, ranges by ``PoolingParams``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..client.offline.prompts import Input
from ..client.offline.scoring import check_pairs
from ..proto.params import ParamError
from ..proto.pooling import PoolingParams
from .errors import ApiError
from .parsing import Request, check_salt, kind_of
from .prompts import check_count, conversation_of, prompts_of, template_of
from .shapes import MESSAGE, Shape
from .vectors import FORMATS, ORDERS, TYPES

_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""What the two sides of a score may be called."""

_NOT_YET: dict[str, tuple[Any, ...]] = {
    "chat_template": (), "max_chunks_per_doc": (), "mm_processor_kwargs": ({},), "padding": ("do_not_pad",),
    "prompt_embeds": (), "rank_fields": (),
}  # fmt: skip
"""Known fields that are not honoured yet, and the values (beside null) that ask for nothing."""


class PoolRequest(Request, kw_only=True):
    """Fields that all of them share. None means: not given."""

    not_yet = _NOT_YET

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: Any = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    use_activation: bool | None = None

    def params(self, task: str) -> PoolingParams:
        """How to pool. Raises ApiError naming the field."""
        return self._params(task, use_activation=self.use_activation)

    def _params(self, task: str | None, **values: Any) -> PoolingParams:
        try:
            return PoolingParams(
                task=task, truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=self.truncation_side,
                **values,
            )  # fmt: skip
        except ParamError as error:
            raise ApiError(400, str(error), error.param) from error

    def check(self) -> None:
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise ApiError(400, f"priority must be a 32-bit integer, got {self.priority}.", "priority")
        check_salt(self.cache_salt)


class InputRequest(PoolRequest, kw_only=True):
    """Each of its inputs is pooled by itself. ``messages`` is one input, rendered by the chat template."""

    input: Any = None
    inside: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE}

    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        PoolRequest.check(self)
        if self.input is not None and self.messages is not None:
            raise ApiError(400, "input and messages were both given; give one of them.", "messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(
                400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )  # fmt: skip

    def inputs(self) -> list[Input]:
        """What is to be pooled, at least one. Raises ApiError."""
        if self.messages is not None:
            template = template_of(
                bool(self.add_generation_prompt), self.continue_final_message, self.chat_template_kwargs,
                self.add_special_tokens,
            )  # fmt: skip
            return [Input(messages=conversation_of(self.messages), template=template)]
        special = True if self.add_special_tokens is None else self.add_special_tokens
        given = prompts_of(self.input, "input", empty=True)
        return [Input(ids=one) if isinstance(one, list) else Input(text=one, special=special) for one in given]


class EncodedRequest(InputRequest, kw_only=True):
    """One that is answered with vectors, as numbers, as base64, or as bytes (`vectors.py`)."""

    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    def check(self) -> None:
        InputRequest.check(self)
        for name, known in (("encoding_format", FORMATS), ("embed_dtype", TYPES), ("endianness", ORDERS)):
            if (given := getattr(self, name)) is not None and given not in known:
                raise ApiError(400, f"{name} must be one of {', '.join(known)}, got {given!r:.80}.", name)

    @property
    def form(self) -> tuple[str, str, str]:
        """How the vectors are written: format, type, order of bytes."""
        return self.encoding_format or "float", self.embed_dtype or "float32", self.endianness or "native"


class EmbeddingRequest(EncodedRequest):
    """POST /v1/embeddings."""

    def params(self, task: str) -> PoolingParams:
        normalize = self.use_activation if self.normalize is None else self.normalize  # vLLM's newer name of it
        return self._params(task, dimensions=self.dimensions, normalize=normalize)


class PoolingRequest(EncodedRequest):
    """POST /pooling. Without ``task`` the model does what it was made for."""

    task: str | None = None

    def params(self, task: str) -> PoolingParams:
        return self._params(
            self.task or task, dimensions=self.dimensions, normalize=self.normalize, use_activation=self.use_activation
        )


class ClassifyRequest(InputRequest):
    """POST /classify."""


class PairedRequest(PoolRequest, kw_only=True):
    """Texts against texts. ``max_tokens_per_doc``: so many tokens of each document are looked at; 0: all."""

    max_tokens_per_doc: int | None = None

    def params(self, task: str) -> PoolingParams:
        return self._params(
            task, use_activation=self.use_activation, max_tokens_per_doc=self.max_tokens_per_doc or None
        )

    def query_params(self, task: str) -> PoolingParams:
        """The same for a query that is pooled by itself."""
        return PoolRequest.params(self, task)


class ScoreRequest(PairedRequest, kw_only=True):
    """POST /score. One text against each of several, or two lists pair by pair."""

    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None

    def names(self) -> tuple[str, str]:
        """What the request calls its two sides. Raises ApiError."""
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        for pair in _SIDES:
            if given == set(pair):
                return pair
        raise ApiError(
            400, "the two sides of a score are text_1 and text_2, or queries and documents; given: "
            f"{', '.join(sorted(given)) or 'neither'}.", min(given, default="text_1"),
        )  # fmt: skip

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts of either side. Raises ApiError."""
        names = self.names()
        first, second = (texts_of(getattr(self, name), name) for name in names)
        try:
            check_pairs(first, second)
        except ValueError as error:
            raise ApiError(400, f"{error} ({len(first)} and {len(second)} given).", names[0]) from error
        return first, second


class RerankRequest(PairedRequest, kw_only=True):
    """POST /rerank: the documents by how well they answer the query, best first. ``top_n`` 0 is all of them."""

    query: Any = None
    documents: Any = None
    top_n: int | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        PoolRequest.check(self)
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(400, f"top_n must be at least 0 (0: all documents), got {self.top_n}.", "top_n")

    def names(self) -> tuple[str, str]:
        """What the request calls its two sides."""
        return "query", "documents"

    def sides(self) -> tuple[list[str], list[str]]:
        """The query and the documents. Raises ApiError."""
        if isinstance(self.query, list):
            raise ApiError(400, "query must be a string, got a list.", "query")
        return texts_of(self.query, "query"), texts_of(self.documents, "documents")


def texts_of(given: Any, name: str) -> list[str]:
    """One text or a list of them, each a string or an object with one as ``text``. Raises ApiError."""
    if given is None:
        raise ApiError(400, f"{name} must be given.", name)
    if not isinstance(given, list):
        return [_text(given, name, name)]
    check_count(given, name, "texts")
    return [_text(one, f"{name}[{position}]", name) for position, one in enumerate(given)]


def _text(given: Any, where: str, name: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise ApiError(
            400, f'{where} must be a string, or an object such as {{"text": "..."}}; got {kind_of(given)}.', name
        )
    return text
