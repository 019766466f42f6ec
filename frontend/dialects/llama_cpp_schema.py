"""What /completion and /infill of llama.cpp's server may hold, and what it means as a completion of OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...proto.params import SamplingParams
from ..errors import ApiError
from ..parsing import Request, kind_of
from ..schema import CompletionRequest
from ..shapes import Shape, shape

DEFAULTS: dict[str, float | int] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own, where neither the request nor the model's folder says something else."""

SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")
"""Those that are run, in the order of llama.cpp's default, which is the only one that ``samplers`` may have."""
_OFF = ("dry", "top_n_sigma", "typ_p", "xtc")
"""Those that ``samplers`` may name, for they do nothing unless their own fields turn them on, which is refused."""
_ALIASES = {"top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "typical_p": "typ_p", "typical": "typ_p",
            "typ-p": "typ_p", "temp": "temperature", "top-n-sigma": "top_n_sigma"}  # fmt: skip

RANDOM_SEED = 4294967295
"""What llama.cpp calls a seed that is drawn."""
FOREVER = -1
MAX_EXTRA = 1024
"""Files of ``input_extra`` at most."""


class Body(CompletionRequest):
    """A completion whose errors are told in llama.cpp's names. ``n_predict`` has no limit but the context's."""

    form: str = ""  # the field that says what form the output has

    def usual_limit(self) -> int | None:
        return None

    def own_names(self) -> dict[str | None, str]:
        names: dict[str | None, str] = {
            "max_tokens": "n_predict",
            "logprobs": "n_probs",
            "repetition_penalty": "repeat_penalty",
            "n": "n_cmpl",
        }
        mine = {**CompletionRequest.own_names(self), **names}
        if self.form:
            mine = {name: self.form if told == "structured_outputs" else told for name, told in mine.items()}
            mine["structured_outputs"] = self.form
        return mine


class LlamaRequest(Request, kw_only=True):
    """Fields of both routes. None means: not given."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {
        "adaptive_target": (-1, -1.0),
        "dry_multiplier": (0, 0.0),
        "dynatemp_range": (0, 0.0),
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
        "lora": ([],),
        "min_keep": (0,),
        "mirostat": (0,),
        "n_indent": (0,),
        "reasoning_budget_tokens": (-1,),
        "t_max_predict_ms": (0,),
        "top_n_sigma": (-1, -1.0, 0, 0.0),
        "typical_p": (1, 1.0),
        "xtc_probability": (0, 0.0),
    }

    without_effect: ClassVar[tuple[str, ...]] = (
        "adaptive_decay", "backend_sampling", "chat_format", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard",
        "n_keep", "preserved_tokens", "reasoning_format", "speculative.n_max", "speculative.n_min",
        "speculative.p_min", "speculative.type", "sse_ping_interval", "stream_options", "xtc_threshold",
    )  # fmt: skip

    model: str | None = None
    prompt: Any = None
    n_predict: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    grammar: str | None = None
    json_schema: Any = None
    stop: Any = None
    stream: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    n_probs: int | None = None
    logprobs: int | None = None
    post_sampling_probs: bool | None = None
    samplers: Any = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None
    id_slot: int | None = None
    cache_salt: Any = None
    priority: int | None = None

    def check(self) -> None:
        if self.repeat_last_n is not None and self.repeat_last_n < -1:
            raise ApiError(400, f"repeat_last_n must be at least -1, got {self.repeat_last_n}.", "repeat_last_n")
        if self.post_sampling_probs and self.probs():
            raise ApiError(
                400, "post_sampling_probs=true is not supported: n_probs tells the model's own probabilities, before "
                "any sampler. Leave it out.", "post_sampling_probs",
            )  # fmt: skip

    def probs(self) -> int:
        """How many likely tokens are told beside each; 0: none."""
        return (self.logprobs or 0) if self.n_probs is None else self.n_probs

    def limit(self) -> int | None:
        """Tokens at most; None: as many as the context holds."""
        asked = next((n for n in (self.n_predict, self.max_completion_tokens, self.max_tokens) if n is not None), None)
        return None if asked is None or asked < 0 else asked

    def body(self, defaults: dict[str, Any]) -> Body:
        """The same as a completion, over the model's ``defaults``. ``prompt`` and ``logit_bias`` need the tokenizer,
        and are not in it. Raises ApiError."""
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        values = {
            name: value if value is not None else defaults.get(name, DEFAULTS[name]) for name, value in given.items()
        }
        values["temperature"] = max(0.0, values["temperature"])
        values["top_k"] = max(0, values["top_k"])
        penalties: dict[str, Any] = {
            "repetition_penalty": self.repeat_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }  # fmt: skip
        used = _samplers(self.samplers)
        if used is not None:
            off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
            values |= {name: value for name, value in off.items() if name not in used}
        if self.repeat_last_n == 0 or (used is not None and "penalties" not in used):
            penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        form, told = _form(self.grammar, self.json_schema)
        limit = self.limit()
        body = Body(
            model=self.model, max_tokens=max(1, limit) if limit is not None else None, stream=self.stream,
            n=self.n_cmpl if self.n_cmpl is not None else self.n,
            seed=None if self.seed in (RANDOM_SEED, -1) else self.seed, stop=_stops(self.stop),
            ignore_eos=self.ignore_eos, logprobs=self.probs() or None, structured_outputs=told, form=form,
            skip_reading_prefix_cache=True if self.cache_prompt is False else None,
            cache_salt=self.cache_salt, priority=self.priority, **values, **penalties,
        )  # fmt: skip
        body.check()
        return body

    def settings(self, params: SamplingParams, context: int) -> dict[str, Any]:
        """``generation_settings``: what is really done, in llama.cpp's words. ``context`` is in tokens."""
        spec, limit = params.structured_outputs, self.limit()
        return {
            "n_ctx": context, "seed": RANDOM_SEED if params.seed is None else params.seed,
            "temperature": params.temperature, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
            "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p, "top_n_sigma": -1.0,
            "xtc_probability": 0.0, "xtc_threshold": 0.1, "typical_p": 1.0, "repeat_last_n": -1,
            "repeat_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty, "dry_multiplier": 0.0, "dry_base": 1.75,
            "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_sequence_breakers": [], "mirostat": 0,
            "mirostat_tau": 5.0, "mirostat_eta": 0.1, "stop": params.stop,
            "max_tokens": FOREVER if limit is None else limit, "n_predict": FOREVER if limit is None else limit,
            "n_keep": 0, "n_discard": 0, "ignore_eos": params.ignore_eos, "stream": bool(self.stream),
            "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
            "n_probs": self.probs(), "min_keep": 0, "grammar": (spec.grammar or "") if spec is not None else "",
            "grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": [],
            "samplers": list(SAMPLERS) if self.samplers is None else self.samplers,
            "timings_per_token": bool(self.timings_per_token),
            "post_sampling_probs": False, "lora": [],
        }  # fmt: skip


