"""What a request may hold: msgspec structs, and what they mean as SamplingParams.

Scalars are checked by type while a body is parsed; ranges, and what lists and objects hold, are ``SamplingParams``'
business. Errors name the request's own field, whatever it is called further in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from ..client.results import RequestError
from ..proto.params import ParamError, SamplingParams
from ..proto.structured import StructuredOutputsParams
from .errors import ApiError
from .extras import Extras
from .parsing import Request, check_salt, parse
from .prompts import MAX_PROMPTS, conversation_of, prompts_of, template_of
from .shapes import CHOICE, FORMAT, MESSAGE, TOOL, Shape
from .structured import OBJECT, form_field, form_of
from .tool_choice import Reading, allowed_of, choice_of, reading_of, shown, tools_of

__all__ = ["MAX_CHOICES", "MAX_PROMPTS", "ChatRequest", "CompletionRequest", "GenerateRequest", "parse"]

MAX_CHOICES = 16384
"""Prompts times n (or best_of) of one request at most."""

_NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "packed_top_logprobs": (False,),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_token_ids": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Known fields that are not honoured yet, and the values (beside null) that ask for nothing."""

_WITHOUT_EFFECT = (
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "verbosity", "return_token_offsets", "session_id",
)  # fmt: skip
"""Fields that clients of OpenAI and vLLM send and that change no answer here (docs/generation.md)."""

_NOT_OF_BEAMS = ("temperature", "top_p", "top_k", "min_p")
"""Defaults of a model that a beam search cannot have."""

