"""LLM: offline generation. It starts the same processes as the server, and ends them when it is closed."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from ...proto.config import EngineArgs
from ...proto.messages import Stats
from ...proto.params import SamplingParams
from ...proto.vllm_flags import rows
from .batch import Job, Offline, Progress
from .beams import BeamSearchOutput, BeamSearchParams, beam_output
from .checks import check_input, check_params, formed, shortened
from .facts import EngineFacts
from .lora import parse_lora
from .metrics import Metric
from .outputs import RequestOutput
from .pooling import PoolingMethods, from_task
from .processors import processor_names
from .prompts import (
    Input,
    check_template,
    parse_conversations,
    parse_params,
    parse_priority,
    parse_prompts,
)
from .tokenizer import load_tokenizer

_OF_WORKERS = ("sleep", "wake_up", "reset_prefix_cache")


class LLM(PoolingMethods):
    """A model, ready to generate from lists of prompts, or to pool them.

    Args (names and defaults are vLLM's):
        model: folder or hub id; the demo model when left out.
        tokenizer: folder or hub id, or a transformers tokenizer; the model's own when left out.
        skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text.
        dtype: "auto", "float16", "bfloat16", "float32", or a torch dtype.
        seed: makes the seeds of requests that name none reproducible; None: they differ from run to run.
        logits_processors: functions that requests may name in their ``logits_processors``, or the names,
            ``package.module:function``. They run in another process, so they must be importable by that name.
        **kwargs: any other field of EngineArgs; those that hold JSON (``hf_overrides``, ...) may be dicts.
            ``task`` is the older form of ``runner`` and ``convert``, ``override_pooler_config`` of ``pooler_config``.
    None is any argument's default.

    Raises:
        TypeError: an argument that does not exist.
        ValueError: a value that cannot work (ConfigError), or is not supported yet.
        LaunchError (a RuntimeError): a process could not start; the message is its own.

    It logs warnings and errors; ``log_level="info"`` also tells how it starts, and how much its KV cache holds.
    Close it with ``close()`` or a ``with`` block; dropping it or ending the interpreter does so too.
    ``generate`` may be called from several threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0,
        enforce_eager: bool = False,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int | None = None,
        disable_custom_all_reduce: bool = False,
        logits_processors: list[Callable[..., Any] | str] | None = None,
        **kwargs: Any,
    ):
        if (task := kwargs.pop("task", None)) is not None:
            kwargs = {**from_task(task), **kwargs}
        if (older := kwargs.pop("override_pooler_config", None)) is not None:
            if kwargs.get("pooler_config") is not None:
                raise TypeError("override_pooler_config is another name of pooler_config; give one of them.")
            kwargs["pooler_config"] = older
        _check_kwargs(kwargs)
        kwargs.setdefault("log_level", "warning")
        names = processor_names(logits_processors)
        names += [name for name in processor_names(kwargs.pop("logits_processor", None)) if name not in names]
        if max_context_len_to_capture is not None:
            warnings.warn("max_context_len_to_capture is now max_seq_len_to_capture", DeprecationWarning, stacklevel=2)
            max_seq_len_to_capture = max_context_len_to_capture
        own = tokenizer if hasattr(tokenizer, "save_pretrained") else None
        if dtype is not None:
            dtype = str(dtype).removeprefix("torch.")
        given: dict[str, Any] = dict(
            model=None if model is None else os.fspath(model),
            tokenizer=None if own is not None or tokenizer is None else os.fspath(tokenizer),
            tokenizer_mode=tokenizer_mode, skip_tokenizer_init=skip_tokenizer_init, trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size, dtype=dtype, quantization=quantization,
            revision=revision, tokenizer_revision=tokenizer_revision, seed=seed,
            gpu_memory_utilization=gpu_memory_utilization, swap_space=swap_space, enforce_eager=enforce_eager,
            max_seq_len_to_capture=max_seq_len_to_capture, logits_processor=names or None,
            disable_custom_all_reduce=disable_custom_all_reduce, **kwargs,
        )  # fmt: skip
        args = EngineArgs(**{name: value for name, value in given.items() if value is not None}).check()
        self._random = random.Random(seed)
        self._request_count = 0
        self._lock = threading.RLock()
        self._tokenizer: Any = own
        self._vocabulary: dict[str, int] | None = None  # of the tokenizer that the workers have
        self._running = Offline(args, own)
        self._finalizer = weakref.finalize(self, self._running.close)

    # ------------------------------------------------------------ generate

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: int | list[int] | None = None,
        *,
        inputs: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts.

        Args:
            prompts: a string, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, or a list of these.
            sampling_params: one for all prompts, or a list with one for each; those of
                ``get_default_sampling_params`` when left out.
            prompt_token_ids: ids of one or of all prompts; run in place of ``prompts`` where both are given.
            use_tqdm: show a progress bar; or a callable that makes one.
            inputs: another name of ``prompts``.
            lora_request: a LoRARequest for all prompts, or a list with one or None for each (``enable_lora``).
            priority: one number for all prompts, or one for each; lower first (``scheduling_policy="priority"``).
            tokenization_kwargs: ``{"add_special_tokens": False}`` takes texts without them.

        Raises:
            ValueError, TypeError: something is wrong with a prompt or its parameters. What can be checked here is
                checked before anything is queued; where the server refuses one prompt the others are aborted.
            RuntimeError: the processes behind are gone for good, or a request failed.
        """
        self._check_generates("generate")
        if prompts is not None and inputs is not None:
            raise TypeError("inputs is another name of prompts; give one of them.")
        parsed = parse_prompts(inputs if prompts is None else prompts, prompt_token_ids, tokenization_kwargs)
        return self._generate(parsed, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation (a list of messages) or of each of several.

        Args:
            chat_template: jinja to render with in place of the model's (to use one always: ``LLM(chat_template=...)``).
            chat_template_content_format: "auto" or "string": contents reach the template as strings.
            add_generation_prompt: end with what makes the model answer.
            continue_final_message: let the model go on with the last message.
            tools, chat_template_kwargs: what else the template may show or look at.

        Raises as ``generate`` does.
        """
        self._check_generates("chat")
        if chat_template_content_format not in ("auto", "string"):
            raise ValueError(
                f'chat_template_content_format must be "auto" or "string", got {chat_template_content_format!r}; '
                "parts of text reach the template joined."
            )
        conversations = parse_conversations(messages)
        template: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
        }  # fmt: skip
        if tools is not None:
            template["tools"] = tools
        if chat_template_kwargs is not None:
            template["chat_template_kwargs"] = chat_template_kwargs
        if chat_template is not None:
            template["chat_template"] = chat_template
        check_template(template)
        inputs = [Input(messages=conversation, template=template) for conversation in conversations]
        return self._generate(inputs, sampling_params, use_tqdm, lora_request, None)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` likeliest continuations of every prompt, each search run to its end.

        Args:
            prompts: as ``generate`` takes them.
            concurrency_limit: prompts that are searched at a time, at most.

        Raises as ``generate`` does.
        """
        self._check_generates("beam_search")
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}.")
        if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
            raise ValueError(f"concurrency_limit must be at least 1, got {concurrency_limit!r}.")
        limits = self._running.limits
        size = limits.config.vocab_size
        sampling = params.sampling(size if limits.max_logprobs == -1 else min(size, limits.max_logprobs))
        outputs = self._generate(
            parse_prompts(prompts, None), sampling, use_tqdm, lora_request, None, concurrency_limit
        )
        tokenizer = self.get_tokenizer() if limits.has_tokenizer else None
        return [beam_output(output, tokenizer) for output in outputs]

    # ------------------------------------------------------------ about it

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no sampling parameters are given: the model's generation_config.json's, by flag."""
        return SamplingParams(**self._running.defaults)

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        """The model's tokenizer, as transformers has it; adapters have none of their own. ValueError with
        ``skip_tokenizer_init``."""
        if not self._running.limits.has_tokenizer:
            raise ValueError("Unable to get tokenizer because `skip_tokenizer_init=True`")
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._running.supervisor.args)
        return self._tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Encode prompts and decode outputs with another tokenizer, from transformers, from now on.

        Grammars stay with the first one: with another vocabulary, structured outputs are refused from then on.
        Raises RuntimeError while ``generate``, ``chat`` or ``beam_search`` is running.
        """
        if not hasattr(tokenizer, "save_pretrained"):
            raise TypeError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}.")
        if self._vocabulary is None:
            self._vocabulary = self.get_tokenizer().get_vocab()
        self._running.set_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._running.limits.no_structure = None
        if tokenizer.get_vocab() != self._vocabulary:
            self._running.limits.no_structure = (
                "structured_outputs cannot be used after set_tokenizer with another vocabulary; start an LLM with it."
            )

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give back the memory of the KV cache, and of the weights, which are dropped (level 2) or go to the host (1);
        a CPU's are there already. Returns when it is done.

        Requests wait until ``wake_up``. ``mode``: what becomes of those that other threads have open: "keep": they go
        on then, "wait": they end first, "abort": they fail. ValueError where a value is wrong.
        """
        self._running.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take back what is named, of "weights" and "kv_cache"; both by default, and requests run again. Weights that
        were dropped are read again from where they were read first."""
        self._running.wake_up(tags or [])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, in host memory and on disk too. False, with nothing forgotten, while other threads'
        requests hold blocks. RuntimeError once closed."""
        try:
            self._running.reset_prefix_cache()
        except ValueError:
            return False
        return True

    def start_profile(self) -> None:
        """Have torch's profiler record what the workers' steps do. ValueError without ``profiler_config``, as in
        ``LLM(profiler_config={"profiler": "torch", "torch_profiler_dir": "/tmp/traces"})``."""
        self._running.profile(True)

    def stop_profile(self) -> None:
        """End that. Returns when each worker has written its trace to the folder."""
        self._running.profile(False)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Have all workers do one of ``sleep``, ``wake_up`` and ``reset_prefix_cache``, with that method's arguments.

        Returns what each worker answers, in a list. ``timeout`` is accepted and not needed: what cannot be done raises.
        ValueError for any other name and TypeError for a callable: no code is sent to workers.
        """
        if not isinstance(method, str):
            raise TypeError("collective_rpc takes the name of a function; no code is sent to workers.")
        if method not in _OF_WORKERS:
            raise ValueError(f"collective_rpc knows {', '.join(_OF_WORKERS)}, got {method!r:.80}.")
        answer = getattr(self, method)(*args, **(kwargs or {}))
        given = self._running.supervisor.args
        return [answer] * (given.data_parallel_size * given.tensor_parallel_size * given.pipeline_parallel_size)

    @property
    def llm_engine(self) -> EngineFacts:
        """What programs written for vLLM read of its engine: ``model_config.max_model_len`` and its kin."""
        return EngineFacts(self._running.supervisor.args, self._running.limits.config, self.get_tokenizer)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms under the names of the server's /metrics. RuntimeError once closed."""
        return self._running.metrics()

    def stats(self) -> Stats:
        """The scheduler's counters and gauges at this moment. RuntimeError once closed."""
        return self._running.stats()

    def close(self) -> None:
        """End every process and remove what was on disk. Idempotent; ``generate`` then raises RuntimeError."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_numbers(self, count: int) -> int:
        """The first of so many numbers for new requests."""
        with self._lock:
            first, self._request_count = self._request_count, self._request_count + count
        return first

    def _check_generates(self, method: str) -> None:
        if (pooler := self._running.pooler) is not None:
            remedy = " Try passing `--runner generate` to use the model as a generative model."
            said = f"LLM.{method}() is only supported for generative models."
            raise ValueError(said if pooler.whole else said + remedy)

    def _generate(
        self, inputs: list[Input], params: Any, use_tqdm: Any, lora_request: Any, priority: Any,
        limit: int | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        adapters = parse_lora(lora_request, len(inputs), self._running.adapters)
        priorities = parse_priority(priority, len(inputs))
        params = self.get_default_sampling_params() if params is None else params
        per_prompt = parse_params(params, len(inputs), SamplingParams, "sampling_params")
        per_prompt = shortened(per_prompt, self._running.limits.config.max_model_len)
        check_params(per_prompt, self._running.limits)
        per_prompt = formed(per_prompt, self._running.limits)
        for given, each in zip(inputs, per_prompt, strict=True):
            check_input(given, each, self._running.limits)
        with self._lock:
            first = self._take_numbers(len(inputs))
            seeds = [self._random.getrandbits(64) for _ in inputs]
        jobs = [
            Job(number, str(first + number), given, each, seed, priorities[number], *adapters[number])
            for number, (given, each, seed) in enumerate(zip(inputs, per_prompt, seeds, strict=True))
        ]
        with Progress(len(jobs), use_tqdm) as progress:
            return self._running.run(jobs, progress, limit)


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    """Drop what changes nothing here, TypeError for what does not exist or is not to be had. The log has no line of
    figures unless it is asked for, as in vLLM."""
    for row in rows() if kwargs else ():
        name = row.name.replace("-", "_")
        value = kwargs.pop(name, None)
        if value is None or value is False:  # which asks for nothing
            continue
        if row.refused:
            raise TypeError(f"LLM() has not vLLM's {name}: {row.said}.")
        if row.values and str(value) not in row.values:
            raise ValueError(f"{name}={value!r:.80} is not possible here: {row.said}; leave it out.")
    kwargs.setdefault("disable_log_stats", True)
    unknown = set(kwargs) - {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown:
        raise TypeError(f"LLM() got unexpected keyword arguments: {', '.join(map(repr, sorted(unknown)))}.")