class InfillRequest(LlamaRequest, kw_only=True):
    """POST /infill. ``prompt`` is how the text in the middle begins."""

    inside: ClassVar[Mapping[str, Shape]] = {"input_extra": shape("text filename")}

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[Any] | None = None

    def check(self) -> None:
        LlamaRequest.check(self)
        for name in ("input_prefix", "input_suffix"):
            if getattr(self, name) is None:
                raise ApiError(400, f"{name} must be given; it may be empty.", name)
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise ApiError(400, f"prompt must be a string, got {kind_of(self.prompt)}.", "prompt")

    def extra(self) -> list[tuple[str, str]]:
        """The other files: (name, text) each. Raises ApiError."""
        files = []
        if len(self.input_extra or ()) > MAX_EXTRA:
            raise ApiError(
                400,
                f"input_extra holds {len(self.input_extra or ())} files, over the limit of {MAX_EXTRA}.",
                "input_extra",
            )
        for n, file in enumerate(self.input_extra or ()):
            if not isinstance(file, dict) or not isinstance(file.get("text"), str):
                raise ApiError(400, f"input_extra[{n}] must be an object with filename and text.", "input_extra")
            name = file.get("filename", "tmp")
            if not isinstance(name, str):
                raise ApiError(400, f"input_extra[{n}].filename must be a string, got {kind_of(name)}.", "input_extra")
            files.append((name, file["text"]))
        return files


def _form(grammar: str | None, schema: Any) -> tuple[str, dict[str, Any] | None]:
    """The field that asks for a form, and the form."""
    if grammar:
        return "grammar", {"grammar": grammar}
    return ("", None) if schema is None else ("json_schema", {"json": schema})


def _stops(given: Any) -> Any:
    """Empty strings, which llama.cpp passes over, left out."""
    return [each for each in given if each != ""] if isinstance(given, list) else given or None


def _samplers(given: Any) -> set[str] | None:
    """The samplers that are to be run; None: all. Raises ApiError for any order but the default's."""
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ApiError(400, f"samplers must be a list of names, got {kind_of(given)}.", "samplers")
    names = [_ALIASES.get(name, name) for name in given]
    if unknown := [name for name in names if name not in (*SAMPLERS, *_OFF)]:
        raise ApiError(
            400,
            f"samplers names {unknown[0]!r:.80}; those that are known are {', '.join((*SAMPLERS, *_OFF))}.",
            "samplers",
        )
    run = [name for name in names if name in SAMPLERS]
    if run != [name for name in SAMPLERS if name in run]:
        raise ApiError(
            400, f"samplers must come in the order {', '.join(SAMPLERS)}, each once; got {', '.join(run)}.", "samplers"
        )
    return set(run)
