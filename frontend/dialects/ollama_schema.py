"""What Ollama's requests may hold, and what they are in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from ...proto.call_arguments import told_object
from ..errors import ApiError
from ..parsing import Request, kind_of
from ..schema import ChatRequest, CompletionRequest, GenerateRequest
from ..shapes import MESSAGE, TOOL, Shape

_IMAGES = "images are not supported: the models served here read text alone; leave images out."
_NAMES: dict[str | None, str] = {
    "max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "structured_outputs": "format",
    "chat_template_kwargs": "think", "reasoning_effort": "think",
}  # fmt: skip
"""What Ollama calls a field, by its name in SamplingParams or in a chat of OpenAI's."""
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
"""Options that have the same name everywhere."""
_LEVELS = ("low", "medium", "high")


class Options(msgspec.Struct, kw_only=True):
    """``options`` of a request. Those that say how a model is loaded are ignored."""

    without_effect: ClassVar[tuple[str, ...]] = (
        "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "use_mmap", "use_mlock", "numa",
        "low_vram", "f16_kv", "logits_all", "vocab_only", "embedding_only", "penalize_newline", "mirostat_tau",
        "mirostat_eta", "rope_frequency_base", "rope_frequency_scale", "draft_num_predict",
    )  # fmt: skip

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    def check(self) -> None:
        """Refuse samplers that there are not. Raises ApiError."""
        _neutral("mirostat", self.mirostat, 0, "temperature, top_p or min_p")
        _neutral("tfs_z", self.tfs_z, 1.0, "min_p")
        _neutral("typical_p", self.typical_p, 1.0, "top_p or min_p")

    def fields(self) -> dict[str, Any]:
        """The same as fields of a GenerateRequest. A penalty is over all of the prompt and of the answer, whatever
        ``repeat_last_n`` says, but for 0, which turns penalties off."""
        found = {name: getattr(self, name) for name in _OPTIONS}
        found["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        found["max_tokens"] = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        found["seed"] = self.seed if self.seed is not None and self.seed >= 0 else None
        return found


def _neutral(name: str, value: float | None, off: float, instead: str) -> None:
    if value is not None and value != off:
        raise ApiError(400, f"options.{name}={value:g} is not supported; leave it out, or use {instead}.", "options")


class _Named(GenerateRequest):
    """Names that errors use in place of OpenAI's."""

    def own_names(self) -> dict[str | None, str]:
        return {**super().own_names(), **_NAMES}

    def usual_limit(self) -> int | None:
        return None  # as many as the context holds, for raw text too


class OllamaChat(_Named, ChatRequest):
    """A chat that came in Ollama's words."""


class OllamaText(_Named, CompletionRequest):
    """A raw prompt that came in Ollama's words."""


class OllamaRequest(Request, kw_only=True):
    """Fields that /api/generate and /api/chat share. ``keep_alive`` is accepted: a model stays while its server runs.
    An answer ends where the context does, whatever ``shift`` says."""

    model: str | None = None
    stream: bool | None = None
    format: Any = None
    options: Options | None = None
    keep_alive: Any = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def empty(self) -> bool:
        """True where nothing is asked but that the model be loaded."""
        raise NotImplementedError

    def body(self) -> OllamaChat | OllamaText:
        """The same in OpenAI's words. Raises ApiError."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream, which is what Ollama does where nothing is said."""
        return self.stream is not False

    def check(self) -> None:
        if self.options is not None:
            self.options.check()
        if isinstance(self.think, str) and self.think not in _LEVELS:
            raise ApiError(400, f"think must be true, false, low, medium or high, got {self.think!r:.80}.", "think")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")

    def shared(self) -> dict[str, Any]:
        """What a ChatRequest and a CompletionRequest have in common. Raises ApiError."""
        fields = {} if self.options is None else self.options.fields()
        fields |= {"model": self.model, "stream": self.streams, "structured_outputs": self._form()}
        if self.truncate:
            fields["truncate_prompt_tokens"] = -1
        return {name: value for name, value in fields.items() if value is not None}

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> OllamaChat:
        """The same as a chat of OpenAI's. Raises ApiError. A last message of the assistant's is gone on with."""
        kwargs = None if self.think is None else {"enable_thinking": self.think is not False}
        last = messages[-1]
        goes_on = last["role"] == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
        chat = OllamaChat(
            messages=messages, tools=tools or None, chat_template_kwargs=kwargs, continue_final_message=goes_on or None,
            reasoning_effort=self.think if isinstance(self.think, str) else None, logprobs=self.logprobs,
            top_logprobs=self.top_logprobs, **self.shared(),
        )  # fmt: skip
        chat.check()
        return chat

    def _form(self) -> dict[str, Any] | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return {"json_object": True}
        if isinstance(self.format, dict):
            return {"json": self.format}
        raise ApiError(400, f'format must be "json" or a JSON schema, got {self.format!r:.80}.', "format")


class OllamaGenerate(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @property
    def empty(self) -> bool:
        return not self.prompt and not self.suffix

    def check(self) -> None:
        OllamaRequest.check(self)
        if self.images:
            raise ApiError(400, _IMAGES, "images")
        if self.template:
            raise ApiError(
                400, "template is not supported: start the server with --chat-template FILE, or send raw=true with the "
                "prompt as the model is to read it.", "template",
            )  # fmt: skip
        if self.context:
            raise ApiError(400, "context is not supported; send the conversation to /api/chat.", "context")
        if self.raw and (self.system or self.suffix):
            name = "system" if self.system else "suffix"
            raise ApiError(400, f"{name} is not part of a raw prompt; leave it out, or send raw=false.", name)

    def body(self) -> OllamaChat | OllamaText:
        """The same as a chat, or as a prompt where it is ``raw`` or something is to be filled in. Raises ApiError."""
        if self.raw or self.suffix:
            count = (self.top_logprobs or 0) if self.logprobs else None
            text = OllamaText(prompt=self.prompt or "", suffix=self.suffix, logprobs=count, **self.shared())
            text.check()
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat([*system, {"role": "user", "content": self.prompt}], None)


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    inside: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL}

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None

    @property
    def empty(self) -> bool:
        return not self.messages

    def body(self) -> OllamaChat:
        """The same as a chat of OpenAI's. Raises ApiError."""
        given = [_message(message, f"messages[{n}]") for n, message in enumerate(self.messages or ())]
        _pair(given)
        return self.chat(given, self.tools)


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """One message of a conversation; a call's arguments are told as an object, as templates want them."""
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}.role must be system, user, assistant or tool, got {role!r:.80}.", "messages")
    if not isinstance(content, str | None):
        raise ApiError(400, f"{where}.content must be a string, got {kind_of(content)}.", "messages")
    if given.get("images"):
        raise ApiError(400, f"{where}: {_IMAGES}", "messages")
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if isinstance(thought := given.get("thinking"), str) and thought:
        message["reasoning_content"] = thought
    if isinstance(name := given.get("tool_name") or given.get("name"), str):
        message["name"] = name
    if isinstance(id := given.get("tool_call_id"), str):
        message["tool_call_id"] = id
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls must be a list, got {kind_of(calls)}.", "messages")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return message


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must be an object with a function that has a name.", "messages")
    arguments = function.get("arguments")
    arguments = told_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict | None):
        raise ApiError(400, f"{where}.function.arguments must be an object, got {kind_of(arguments)}.", "messages")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": given["id"], **call} if isinstance(given.get("id"), str) else call