_COMPLETION_TOKENS = 16
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class StreamOptions(msgspec.Struct):
    """What a stream carries beside text."""

    without_effect: ClassVar[tuple[str, ...]] = ("include_obfuscation",)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(Request, kw_only=True):
    """Fields that completions and chat completions share. None means: not given."""

    not_yet = _NOT_YET
    without_effect: ClassVar[tuple[str, ...]] = _WITHOUT_EFFECT
    inside: ClassVar[Mapping[str, Shape]] = {"response_format": FORMAT}

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    logits_processors: Any = None
    vllm_xargs: dict[str, Any] | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    prompt_logprobs: int | bool | None = None
    logprob_token_ids: Any = None
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # of vLLM's several; here is one
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    priority: int | None = None
    cache_salt: Any = None
    request_id: str | None = None
    user: str | None = None

    def token_limit(self) -> int | None:
        """Output tokens at most; None: the request does not say."""
        return self.max_tokens

    def usual_limit(self) -> int | None:
        """Output tokens at most where the request does not say; None: as many as the context holds."""
        return None

    @property
    def prompt_only(self) -> bool:
        """True where the answer is the prompt alone (``echo`` with ``max_tokens`` 0), to learn its logprobs."""
        return False

    def likeliest(self) -> int | None:
        """How many of the most likely tokens are wanted beside each token; None: no logprobs."""
        raise NotImplementedError

    def likeliest_of_prompt(self) -> int | None:
        """The same for the prompt's tokens."""
        return _count(self.prompt_logprobs)

    def extras(self) -> Extras | None:
        """What the answer is to carry beside text; None: nothing, as for most."""
        logprobs, of_prompt = self.likeliest(), _count(self.prompt_logprobs)
        if logprobs is None and of_prompt is None and not self.return_token_ids:
            return None
        return Extras(logprobs, of_prompt, bool(self.return_token_ids), bool(self.return_tokens_as_token_ids))

    def sampling(self, defaults: dict[str, Any], ceiling: int | None = None) -> SamplingParams:
        """SamplingParams of this request, over the model's own defaults; ``ceiling`` is the most output tokens that
        any request gets. Raises ApiError naming the field."""
        values = dict(defaults)
        usual = values.pop("max_tokens", None)
        if self.use_beam_search:
            values = {name: value for name, value in values.items() if name not in _NOT_OF_BEAMS} | {"temperature": 0.0}
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        limit = 1 if self.prompt_only else self.token_limit()
        limit = _least(self.usual_limit(), usual) if limit is None else limit
        values["max_tokens"] = _least(limit, ceiling)
        try:
            return SamplingParams(
                logprobs=self.likeliest(), prompt_logprobs=self.likeliest_of_prompt(), structured_outputs=form_of(self),
                **values,
            )  # fmt: skip
        except (ParamError, ApiError) as error:
            raise self.own_words(error) from error

    def usage_options(self) -> tuple[bool, bool]:
        """Whether a stream ends with a usage chunk, and whether each of its chunks has the usage so far: as in vLLM the
        second means nothing without the first."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)

    def own_names(self) -> dict[str | None, str]:
        """What this request calls a field, by its name in SamplingParams, where that differs."""
        names: dict[str | None, str] = {}
        if self.use_beam_search and self.best_of is None:
            names["best_of"] = "n"  # the width is best_of, or n
        form = form_field(self)
        if form is not None:
            names |= dict.fromkeys(StructuredOutputsParams.__struct_fields__, form)
            if form != OBJECT:
                names[OBJECT] = form
        return names

    def own_words(self, error: ParamError | RequestError) -> RequestError:
        """The error, in this request's own names of its fields."""
        known = error if isinstance(error, RequestError) else ApiError(400, str(error), error.param)
        names = self.own_names()
        words = known.message
        for name in {known.param, "max_tokens"} & names.keys():
            words = re.sub(
                rf"(?<![\w-]){name}(\.(json|regex|choice|grammar|json_object|structural_tag))?\b", names[name], words
            )
        if words == known.message and known.param not in names:
            return known
        return ApiError(known.status, words, names.get(known.param, known.param), known.retry_after)

    def check(self) -> None:
        """Refuse combinations that mean nothing. Raises ApiError."""
        if self.logprob_token_ids and getattr(self, "logprobs", None) in (None, False):
            raise ApiError(400, "logprob_token_ids needs logprobs: set logprobs too.", "logprob_token_ids")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream=true.", "stream_options")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise ApiError(400, f"priority must be a 32-bit integer, got {self.priority}.", "priority")
        check_salt(self.cache_salt)
        if self.stream_interval is not None and self.stream_interval < 1:
            raise ApiError(400, f"stream_interval must be at least 1, got {self.stream_interval}.", "stream_interval")
        if self.stream:
            self._check_stream()

    def _check_stream(self) -> None:
        if self.use_beam_search:
            raise ApiError(
                400, "Streaming is not currently supported with beam search: use_beam_search needs stream=false.",
                "use_beam_search",
            )  # fmt: skip
        if self.best_of is not None and self.best_of != (self.n or 1):
            said = f"best_of={self.best_of} must equal n={self.n or 1} when stream=true"
            raise ApiError(400, said + ": which are the best is known at the end.", "best_of")
        if _count(self.prompt_logprobs) is not None:
            raise ApiError(400, "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


_PASSED_ON = [
    name for name in GenerateRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("max_tokens", "prompt_logprobs", "structured_outputs")
]  # fmt: skip
"""Fields that are SamplingParams' own, as they are; the three left out are worked out from several fields."""


class CompletionRequest(GenerateRequest):
    """POST /v1/completions. ``prompt`` is a string, a list of strings, token ids, or a list of lists of ids; with a
    ``suffix`` strings alone, and what comes between is filled in."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: neutral for name, neutral in _NOT_YET.items() if name not in ("suffix", "prompt_embeds")
    }

    prompt: Any = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: int | bool | None = None

    def usual_limit(self) -> int | None:
        return max(_COMPLETION_TOKENS, self.min_tokens or 0)

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0 and bool(self.echo)

    def likeliest(self) -> int | None:
        return -1 if self.logprob_token_ids else _count(self.logprobs)

    def likeliest_of_prompt(self) -> int | None:
        asked = _count(self.prompt_logprobs)
        shown = _count(self.logprobs) if self.echo else None
        if asked is None or shown is None:
            return shown if asked is None else asked
        return -1 if -1 in (asked, shown) else max(asked, shown)

    def own_names(self) -> dict[str | None, str]:
        names = GenerateRequest.own_names(self)
        return names if self.prompt_logprobs is not None else {**names, "prompt_logprobs": "logprobs"}  # of echo

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, at least one, none empty. Raises ApiError."""
        if self.prompt is None and self.prompt_embeds is not None:
            return []
        prompts = prompts_of(self.prompt, "prompt", empty=bool(self.suffix))
        if self.suffix and isinstance(prompts[0], list):
            raise ApiError(400, "suffix needs a prompt of text: what is filled in stands between two texts.", "suffix")
        return prompts

    def check(self) -> None:
        GenerateRequest.check(self)
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise ApiError(400, f"{name} means nothing with a suffix: leave one of them out.", name)
        if self.prompt_embeds is None:
            return
        for name in ("suffix", "echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "best_of"):
            if (value := getattr(self, name)) is not None and value is not False and value != "":
                raise ApiError(400, f"{name} is not supported with prompt_embeds; leave one of them out.", name)
        if self.n not in (None, 1):
            raise ApiError(400, f"n must be 1 with prompt_embeds, got {self.n}; send the prompt several times.", "n")


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    inside: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL, "tool_choice": CHOICE}

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def likeliest(self) -> int | None:
        if self.logprob_token_ids:
            return -1
        return (self.top_logprobs or 0) if self.logprobs else None

    def own_names(self) -> dict[str | None, str]:
        names = {**GenerateRequest.own_names(self), "logprobs": "top_logprobs"}
        if self.tools is not None and form_field(self) is None:
            names[OBJECT] = "tools"
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def check(self) -> None:
        GenerateRequest.check(self)
        self.tools, self.tool_choice = allowed_of(self.tools, self.tool_choice)
        if (effort := self.reasoning_effort) is not None and effort not in _EFFORTS:
            raise ApiError(
                400, f"reasoning_effort must be one of {', '.join(_EFFORTS)}; got {effort!r:.80}.", "reasoning_effort"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")

    def reading(
        self, params: SamplingParams, parser: str | None, reasoning: str | None, kwargs: dict[str, Any] | None = None
    ) -> Reading | None:
        """How the answer is read by the server's parsers; None: as it comes. ``kwargs`` are the server's own of chat
        templates. Raises ApiError."""
        if self.tools is None and self.tool_choice is None and reasoning is None:
            return None
        tools = tools_of(self.tools)
        choice = choice_of(self.tool_choice, tools)
        one, thoughts = self.parallel_tool_calls is False, self.include_reasoning is not False
        own, thinks = params.structured_outputs, self._thinks(kwargs or {})
        return reading_of(tools, choice, one, thoughts, own, parser, reasoning, thinks)

    def _thinks(self, usual: dict[str, Any]) -> bool:
        """False where the request, or else the server, tells the model not to think, in the words that chat templates
        know."""
        effort = {} if self.reasoning_effort is None else {"thinking": self.reasoning_effort != "none"}
        for kwargs in (self.chat_template_kwargs or {}, effort, usual):
            if (said := kwargs.get("enable_thinking", kwargs.get("thinking"))) is not None:
                return said is not False
        return True

    def template(self) -> dict[str, Any]:
        """How the chat template is to be rendered; the detokenizer refuses what cannot be. A model that is to call no
        tools is told of none."""
        kwargs = self.chat_template_kwargs
        if self.reasoning_effort is not None:
            effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
            kwargs = {**effort, **(kwargs or {})}
        template = template_of(self.add_generation_prompt, self.continue_final_message, kwargs, self.add_special_tokens)
        if self.tools is not None and self.tool_choice != "none":
            template["tools"] = [shown(tool) for tool in self.tools]
        return template

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, each with a role, all their parts as parts of text. Raises ApiError."""
        return conversation_of(self.messages)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _count(given: int | bool | None) -> int | None:
    """A number of logprobs: true asks for one, false for none."""
    return (1 if given else None) if isinstance(given, bool) else given
