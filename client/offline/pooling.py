"""LLM's methods for models that pool: encode, embed, classify and score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...proto.checkpoint.pooler_config import PoolerConfig
from ...proto.flag_words import TASKS
from ...proto.pooling import PoolingParams
from ..results import Pooled
from .batch import Offline, PoolJob, Progress
from .checks import check_pooled
from .lora import parse_lora
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .prompts import Input, parse_params, parse_prompts
from .scoring import Pairs, pooled_for_score

PoolingOutputs = list[PoolingRequestOutput[PoolingOutput]]
Tqdm = bool | Callable[..., Any]

_TASKS = {"encode": None, "reward": "token_classify"}
"""Names that vLLM once had for tasks."""

_EMBEDDING = ("embed", "token_embed")


def from_task(task: Any) -> dict[str, str]:
    """The keywords that mean what the older ``task`` did. Raises ValueError."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {task!r}; newer names are runner and convert.")
    return TASKS[task]


class PoolingMethods:
    """They raise ValueError or TypeError for what is wrong with a prompt or its parameters, as far as that is known
    here before anything is queued; RuntimeError where the processes behind are gone, or a request failed."""

    _running: Offline

    def _take_numbers(self, count: int) -> int:
        raise NotImplementedError

    def encode(
        self,
        prompts: Any = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        inputs: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> PoolingOutputs:
        """What the model pools of every prompt, in the order of the prompts.

        Args:
            prompts: as ``generate`` takes them.
            pooling_params: one for all prompts, or a list with one for each.
            prompt_token_ids: ids of one or of all prompts; run in place of ``prompts`` where both are given.
            pooling_task: "embed", "classify", "token_embed" or "token_classify"; left out, that of the parameters, or
                what the model was made for.
            truncate_prompt_tokens: tokens of a prompt that are kept, from its beginning; -1: what the model can hold.
            lora_request: a LoRARequest for all prompts, or a list with one or None for each (``enable_lora``).
            inputs: another name of ``prompts``.
            tokenization_kwargs: ``{"add_special_tokens": False}`` takes texts without them.
        """
        if prompts is not None and inputs is not None:
            raise TypeError("inputs is another name of prompts; give one of them.")
        pooler = self._pooler("encode")
        parsed = parse_prompts(inputs if prompts is None else prompts, prompt_token_ids, tokenization_kwargs)
        return self._pool(
            pooler, parsed, pooling_params, _TASKS.get(pooling_task or "", pooling_task), truncate_prompt_tokens,
            use_tqdm, lora_request,
        )  # fmt: skip

    def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of every prompt; arguments as for ``encode``."""
        pooler = self._pooler("embed")
        if "embed" not in pooler.tasks:
            raise ValueError(
                "Embedding API is not supported by this model. Try converting the model using `--convert embed`."
            )
        found = self._pool(
            pooler, parse_prompts(prompts, None, tokenization_kwargs), pooling_params, "embed", truncate_prompt_tokens,
            use_tqdm, lora_request,
        )  # fmt: skip
        return [_with(EmbeddingRequestOutput, each, EmbeddingOutput(each.outputs.data.tolist())) for each in found]

    def reward(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> PoolingOutputs:
        """A reward model's values for each token of every prompt (``outputs.data``, [tokens, labels]); arguments as for
        ``encode``."""
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="token_classify",
            truncate_prompt_tokens=truncate_prompt_tokens, tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip

    def classify(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """A probability of each class for every prompt; arguments as for ``encode``."""
        pooler = self._pooler("classify")
        if "classify" not in pooler.tasks:
            raise ValueError(
                "Classification API is not supported by this model. Try converting the model using "
                "`--convert classify`."
            )
        found = self._pool(
            pooler, parse_prompts(prompts, None, tokenization_kwargs), pooling_params, "classify",
            truncate_prompt_tokens, use_tqdm, lora_request,
        )  # fmt: skip
        return [
            _with(ClassificationRequestOutput, each, ClassificationOutput(each.outputs.data.tolist())) for each in found
        ]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of ``data_1`` goes with its counterpart in ``data_2``, or one with each of several.

        ``chat_template`` puts the two together for a cross-encoder, as messages of the roles query and document; so
        does that of ``LLM(chat_template=...)``.

        A cross-encoder says so itself; for a model that embeds it is the cosine of the two embeddings.
        """
        pooler = self._pooler("score")
        cross = "score" in pooler.tasks
        task = pooled_for_score(pooler)
        if task not in pooler.tasks:
            raise ValueError("Scoring API is only enabled for num_labels == 1.")
        usual = None if self._running.supervisor.args.chat_template is None else ""
        pairs = Pairs(_texts(data_1), _texts(data_2), cross, chat_template or usual)
        found = self._pool(pooler, pairs.inputs, pooling_params, task, truncate_prompt_tokens, use_tqdm, lora_request)
        pooled = [Pooled(each.prompt_token_ids, each.outputs.data, each.num_cached_tokens) for each in found]
        return [
            ScoringRequestOutput(found[place].request_id, ScoringOutput(each.score), each.prompt_ids, each.cached)
            for place, each in enumerate(pairs.scores(pooled))
        ]

    def _pooler(self, method: str) -> PoolerConfig:
        if self._running.pooler is None:
            raise ValueError(
                f"LLM.{method}() is only supported for pooling models. Try passing `--runner pooling` to use the model "
                "as a pooling model."
            )
        return self._running.pooler

    def _pool(
        self, pooler: PoolerConfig, inputs: list[Input], params: Any, task: str | None, keep: int | None,
        use_tqdm: Tqdm, lora_request: Any,
    ) -> PoolingOutputs:  # fmt: skip
        adapters = parse_lora(lora_request, len(inputs), self._running.adapters)
        parsed = parse_params(
            PoolingParams() if params is None else params, len(inputs), PoolingParams, "pooling_params"
        )
        per_prompt = [_for_task(each, task, keep, pooler) for each in parsed]
        for given in inputs:
            check_pooled(given, self._running.limits)
        first = self._take_numbers(len(inputs))
        jobs = [
            PoolJob(number, str(first + number), given, each, adapters[number][1])
            for number, (given, each) in enumerate(zip(inputs, per_prompt, strict=True))
        ]
        with Progress(len(jobs), use_tqdm) as progress:
            return self._running.pool(jobs, progress)


def _for_task(params: PoolingParams, task: str | None, keep: int | None, pooler: PoolerConfig) -> PoolingParams:
    """The parameters of one prompt, checked against what the model can do. Raises ParamError."""
    changes: dict[str, Any] = {"task": task or params.task or pooler.tasks[0]}
    if changes["task"] in _EMBEDDING and params.use_activation is not None and params.normalize is None:
        changes.update(normalize=params.use_activation, use_activation=None)  # vLLM's newer name of it
    if keep is not None:
        changes["truncate_prompt_tokens"] = keep
    params = msgspec.structs.replace(params, **changes)
    pooler.resolve(params)
    return params


def _texts(given: Any) -> list[str]:
    """One text or several. Raises TypeError."""
    parsed = parse_prompts(given, None)
    if any(each.text is None or each.ids is not None for each in parsed):
        raise TypeError("texts to be scored must be strings, or a list of strings.")
    return [each.text or "" for each in parsed]


def _with(kind: Any, base: PoolingRequestOutput[PoolingOutput], outputs: Any) -> Any:
    return kind(base.request_id, outputs, base.prompt_token_ids, base.num_cached_tokens)
