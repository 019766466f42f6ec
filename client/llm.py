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

from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import Stats
from ..proto.params import SamplingParams
from .batch import Job, Offline, Progress
from .outputs import RequestOutput
from .prompts import (
    Input,
    check_input,
    check_params,
    check_template,
    parse_conversations,
    parse_params,
    parse_priority,
    parse_prompts,
)

_ACCEPTED_AND_UNUSED = {"disable_log_stats", "disable_log_requests", "enable_log_requests"}


class LLM:
    """A model, ready to generate from lists of prompts.

    Args (names and defaults are vLLM's):
        model: folder or hub id; the demo model when left out.
        tokenizer: folder or hub id, or a transformers tokenizer; the model's own when left out.
        dtype: "auto", "float16", "bfloat16", "float32", or a torch dtype.
        seed: makes the seeds of requests that name none reproducible.
        **kwargs: any other field of EngineArgs.

    Raises:
        TypeError: an argument that does not exist.
        ValueError: a value that cannot work (ConfigError), or is not supported yet.
        LaunchError (a RuntimeError): a process could not start; the message is its own.

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
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4,
        enforce_eager: bool = False,
        max_context_len_to_capture: int | None = None,
        max_seq_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        **kwargs: Any,
    ):
        _check_kwargs(kwargs)
        if skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init=True is not supported yet by this version; leave it out.")
        if max_context_len_to_capture is not None:
            warnings.warn("max_context_len_to_capture is now max_seq_len_to_capture", DeprecationWarning, stacklevel=2)
            max_seq_len_to_capture = max_context_len_to_capture
        own = tokenizer if hasattr(tokenizer, "save_pretrained") else None
        args = EngineArgs(
            model=None if model is None else os.fspath(model),
            tokenizer=None if own is not None or tokenizer is None else os.fspath(tokenizer),
            tokenizer_mode=tokenizer_mode, trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size, dtype=str(dtype).removeprefix("torch."),
            quantization=quantization, revision=revision, tokenizer_revision=tokenizer_revision, seed=seed,
            gpu_memory_utilization=gpu_memory_utilization, swap_space=swap_space, enforce_eager=enforce_eager,
            max_seq_len_to_capture=max_seq_len_to_capture, **kwargs,
        ).check()  # fmt: skip
        self._random = random.Random(seed)
        self._request_count = 0
        self._lock = threading.Lock()
        self._tokenizer: Any = own
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
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts.

        Args:
            prompts: a string, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, or a list of these.
            sampling_params: one for all prompts, or a list with one for each; ``SamplingParams()`` when left out.
            prompt_token_ids: ids of one or of all prompts; run in place of ``prompts`` where both are given.
            use_tqdm: show a progress bar; or a callable that makes one.
            priority: one number for each prompt, lower first (with ``scheduling_policy="priority"``).

        Raises:
            ValueError, TypeError: something is wrong with a prompt or its parameters. What can be checked here is
                checked before anything is queued; where the server refuses one prompt the others are aborted.
            RuntimeError: the processes behind are gone for good, or a request failed.
        """
        inputs = parse_prompts(prompts, prompt_token_ids)
        return self._generate(inputs, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation (a list of messages) or of each of several.

        Raises as ``generate`` does.
        """
        conversations = parse_conversations(messages)
        template: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
        }  # fmt: skip
        if tools is not None:
            template["tools"] = tools
        if chat_template_kwargs is not None:
            template["chat_template_kwargs"] = chat_template_kwargs
        check_template(template)
        inputs = [Input(messages=conversation, template=template) for conversation in conversations]
        return self._generate(inputs, sampling_params, use_tqdm, lora_request, None)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            args = self._running.stack.args
            self._tokenizer = AutoTokenizer.from_pretrained(
                args.tokenizer or args.model, use_fast=args.tokenizer_mode != "slow", trust_remote_code=False
            )
        return self._tokenizer

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

    def _generate(
        self, inputs: list[Input], params: Any, use_tqdm: Any, lora_request: Any, priority: list[int] | None
    ) -> list[RequestOutput]:
        if isinstance(lora_request, list) and len(lora_request) != len(inputs):
            raise ValueError("The lengths of prompts and lora_request must be the same.")
        if lora_request:
            raise ValueError("lora_request is not supported yet by this version; leave it out.")
        priorities = parse_priority(priority, len(inputs))
        per_prompt = parse_params(params, len(inputs))
        check_params(per_prompt)
        for given, each in zip(inputs, per_prompt, strict=True):
            check_input(given, each, self._running.stack.config)
        with self._lock:
            first, self._request_count = self._request_count, self._request_count + len(inputs)
            seeds = [self._random.getrandbits(64) for _ in inputs]
        jobs = [
            Job(number, str(first + number), given, each, seed, priorities[number])
            for number, (given, each, seed) in enumerate(zip(inputs, per_prompt, seeds, strict=True))
        ]
        with Progress(len(jobs), use_tqdm) as progress:
            return self._running.run(jobs, progress)


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    """Drop what is accepted for vLLM's sake alone; TypeError for what does not exist."""
    for name in _ACCEPTED_AND_UNUSED & set(kwargs):
        del kwargs[name]
    unknown = set(kwargs) - {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown:
        raise TypeError(f"LLM() got unexpected keyword arguments: {', '.join(map(repr, sorted(unknown)))}.")
