"""quire: a server for large language models made of small processes.

Public names load lazily (PEP 562), so that importing one service never imports another's libraries:
``from quire import LLM, SamplingParams``. So this file imports nothing of ours, and pytest can load it whatever the
folder that holds the checkout is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client.engine import Engine
    from .client.offline.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .client.offline.flat import FlatLogprobs
    from .client.offline.llm import LLM
    from .client.offline.lora import LoRARequest
    from .client.offline.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from .client.offline.prompts import TextPrompt, TokensPrompt
    from .client.results import RequestMetrics
    from .proto.config import EngineArgs
    from .proto.params import RequestOutputKind, SamplingParams
    from .proto.pooling import PoolingParams
    from .proto.structured import GuidedDecodingParams, StructuredOutputsParams
    from .proto.version import __version__

_HOMES = {
    "Engine": ".client.engine",
    "EngineArgs": ".proto.config",
    "LLM": ".client.offline.llm",
    "LoRARequest": ".client.offline.lora",
    "BeamSearchOutput": ".client.offline.beams",
    "BeamSearchParams": ".client.offline.beams",
    "BeamSearchSequence": ".client.offline.beams",
    "GuidedDecodingParams": ".proto.structured",
    "FlatLogprobs": ".client.offline.flat",
    "Logprob": ".client.offline.outputs",
    "StructuredOutputsParams": ".proto.structured",
    "CompletionOutput": ".client.offline.outputs",
    "RequestMetrics": ".client.results",
    "RequestOutput": ".client.offline.outputs",
    "TextPrompt": ".client.offline.prompts",
    "TokensPrompt": ".client.offline.prompts",
    "RequestOutputKind": ".proto.params",
    "SamplingParams": ".proto.params",
    "PoolingParams": ".proto.pooling",
    "ClassificationOutput": ".client.offline.outputs",
    "ClassificationRequestOutput": ".client.offline.outputs",
    "EmbeddingOutput": ".client.offline.outputs",
    "EmbeddingRequestOutput": ".client.offline.outputs",
    "PoolingOutput": ".client.offline.outputs",
    "PoolingRequestOutput": ".client.offline.outputs",
    "ScoringOutput": ".client.offline.outputs",
    "ScoringRequestOutput": ".client.offline.outputs",
    "__version__": ".proto.version",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineArgs",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
