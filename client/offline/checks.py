"""What LLM refuses before anything is queued; ``proto/checks.py`` has what a server refuses in the same words."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ...proto import checks
from ...proto.checkpoint.model_config import ModelConfig
from ...proto.grammars.thought_formats import waiting
from ...proto.params import MAX_INT, RequestOutputKind, SamplingParams
from ...proto.structured import StructuredOutputsParams, by_rules
from ..sendable import bad_field
from .prompts import Input

_NO_TEXT = "You cannot pass text prompts when `skip_tokenizer_init=True`; give token ids."


@dataclass(slots=True)
class Limits:
    """What the running stack can do, as far as that is known here."""

    config: ModelConfig
    max_logprobs: int  # -1: no limit
    processors: list[str]  # names of the registered logits processors
    has_tokenizer: bool
    no_structure: str | None = None  # why structured outputs are refused
    rules: dict[str, bool] = field(default_factory=dict)  # of structured output, where a request says nothing
    reasoning: str | None = None  # the parser of the thoughts that a form lets go before it


def shortened(params: list[SamplingParams], longest: int) -> list[SamplingParams]:
    """The same with ``max_tokens`` of at most ``longest``: as in vLLM, what asks for more ends with the context.

    Over HTTP it is refused, there as here. Raises ValueError for what else is wrong with such parameters.
    """
    held = {
        id(each): msgspec.structs.replace(each, max_tokens=longest)
        for each in params
        if type(each.max_tokens) is int and longest < each.max_tokens <= MAX_INT
    }
    return [held.get(id(each), each) for each in params]


def formed(params: list[SamplingParams], limits: Limits) -> list[SamplingParams]:
    """The same with forms by the operator's rules, and after a thought where the model has a parser of thoughts."""
    if not limits.rules and limits.reasoning is None:
        return params
    held = {}
    for each in params:
        if isinstance(own := each.structured_outputs, StructuredOutputsParams) and id(each) not in held:
            form = msgspec.structs.replace(own)
            by_rules(form, limits.rules)
            form = (waiting(form, limits.reasoning) if limits.reasoning is not None else None) or form
            held[id(each)] = msgspec.structs.replace(each, structured_outputs=form)
    return [held.get(id(each), each) for each in params]


def check_params(params: list[SamplingParams], limits: Limits) -> None:
    """Refuse parameters that could not be run, or be sent (changed after their checks). Raises ValueError."""
    for each in {id(each): each for each in params}.values():
        if (bad := bad_field(each)) is not None:
            raise ValueError(f"{bad[0]} of sampling_params cannot be sent: {bad[1]}.")
        checks.check_params(each, limits.config, limits.config.max_model_len, limits.max_logprobs)
        if each.structured_outputs is not None and limits.no_structure is not None:
            raise ValueError(limits.no_structure)
        checks.check_text(each, limits.has_tokenizer)
        _check_processors(each, limits.processors)
        if each.output_kind == RequestOutputKind.DELTA and each.best_of is not None:
            raise ValueError("best_of must equal n to use output_kind=DELTA: the best are known at the end only.")


def _check_processors(params: SamplingParams, registered: list[str]) -> None:
    for name in params.logits_processors or ():
        if name not in registered:
            raise ValueError(
                f"logits_processors names {name!r}, which is not registered (registered: "
                f"{', '.join(registered) or 'none'}); start with LLM(logits_processor=[...])."
            )


def check_input(given: Input, params: SamplingParams, limits: Limits) -> None:
    """Refuse what could not run: empty, too long, ids the model does not have. Raises ValueError."""
    config = limits.config
    if given.ids is None:
        if not limits.has_tokenizer:
            raise ValueError(_NO_TEXT)
        return
    keep = checks.tokens_kept(params, config.max_model_len)
    checks.check_prompt(given.ids if keep is None else given.ids[-keep:], config, config.max_model_len)


def check_pooled(given: Input, limits: Limits) -> None:
    """The same of an input that is pooled, but for its length. Raises ValueError."""
    if given.ids is not None:
        checks.check_ids(given.ids, limits.config)
    elif not limits.has_tokenizer:
        raise ValueError(_NO_TEXT)
