"""What a request may hold: msgspec structs, and the refusal of everything else by the name of its field.

A body is decoded once to plain objects, so that fields which are known but not honoured yet can be refused by name
and unknown ones merely noted; then it is converted to a struct, which checks types strictly: no ``true`` for an
integer, no ``"5"`` for a 5. Ranges are ``SamplingParams``' business.
"""

from __future__ import annotations

import logging
import re
from typing import Any, TypeVar

import msgspec

from ..proto.params import ParamError, SamplingParams
from .errors import ApiError

log = logging.getLogger(__name__)

MAX_PROMPTS = 2048
"""Prompts in one request at most."""

MAX_CHOICES = 16384
"""Prompts times n of one request at most."""

_PASSED_ON = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
)  # fmt: skip

# Known fields that are not honoured yet, and the values (beside null) that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

_PATH = re.compile(r"(?P<what>.*?) - at `\$(?P<path>.*)`$", re.S)
_NAMES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
          "object": "an object", "null": "null"}  # fmt: skip

R = TypeVar("R", bound="GenerateRequest")


class StreamOptions(msgspec.Struct):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share. None means: not given."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None

    def token_limit(self) -> int | None:
        """Output tokens at most; None: as many as the context holds."""
        return self.max_tokens

    def sampling(self, defaults: dict[str, Any], max_model_len: int) -> SamplingParams:
        """SamplingParams of this request, over the model's own defaults. Raises ApiError naming the field."""
        values = dict(defaults)
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        values["max_tokens"] = limit = self.token_limit()
        if (keep := self.truncate_prompt_tokens) is not None:
            # -1 keeps as much of the prompt as leaves room for the output
            values["truncate_prompt_tokens"] = max(1, max_model_len - (limit or 1)) if keep == -1 else keep
        try:
            return SamplingParams(**values)
        except ParamError as error:
            raise self._own_words(error) from error

    def _own_words(self, error: ParamError) -> ApiError:
        """The error, in this request's own names of its fields."""
        return ApiError(400, str(error), error.param)

    def check(self) -> None:
        """Refuse combinations that mean nothing. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only allowed with stream=true.", "stream_options")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise ApiError(400, f"priority must be a 32-bit integer, got {self.priority}.", "priority")


class CompletionRequest(GenerateRequest):
    """POST /v1/completions. ``prompt`` is a string, a list of strings, token ids, or a list of lists of ids."""

    prompt: Any = None

    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, at least one, none empty. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompts: list[Any] = [prompt]
        elif isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            prompts = [prompt]
        elif isinstance(prompt, list):
            prompts = prompt
        elif prompt is None:
            raise ApiError(400, "prompt must be given and must not be empty.", "prompt")
        else:
            raise ApiError(400, f"prompt must be a string or a list, got {_kind(prompt)}.", "prompt")
        if not prompts:
            raise ApiError(400, "prompt must be given and must not be empty.", "prompt")
        if len(prompts) > MAX_PROMPTS:
            raise ApiError(400, f"prompt holds {len(prompts)} prompts, over the limit of {MAX_PROMPTS}.", "prompt")
        kind = type(prompts[0])
        for position, one in enumerate(prompts):
            _check_prompt(one, kind, f"prompt[{position}]" if len(prompts) > 1 else "prompt")
        return prompts


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _own_words(self, error: ParamError) -> ApiError:
        if error.param != "max_tokens" or self.max_completion_tokens is None:
            return GenerateRequest._own_words(self, error)
        return ApiError(400, str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")

    def template(self) -> dict[str, Any]:
        """How the chat template is to be rendered; the detokenizer refuses what cannot be."""
        go_on = bool(self.continue_final_message)
        template: dict[str, Any] = {
            "add_generation_prompt": not go_on if self.add_generation_prompt is None else self.add_generation_prompt,
            "continue_final_message": go_on,
        }
        if self.chat_template_kwargs:
            template["chat_template_kwargs"] = self.chat_template_kwargs
        return template

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, each with a role, their text parts joined. Raises ApiError."""
        if not self.messages:
            raise ApiError(400, "messages must hold at least one message.", "messages")
        return [_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def parse(body: bytes, kind: type[R]) -> R:
    """Bytes of a request to its struct, checked. Raises ApiError 400 naming the field."""
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError:
        raw = _decode_typed(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply.") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(raw)}.")
    _refuse_not_yet(raw)
    try:
        request = msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    if log.isEnabledFor(logging.DEBUG):
        unknown = sorted(raw.keys() - set(kind.__struct_fields__) - _NOT_YET.keys())
        if unknown:
            log.debug("ignored unknown fields %s", unknown[:20])
    request.check()
    return request


def _decode_typed(body: bytes, kind: type[Any]) -> Any:
    """A number too large to decode: decoding into the struct tells in which field it is."""
    try:
        msgspec.json.decode(body, type=kind)
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    for name, value in raw.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{name} holds a number that is out of range.", name) from error
    raise ApiError(400, "the body holds a number that is out of range.")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """msgspec's words as ours: which field, what was expected, what came."""
    match = _PATH.fullmatch(str(error))
    if match is None:
        return ApiError(400, f"the body is not valid: {error}.")
    path = match["path"].removeprefix(".")
    param = re.split(r"[.\[]", path, maxsplit=1)[0] or None
    what = match["what"]
    if types := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what):
        wanted = [_NAMES.get(t, t) for t in types[1].split(" | ") if t != "null"]
        what = f"must be {' or '.join(wanted)}, got {_NAMES.get(types[2], types[2])}"
    else:
        what = f"is not valid: {what[:1].lower()}{what[1:]}"
    if path.startswith("["):
        return ApiError(400, f"a value of the body {what}.")
    return ApiError(400, f"{path} {what}.", param)


def _refuse_not_yet(raw: dict[str, Any]) -> None:
    for name in raw.keys() & _NOT_YET.keys():
        value = raw[name]
        if value is not None and not any(_same(value, neutral) for neutral in _NOT_YET[name]):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else shown[:80] + "..."
            raise ApiError(400, f"{name}={shown} is not supported yet by this version; leave it out.", name)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells false from 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _check_prompt(prompt: Any, kind: type[Any], where: str) -> None:
    if type(prompt) is not kind or kind not in (str, list):
        raise ApiError(
            400, f"{where} must be a string or a list of token ids, all alike; got {_kind(prompt)}.", "prompt"
        )
    if not prompt:
        raise ApiError(400, f"{where} must not be empty.", "prompt")
    if kind is list:
        if set(map(type, prompt)) != {int}:
            odd = next(i for i in prompt if type(i) is not int)
            raise ApiError(400, f"{where} must hold integers (token ids), got {_kind(odd)}.", "prompt")
        if min(prompt) < 0 or max(prompt) >= 2**31:
            odd = next(i for i in prompt if not 0 <= i < 2**31)
            raise ApiError(400, f"{where} holds {odd}, which is no token id.", "prompt")


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}.role must be a string such as 'user', got {_kind(role)}.", "messages")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string or a list of parts, got {_kind(content)}.", "messages")
    texts = []
    for position, part in enumerate(content):
        at = f"{where}.content[{position}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ApiError(400, f"{at} must be an object with a type, got {_kind(part)}.", "messages")
        if part["type"] not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(400, f"{at} of type {part['type']!r} is not supported yet by this version.", "messages")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{at}.text must be a string, got {_kind(text)}.", "messages")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
