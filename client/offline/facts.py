"""What programs written for vLLM read of ``llm.llm_engine``: numbers and names, as this LLM has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import EngineArgs


@dataclass(frozen=True)
class ModelFacts:
    """``vllm_config.model_config``. ``hf_config`` has the values of config.json as attributes; lengths are tokens."""

    model: str
    tokenizer: str
    max_model_len: int
    dtype: str
    seed: int
    quantization: str | None
    trust_remote_code: bool
    max_logprobs: int
    hf_config: SimpleNamespace
    vocab_size: int

    @property
    def hf_text_config(self) -> SimpleNamespace:
        """The same: quire reads the text model's values."""
        return self.hf_config

    def get_vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Values of a hidden state. AttributeError where config.json does not say it."""
        return int(self.hf_config.hidden_size)


@dataclass(frozen=True)
class EngineFacts:
    """``llm.llm_engine``, as far as it is read: its configs, and the tokenizer. Nothing in it can be set."""

    args: EngineArgs
    config: ModelConfig
    tokenizer_of: Callable[[], Any]

    @property
    def model_config(self) -> ModelFacts:
        """Of the model."""
        args, config = self.args, self.config
        return ModelFacts(
            model=args.model or config.path, tokenizer=args.tokenizer or args.model or config.path,
            max_model_len=config.max_model_len, dtype=args.dtype, seed=args.seed, quantization=args.quantization,
            trust_remote_code=args.trust_remote_code, max_logprobs=args.max_logprobs,
            hf_config=_attributes(config.hf), vocab_size=config.vocab_size,
        )  # fmt: skip

    @property
    def cache_config(self) -> SimpleNamespace:
        """Of the KV cache."""
        args = self.args
        return SimpleNamespace(
            block_size=args.block_size, gpu_memory_utilization=args.gpu_memory_utilization,
            cache_dtype=args.kv_cache_dtype, enable_prefix_caching=args.enable_prefix_caching,
        )  # fmt: skip

    @property
    def scheduler_config(self) -> SimpleNamespace:
        """Of the scheduler."""
        args = self.args
        return SimpleNamespace(
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.token_budget(),
            max_model_len=self.config.max_model_len, policy=args.scheduling_policy,
        )  # fmt: skip

    @property
    def parallel_config(self) -> SimpleNamespace:
        """Of the workers."""
        args = self.args
        sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
        return SimpleNamespace(
            tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], data_parallel_size=sizes[2],
            world_size=sizes[0] * sizes[1],
        )  # fmt: skip

    @property
    def vllm_config(self) -> EngineFacts:
        """The same: newer vLLM has its configs one level further down."""
        return self

    @property
    def tokenizer(self) -> Any:
        """As of ``LLM.get_tokenizer``."""
        return self.tokenizer_of()

    def get_tokenizer(self) -> Any:
        """As of ``LLM.get_tokenizer``."""
        return self.tokenizer_of()

    def get_model_config(self) -> ModelFacts:
        """As ``model_config``."""
        return self.model_config


def _attributes(value: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: _attributes(each) if isinstance(each, dict) else each for name, each in value.items()}
    )