def _pair(messages: list[dict[str, Any]]) -> None:
    """Give the calls ids, and their results the same: clients of Ollama send results in the order of the calls, with
    no ids, and some templates want them."""
    waiting: list[tuple[str, str]] = []
    for n, message in enumerate(messages):
        if message.get("tool_calls"):
            for place, call in enumerate(message["tool_calls"]):
                call.setdefault("id", f"call{n:03}{place:02}")  # nine characters, as Mistral's templates want
            waiting = [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]
        elif message["role"] == "tool" and waiting and "tool_call_id" not in message:
            named = next((pair for pair in waiting if pair[1] == message.get("name")), waiting[0])
            waiting.remove(named)
            message["tool_call_id"] = named[0]


class ShowRequest(Request):
    """POST /api/show. ``name`` is what the field was called once."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def __post_init__(self) -> None:
        self.model = self.model or self.name


class EmbedRequest(Request):
    """POST /api/embed. Vectors have length 1. ``keep_alive`` and ``options`` are accepted."""

    model: str | None = None
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: Any = None

    def texts(self) -> list[str]:
        """The texts, none where there is nothing to do. Raises ApiError."""
        if self.input is None or self.input == "":
            return []
        given = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
            raise ApiError(400, "input must be a string or a list of strings.", "input")
        return given


class EmbeddingsRequest(Request):
    """POST /api/embeddings, the older form: one text, a vector of any length."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: Any = None
